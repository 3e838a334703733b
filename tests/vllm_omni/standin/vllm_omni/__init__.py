"""A small substitute for vLLM-Omni 0.30: how it finds plugins, selects a cache, passes on its settings and calls it.

Its pipelines in the tests run real diffusers models.
"""

__version__ = "0.30.0"
