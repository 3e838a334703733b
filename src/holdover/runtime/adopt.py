"""Give one instance other methods for a while, and take them back without a trace.

The instance gets a private subclass of its own class. Nothing is added to its `__dict__`, no class is changed,
hooks and wrappers put on before or after (offload, compile, LoRA) stay where they are, and copies of the
instance are plain again.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import EnableError

_MARK = "_holdover_adopted"
_OWN = set(vars(type("Empty", (), {}))) | {"__qualname__", "__reduce_ex__"}  # what a private class has at rest
_PRIVATE: WeakKeyDictionary[Any, type] = WeakKeyDictionary()


def adoptions_of(instance: object) -> Adoptions | None:
    """The set an instance was adopted by, if its class is a private one made here."""
    found: Adoptions | None = vars(type(instance)).get(_MARK)
    return found


class Adoptions:
    """A set of adopted instances that are released together: all or nothing."""

    def __init__(self) -> None:
        self._adopted: list[tuple[Any, type, type]] = []
        self.owner: object = None

    def adopt(self, instance: Any, methods: Mapping[str, Callable[..., Any]]) -> type:
        """Override methods on one instance; returns the class it had, for calling the plain methods."""
        base = type(instance)
        if adoptions_of(instance) is not None:
            raise EnableError(f"There already is a holdover cache here (on a {base.__name__}): disable() it first.")
        private = _private(instance, base)
        for name, method in (*methods.items(), (_MARK, self)):
            setattr(private, name, method)
        instance.__class__ = private
        self._adopted.append((instance, base, private))
        return base

    def holds(self, instance: object) -> bool:
        """Whether this set adopted the instance."""
        return any(adopted is instance for adopted, _, _ in self._adopted)

    def release(self, instance: object) -> None:
        """Give one instance its class back."""
        kept = []
        for adopted, base, private in self._adopted:
            if adopted is not instance:
                kept.append((adopted, base, private))
            else:
                _restore(adopted, base, private)
        self._adopted = kept

    def release_all(self) -> None:
        """Give every instance its class back, the last adopted first; one that cannot be does not keep the others."""
        errors = []
        while self._adopted:
            try:
                _restore(*self._adopted.pop())
            except EnableError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _restore(instance: Any, base: type, private: type) -> None:
    if type(instance) is not private:
        raise EnableError(
            f"{base.__name__} changed its class to {type(instance).__name__} after the cache was enabled: "
            "undo that first, then disable() again."
        )
    instance.__class__ = base
    for name in set(vars(private)) - _OWN:
        delattr(private, name)


def _private(instance: Any, base: type) -> type:
    """A subclass for this instance alone: the one it had before, so that what was compiled for it still is."""
    try:
        known = _PRIVATE.get(instance)
        if known is None or known.__bases__ != (base,):
            known = _PRIVATE[instance] = _subclass(base)
        return known
    except TypeError:  # an instance that cannot be a key
        return _subclass(base)


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
