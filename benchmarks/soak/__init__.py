"""Many generations on long-lived pipelines, which must leave nothing behind: `python -m benchmarks.soak`."""
