"""From a cache backend's name to the backend."""

from vllm_omni.diffusion.data import DiffusionCacheConfig


class TeaCacheBackend:
    """One of vLLM-Omni's own."""

    def __init__(self, config):
        self.config = config


def get_cache_backend(cache_backend, cache_config):
    """The backend of that name, or None for no cache."""
    if cache_backend is None or cache_backend == "none":
        return None
    if isinstance(cache_config, dict):
        cache_config = DiffusionCacheConfig.from_dict(cache_config)
    if cache_backend == "tea_cache":
        return TeaCacheBackend(cache_config)
    raise ValueError(f"Unsupported cache backend: {cache_backend}")
