"""What only feeds blocks does not run on a held step, and not a bit changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdover
from holdover.runtime.feeders import TouchedError, Unrun, candidates
from tiny.models import MODELS, with_timestep
from tiny.pipelines import PIPELINES, run

EVERY_THIRD = {"mag_ratios": [1.0], "mag_threshold": 1e9, "mag_max_skip_steps": 2, "mag_retention_ratio": 0.0}
MAG = ("mag_cache", EVERY_THIRD | {"num_inference_steps": 12})
TEA = ("tea_cache", {"coefficients": (0.0, 1.0), "rel_l1_thresh": 2.5})
LATE = ("tea_cache", TEA[1] | {"read": "late"})
FEEDERS = {
    "FluxTransformer2DModel": {"pos_embed", "context_embedder"},
    "FluxTransformer2DModel[controlnet]": {"pos_embed", "context_embedder"},
    "SD3Transformer2DModel": {"context_embedder"},
    "OvisImageTransformer2DModel": {"pos_embed", "context_embedder_norm", "context_embedder"},
    "Flux2Transformer2DModel": {
        "pos_embed",
        "double_stream_modulation_img",
        "double_stream_modulation_txt",
        "single_stream_modulation",
    },
    "WanTransformer3DModel": {"rope"},
    "AuraFlowTransformer2DModel": set(),
}


class Calls:
    """Counts the forwards of some children, unnoticed: their classes are watched, not the modules."""

    def __init__(self, monkeypatch, transformer, names):
        self.of = dict.fromkeys(names, 0)
        modules = {getattr(transformer, name): name for name in names}
        for cls in {type(module) for module in modules}:
            monkeypatch.setattr(cls, "forward", self._counting(cls.forward, modules))

    def _counting(self, forward, modules):
        def counting(module, *args, **kwargs):
            if module in modules:
                self.of[modules[module]] += 1
            return forward(module, *args, **kwargs)

        return counting


def listened_to(transformer):
    """The same transformer with a hook at each child: nothing may be left out."""
    for child in transformer.children():
        child.register_forward_hook(lambda *_: None)
    return transformer


def walked(model, tiny, method, settings, ts=(1.0, 0.9, 0.8, 0.6, 0.4)):
    """The outputs of a few forwards, and which of them were computed."""
    inputs = tiny.inputs()
    with holdover.enable(model, method, **settings) as cache, torch.no_grad():
        outputs = [model(**with_timestep(tiny, inputs, t), return_dict=False)[0] for t in ts]
        return outputs, [v.computed for v in cache.stats().generations[-1].visits]


@pytest.mark.parametrize("name", FEEDERS)
def test_what_only_feeds_blocks_runs_at_computed_steps_alone(name, monkeypatch):
    tiny = MODELS[name]
    model = tiny.build()
    calls = Calls(monkeypatch, model, FEEDERS[name])
    inputs = tiny.inputs()
    with holdover.enable(model, MAG[0], **MAG[1]) as cache, torch.no_grad():
        model(**with_timestep(tiny, inputs, 1.0))
        (choice,) = cache.engine.units[0].cuts.values()
        found = {child for child, module in model.named_children() if module in choice.shortcut.feeders}
        assert found == FEEDERS[name]
        before = dict(calls.of)
        for t in (0.9, 0.8):
            model(**with_timestep(tiny, inputs, t))
        assert calls.of == before
        model(**with_timestep(tiny, inputs, 0.7))
        assert [v.computed for v in cache.stats().generations[-1].visits] == [True, False, False, True]
    assert all(count > before[child] for child, count in calls.of.items())


@pytest.mark.parametrize("name", FEEDERS)
@pytest.mark.parametrize(("method", "settings"), [MAG, TEA, LATE], ids=["mag", "tea", "late"])
def test_no_bit_depends_on_what_is_left_out(name, method, settings):
    tiny = MODELS[name]
    short, computed = walked(tiny.build(), tiny, method, settings)
    whole, same = walked(listened_to(tiny.build()), tiny, method, settings)
    assert computed == same
    assert not all(computed)
    assert all(map(torch.equal, short, whole))


@pytest.mark.parametrize(("method", "settings"), [MAG, TEA], ids=["mag", "tea"])
def test_loops_end_where_blocks_would_only_hand_on(method, settings):
    tiny = MODELS["FluxTransformer2DModel"]
    model = tiny.build()
    inputs = tiny.inputs()
    with holdover.enable(model, method, **settings) as cache, torch.no_grad():
        model(**with_timestep(tiny, inputs, 1.0))
        (choice,) = cache.engine.units[0].cuts.values()
    assert choice.shortcut.lengths == {"transformer_blocks": 1, "single_transformer_blocks": 0}


def test_a_loop_ends_no_earlier_than_what_happens_between_blocks():
    tiny = MODELS["FluxTransformer2DModel[controlnet_full]"]
    model = tiny.build()
    with holdover.enable(model, MAG[0], **MAG[1]) as cache, torch.no_grad():
        model(**tiny.inputs())
        (choice,) = cache.engine.units[0].cuts.values()
    assert choice.shortcut.lengths == {"transformer_blocks": 3, "single_transformer_blocks": 3}


@pytest.mark.parametrize(("method", "settings"), [MAG, TEA], ids=["mag", "tea"])
def test_in_inference_mode_too(method, settings):
    tiny = PIPELINES["FluxPipeline"]

    def draw(pipe):
        with holdover.enable(pipe, method, **settings), torch.inference_mode():
            return run(pipe, **tiny.call(steps=6))

    pipe = tiny.build()
    listened_to(pipe.transformer)
    assert torch.equal(draw(tiny.build()), draw(pipe))


def test_a_hook_put_on_later_is_called_at_every_step_from_then_on():
    tiny = MODELS["FluxTransformer2DModel"]
    model, inputs, seen = tiny.build(), tiny.inputs(), []
    settings = MAG[1] | {"mag_max_skip_steps": 9}
    with holdover.enable(model, "mag_cache", **settings) as cache, torch.no_grad():
        for t in (1.0, 0.9):
            model(**with_timestep(tiny, inputs, t))
        model.context_embedder.register_forward_hook(lambda module, args, output: seen.append(output))
        for t in (0.8, 0.7):
            model(**with_timestep(tiny, inputs, t))
        assert [v.computed for v in cache.stats().generations[-1].visits] == [True, False, False, False]
    assert len(seen) == 2
    assert torch.equal(seen[0], model.context_embedder(inputs["encoder_hidden_states"]))


@pytest.mark.parametrize(("method", "settings"), [MAG, TEA], ids=["mag", "tea"])
def test_modules_are_what_they_were_also_after_an_exception(method, settings):
    tiny = MODELS["FluxTransformer2DModel"]
    model, inputs = tiny.build(), tiny.inputs()
    with holdover.enable(model, method, **settings), torch.no_grad():
        model(**with_timestep(tiny, inputs, 1.0))
        broken = model.proj_out.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**with_timestep(tiny, inputs, 0.9))
        broken.remove()
        model(**with_timestep(tiny, inputs, 0.9))
    assert not any("forward" in vars(module) for module in model.modules())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden_states, cond):
        return hidden_states + self.layer(torch.tanh(hidden_states + cond))


class Model(nn.Module):
    """Three blocks that are given a condition; what else is done with it, and after the loop, is for the subclass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cond_embed, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, hidden_states, timestep, cond):
        hidden_states, cond = self.embed(hidden_states), self.cond_embed(cond)
        for index, block in enumerate(self.blocks):  # noqa: B007
            hidden_states = block(hidden_states, cond)
        return self.out(self.finish(hidden_states, cond, timestep, index))

    def finish(self, hidden_states, cond, timestep, index):
        return hidden_states


