"""Streams that nothing reads after the blocks are not held, and models with unusual loops stay exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdover
from holdover.engine.storage import UnreadStream, UnreadStreamError
from tiny.models import MODELS, with_timestep

EVERY_THIRD = {"mag_ratios": [1.0], "mag_threshold": 1e9, "mag_max_skip_steps": 2, "mag_retention_ratio": 0.0}
MAG = ("mag_cache", EVERY_THIRD | {"num_inference_steps": 12})
TEA = ("tea_cache", {"coefficients": (0.0, 1.0), "rel_l1_thresh": 2.5})


@pytest.mark.parametrize(("method", "settings"), [MAG, TEA], ids=["mag", "tea"])
def test_modules_and_lists_are_restored_after_an_exception(method, settings):
    tiny = MODELS["FluxTransformer2DModel"]
    model, inputs = tiny.build(), tiny.inputs()
    with holdover.enable(model, method, **settings), torch.no_grad():
        model(**with_timestep(tiny, inputs, 1.0))
        broken = model.proj_out.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**with_timestep(tiny, inputs, 0.9))
        broken.remove()
        model(**with_timestep(tiny, inputs, 0.9))
        assert type(model.transformer_blocks) is nn.ModuleList
        assert not any("_holdover_proxies" in vars(module) for module in model.modules())
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
    """Uses the number of blocks its loop has run."""

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
        return outputs, [v.computed for v in cache.stats().generations[-1].forwards], cache.reports()["transformer"]


def test_a_stream_that_nothing_reads_is_not_held():
    model, ts = TwoStreams().eval(), [torch.tensor(t) for t in (1.0, 0.9)]
    with torch.no_grad():
        expected = forward_of(model, ts[0])
    outputs, computed, report = steps_of(model, ts)
    assert computed == [True, False]
    assert torch.equal(outputs[0], expected)
    assert torch.allclose(outputs[1], expected, rtol=1e-5)
    assert report.unread == ("blocks.cond",)
    assert "because nothing reads it after the blocks: blocks.cond" in str(report)


def test_a_stream_that_is_read_after_all_is_computed_and_held_from_then_on():
    model, ts = ReadsBothLate().eval(), [torch.tensor(t) for t in (1.0, 0.9, 0.8, 0.7)]
    with torch.no_grad():
        expected = forward_of(model, ts[2])
    outputs, computed, report = steps_of(model, ts)
    assert computed == [True, False, True, False]
    assert torch.equal(outputs[2], expected)
    assert torch.allclose(outputs[3], expected, rtol=1e-5)
    assert report.unread == ()


def test_what_was_held_before_a_stream_was_read_is_not_summed_with_what_is_held_after():
    model, ts = ReadsBothLate().eval(), (1.0, 0.97, 0.94, 0.91, 0.88, 0.8, 0.7, 0.6)
    settings = {"schedule": (0, 1, 2), "predictor": "newton", "quantity": "seam"}
    with torch.no_grad(), holdover.enable(model, "plan", **settings) as cache:
        cache.refresh(model, len(ts))
        outputs = [forward_of(model, torch.tensor(t)) for t in ts]
        computed = [v.computed for v in cache.stats().generations[-1].forwards]
    with torch.no_grad():
        expected = forward_of(model, torch.tensor(ts[-1]))
    assert computed == [True, True, True, False, False, True, False, False]
    assert torch.allclose(outputs[-1], expected, rtol=1e-5)


EMBEDDERS = {"FluxTransformer2DModel": "x_embedder", "QwenImageTransformer2DModel": "img_in"}


@pytest.mark.parametrize(("name", "embedder"), EMBEDDERS.items())
def test_one_tensor_is_held_where_nothing_reads_the_text(name, embedder):
    tiny = MODELS[name]
    model, inputs = tiny.build(), tiny.inputs()
    with holdover.enable(model, "mag_cache", **MAG[1]) as cache, torch.no_grad():
        for t in (1.0, 0.9, 0.8, 0.7):
            model(**with_timestep(tiny, inputs, t))
        assert cache.stats().peak_bytes == getattr(model, embedder)(inputs["hidden_states"]).nbytes
        assert cache.reports()["transformer"].unread == ("transformer_blocks.encoder_hidden_states",)


class Watches(Model):
    """Counts the blocks that its loops have come to, for others to see."""

    seen = 0

    def forward(self, hidden_states, timestep, cond):
        hidden_states, cond = self.embed(hidden_states), self.cond_embed(cond)
        for block in self.blocks:
            self.seen += 1
            hidden_states = block(hidden_states, cond)
        return self.out(hidden_states)


@pytest.mark.parametrize(("method", "settings"), [MAG, TEA], ids=["mag", "tea"])
def test_a_loop_ends_where_blocks_would_only_pass_streams_on(method, settings, read_at_first_block):
    model = Watches().eval()
    with holdover.enable(model, method, **settings) as cache, torch.no_grad():
        forward_of(model, torch.tensor(1.0))
        seen = model.seen
        forward_of(model, torch.tensor(0.9))
        assert [f.computed for f in cache.stats().generations[-1].forwards] == [True, False]
    assert model.seen == seen + 1


def test_a_model_that_counts_its_loop_sees_every_block():
    ts = [torch.tensor(t) for t in (1.0, 0.9)]
    outputs, computed, _ = steps_of(Counts().eval(), ts)
    assert computed == [True, False]
    assert torch.allclose(outputs[1], outputs[0], rtol=1e-6)


READS = {
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
    "concatenation": lambda t: torch.cat([t, torch.ones(1)]),
    "written to": lambda t: torch.cat([t, t], out=torch.empty(4)),
    "module": nn.Linear(2, 2),
    "text": repr,
    "equality": lambda t: t == torch.ones(1),
    "written": lambda t: torch.ones(1).add_(t),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_read_of_an_unread_stream_is_noticed(read):
    with pytest.raises(UnreadStreamError) as error:
        read(UnreadStream.of_group(3))
    assert error.value.group == 3


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
def read_at_first_block():
    """A signal that is read at the first block, so that the decision is made inside the forward."""
    signal = holdover.Signal("given", of_block=lambda block, given: given["hidden_states"])
    family = holdover.Family("own", ("Model", "WritesItsInput", "Watches"), signals=(signal,))
    holdover.register_family(family)
    yield
    holdover.unregister_family(family)


@pytest.mark.parametrize("cls", [Model, WritesItsInput])
def test_computed_steps_keep_their_bits_when_the_decision_is_made_inside_the_forward(cls, read_at_first_block):
    model = cls().eval()
    with torch.no_grad():
        expected = forward_of(model, torch.tensor(1.0))
        with holdover.enable(model, TEA[0], **TEA[1]) as cache:
            outputs = [forward_of(model, torch.tensor(t)) for t in (1.0, 0.9, 0.8, 0.7)]
            assert [v.computed for v in cache.stats().generations[-1].forwards] == [True, False, False, True]
    assert torch.equal(outputs[0], expected)
    assert torch.allclose(outputs[1], expected, rtol=1e-5)
    assert torch.equal(outputs[3], expected)


class Keeps(Model):
    """Keeps what its embedder returned, and reads it in the next forward."""

    kept = None

    def forward(self, hidden_states, timestep, cond):
        before, self.kept = self.kept, self.cond_embed(cond)
        hidden_states = self.embed(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, self.kept)
        return self.out(hidden_states) if before is None else self.out(hidden_states) + 0 * before.sum()


def test_a_model_that_keeps_a_tensor_for_its_next_forward_holds():
    outputs, computed, _ = steps_of(Keeps().eval(), [torch.tensor(t) for t in (1.0, 0.9, 0.8)])
    assert computed == [True, False, False]
    assert torch.allclose(outputs[2], outputs[0], rtol=1e-5)
