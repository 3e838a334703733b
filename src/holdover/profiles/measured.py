"""What `holdover.calibrate` measures of a model, in one file: JSON facts and arrays, as safetensors.

The file is a safetensors file whose metadata entry `holdover` is a JSON object: nothing in it can run code. A digest
over facts and arrays tells a damaged file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialized

from ..errors import ProfileError
from .codec import decode, encode
from .profile import MagCacheProfile, TeaCacheProfile

FORMAT = "holdover-measured-profile"
VERSION = 1
SUFFIX = ".safetensors"
_ENTRY = "holdover"


@dataclass(frozen=True)
class ModelFacts:
    """Which transformer was measured: its class, a fingerprint of its weights, its dtype and active adapters."""

    transformer_class: str
    fingerprint: str
    dtype: str
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A schedule that was tried on the model itself, for one grid and scheduler.

    `weights` are those of its held steps one after the other, each over the last computed steps, four at most, for all
    branches alike or for each of `branches`; `psnr` is what it kept on prompts its weights were not fitted to.
    """

    noise: tuple[float, ...]
    scheduler: str
    computed: tuple[int, ...]
    weights: tuple[float, ...]
    origin: str
    psnr: float
    branches: tuple[str, ...] = ()
    guidance: float | None = None


@dataclass(frozen=True)
class Certificate:
    """What was shown by trial on held-back prompts: the share of pictures that meets a target, and how surely."""

    target: str
    computed: tuple[int, ...]
    noise: tuple[float, ...]
    share: float
    confidence: float
    prompts: int
    below: int
    prompts_hash: str
    scheduler: str
    plan: str
    guidance: float | None = None
    adapters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"for prompts like these, {self.share:.0%} of pictures meet {self.target}, with {self.confidence:.0%} "
            f"confidence; {self.prompts} prompts tried, {self.below} below"
        )


