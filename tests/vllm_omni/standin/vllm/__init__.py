"""The little of vLLM that the stand-in for vLLM-Omni needs."""
