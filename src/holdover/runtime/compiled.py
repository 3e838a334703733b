"""Under a compiler of the whole transformer: it stays out of what is ours and goes on in what is the model's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

from .adopt import adoptions_of
from .outputs import copied
from .standin import untraced

Plain = Callable[..., Any]


def is_compiled(module: nn.Module) -> bool:
    """Whether a transformer was compiled as a whole, in place or by a wrapper."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def kept_out(plain: Plain, forward: Callable[[Plain, bool, Any, Any], Any]) -> Plain:
    """A `__call__` around `plain` whose own work no compiler sees.

    `forward` is given the plain call, whether a compiled wrapper made this one, and the arguments. A wrapper remembers
    what it wrapped for good: once the module is no longer adopted, this is the plain call. What a compiled call returns
    is copied: a CUDA graph writes into the same memory the next time it runs.
    """

    def call(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
        compiler: Any = set_eval_frame(None)
        try:
            back = functools.partial(plain, this) if compiler is None else _seen_by(compiler, plain, this)
            if adoptions_of(this) is None:
                return back(*args, **kwargs)
            wrapped = compiler is not None
            return forward(_copying(back) if wrapped or is_compiled(this) else back, wrapped, args, kwargs)
        finally:
            set_eval_frame(compiler)

    return untraced(call, recursive=False)  # type: ignore[no-any-return]


def _copying(plain: Plain) -> Plain:
    return lambda *args, **kwargs: copied(plain(*args, **kwargs))


def _seen_by(compiler: Any, plain: Plain, this: nn.Module) -> Plain:
    """The call, back in the compiler's hands."""

    def back(*args: Any, **kwargs: Any) -> Any:
        set_eval_frame(compiler)
        try:
            return plain(this, *args, **kwargs)
        finally:
            set_eval_frame(None)

    return back
