"""What MagCache remembers of one branch."""

from ..policies.magcache import MagCacheState

__all__ = ["MagCacheState"]
