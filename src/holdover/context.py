"""`CacheContext`: the stack of transformer blocks at one step, as an extractor describes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class CacheContext:
    """The stack of transformer blocks at one step of one branch.

    `modulated_input` is the signal that a method may compare between steps. `hidden_states` and
    `encoder_hidden_states` are the inputs of the first block; `run_transformer_blocks()` returns the outputs of the
    last block, hidden states first, then encoder states if the model has them; `postprocess(hidden)` turns them into
    the model's output. Both fields hold the outputs of the last block, computed or held, when `postprocess` is called.
    `extra_states` is whatever else an extractor wants to hand over. An extractor that a user registers for an unusual
    model builds this object.
    """

    modulated_input: torch.Tensor
    hidden_states: torch.Tensor
    encoder_hidden_states: torch.Tensor | None
    temb: torch.Tensor
    run_transformer_blocks: Callable[[], tuple[torch.Tensor, ...]]
    postprocess: Callable[[torch.Tensor], Any]
    extra_states: dict[str, Any] | None = None

    def validate(self) -> None:
        """Check types (TypeError), tensors (ValueError) and the signatures of the callables (RuntimeError)."""
        for name in ("modulated_input", "hidden_states", "temb"):
            _check_tensor(name, getattr(self, name))
        if self.encoder_hidden_states is not None:
            _check_tensor("encoder_hidden_states", self.encoder_hidden_states)
        signal, hidden = self.modulated_input, self.hidden_states
        batches = [tensor.shape[0] if tensor.ndim else None for tensor in (signal, hidden)]
        if batches[0] != batches[1]:
            sizes = f"modulated_input has batch size {batches[0]} and hidden_states {batches[1]}"
            raise ValueError(f"CacheContext.{sizes}.")
        if signal.device != hidden.device:
            raise ValueError(
                f"CacheContext.modulated_input is on {signal.device} and hidden_states on {hidden.device}."
            )
        if self.extra_states is not None and not isinstance(self.extra_states, dict):
            raise TypeError(
                f"CacheContext.extra_states must be a dict or None, not {type(self.extra_states).__name__}."
            )
        _check_callable("run_transformer_blocks", self.run_transformer_blocks)
        _check_callable("postprocess", self.postprocess, hidden)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"CacheContext.{name} must be a torch.Tensor, not {type(value).__name__}.")
    if value.numel() == 0:
        raise ValueError(f"CacheContext.{name} is empty (shape {tuple(value.shape)}).")
    if not (value.is_floating_point() or value.is_complex()):
        raise ValueError(f"CacheContext.{name} must hold floating-point numbers, not {value.dtype}.")


def _check_callable(name: str, value: object, *arguments: object) -> None:
    if not callable(value):
        raise TypeError(f"CacheContext.{name} must be callable, not {type(value).__name__}.")
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError as error:
        wanted = f"{len(arguments)} argument" + ("" if len(arguments) == 1 else "s")
        raise RuntimeError(f"CacheContext.{name} must take {wanted}: {error}.") from None
    except ValueError:
        return  # a builtin without a readable signature
