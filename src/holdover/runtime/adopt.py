"""Give one instance other methods for a while, and take them back without a trace.

The instance gets a private subclass of its own class. Nothing is added to its `__dict__`, no class is changed,
hooks and wrappers put on before or after (offload, compile, LoRA) stay where they are, and copies of the
instance are plain again.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from ..errors import EnableError

_MARK = "_holdover_adopted"
_PRIVATE: dict[int, type] = {}  # by the id of an instance, as long as it lives


def adoptions_of(instance: object) -> Adoptions | None:
    """The set an instance was adopted by, if its class is a private one made here."""
    found: Adoptions | None = vars(type(instance)).get(_MARK)
    return found


@dataclass(frozen=True, eq=False)
class _Adopted:
    """One instance, the class it had, the one it has, and what that was given."""

    instance: Any
    base: type
    private: type
    given: tuple[str, ...]

    def restore(self) -> None:
        """Give the instance its class back, and leave the private one empty."""
        if type(self.instance) is not self.private:
            raise EnableError(
                f"{self.base.__name__} changed its class to {type(self.instance).__name__} after the cache was "
                "enabled: undo that first, then disable() again."
            )
        self.instance.__class__ = self.base
        for name in self.given:
            delattr(self.private, name)


class Adoptions:
    """A set of adopted instances that are released together: all or nothing."""

    def __init__(self) -> None:
        self._adopted: list[_Adopted] = []
        self.owner: object = None

    def adopt(self, instance: Any, methods: Mapping[str, Callable[..., Any]]) -> type:
        """Override methods on one instance; returns the class it had, for calling the plain methods."""
        base = type(instance)
        if adoptions_of(instance) is not None:
            raise EnableError(f"There already is a holdover cache here (on a {base.__name__}): disable() it first.")
        private, given = _private(instance, base), {**methods, _MARK: self}
        for name, value in given.items():
            setattr(private, name, value)
        instance.__class__ = private
        self._adopted.append(_Adopted(instance, base, private, tuple(given)))
        return base

    def holds(self, instance: object) -> bool:
        """Whether this set adopted the instance."""
        return any(adopted.instance is instance for adopted in self._adopted)

    def release(self, instance: object) -> None:
        """Give one instance its class back."""
        kept = []
        for adopted in self._adopted:
            if adopted.instance is not instance:
                kept.append(adopted)
            else:
                adopted.restore()
        self._adopted = kept

    def release_all(self) -> None:
        """Give every instance its class back, the last adopted first; one that cannot be does not keep the others."""
        errors = []
        while self._adopted:
            try:
                self._adopted.pop().restore()
            except EnableError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _private(instance: Any, base: type) -> type:
    """A subclass for this instance alone: the one it had before, so that what was compiled for it still is."""
    known = _PRIVATE.get(id(instance))
    if known is not None and known.__bases__ == (base,):
        return known
    made = _subclass(base)
    try:
        finalize(instance, _PRIVATE.pop, id(instance), None).atexit = False
    except TypeError:  # nobody would say when it is gone
        return made
    _PRIVATE[id(instance)] = made
    return made


def _subclass(base: type) -> type:
    own = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), own | {"__reduce_ex__": _reduce_as(base)})


def _reduce_as(base: type) -> Callable[[Any, Any], Any]:
    """Copies and pickles of an adopted instance are of its own class."""
    plain: Any = base.__reduce_ex__

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = plain(self, protocol)
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        _, (_, *arguments), *state = reduced
        return (_new, (base, *arguments), *state)

    return reduce


def _new(cls: Any, *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)
