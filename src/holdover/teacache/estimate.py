"""Measure TeaCache's rescaling polynomial for a model: how much its output changes when its signal changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import torch

from ..engine.engine import Engine
from ..engine.install import CachedTransformer
from ..engine.method import Method, NoneConfig
from ..engine.signals import relative_change
from ..engine.state import ComputedForward
from ..errors import ConfigError
from ..grid import Grid
from ..models.inputs import iter_tensors
from ..models.pipelines import find_transformers
from ..models.registry import Signal
from ..policies.base import AlwaysCompute
from ..profiles import TeaCacheFit, TeaCacheProfile, save
from .backend import resolve_signal

_SAMPLES = 200


@dataclass
class _Pairs:
    """Change of the signal and of the output between neighboring steps of one branch."""

    signal: list[float] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    previous: torch.Tensor | None = None


class SignalMeasure(Method[NoneConfig]):
    """Computes every step and looks at signal and output."""

    name = "estimate"
    observes = True

    def __init__(self, signal: str | None) -> None:
        super().__init__(NoneConfig())
        self._name = signal
        self.pairs: dict[tuple[str, str], _Pairs] = {}

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        return (f"{transformer.name}: signal {self.signal(transformer).name}",)

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> AlwaysCompute:
        return AlwaysCompute(needs_signal=True)

    def signal(self, transformer: CachedTransformer) -> Signal:
        return resolve_signal(transformer, self._name)

    def observe(self, computed: ComputedForward) -> None:
        pairs = self.pairs.setdefault((computed.transformer.name, computed.branch), _Pairs())
        output = next(iter_tensors(dict(computed.output) if isinstance(computed.output, Mapping) else computed.output))
        if computed.change is not None and pairs.previous is not None:
            pairs.signal.append(float(computed.change))
            pairs.output.append(float(relative_change(output.float(), pairs.previous)))
        pairs.previous = output.float()

    def on_end(self) -> None:
        for pairs in self.pairs.values():
            pairs.previous = None

    def profile(self, transformer: CachedTransformer, degree: int, generations: int) -> TeaCacheProfile:
        """The polynomials of one transformer, over all branches and by branch."""
        branches = {branch: pairs for (name, branch), pairs in self.pairs.items() if name == transformer.name}
        signals = [x for pairs in branches.values() for x in pairs.signal]
        outputs = [y for pairs in branches.values() for y in pairs.output]
        fits = {"": fit_polynomial(signals, outputs, degree)}
        if len(branches) > 1:
            fits |= {branch: fit_polynomial(pairs.signal, pairs.output, degree) for branch, pairs in branches.items()}
        return TeaCacheProfile(
            name=f"estimated-{transformer.class_name}",
            model=transformer.class_name,
            transformer_class=transformer.class_name,
            signal=self.signal(transformer).name,
            fits=tuple(fits.items()),
            source=(("measured", "holdover"), ("date", date.today().isoformat()), ("prompts", str(generations))),
        )


def estimate_coefficients(
    pipe: Any,
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    *,
    signal: str | None = None,
    degree: int = 4,
    path: str | None = None,
    **call: Any,
) -> TeaCacheProfile:
    """Run the pipeline uncached on some prompts and fit the polynomial, by branch and over all branches.

    A prompt is a text, or the keywords of one call (`{"prompt_embeds": ...}`); `call` goes to every call. The
    profile has R^2, the range of the signal's change and whether the polynomial rises over it; `path` saves it.
    """
    prompts = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
    if not prompts:
        raise ConfigError("Estimating coefficients needs at least one prompt.")
    measure = SignalMeasure(signal)
    engine = Engine(pipe, find_transformers(pipe), measure)
    engine.install()
    try:
        for prompt in prompts:
            pipe(**{**call, **({"prompt": prompt} if isinstance(prompt, str) else prompt)})
    finally:
        engine.uninstall()
    profile = measure.profile(engine.transformers[0], degree, len(prompts))
    if path is not None:
        save(profile, path)
    return profile


def fit_polynomial(signal: Sequence[float], output: Sequence[float], degree: int = 4) -> TeaCacheFit:
    """Least squares through (change of signal, change of output), with what it takes to trust it.

    The degree is the highest, up to `degree`, whose polynomial rises over the whole range: one that falls would hold
    more where more has changed. Where none rises, the straight line is returned and says so.
    """
    distinct = len(set(signal))
    if distinct < 2:
        raise ConfigError(f"{distinct} distinct changes of the signal were measured; a fit needs at least 2.")
    x, y = np.asarray(signal, dtype=np.float64), np.asarray(output, dtype=np.float64)
    low, high, spread = float(x.min()), float(x.max()), float(((y - y.mean()) ** 2).sum())
    for power in range(min(degree, distinct - 1), 0, -1):
        with np.errstate(all="ignore"):
            coefficients = np.polyfit(x, y, power)
        misfit = float(((y - np.polyval(coefficients, x)) ** 2).sum())
        r_squared = 1.0 - misfit / spread if spread > 0 else 1.0
        rises = bool((np.diff(np.polyval(coefficients, np.linspace(low, high, _SAMPLES))) >= 0).all())
        if rises:
            break
    return TeaCacheFit(tuple(map(float, coefficients)), low, high, r_squared, rises, len(x))
