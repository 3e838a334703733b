"""CacheContext.validate: TypeError, ValueError and RuntimeError, each where it is documented."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdover.context import CacheContext


def valid(**changed: Any) -> CacheContext:
    """A context of a dual-stream model, with some fields changed."""
    hidden, encoder = torch.randn(2, 6, 8), torch.randn(2, 3, 8)
    fields: dict[str, Any] = {
        "modulated_input": hidden.clone(),
        "hidden_states": hidden,
        "encoder_hidden_states": encoder,
        "temb": torch.randn(2, 8),
        "run_transformer_blocks": lambda: (hidden, encoder),
        "postprocess": lambda states: states,
    }
    return CacheContext(**fields | changed)


TENSORS = ("modulated_input", "hidden_states", "temb")


def test_a_valid_context_passes() -> None:
    valid().validate()
    valid(extra_states={"rotary": torch.ones(1)}).validate()
    valid(encoder_hidden_states=None).validate()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_kind_of_fraction_passes(dtype: torch.dtype) -> None:
    valid(hidden_states=torch.ones(2, 6, 8, dtype=dtype)).validate()


@pytest.mark.parametrize("field", [*TENSORS, "encoder_hidden_states"])
@pytest.mark.parametrize("value", [[1.0], 1.0, "hidden", np.ones((2, 6, 8)), (torch.ones(2, 6, 8),)], ids=type)
def test_what_is_no_tensor_is_a_type_error(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"CacheContext\.{field} must be a torch.Tensor, not {type(value).__name__}"):
        valid(**{field: value}).validate()


@pytest.mark.parametrize("field", TENSORS)
def test_only_the_encoder_states_may_be_none(field: str) -> None:
    with pytest.raises(TypeError, match=rf"CacheContext\.{field} must be a torch.Tensor, not NoneType"):
        valid(**{field: None}).validate()


@pytest.mark.parametrize("value", [[], "state", torch.ones(1)], ids=type)
def test_extra_states_that_are_no_dict_are_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"CacheContext\.extra_states must be a dict or None"):
        valid(extra_states=value).validate()


@pytest.mark.parametrize("field", ["run_transformer_blocks", "postprocess"])
@pytest.mark.parametrize("value", [None, (torch.ones(1),), "run"], ids=type)
def test_what_cannot_be_called_is_a_type_error(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"CacheContext\.{field} must be callable, not {type(value).__name__}"):
        valid(**{field: value}).validate()


@pytest.mark.parametrize("field", [*TENSORS, "encoder_hidden_states"])
def test_an_empty_tensor_is_a_value_error(field: str) -> None:
    with pytest.raises(ValueError, match=rf"CacheContext\.{field} is empty \(shape \(2, 0, 8\)\)"):
        valid(**{field: torch.ones(2, 0, 8)}).validate()


@pytest.mark.parametrize("field", [*TENSORS, "encoder_hidden_states"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_a_tensor_of_whole_numbers_is_a_value_error(field: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"CacheContext\.{field} must hold floating-point numbers, not {dtype}"):
        valid(**{field: torch.ones(2, 6, 8, dtype=dtype)}).validate()


def test_the_signal_has_the_batch_and_device_of_the_hidden_states() -> None:
    with pytest.raises(ValueError, match="modulated_input has batch size 3 and hidden_states 2"):
        valid(modulated_input=torch.ones(3, 6, 8)).validate()
    with pytest.raises(ValueError, match="modulated_input has batch size None and hidden_states 2"):
        valid(modulated_input=torch.tensor(1.0)).validate()
    with pytest.raises(ValueError, match="modulated_input is on meta and hidden_states on cpu"):
        valid(modulated_input=torch.ones(2, 6, 8, device="meta")).validate()


def test_encoder_states_may_have_a_batch_of_their_own() -> None:
    valid(encoder_hidden_states=torch.ones(3, 3, 8)).validate()
    valid(
        modulated_input=torch.ones(6, 8), hidden_states=torch.ones(6, 8), encoder_hidden_states=torch.ones(3, 8)
    ).validate()


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("run_transformer_blocks", lambda states: (states,), "0 arguments"),
        ("run_transformer_blocks", lambda *, states: (states,), "0 arguments"),
        ("postprocess", lambda: None, "1 argument"),
        ("postprocess", lambda states, temb: states, "1 argument"),
        ("postprocess", lambda *, states: states, "1 argument"),
    ],
)
def test_what_cannot_be_called_so_is_a_runtime_error(field: str, value: Any, wanted: str) -> None:
    with pytest.raises(RuntimeError, match=rf"CacheContext\.{field} must take {wanted}: "):
        valid(**{field: value}).validate()


@pytest.mark.parametrize("value", [lambda states, scale=1.0: states, lambda *args: args, nn.Identity(), torch.relu])
def test_what_can_be_called_so_passes(value: Any) -> None:
    valid(postprocess=value).validate()


def test_validating_runs_nothing() -> None:
    """A forward is expensive: whether the callables can be called is seen from their signatures."""
    ran: list[str] = []
    valid(run_transformer_blocks=lambda: ran.append("blocks"), postprocess=lambda states: ran.append("post")).validate()
    assert ran == []


def test_a_context_is_a_dataclass_of_seven_fields() -> None:
    assert [field.name for field in dataclasses.fields(CacheContext)] == [
        "modulated_input",
        "hidden_states",
        "encoder_hidden_states",
        "temb",
        "run_transformer_blocks",
        "postprocess",
        "extra_states",
    ]
    assert valid().extra_states is None
