"""A stand-in for vLLM-Omni 0.30: how it finds plugins, selects a cache, hands on its settings and calls it.

What it generates with are real diffusers models.
"""

__version__ = "0.30.0"
