"""What cache-dit's functors change on a model: found out once, then in place only while a forward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ..errors import UnsupportedModelError

_HOOKED = "_old_forward"  # where accelerate keeps the forward its hooks run


class Patches:
    """Attributes of some modules with the values they have while a forward runs."""

    def __init__(self) -> None:
        self._values: dict[nn.Module, dict[str, Any]] = {}

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Give one attribute another value; a forward that an offload hook runs is patched beneath the hook."""
        if name == "forward" and "forward" in vars(module):
            if _HOOKED not in vars(module):
                raise UnsupportedModelError(
                    f"cache-dit runs {type(module).__name__} with a forward of its own, and another hook is on that "
                    "forward: take the hook off, or use tea_cache or mag_cache."
                )
            name = _HOOKED
        self._values.setdefault(module, {})[name] = value

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Have the values in place; afterwards every module has exactly the attributes it had."""
        kept = {module: dict(vars(module)) for module in self._values}
        for module, values in self._values.items():
            vars(module).update(values)
        try:
            yield
        finally:
            for module, values in self._values.items():
                _put_back(vars(module), kept[module], values)


def captured(apply: Callable[[], object], transformer: nn.Module) -> Patches:
    """What `apply` changes on the transformer's modules; everything is put back at once."""
    before = {module: (dict(vars(module)), dict(module._modules)) for module in transformer.modules()}
    changes: list[tuple[nn.Module, str, Any]] = []
    try:
        apply()
        for module, (attributes, children) in before.items():
            changes += [(module, name, value) for name, value in _changed(vars(module), attributes)]
            changes += [(module, name, value) for name, value in _changed(module._modules, children)]
    finally:
        for module, (attributes, children) in before.items():
            _put_back(vars(module), attributes, attributes)
            _put_back(module._modules, children, children)
    patches = Patches()
    for module, name, value in changes:
        patches.put(module, name, value)
    return patches


def _changed(now: dict[str, Any], then: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in now.items() if name not in then or then[name] is not value]


def _put_back(now: dict[str, Any], then: dict[str, Any], names: Iterable[str]) -> None:
    for name in [name for name in now if name not in then]:
        del now[name]
    for name in names:
        if name in then and now.get(name) is not then[name]:
            now[name] = then[name]
