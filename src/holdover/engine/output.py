"""Runners that do not go block by block: the transformer's whole output is held, or a registered extractor is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..context import CacheContext
from ..errors import UnsupportedModelError
from ..models.inputs import iter_tensors, scale_argument
from ..models.registry import INPUT_SIGNAL
from .parallel import known_to_shards
from .state import ForwardCall, Outcome
from .storage import HeldOutput, HeldTuple, RecentDict
from .verify import compare_plain, verify_output

if TYPE_CHECKING:
    from .install import CachedTransformer

WHOLE = "the whole transformer: its output is held"
EXTRACTED = "by the registered extractor"
STREAMS = ("hidden_states", "encoder_hidden_states")  # of a CacheContext, in the order its blocks return them


class OutputRunner:
    """Holds a transformer's output: nothing inside the transformer runs at a held step."""

    def __init__(self, transformer: CachedTransformer) -> None:
        self._transformer = transformer
        self._verified: RecentDict[Any, None] = RecentDict()

    def run(self, call: ForwardCall) -> Outcome:
        """Run the transformer, or return the output that is predicted."""
        decision = call.decide(self._read_signal(call))
        if not decision.compute:
            predicted = call.state.predict(call.step)
            assert isinstance(predicted, HeldOutput)
            return Outcome(self.replay(call, predicted), decision, None)
        factor = call.generation.method.timestep_factor(call.step)
        if factor is not None:
            key = self._transformer.inputs.find_timestep(call.args, call.kwargs)
            if key is None:
                raise UnsupportedModelError(
                    f"The plan changes the timestep of {self._transformer.class_name}, which was called without a "
                    "floating-point tensor as its timestep. Call it as it was when its profile was measured."
                )
            call.args, call.kwargs = scale_argument(call.args, call.kwargs, key, factor)
        if call.structure not in self._verified:
            call.keep_inputs()
        output = call.plain(*call.args, **call.kwargs)
        held = self.hold(call, output)
        if not known_to_shards(self._transformer.groups, call.structure in self._verified):
            self._verify(call, held)
        return Outcome(output, decision, held)

    def hold(self, call: ForwardCall, output: Any) -> HeldOutput:
        """What is held of a computed forward."""
        return HeldOutput.copy_of(output)

    def replay(self, call: ForwardCall, held: HeldOutput) -> Any:
        """The output of a forward that is held."""
        return held.build_output()

    def _read_signal(self, call: ForwardCall) -> torch.Tensor | None:
        """The model's input: the only signal there is without blocks."""
        if call.signal is None:
            return None
        if call.signal.of_residual is not None:
            raise UnsupportedModelError(
                f"The blocks of this {self._transformer.class_name} cannot be traced, so its first block cannot be run "
                "alone. Use a method that holds the output, such as easy_cache or spectrum."
            )
        if call.signal != INPUT_SIGNAL:
            raise UnsupportedModelError(
                f"The blocks of this {self._transformer.class_name} cannot be traced, so their signal cannot be read. "
                'Measure coefficients with signal="input" and use them.'
            )
        return next(iter_tensors([*call.args, *call.kwargs.values()]))

    def _verify(self, call: ForwardCall, held: HeldOutput) -> None:
        """The model must give the same output for the same input: one with a memory of its own cannot be held."""
        transformer, again = self._transformer, call.repeat(lambda args, kwargs: call.plain(*args, **kwargs))
        problem = (
            f"{transformer.class_name} gives another output for the same input each time, and its blocks cannot be "
            "traced: its steps cannot be held."
        )
        verify_output(transformer, again, self.replay(call, held), WHOLE, problem)
        self._verified[call.structure] = None
        transformer.notes.add(f"{transformer.name}: {WHOLE}")


class ExtractorRunner:
    """Runs a transformer through the CacheContext that a registered extractor builds."""

    def __init__(self, transformer: CachedTransformer) -> None:
        self._transformer = transformer
        self._verified: RecentDict[Any, None] = RecentDict()

    def run(self, call: ForwardCall) -> Outcome:
        """Build the context, decide, then run the blocks or add what is held."""
        context = self._build_context(call)
        decision = call.decide(context.modulated_input)
        if not decision.compute:
            predicted = call.state.predict(call.step)
            assert isinstance(predicted, HeldStreams)
            return Outcome(_hold(context, predicted), decision, None)
        held = self._run_blocks(context)
        output = context.postprocess(context.hidden_states)
        if not known_to_shards(self._transformer.groups, call.structure in self._verified):
            self._verify(call, output, held)
        return Outcome(output, decision, held)

    def _build_context(self, call: ForwardCall) -> CacheContext:
        transformer = self._transformer
        assert transformer.extractor is not None
        context = transformer.extractor(transformer.core, *call.args, **call.kwargs)
        if not isinstance(context, CacheContext):
            raise TypeError(f"The extractor for {transformer.class_name} returned {context!r}, not a CacheContext.")
        context.validate()
        return context

    def _run_blocks(self, context: CacheContext) -> HeldStreams:
        """Run the blocks, let the context's streams be what leaves them, and return what they added to each."""
        outputs = context.run_transformer_blocks()
        if not isinstance(outputs, (tuple, list)) or not outputs or not isinstance(outputs[0], torch.Tensor):
            raise TypeError("CacheContext.run_transformer_blocks must return a tuple with the hidden states first.")
        residuals: list[torch.Tensor | None] = [None, None]
        for number, name in enumerate(STREAMS):
            entering = getattr(context, name)
            if entering is None or number >= len(outputs) or outputs[number] is None:
                continue
            if outputs[number].shape != entering.shape:
                raise ValueError(
                    f"CacheContext.run_transformer_blocks must keep the shape of the {name} to be held: "
                    f"{tuple(entering.shape)} became {tuple(outputs[number].shape)}."
                )
            residuals[number] = outputs[number] - entering
            setattr(context, name, outputs[number])
        return HeldStreams(residuals)

    def _verify(self, call: ForwardCall, output: object, held: HeldStreams) -> None:
        """The step that was just computed must equal the plain forward, and give the same when it is held."""
        replayed = _hold(self._build_context(call), held)
        plain_error = compare_plain(self._transformer, call, output)
        problem = (
            "The extractor's context does not do what the model's forward does, or its postprocess depends on more "
            "than the two streams."
        )
        verify_output(self._transformer, output, replayed, EXTRACTED, problem, plain_error)
        self._verified[call.structure] = None


class HeldStreams(HeldTuple):
    """The residuals of hidden states and encoder states; None for a stream that the extractor does not carry."""

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        return super().main[:1]


def _hold(context: CacheContext, held: HeldStreams) -> Any:
    for name, residual in zip(STREAMS, held.tensors, strict=True):
        if residual is not None:
            setattr(context, name, getattr(context, name) + residual)
    return context.postprocess(context.hidden_states)
