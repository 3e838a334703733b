"""Diffusion transformers, several times faster: what earlier denoising steps computed is held over.

import holdover

cache = holdover.enable(pipe, "tea_cache", rel_l1_thresh=0.2)
image = pipe("red apple, glossy 3d style").images[0]
print(cache.stats())
cache.disable()
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from .lazy import lazy_names

if TYPE_CHECKING:
    from .api import check as check
    from .api import disable as disable
    from .api import enable as enable
    from .base import CacheBackend as CacheBackend
    from .base import DiffusionCacheConfig as DiffusionCacheConfig
    from .cache_dit_backend import CacheDiTBackend as CacheDiTBackend
    from .cache_dit_backend import CacheDiTConfig as CacheDiTConfig
    from .context import CacheContext as CacheContext
    from .engine.parallel import Ranks as Ranks
    from .errors import ConfigError as ConfigError
    from .errors import EnableError as EnableError
    from .errors import HoldoverError as HoldoverError
    from .errors import HoldoverWarning as HoldoverWarning
    from .errors import NotEnabledError as NotEnabledError
    from .errors import ProfileError as ProfileError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .errors import UntraceableError as UntraceableError
    from .errors import WriteError as WriteError
    from .magcache import MagCacheBackend as MagCacheBackend
    from .magcache import MagCacheConfig as MagCacheConfig
    from .methods.easy_cache import EasyCacheBackend as EasyCacheBackend
    from .methods.easy_cache import EasyCacheConfig as EasyCacheConfig
    from .methods.first_block import FirstBlockBackend as FirstBlockBackend
    from .methods.first_block import FirstBlockConfig as FirstBlockConfig
    from .methods.sea_cache import SeaCacheBackend as SeaCacheBackend
    from .methods.sea_cache import SeaCacheConfig as SeaCacheConfig
    from .methods.spectrum import SpectrumBackend as SpectrumBackend
    from .methods.spectrum import SpectrumConfig as SpectrumConfig
    from .methods.taylor_seer import TaylorSeerBackend as TaylorSeerBackend
    from .methods.taylor_seer import TaylorSeerConfig as TaylorSeerConfig
    from .models.registry import Family as Family
    from .models.registry import Signal as Signal
    from .models.registry import register_extractor as register_extractor
    from .models.registry import register_family as register_family
    from .models.registry import unregister_extractor as unregister_extractor
    from .models.registry import unregister_family as unregister_family
    from .plan import PlanBackend as PlanBackend
    from .plan import PlanConfig as PlanConfig
    from .plan import calibrate as calibrate
    from .plan import polish as polish
    from .plan import tune as tune
    from .profiles import Profile as Profile
    from .prompt_embed_cache import PromptEmbedCache as PromptEmbedCache
    from .prompt_embed_cache import install_prompt_embed_cache as install_prompt_embed_cache
    from .prompt_embed_cache import resolve_prompt_embed_cache_config as resolve_prompt_embed_cache_config
    from .prompt_embed_cache import uninstall_prompt_embed_cache as uninstall_prompt_embed_cache
    from .selector import get_cache_backend as get_cache_backend
    from .teacache import TeaCacheBackend as TeaCacheBackend
    from .teacache import TeaCacheConfig as TeaCacheConfig
    from .teacache import apply_teacache_hook as apply_teacache_hook
    from .zoo import load as load

__version__ = "0.1.0"

# The public names by module. They are imported on first use, so that `import holdover` and the command line's help cost
# nothing.
_PUBLIC = {
    "api": "check disable enable",
    "base": "CacheBackend DiffusionCacheConfig",
    "cache_dit_backend": "CacheDiTBackend CacheDiTConfig",
    "context": "CacheContext",
    "engine.parallel": "Ranks",
    "errors": "ConfigError EnableError HoldoverError HoldoverWarning NotEnabledError ProfileError "
    "UnsupportedModelError UntraceableError WriteError",
    "magcache": "MagCacheBackend MagCacheConfig",
    "methods.easy_cache": "EasyCacheBackend EasyCacheConfig",
    "methods.first_block": "FirstBlockBackend FirstBlockConfig",
    "methods.sea_cache": "SeaCacheBackend SeaCacheConfig",
    "methods.spectrum": "SpectrumBackend SpectrumConfig",
    "methods.taylor_seer": "TaylorSeerBackend TaylorSeerConfig",
    "models.registry": "Family Signal register_extractor register_family unregister_extractor unregister_family",
    "plan": "PlanBackend PlanConfig calibrate polish tune",
    "profiles": "Profile",
    "prompt_embed_cache": "PromptEmbedCache install_prompt_embed_cache resolve_prompt_embed_cache_config "
    "uninstall_prompt_embed_cache",
    "selector": "get_cache_backend",
    "teacache": "TeaCacheBackend TeaCacheConfig apply_teacache_hook",
    "zoo": "load",
}
__getattr__, _names = lazy_names(__name__, _PUBLIC)

# `from holdover import *` gives what can be imported: cache_dit_backend needs the extra `cache-dit`.
_MISSING = () if importlib.util.find_spec("cache_dit") else _PUBLIC["cache_dit_backend"].split()

__all__ = ["__version__", *(name for name in _names if name not in _MISSING)]


def __dir__() -> list[str]:
    return sorted(__all__)