@dataclass(frozen=True)
class Facts:
    """Everything in a profile that is not an array.

    `starts` has the first step of each expert, of which most models have one. `scale` and `carry` say for each step how
    much of the output and of the latent the scheduler got; they are empty where it got the output as it is.
    """

    name: str
    pipeline: str
    scheduler: str
    noise: tuple[float, ...]
    models: tuple[tuple[str, ModelFacts], ...]
    prompts: int
    prompts_hash: str
    date: str
    versions: tuple[tuple[str, str], ...]
    guidance: float | None = None
    branches: tuple[str, ...] = ()
    mix: tuple[float, ...] = (1.0,)
    scale: tuple[float, ...] = ()
    carry: tuple[float, ...] = ()
    call: tuple[tuple[str, str | int | float | bool | None], ...] = ()
    starts: tuple[int, ...] = (0,)
    psnr_offset: float | None = None
    surprise: tuple[float, ...] = ()
    tea_cache: tuple[tuple[str, TeaCacheProfile], ...] = ()
    mag_cache: tuple[tuple[str, MagCacheProfile], ...] = ()
    schedules: tuple[Schedule, ...] = ()
    certificates: tuple[Certificate, ...] = ()


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured constants of one model for every method, with their provenance.

    - `grams`: (generations, B N, B N), inner products of the outputs of uncached generations: those the scheduler got,
      or those of each of the B `branches` of the facts, of which it got the `mix`.
    - `growth`: (generations, N+1), how errors grew in generations with held steps.
    - `seams`: the same inner products of the residuals at the seam, by transformer, where they were asked for.
    """

    facts: Facts
    grams: NDArray[np.float64]
    growth: NDArray[np.float64]
    seams: Mapping[str, NDArray[np.float64]]

    def __post_init__(self) -> None:
        steps = len(self.facts.noise)
        _require(steps > 0, "it has no steps")
        _require(_rising((-1, *self.facts.starts, steps)) and self.facts.starts[:1] == (0,), "its starts are no steps")
        _require(len(self.facts.surprise) in (0, 2), "its surprise is not two numbers")
        _require(len(self.facts.mix) == max(1, len(self.facts.branches)), "its mix does not fit its branches")
        scale, carry = self.facts.scale, self.facts.carry
        _require(len(scale) == len(carry) in (0, steps) and all(scale), "its scale and carry do not fit its steps")
        _require(_squares(self.grams, steps * len(self.facts.mix)), "its Gram matrices do not fit")
        for name, seam in self.seams.items():
            _require(_squares(seam, steps), f"the seam {name!r}'s Gram matrices do not fit")
        _require(self.growth.shape == (len(self.grams), steps + 1), "its error growth does not fit its Gram matrices")
        for array in (self.grams, self.growth, *self.seams.values()):
            _require(bool(np.isfinite(array).all()), "it holds numbers that are not finite")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        facts = self.facts
        models = ", ".join(model.transformer_class for _, model in facts.models)
        return f"<Profile {facts.name!r}: {models}, {len(self.grams)} generations of {len(facts.noise)} steps>"

    @property
    def name(self) -> str:
        return self.facts.name

    @cached_property
    def digest(self) -> str:
        """A hash of everything in the profile."""
        return _digest(encode(self.facts), self._arrays())

    def with_facts(self, **changes: Any) -> Self:
        """The same measurements with other facts."""
        return replace(self, facts=replace(self.facts, **changes))

    def _arrays(self) -> dict[str, NDArray[np.float64]]:
        seams = {f"seam.{name}": array for name, array in self.seams.items()}
        return {"grams": self.grams, "growth": self.growth, **seams}

    def save(self, path: str | PathLike[str]) -> Path:
        """Write one file; an older one is replaced at once or not at all."""
        target = Path(path)
        if target.suffix != SUFFIX:
            raise ProfileError(f"A profile is saved as a {SUFFIX} file, not as {target.name!r}.")
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest, "facts": encode(self.facts)}
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.unfinished")
        unfinished.write_bytes(serialized(arrays, {_ENTRY: json.dumps(head, allow_nan=False)}))
        unfinished.replace(target)
        return target

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a file that `save` wrote; anything else is a ProfileError that says what is wrong with it."""
        where = str(path)
        head, arrays = _read(where)
        facts = decode(Facts, head["facts"], where)
        if head.get("digest") != _digest(head["facts"], arrays):
            raise ProfileError(f"{where} is damaged: its contents do not match its digest. Calibrate again.")
        seams = {name.removeprefix("seam."): array for name, array in arrays.items() if name.startswith("seam.")}
        try:
            return cls(facts, arrays["grams"], arrays["growth"], seams)
        except KeyError as error:
            raise ProfileError(f"{where} lacks the array {error}.") from None


def _read(where: str) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
    """The facts and the arrays of a file; arrays are read only once it is known to be a profile."""
    try:
        with safe_open(where, framework="numpy") as file:
            head = _head((file.metadata() or {}).get(_ENTRY), where)
            return head, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise ProfileError(f"No profile could be read from {where}: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise ProfileError(f"{where} is not a profile, or it is truncated: {error}.") from None


def _head(text: str | None, where: str) -> dict[str, Any]:
    try:
        head = json.loads(text or "null")
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"The facts in {where} are not JSON that can be read: {error}.") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT or not isinstance(head.get("facts"), dict):
        raise ProfileError(f"{where} is a safetensors file, but not a holdover profile.")
    if head.get("version") != VERSION:
        raise ProfileError(f"{where} has version {head.get('version')!r}; this holdover reads version {VERSION}.")
    return head


def _digest(facts: Any, arrays: Mapping[str, NDArray[np.float64]]) -> str:
    hashed = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(arrays):
        hashed.update(name.encode())
        hashed.update(str(arrays[name].shape).encode())
        hashed.update(np.ascontiguousarray(arrays[name]).tobytes())
    return hashed.hexdigest()


def _rising(values: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _squares(array: NDArray[np.float64], size: int) -> bool:
    return array.ndim == 3 and array.shape[1:] == (size, size) and len(array) > 0


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ProfileError(f"This profile cannot be right: {otherwise}.")
