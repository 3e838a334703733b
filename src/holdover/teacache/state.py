"""What TeaCache remembers of one branch."""

from ..policies.teacache import TeaCacheState

__all__ = ["TeaCacheState"]
