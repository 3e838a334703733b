"""Which profile a plan stands on."""

from __future__ import annotations

from torch import nn

from ..errors import ProfileError, did_you_mean
from ..models.inputs import get_module_class
from ..profiles import Profile, measured
from ..profiles.profile import SUFFIX
from ..runtime.identity import fingerprint


def resolved(asked: Profile | str | None, transformer: nn.Module) -> Profile | None:
    """The profile asked for: an object, a file, a shipped one's name; else the shipped one of this very model."""
    if isinstance(asked, Profile):
        return asked
    if asked is None:
        return _of(transformer)
    if asked.endswith(SUFFIX):
        return Profile.load(asked)
    known = {profile.name: profile for profile in measured()}
    if asked not in known:
        listed = f" Shipped: {', '.join(known)}." if known else ""
        raise ProfileError(
            f"There is no profile {asked!r}.{did_you_mean(asked, known)}{listed} A path to a file must end in {SUFFIX}."
        )
    return known[asked]


def _of(transformer: nn.Module) -> Profile | None:
    of_class = [
        (profile, model)
        for profile in measured()
        for _, model in profile.facts.models
        if model.transformer_class == get_module_class(transformer).__name__
    ]
    if not of_class:
        return None
    now = fingerprint(transformer)
    return next((profile for profile, model in of_class if model.fingerprint == now), None)
