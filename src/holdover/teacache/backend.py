"""TeaCache as a backend: the policy of its paper, the model's signal, and the polynomial of a profile."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from ..base import DiffusionCacheConfig
from ..engine.backend import EngineBackend
from ..engine.engine import Engine
from ..engine.install import CachedTransformer, find_engine
from ..engine.method import Method
from ..engine.storage import STORAGES
from ..errors import WITHOUT_CONSTANTS, ConfigError, EnableError, HoldoverWarning, did_you_mean
from ..grid import Grid
from ..models.inputs import get_module_class, unwrap_module
from ..models.pipelines import find_transformers
from ..models.registry import EXTRACTOR_REGISTRY, INPUT_SIGNAL, Extractor, Signal, find_extractor
from ..policies.teacache import Polynomial, TeaCachePolicy
from ..profiles import TeaCacheFit, TeaCacheProfile, find, shipped
from ..profiles.profile import display_name
from .config import OWN_CLASS, TeaCacheConfig

Enabler = Callable[[Any, Any], None]


@cache
def polynomial_of(fit: TeaCacheFit) -> Polynomial:
    """A fit's polynomial on its own range, or on the part of it that can be trusted."""
    if fit.low is not None and fit.high is not None:
        return Polynomial(fit.coefficients, fit.low, fit.high)
    return Polynomial.trusted(fit.coefficients)


def name_transformer(config: TeaCacheConfig, transformer: nn.Module) -> TeaCacheConfig:
    """The config with the transformer's own class filled in where none was named."""
    if config.transformer_type not in OWN_CLASS:
        return config
    return config.replaced(transformer_type=get_module_class(unwrap_module(transformer)).__name__)


def find_named_extractor(config: TeaCacheConfig, transformer: nn.Module) -> Extractor | None:
    """The extractor registered for the class that the config names, else for the transformer's own."""
    named = None if config.transformer_type in OWN_CLASS else EXTRACTOR_REGISTRY.get(config.transformer_type)
    return named or find_extractor(transformer)


def resolve_signal(transformer: CachedTransformer, name: str | None) -> Signal:
    """A model's signal by name, its default one, or what enters the first block."""
    signal = transformer.family.signal(name)
    if signal is not None:
        return signal
    if name in (None, INPUT_SIGNAL.name):
        return INPUT_SIGNAL
    known = [s.name for s in transformer.family.signals] + [INPUT_SIGNAL.name]
    hint = did_you_mean(name or "", known) or f" It has {', '.join(known)}."
    raise ConfigError(f"{transformer.class_name} has no signal {name!r}.{hint}")


class TeaCacheMethod(Method[TeaCacheConfig]):
    """TeaCache with one set of settings."""

    name = "tea_cache"

    def __init__(self, config: TeaCacheConfig) -> None:
        super().__init__(config)
        self._constants: dict[CachedTransformer, tuple[Signal, TeaCacheProfile]] = {}
        self.storage = STORAGES[config.hold_in]
        self.reads_late = config.read == "late"

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        transformer.extractor = find_named_extractor(self.config, transformer.core)
        signal, profile = self._constants[transformer] = self._resolve(transformer, pipeline)
        least = max(polynomial_of(fit).minimum() for _, fit in profile.fits)
        if self.config.clamp and 0 < self.config.threshold <= least:
            warnings.warn(
                f"TeaCache can never hold a step of {transformer.class_name} at "
                f"rel_l1_thresh={self.config.threshold:g}: its polynomial adds at least {least:.3g} at every "
                "step. Use a threshold above that, or measure coefficients of your own with "
                "holdover.teacache.estimate_coefficients.",
                HoldoverWarning,
                stacklevel=6,  # the caller of holdover.enable
            )
        source = "coefficients given" if self.config.coefficients is not None else f"profile {display_name(profile)}"
        return (f"{transformer.name}: signal {signal.name}, {source}",)

    def _resolve(self, transformer: CachedTransformer, pipeline: Any) -> tuple[Signal, TeaCacheProfile]:
        settings = self.config
        if settings.signal is not None:
            resolve_signal(transformer, settings.signal)  # an unknown name is an error of its own
        if settings.coefficients is not None:
            signal, name = resolve_signal(transformer, settings.signal), transformer.class_name
            fits = (("", TeaCacheFit(settings.coefficients)),)
            return signal, TeaCacheProfile(
                name="given", model=name, transformer_class=name, signal=signal.name, fits=fits
            )
        profile = self._profile(transformer, pipeline)
        if profile is None:
            measured = f" measured with the signal {settings.signal!r}" if settings.signal is not None else ""
            named = settings.transformer_type if self._is_foreign(transformer) else transformer.class_name
            raise ConfigError(
                f"No TeaCache coefficients{measured} ship for {named}. Measure them with "
                "holdover.teacache.estimate_coefficients(pipe, prompts), or give coefficients=[...]. "
                + WITHOUT_CONSTANTS
            )
        if settings.signal not in (None, profile.signal):
            raise ConfigError(
                f"Profile {profile.name!r} was measured with the signal {profile.signal!r}, not {settings.signal!r}."
            )
        found = transformer.family.signal(profile.signal)
        if found is None and not self._is_foreign(transformer):
            found = resolve_signal(transformer, profile.signal)
        return found or resolve_signal(transformer, None), profile

    def _profile(self, transformer: CachedTransformer, pipeline: Any) -> TeaCacheProfile | None:
        """The profile asked for, that of the class named in the settings, or the one that fits the model."""
        settings = self.config
        if settings.profile is None and self._is_foreign(transformer):
            of_class = (p for p in shipped("tea_cache") if p.transformer_class == settings.transformer_type)
            return next((p for p in of_class if settings.signal in (None, p.signal)), None)
        return find("tea_cache", transformer.core, pipeline, settings.profile, settings.signal)

    def _is_foreign(self, transformer: CachedTransformer) -> bool:
        """Whether the settings name another class than the transformer's own: its constants are borrowed."""
        own = (cls.__name__ for cls in type(transformer.core).__mro__)
        return self.config.transformer_type not in (*OWN_CLASS, *own)

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> TeaCachePolicy:
        settings, profile = self.config, self.profile(transformer)
        polynomial = polynomial_of(profile.fit(branch))
        rescale: Callable[[float], float] = polynomial if settings.clamp else polynomial.raw
        return TeaCachePolicy(
            settings.threshold, rescale, grid, profile.retained, self.reads_late, settings.compute_last
        )

    def profile(self, transformer: CachedTransformer) -> TeaCacheProfile:
        """The constants in use on a transformer."""
        return self._constants[transformer][1]

    def signal(self, transformer: CachedTransformer) -> Signal:
        return INPUT_SIGNAL if transformer.extractor is not None else self._constants[transformer][0]