class LooksLate(Model):
    """Uses the condition after the blocks as well, but only once the noise is low."""

    def finish(self, hidden_states, cond, timestep, index):
        return hidden_states + cond if timestep < 0.85 else hidden_states


class Beside(nn.Module):
    """A block that hands on a condition beside the image."""

    def __init__(self, width):
        super().__init__()
        self.image, self.text = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden_states, cond):
        return hidden_states + self.image(hidden_states + cond), cond + self.text(cond)


class TwoStreams(Model):
    """Its blocks change the condition as well; nobody reads what becomes of it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Beside(8) for _ in range(3))

    def forward(self, hidden_states, timestep, cond):
        hidden_states, cond = self.embed(hidden_states), self.cond_embed(cond)
        for block in self.blocks:
            hidden_states, cond = block(hidden_states, cond)
        return self.out(self.finish(hidden_states, cond, timestep, 0))


class ReadsBothLate(TwoStreams):
    """Somebody does, once the noise is low."""

    def finish(self, hidden_states, cond, timestep, index):
        return hidden_states + cond if timestep < 0.85 else hidden_states


class Counts(Model):
    """Wants to know how far its loop went."""

    def finish(self, hidden_states, cond, timestep, index):
        return hidden_states * (index + 1)


def forward_of(model, t):
    """One forward of such a model; but for the time all have the same input."""
    draw = torch.Generator().manual_seed(1)
    hidden, cond = torch.randn(1, 5, 4, generator=draw), torch.randn(1, 1, 4, generator=draw)
    return model(hidden_states=hidden, timestep=t, cond=cond)


def steps_of(model, ts):
    settings = MAG[1] | {"mag_max_skip_steps": 9}
    with holdover.enable(model, "mag_cache", **settings) as cache, torch.no_grad():
        outputs = [forward_of(model, t) for t in ts]
        return outputs, [v.computed for v in cache.stats().generations[-1].visits], cache.engine.units[0]


def test_a_forward_that_looks_after_all_is_computed_and_nothing_is_left_out_of_it_again():
    model, ts = LooksLate().eval(), [torch.tensor(t) for t in (1.0, 0.9, 0.8, 0.7)]
    outputs, computed, _ = steps_of(model, ts)
    assert computed == [True, False, True, False]
    plain = listened_to(LooksLate().eval())
    expected, _, _ = steps_of(plain, ts)
    assert torch.equal(outputs[1], expected[1])
    with torch.no_grad():
        assert torch.equal(outputs[2], forward_of(plain, ts[2]))
    assert torch.allclose(outputs[3], outputs[2], rtol=1e-5)  # the same input, and what was added is added back


@pytest.mark.parametrize("listened", [False, True], ids=["embedder left out", "embedder runs"])
def test_a_stream_that_nobody_reads_is_not_held(listened):
    model, ts = TwoStreams().eval(), [torch.tensor(t) for t in (1.0, 0.9)]
    if listened:
        listened_to(model)
    with torch.no_grad():
        expected = forward_of(model, ts[0])
    outputs, computed, unit = steps_of(model, ts)
    assert computed == [True, False]
    assert torch.equal(outputs[0], expected)
    assert torch.allclose(outputs[1], expected, rtol=1e-5)
    assert unit.report.unread == ("blocks.cond",)
    assert "nobody reads it after the blocks: blocks.cond" in str(unit.report)


@pytest.mark.parametrize("listened", [False, True], ids=["embedder left out", "embedder runs"])
def test_a_stream_that_is_read_after_all_is_computed_and_held_from_then_on(listened):
    model, ts = ReadsBothLate().eval(), [torch.tensor(t) for t in (1.0, 0.9, 0.8, 0.7)]
    if listened:
        listened_to(model)
    with torch.no_grad():
        expected = forward_of(model, ts[2])
    outputs, computed, unit = steps_of(model, ts)
    assert computed == [True, False, True, False]
    assert torch.equal(outputs[2], expected)
    assert torch.allclose(outputs[3], expected, rtol=1e-5)
    assert unit.report.unread == ()


def test_what_was_held_before_a_stream_was_read_is_not_weighed_with_what_is_held_after():
    model, ts = ReadsBothLate().eval(), (1.0, 0.97, 0.94, 0.91, 0.88, 0.8, 0.7, 0.6)
    settings = {"schedule": (0, 1, 2), "predictor": "newton", "quantity": "seam"}
    with torch.no_grad(), holdover.enable(model, "plan", **settings) as cache:
        cache.refresh(model, len(ts))
        outputs = [forward_of(model, torch.tensor(t)) for t in ts]
        computed = [v.computed for v in cache.stats().generations[-1].visits]
    with torch.no_grad():
        expected = forward_of(model, torch.tensor(ts[-1]))
    assert computed == [True, True, True, False, False, True, False, False]
    assert torch.allclose(outputs[-1], expected, rtol=1e-5)


EMBEDDERS = {"FluxTransformer2DModel": "x_embedder", "QwenImageTransformer2DModel": "img_in"}


@pytest.mark.parametrize(("name", "embedder"), EMBEDDERS.items())
def test_one_tensor_is_held_where_nobody_reads_the_text(name, embedder):
    tiny = MODELS[name]
    model, inputs = tiny.build(), tiny.inputs()
    with holdover.enable(model, "mag_cache", **MAG[1]) as cache, torch.no_grad():
        for t in (1.0, 0.9, 0.8, 0.7):
            model(**with_timestep(tiny, inputs, t))
        assert cache.stats().peak_bytes == getattr(model, embedder)(inputs["hidden_states"]).nbytes
        assert cache.reports()["transformer"].unread == ("transformer_blocks.encoder_hidden_states",)


def test_a_model_that_counts_its_loop_goes_the_whole_way():
    ts = [torch.tensor(t) for t in (1.0, 0.9)]
    outputs, computed, unit = steps_of(Counts().eval(), ts)
    assert computed == [True, False]
    assert torch.allclose(outputs[1], outputs[0], rtol=1e-6)
    (choice,) = unit.cuts.values()
    assert not choice.shortcut.lengths


LOOKS = {
    "shape": lambda t: t.shape,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "truth": bool,
    "length": len,
    "items": list,
    "sum": lambda t: t + 1,
    "sum from the right": lambda t: torch.ones(1) + t,
    "index": lambda t: t[0],
    "list": lambda t: torch.add(*[torch.ones(1), t]),
    "written to": lambda t: torch.cat([t, t], out=torch.empty(4)),
    "module": nn.Linear(2, 2),
    "text": repr,
    "equality": lambda t: t == torch.ones(1),
    "written": lambda t: torch.ones(1).add_(t),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_stand_in_can_be_carried_about_and_nothing_else(look):
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"layer": layer})
    with torch.no_grad():
        feeders = candidates(model, lambda: layer(torch.ones(2)))
        with feeders.left_out():
            standing = layer(torch.ones(2))
    assert isinstance(standing, Unrun)
    assert isinstance(standing, torch.Tensor)
    with pytest.raises(TouchedError) as touched:
        look(standing)
    assert touched.value.origins == {layer}


def test_a_postponed_result_is_the_very_tensor_once_it_is_wanted():
    first, second = nn.Linear(2, 3), nn.Linear(3, 4)
    model = nn.ModuleDict({"first": first, "second": second})
    given = torch.randn(5, 2)
    with torch.no_grad():
        expected = second(first(given))
        postponed = candidates(model, lambda: second(first(given))).postponed
        with postponed.waiting():
            standing = second(first(given))
            assert type(standing) is Unrun
            postponed.run()
            again = second(first(given))
    assert type(standing) is torch.Tensor
    assert torch.equal(standing, expected)
    assert torch.equal(again, expected)


class Sized(nn.Module):
    """Returns a number beside its tensor."""

    def forward(self, x):
        return x * 2, x.shape[0]


def test_a_module_that_returns_more_than_tensors_always_runs():
    sized = Sized()
    model = nn.ModuleDict({"sized": sized})
    with torch.no_grad():
        assert sized not in candidates(model, lambda: sized(torch.ones(2)))


def test_what_is_joined_on_the_way_is_joined_when_it_is_wanted():
    layer = nn.Linear(2, 3)
    model = nn.ModuleDict({"layer": layer})
    one, other = torch.randn(5, 2), torch.randn(4, 2)

    def forward():
        return torch.cat([layer(one), layer(other)]).unsqueeze(0)

    with torch.no_grad():
        expected = forward()
        feeders = candidates(model, forward)
        with feeders.left_out():
            assert type(forward()) is Unrun
        for _ in range(2):  # the second time with new stand-ins
            postponed = feeders.postponed
            with postponed.waiting():
                joined = forward()
                postponed.run()
            assert torch.equal(joined, expected)


def test_a_module_that_is_called_more_often_than_it_was_seen_to_be_ends_the_forward():
    layer = nn.Linear(2, 3)
    model = nn.ModuleDict({"layer": layer})
    with torch.no_grad():
        feeders = candidates(model, lambda: layer(torch.ones(2)))
        with feeders.postponed.waiting():
            layer(torch.ones(2))
            with pytest.raises(TouchedError):
                layer(torch.ones(2))


class WritesItsInput(Model):
    """Changes what it has given to an embedder before its blocks run."""

    def forward(self, hidden_states, timestep, cond):
        cond = cond.clone()
        embedded = self.cond_embed(cond)
        cond.zero_()
        hidden_states = self.embed(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, embedded)
        return self.out(hidden_states)


@pytest.fixture
def read_at_the_head():
    """A signal that is read where the blocks begin, so that embedders wait for the decision."""
    signal = holdover.Signal("given", of_block=lambda block, given: given["hidden_states"])
    family = holdover.Family("own", ("Model", "WritesItsInput"), signals=(signal,))
    holdover.register_family(family)
    yield
    holdover.unregister_family(family)


@pytest.mark.parametrize("cls", [Model, WritesItsInput])
def test_computed_steps_keep_their_bits_whether_embedders_can_wait_or_not(cls, read_at_the_head):
    model = cls().eval()
    with torch.no_grad():
        expected = forward_of(model, torch.tensor(1.0))
        with holdover.enable(model, TEA[0], **TEA[1]) as cache:
            outputs = [forward_of(model, torch.tensor(t)) for t in (1.0, 0.9, 0.8, 0.7)]
            assert [v.computed for v in cache.stats().generations[-1].visits] == [True, False, False, True]
            (choice,) = cache.engine.units[0].cuts.values()
    assert (model.cond_embed in choice.shortcut.feeders) == (cls is Model)
    assert torch.equal(outputs[0], expected)
    assert torch.allclose(outputs[1], expected, rtol=1e-5)
    assert torch.equal(outputs[3], expected)


class Keeps(Model):
    """Keeps what its embedder returned, and looks into it in the next forward."""

    kept = None

    def forward(self, hidden_states, timestep, cond):
        before, self.kept = self.kept, self.cond_embed(cond)
        hidden_states = self.embed(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, self.kept)
        return self.out(hidden_states) if before is None else self.out(hidden_states) + 0 * before.sum()


def test_what_a_model_keeps_for_its_next_forward_is_computed():
    outputs, computed, unit = steps_of(Keeps().eval(), [torch.tensor(t) for t in (1.0, 0.9, 0.8)])
    assert computed == [True, False, False]
    (choice,) = unit.cuts.values()
    assert unit.core.cond_embed not in choice.shortcut.feeders
    assert torch.allclose(outputs[2], outputs[0], rtol=1e-5)
