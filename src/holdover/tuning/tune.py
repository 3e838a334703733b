"""The fastest plan that meets a target, with a certificate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from ..calibration.calls import Caller, quiet
from ..calibration.prompts import GENERATIONS, Prompt, built_in, hash_of
from ..errors import ConfigError
from ..plan.planner import Choice
from ..plan.target import Target
from ..profiles import Certificate, Profile
from ..runtime.backend import transformers_of
from ..runtime.identity import adapters
from .certify import allowed, fastest, fewest
from .setting import planner_for
from .trials import Trials

_MARGIN = 20.0  # dB above the target at which the sequence of candidates begins
_FASTER = 1.12  # from one candidate to the next


@dataclass(frozen=True)
class Tried:
    """One candidate: what was expected of it, and the quality of the pictures it was tried on."""

    computed: tuple[int, ...]
    expected: float | None
    values: tuple[float, ...]
    passed: bool
    plan: str


@dataclass(frozen=True)
class Tuned:
    """The profile with its certificate, and every candidate that was tried, from slow to fast."""

    profile: Profile
    certificate: Certificate | None
    tried: tuple[Tried, ...]

    def __str__(self) -> str:
        if self.certificate is None:
            return "no plan could be certified: none tried keeps the target often enough on these prompts"
        return f"{len(self.certificate.computed)} of {len(self.certificate.noise)} steps computed: {self.certificate}"


def tune(
    pipe: Any,
    profile: Profile,
    prompts: Sequence[Prompt] | None = None,
    target: str = "psnr>=40",
    confidence: float = 0.95,
    *,
    share: float = 0.95,
    seed: int = 1_000_000,
    batch_size: int = 1,
    progress: bool = True,
    **call: Any,
) -> Tuned:
    """Find the fastest plan of which `share` of pictures meet `target`, shown with `confidence` on held-back prompts.

    The prompts must not be those of the calibration; without any, the rest of the built-in list is used. Candidates are
    tried from slow to fast, each until it has passed or can no longer pass.
    """
    wanted, chosen = Target.parsed(target), _held_back(pipe, profile, prompts, share, confidence)
    caller = Caller(pipe, len(profile.facts.noise), profile.facts.guidance, {**dict(profile.facts.call), **call})
    candidates = _candidates(planner_for(profile).frontier, wanted, profile.facts.psnr_offset)
    with quiet(pipe), Trials(caller, chosen, seed, batch_size) as trials:
        total = trials.runs * (1 + len(candidates))
        with tqdm(total=total, disable=not progress, desc=f"tuning to {wanted}", unit="run") as bar:
            trials.reference(bar.update)
            test = _Test(profile, wanted, trials, allowed(len(chosen), share, confidence) or 0, bar.update)
            best = fastest(candidates, test.passes)
    if best is None:
        return Tuned(profile, None, tuple(test.tried))
    shown = next(tried for tried in test.tried if tried.computed == best.computed)
    certificate = _certificate(pipe, profile, chosen, wanted, shown, (share, confidence))
    kept = tuple(c for c in profile.facts.certificates if c.target != certificate.target)
    return Tuned(profile.with_facts(certificates=(*kept, certificate)), certificate, tuple(test.tried))


def _certificate(
    pipe: Any, profile: Profile, prompts: list[Prompt], target: Target, shown: Tried, promise: tuple[float, float]
) -> Certificate:
    """What was shown, with everything it was shown for."""
    share, confidence = promise
    return Certificate(
        target=str(target),
        computed=shown.computed,
        noise=profile.facts.noise,
        share=share,
        confidence=confidence,
        prompts=len(shown.values),
        below=_below(shown.values, target),
        prompts_hash=hash_of(prompts),
        scheduler=type(pipe.scheduler).__name__,
        plan=shown.plan,
        guidance=profile.facts.guidance,
        adapters=tuple(a for module in transformers_of(pipe).values() for a in adapters(module)),
    )


@dataclass
class _Test:
    """Tries candidates on held-back prompts, each until it has passed or can no longer pass."""

    profile: Profile
    target: Target
    trials: Trials
    most: int
    done: Callable[[], Any]
    tried: list[Tried] = field(default_factory=list)

    def passes(self, choice: Choice) -> bool:
        """Whether no more pictures miss the target than are allowed."""
        values, plan = self.trials.tried(
            self.profile, self.target.metric, choice.computed, self.done, enough=self._hopeless
        )
        offset = self.profile.facts.psnr_offset
        expected = None if offset is None or self.target.metric != "psnr" else choice.psnr(offset)
        passed = not self._hopeless(values)
        self.tried.append(Tried(choice.computed, expected, tuple(values), passed, plan))
        return passed

    def _hopeless(self, values: list[float]) -> bool:
        return _below(values, self.target) > self.most


def _below(values: Sequence[float], target: Target) -> int:
    return sum(not value >= target.least for value in values)


def _held_back(
    pipe: Any, profile: Profile, prompts: Sequence[Prompt] | None, share: float, confidence: float
) -> list[Prompt]:
    for name, value in (("share", share), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ConfigError(f"{name} must lie between 0 and 1, not {value}.")
    chosen: list[Prompt] = list(
        built_in(pipe)[max(GENERATIONS, profile.facts.prompts) :] if prompts is None else prompts
    )
    least = fewest(share, confidence)
    if len(chosen) < least:
        raise ConfigError(
            f"{len(chosen)} held-back prompts cannot show that {share:.0%} of pictures meet a target with "
            f"{confidence:.0%} confidence: at least {least} are needed."
        )
    return chosen


def _candidates(frontier: dict[int, Choice], target: Target, offset: float | None) -> list[Choice]:
    """Budgets from slow to fast, chosen from the profile alone; they begin well above the target."""
    budgets = [count for count, choice in frontier.items() if choice.cost > 0]
    if target.metric == "psnr" and offset is not None:
        safe = [count for count in budgets if frontier[count].psnr(offset) >= target.least + _MARGIN]
        slowest = min(safe, default=max(budgets, default=0))
    else:
        slowest = max(budgets, default=0)
    chosen: list[Choice] = []
    count = float(slowest)
    while count >= min(frontier):
        if not chosen or round(count) != len(chosen[-1].computed):
            chosen.append(frontier[round(count)])
        count = min(count / _FASTER, math.ceil(count) - 1)
    return chosen