class TeaCacheBackend(EngineBackend[TeaCacheConfig]):
    """TeaCache: hold while the signal has changed little since the last computed step."""

    config_class = TeaCacheConfig

    @classmethod
    def _own_config(cls, config: Any) -> TeaCacheConfig:
        """The settings of a DiffusionCacheConfig mean what they do in vLLM-Omni, whose polynomial is not clamped."""
        own = super()._own_config(config)
        return own.replaced(clamp=False, compute_last=False) if isinstance(config, DiffusionCacheConfig) else own

    def enable(self, pipeline: Any) -> None:
        enabler = CUSTOM_TEACACHE_ENABLERS.get(type(pipeline).__name__)
        if enabler is not None and self._engine is None:
            self._enable_by(enabler, pipeline)
            return
        transformer = next(iter(find_transformers(pipeline).values()))
        self.settings = name_transformer(self.settings, transformer)
        super().enable(pipeline)

    def _enable_by(self, enabler: Enabler, pipeline: Any) -> None:
        """Let an enabler put a cache on the pipeline, and take it over."""
        before = _find_engines(pipeline)
        try:
            enabler(pipeline, self.config)
        finally:
            found = [engine for engine in _find_engines(pipeline) if engine not in before]
            if len(found) == 1 and sys.exc_info()[0] is None:
                self.take_over(found[0])
            else:
                for engine in found:
                    engine.uninstall()
        if self._engine is None:
            name = type(pipeline).__name__
            raise EnableError(f"The TeaCache enabler of {name} put caches on {len(found)} transformers instead of one.")

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        by_enabler = type(pipeline).__name__ in CUSTOM_TEACACHE_ENABLERS  # the engine does not know the pipeline
        super().refresh(None if by_enabler else pipeline, num_inference_steps, verbose)

    def make_method(self, settings: TeaCacheConfig) -> TeaCacheMethod:
        return TeaCacheMethod(settings)


def _find_engines(pipeline: Any) -> list[Engine]:
    """The caches on any module of a pipeline."""
    parts = [pipeline] if isinstance(pipeline, nn.Module) else list(vars(pipeline).values())
    modules = dict.fromkeys(m for part in parts if isinstance(part, nn.Module) for m in part.modules())
    return [engine for module in modules if (engine := find_engine(module)) is not None]


def _enabler(attribute: str, transformer_type: str) -> Enabler:
    """An enabler for pipelines that have their transformer under another name."""

    def enable(pipeline: Any, config: Any) -> None:
        backend = TeaCacheBackend(config)
        backend.settings = backend.settings.replaced(transformer_type=transformer_type)
        backend.enable(getattr(pipeline, attribute))

    return enable


# How TeaCache gets onto a pipeline that has no `transformer`, by the name of the pipeline's class. An enabler is called
# with the pipeline and the config of the backend, and applies TeaCache to one transformer.
CUSTOM_TEACACHE_ENABLERS: dict[str, Enabler] = {
    "BagelPipeline": _enabler("bagel", "Bagel"),
    "SenseNovaU1Pipeline": _enabler("denoising_transformer", "SenseNovaU1ForCausalLM"),
}
