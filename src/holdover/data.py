"""The settings of all methods in one object, under the path that the documented examples import it from."""

from .base import DiffusionCacheConfig

__all__ = ["DiffusionCacheConfig"]
