"""Many generations on living pipelines, and that they leave nothing behind: `python -m benchmarks.soak`."""
