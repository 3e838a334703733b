"""`Profile`: everything that `holdover.calibrate` measures of a model, saved and loaded as one safetensors file.

Its metadata entry `holdover` is a JSON object with the facts; the measurements are arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from ..errors import ProfileError
from .facts import MeasuredPlan, MethodProfile, ProfileFacts, QualityEstimate, require
from .files import SUFFIX, check_version, compute_digest, decode, encode, parse_json, write_file
from .hub import locate, upload
from .targets import QUALITY_TARGETS, Target, check_quality

if TYPE_CHECKING:
    from pydantic_core.core_schema import CoreSchema

FORMAT = "holdover-measured-profile"
VERSION = 1
_ENTRY = "holdover"


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured constants of one model for every method, with their provenance.

    - `grams`: (generations, B N, B N), inner products of the outputs of uncached generations: the outputs that the
      scheduler gets (B = 1), or those of each of the B `branches`, which are combined by `mix` for the scheduler. If
      the mix changes from step to step, `mix` has B N shares, and `branches` is empty: all are held alike.
    - `growth`: (generations, N + 1), how errors grow in generations with held steps.
    - `seams`: the same inner products for the residuals of the blocks, by transformer, if they were measured.
    """

    facts: ProfileFacts
    grams: NDArray[np.float64]
    growth: NDArray[np.float64]
    seams: Mapping[str, NDArray[np.float64]]

    def __post_init__(self) -> None:
        facts, steps = self.facts, len(self.facts.noise)
        require(steps > 0, "it has no steps")
        is_rising = all(a < b for a, b in pairwise((-1, *facts.starts, steps)))
        require(is_rising and facts.starts[:1] == (0,), "its starts are not ascending steps from 0")
        require(len(facts.surprise) in (0, 2), "its surprise is not two numbers")
        by_step = not facts.branches and len(facts.mix) > 1
        parts = len(facts.mix) // steps if by_step else len(facts.mix)
        fits = len(facts.mix) == parts * steps if by_step else parts == max(1, len(facts.branches))
        require(fits, "its mix does not fit its branches")
        fits = len(facts.scale) == len(facts.carry) in (0, steps) and all(facts.scale)
        require(fits, "its scale and carry do not fit its steps")
        require(_is_square(self.grams, steps * parts), "its Gram matrices do not fit its steps and branches")
        for name, seam in self.seams.items():
            require(_is_square(seam, steps), f"the residuals' Gram matrices of {name!r} do not fit its steps")
        require(self.growth.shape == (len(self.grams), steps + 1), "its error growth does not fit its Gram matrices")
        for array in (self.grams, self.growth, *self.seams.values()):
            require(bool(np.isfinite(array).all()), "it has numbers that are not finite")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        facts = self.facts
        models = ", ".join(model.transformer_class for _, model in facts.models)
        made = f"{len(self.grams)} generations of {len(facts.noise)} steps"
        return f"<Profile {facts.name!r}: {models}, {made}{f', {facts.origin}' if facts.origin else ''}>"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """As a setting of a config, a profile is an instance; pydantic does not look into it."""
        from pydantic_core.core_schema import is_instance_schema

        return is_instance_schema(cls)

    @property
    def name(self) -> str:
        """The name it was saved under."""
        return self.facts.name

    @cached_property
    def digest(self) -> str:
        """A hash of everything in the profile but its cost."""
        return compute_digest(_without_cost(encode(self.facts)), self._arrays())

    def with_facts(self, **changes: Any) -> Self:
        """A copy with some facts changed and the same measurements."""
        return replace(self, facts=replace(self.facts, **changes))

    def target_of(self, quality: str) -> str:
        """The target that a quality stands for: the profile's own, else the default."""
        check_quality(quality)
        return dict(self.facts.qualities).get(quality, QUALITY_TARGETS[quality])

    def with_quality(self, quality: str, target: str) -> Self:
        """A copy in which a quality (`lossless`, `high`, `balanced` or `draft`) stands for this target."""
        check_quality(quality)
        changed = dict(self.facts.qualities) | {quality: str(Target.parsed(target))}
        return self.with_facts(qualities=tuple(changed.items()))

    def with_plan(self, plan: MeasuredPlan) -> Self:
        """A copy with one more plan, in place of one with as many computed steps under the same conditions."""
        conditions = (len(plan.computed), plan.noise, plan.scheduler)
        known = self.facts.schedules
        others = [other for other in known if (len(other.computed), other.noise, other.scheduler) != conditions]
        return self.with_facts(schedules=(*others, plan))

    def with_estimate(self, estimate: QualityEstimate | None) -> Self:
        """A copy with one more estimate, in place of an older one of the same plan; unchanged for None."""
        if estimate is None:
            return self
        others = tuple(other for other in self.facts.estimates if other.plan != estimate.plan)
        return self.with_facts(estimates=(*others, estimate))

    def _arrays(self) -> dict[str, NDArray[np.float64]]:
        seams = {f"seam.{name}": array for name, array in self.seams.items()}
        return {"grams": self.grams, "growth": self.growth, **seams}

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the profile to a `.safetensors` file; an existing file is replaced completely or not at all."""
        if Path(path).suffix != SUFFIX:
            raise ProfileError(f"A profile is saved as a {SUFFIX} file, not as {Path(path).name!r}.")
        return write_file(path, self._to_bytes())

    def push_to_hub(
        self,
        repo_id: str,
        path_in_repo: str = f"profile{SUFFIX}",
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload the profile to a model repository, which is created if it does not exist.

        Returns the address with the commit, which can be given as `profile=`.
        """
        if Path(path_in_repo).suffix != SUFFIX:
            raise ProfileError(f"A profile is saved as a {SUFFIX} file, not as {path_in_repo!r}.")
        message = commit_message or f"Add the holdover profile {self.name}"
        return upload(self._to_bytes(), repo_id, path_in_repo, message, private, token, create_pr)

    def _to_bytes(self) -> bytes:
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest, "facts": encode(self.facts)}
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        return to_safetensors(arrays, {_ENTRY: json.dumps(head, allow_nan=False)})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a file that `save` wrote, or one on the Hub; a ProfileError says what is wrong with anything else.

        `origin` of a profile from the Hub has the commit, and so does its digest.
        """
        file_path, origin = locate(path)
        where = origin or file_path
        try:
            with safe_open(file_path, framework="numpy") as file:
                head = parse_json((file.metadata() or {}).get(_ENTRY, "null"), f"The metadata of {where}")
                is_ours = isinstance(head, dict) and head.get("format") == FORMAT
                if not is_ours or not isinstance(head.get("facts"), dict):  # do not read its arrays
                    raise ProfileError(f"{where} is a safetensors file, but not a holdover profile.")
                check_version(head, VERSION, where)
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise ProfileError(f"No profile could be read from {where}: {error.strerror or error}.") from None
        except SafetensorError as error:
            raise ProfileError(f"{where} is not a profile, or it is truncated: {error}.") from None
        facts = decode(ProfileFacts, head["facts"], where)
        if head.get("digest") != compute_digest(_without_cost(head["facts"]), arrays):
            raise ProfileError(f"{where} is damaged: its contents do not match its digest. Calibrate again.")
        seams = {name.removeprefix("seam."): array for name, array in arrays.items() if name.startswith("seam.")}
        try:
            profile = cls(facts, arrays["grams"], arrays["growth"], seams)
        except KeyError as error:
            raise ProfileError(f"{where} lacks the array {error}.") from None
        return profile.with_facts(origin=origin) if origin else profile


def display_name(profile: Profile | MethodProfile) -> str:
    """The name for notes, with the address of a profile from the Hub."""
    origin = profile.facts.origin if isinstance(profile, Profile) else profile.origin
    return f"{profile.name} ({origin})" if origin else profile.name


def _is_square(array: NDArray[np.float64], size: int) -> bool:
    """Whether an array is a non-empty stack of square matrices of this size."""
    return array.ndim == 3 and array.shape[1:] == (size, size) and len(array) > 0


def _without_cost(facts: dict[str, Any]) -> dict[str, Any]:
    """Encoded facts that are the same for every calibration on the same prompts and seed: all but the seconds."""
    return {name: value for name, value in facts.items() if name != "cost"}
