"""cache-dit: DBCache, SCM and TaylorSeer of the cache-dit library, with step and branch known instead of counted."""

from .adapters import CacheDiTAdapterConfig as CacheDiTAdapterConfig
from .backend import CUSTOM_DIT_ENABLERS as CUSTOM_DIT_ENABLERS
from .backend import CacheDiTBackend as CacheDiTBackend
from .backend import RefreshCacheContextFunc as RefreshCacheContextFunc
from .backend import build_cache_context_refresh as build_cache_context_refresh
from .backend import cache_summary as cache_summary
from .backend import default_get_pipeline_transformer as default_get_pipeline_transformer
from .backend import enable_cache_for_cosmos3 as enable_cache_for_cosmos3
from .backend import enable_cache_for_dit as enable_cache_for_dit
from .backend import enable_cache_for_wan22 as enable_cache_for_wan22
from .backend import enable_cache_for_wan22_s2v as enable_cache_for_wan22_s2v
from .backend import logger as logger
from .backend import may_enable_cache_dit as may_enable_cache_dit
from .config import CacheDiTConfig as CacheDiTConfig
from .model_adapters import BagelCachedAdapter as BagelCachedAdapter
from .model_adapters import BagelCachedBlocks as BagelCachedBlocks
from .model_adapters import BagelCachedContextManager as BagelCachedContextManager
from .model_adapters import SensenovaCachedAdapter as SensenovaCachedAdapter
from .model_adapters import SensenovaCachedBlocks as SensenovaCachedBlocks
from .model_adapters import Wan22S2VCachedAdapter as Wan22S2VCachedAdapter
from .model_adapters import Wan22S2VCachedBlocks as Wan22S2VCachedBlocks
