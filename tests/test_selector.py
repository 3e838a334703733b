"""From a method's name to its backend."""

from __future__ import annotations

from typing import Any

import pytest

import holdover
from holdover.base import CacheBackend, DiffusionCacheConfig
from holdover.cache_dit_backend import CacheDiTBackend, CacheDiTConfig
from holdover.config import Config
from holdover.engine.backend import NoneBackend
from holdover.engine.method import NoneConfig
from holdover.errors import WITHOUT_CONSTANTS, ConfigError, NotEnabledError
from holdover.magcache import MagCacheBackend, MagCacheConfig
from holdover.methods.easy_cache import EasyCacheBackend, EasyCacheConfig
from holdover.methods.first_block import FirstBlockBackend, FirstBlockConfig
from holdover.methods.sea_cache import SeaCacheBackend, SeaCacheConfig
from holdover.methods.spectrum import SpectrumBackend, SpectrumConfig
from holdover.methods.taylor_seer import TaylorSeerBackend, TaylorSeerConfig
from holdover.plan import PlanBackend, PlanConfig
from holdover.selector import backend_class, backend_for_config, config_class, get_cache_backend, methods, own_config
from holdover.teacache import TeaCacheBackend, TeaCacheConfig
from tiny.models import MODELS

METHODS: dict[str, tuple[type[CacheBackend], type[Config]]] = {
    "tea_cache": (TeaCacheBackend, TeaCacheConfig),
    "mag_cache": (MagCacheBackend, MagCacheConfig),
    "cache_dit": (CacheDiTBackend, CacheDiTConfig),
    "plan": (PlanBackend, PlanConfig),
    "easy_cache": (EasyCacheBackend, EasyCacheConfig),
    "sea_cache": (SeaCacheBackend, SeaCacheConfig),
    "first_block": (FirstBlockBackend, FirstBlockConfig),
    "taylor_seer": (TaylorSeerBackend, TaylorSeerConfig),
    "spectrum": (SpectrumBackend, SpectrumConfig),
    "none": (NoneBackend, NoneConfig),
}
REAL = [name for name in METHODS if name != "none"]


def test_the_table_has_every_method() -> None:
    assert set(methods()) == METHODS.keys()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_names_and_classes(name: str) -> None:
    backend, config = METHODS[name]
    assert backend_class(name) is backend
    assert config_class(name) is backend.config_class is config
    assert config.method == name
    assert type(backend_for_config(config())) is backend


@pytest.mark.parametrize("name", REAL)
def test_a_name_alone_gives_the_defaults(name: str) -> None:
    backend, config = METHODS[name]
    made = get_cache_backend(name)
    assert type(made) is backend
    assert made.config == config()
    assert made.enabled is made.is_enabled() is False


@pytest.mark.parametrize("name", [None, "none"])
@pytest.mark.parametrize("config", [None, {}, DiffusionCacheConfig(), {"rel_l1_thresh": 0.4}])
def test_no_method_is_no_backend(name: str | None, config: Any) -> None:
    assert get_cache_backend(name, config) is None


GIVEN = [
    ("tea_cache", "rel_l1_thresh", 0.4),
    ("tea_cache", "coefficients", (1.0, 0.0)),
    ("mag_cache", "mag_threshold", 0.06),
    ("mag_cache", "mag_ratios", (1.0, 1.1)),
]


@pytest.mark.parametrize(("name", "key", "value"), GIVEN)
def test_settings_in_a_dict(name: str, key: str, value: Any) -> None:
    given = {key: value}
    made = get_cache_backend(name, given)
    assert made.config == METHODS[name][1](**given)
    assert given == {key: value}


AS_DOCUMENTED = {"tea_cache": {"clamp": False, "compute_last": False}}  # what the union means in vLLM-Omni


@pytest.mark.parametrize(("name", "key", "value"), GIVEN)
def test_the_union_of_all_settings(name: str, key: str, value: Any) -> None:
    config = DiffusionCacheConfig(**{key: value})
    made = get_cache_backend(name, config)
    assert made.config is config
    assert made.settings == METHODS[name][1](**{key: value} | AS_DOCUMENTED.get(name, {}))


