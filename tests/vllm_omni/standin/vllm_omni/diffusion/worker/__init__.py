"""Laid out as in vLLM-Omni."""