@pytest.mark.parametrize(("name", "key", "value"), GIVEN)
def test_a_methods_own_config(name: str, key: str, value: Any) -> None:
    config = METHODS[name][1](**{key: value})
    made = get_cache_backend(name, config)
    assert made.config is made.settings is config


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("teacache", "tea_cache"),
        ("tea-cache", "tea_cache"),
        ("TeaCache", "tea_cache"),
        ("magcache", "mag_cache"),
        ("mag_chache", "mag_cache"),
        ("non", "none"),
    ],
)
def test_an_unknown_name_suggests_the_nearest_and_lists_all(name: str, meant: str) -> None:
    message = rf"^There is no caching method '{name}'. Did you mean '{meant}'\? Methods: {', '.join(methods())}\.$"
    with pytest.raises(ConfigError, match=message):
        get_cache_backend(name)
    with pytest.raises(ConfigError, match=message):
        holdover.enable(None, name)


@pytest.mark.parametrize("name", ["", "lossless", "off"])
def test_a_name_like_no_other_lists_all(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^There is no caching method '{name}'. Methods: {', '.join(methods())}\.$"):
        get_cache_backend(name, {})


@pytest.mark.parametrize("name", REAL)
def test_unknown_and_impossible_settings_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match="has no setting 'treshold'"):
        get_cache_backend(name, {"treshold": 0.1})
    keys = {"tea_cache": "rel_l1_thresh", "mag_cache": "mag_threshold", "cache_dit": "residual_diff_threshold"}
    keys |= {"plan": "budget", "taylor_seer": "interval", "spectrum": "interval"}
    key = keys.get(name, "threshold")
    with pytest.raises(ConfigError, match=f"{key} must be at least"):
        get_cache_backend(name, {key: -1})


def test_a_setting_of_another_method_is_named() -> None:
    with pytest.raises(ConfigError, match="'mag_threshold' is a setting of 'mag_cache', not of 'tea_cache'"):
        get_cache_backend("tea_cache", {"mag_threshold": 0.1})
    with pytest.raises(ConfigError, match="'rel_l1_thresh' is a setting of 'tea_cache', not of 'mag_cache'"):
        holdover.enable(None, "mag_cache", rel_l1_thresh=0.1)


@pytest.mark.parametrize("config", [MagCacheConfig(), NoneConfig(), 0.2, "{}", [("rel_l1_thresh", 0.2)]])
def test_what_is_no_config_of_the_method_is_refused(config: Any) -> None:
    message = f"^TeaCacheBackend takes a TeaCacheConfig, not {type(config).__name__}"
    with pytest.raises(ConfigError, match=message):
        get_cache_backend("tea_cache", config)


def test_methods_that_need_no_constants_are_named_where_constants_are_missing() -> None:
    named = WITHOUT_CONSTANTS.partition(" need ")[0].replace(" and ", ", ").split(", ")
    assert {"easy_cache", "sea_cache", "spectrum", "first_block", "taylor_seer"} == set(named) <= set(methods())
    assert not any(config_class(name).constants for name in named)
    model = MODELS["PixArtTransformer2DModel"].build()
    for name in ("tea_cache", "mag_cache"):
        with pytest.raises(ConfigError, match=WITHOUT_CONSTANTS):
            holdover.enable(model, name)
    for name in named:
        holdover.enable(model, name).disable()


def test_the_union_alone_belongs_to_no_method() -> None:
    with pytest.raises(ConfigError, match="DiffusionCacheConfig belongs to no caching method; name the method"):
        backend_for_config(DiffusionCacheConfig())


@pytest.mark.parametrize("method", [None, 3, TeaCacheConfig, {"method": "tea_cache"}])
def test_enable_wants_a_name_or_a_config(method: Any) -> None:
    with pytest.raises(ConfigError, match="A method is a name or a config"):
        holdover.enable(None, method)


def test_settings_become_the_methods_own_config() -> None:
    assert own_config("mag_cache", {"mag_threshold": 1}) == MagCacheConfig(mag_threshold=1.0)
    assert own_config("none", {}) == NoneConfig()


class _Bare(CacheBackend[NoneConfig]):
    """The least a backend must define."""

    config_class = NoneConfig

    def enable(self, pipeline: Any) -> None:
        self.enabled = True

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        pass


def test_what_a_backend_does_not_define_is_not_implemented() -> None:
    bare = _Bare(NoneConfig())
    for use in (bare.disable, bare.stats, bare.reports, bare.off, bare.using):
        with pytest.raises(NotImplementedError, match="^_Bare "):
            use()


@pytest.mark.parametrize("name", REAL)
def test_a_backend_that_is_not_enabled_says_so(name: str) -> None:
    made = get_cache_backend(name)
    for use in (made.disable, made.stats, made.reports, made.off, lambda: made.refresh(None, 4), made.__enter__):
        with pytest.raises(NotEnabledError):
            use()
