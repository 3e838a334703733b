"""Functions that every rank of a worker group runs; each returns what the tests compare."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdover
from holdover.errors import ConfigError, EnableError, UnsupportedModelError
from holdover.models.registry import get_family
from holdover.selector import own_config
from holdover.serve.model import ServedModel
from holdover.serve.queue import ImageSpec
from holdover.serve.settings import Settings
from holdover.serve.tensor_parallel import Messages, SplitModel, follow, split_pipeline
from holdover.serve.worker import CacheSwitch, CancelledGenerationError
from tiny.pipelines_image import WIDTH, noise
from tiny.prompted import prompted_flux

from .pipelines import (
    SHARD,
    STEPS,
    GuidedLoop,
    build,
    distance,
    generate,
    mesh_of_four,
    settings,
    split_tokens,
    traces,
)

Found = dict[str, tuple[Any, ...]]


def rank() -> int:
    """The rank that answers."""
    return dist.get_rank()


def wait_alone() -> None:
    """The first rank waits at a barrier that the others never reach."""
    if dist.get_rank() == 0:
        dist.barrier()


def cached(pipe: Any, model: str, method: str, prompt: int = 0, **more: Any) -> tuple[torch.Tensor, dict[str, str]]:
    """A generation under a method, and its decisions; `prompt` selects the conditioning."""
    words = {"pooled_prompt_embeds": 3 * noise(1, WIDTH, seed=prompt)} if model == "flux" and prompt else {}
    with holdover.enable(pipe, method, **settings(method, model) | more) as cache:
        return generate(pipe, model, prompt, **words), traces(cache)


# Guidance


def guidance(model: str, methods: tuple[str, ...], named: bool = True) -> Found:
    """Each branch on a rank of its own: is the image that of one process, bit for bit; the decisions of both."""
    found, loop = {}, GuidedLoop(model, named)
    for method in methods:
        one, of_one = loop.generate(method)
        image, decisions = loop.generate(method, dist.group.WORLD)
        found[method] = (torch.equal(image, one), decisions, of_one)
    return found


def drifting_guidance() -> dict[str, str]:
    """Only the rank identifies the branch: it has no name, and the conditioning changes at each step."""
    return GuidedLoop("qwen", named=False, drifting=True).generate("mag_cache", dist.group.WORLD)[1]


# Sequence


def sequence(model: str, how: dict[str, Any], methods: tuple[str, ...], more: dict[str, Any] | None = None) -> Found:
    """The tokens split over all ranks: the distance to one process, and the decisions of both."""
    found, plain, pipe = {}, build(model), split_tokens(build(model), **how)
    for method in methods:
        one, of_one = cached(plain, model, method, **more or {})
        image, decisions = cached(pipe, model, method, **more or {})
        found[method] = (distance(image, one), decisions, of_one)
    return found


def guidance_and_sequence(model: str, methods: tuple[str, ...]) -> Found:
    """Two branches on two ranks each."""
    mesh = mesh_of_four("cfg")
    found, plain, loop = {}, GuidedLoop(model), GuidedLoop(model)
    split_tokens(loop, mesh, ulysses_degree=2)
    for method in methods:
        one, of_one = plain.generate(method)
        image, decisions = loop.generate(method, mesh["cfg"])
        found[method] = (distance(image, one), decisions, of_one)
    return found


def two_requests(methods: dict[str, dict[str, Any]]) -> Found:
    """Two requests on two ranks each, with different prompts."""
    mesh = mesh_of_four("data")
    prompt = 1 + mesh["data"].get_local_rank()
    found, plain, pipe = {}, build("flux"), split_tokens(build("flux"), mesh, ulysses_degree=2)
    for method, more in methods.items():
        one, of_one = cached(plain, "flux", method, prompt, **more)
        image, decisions = cached(pipe, "flux", method, prompt, **more)
        found[method] = (distance(image, one), decisions, of_one)
    return found


def two_processes(methods: dict[str, dict[str, Any]]) -> Found:
    """A request on each rank, and no group."""
    pipe, prompt = build("flux"), 1 + dist.get_rank()
    return {method: cached(pipe, "flux", method, prompt, **more)[1:] for method, more in methods.items()}


def uneven_signal(threshold: float) -> tuple[dict[str, str], list[float]]:
    """The tokens of one rank change more than those of the other: the decisions, and the changes on this rank alone."""
    own = get_family(build("flux").transformer).signal()
    assert own is not None
    assert own.of_block is not None
    seen: list[torch.Tensor] = []

    def watched(block: nn.Module, arguments: Any) -> torch.Tensor:
        seen.append(own.of_block(block, arguments))
        return seen[-1]

    probe = holdover.Family("probe", ("FluxTransformer2DModel",), signals=(holdover.Signal("seen", of_block=watched),))
    holdover.register_family(probe)
    try:
        pipe = split_tokens(build("flux"), ulysses_degree=2)
        latents = noise(1, 16, 16, seed=5)
        latents[:, 8:] *= 0.05
        with holdover.enable(pipe, "tea_cache", coefficients=(1.0, 0.0), rel_l1_thresh=threshold) as cache:
            generate(pipe, "flux", latents=latents)
            changes = [float((b - a).abs().mean() / a.abs().mean()) for a, b in pairwise(seen)]
            return traces(cache), changes
    finally:
        holdover.unregister_family(probe)


# Weights


def weights(how: str, model: str, methods: tuple[str, ...]) -> Found:
    """The weights split over all ranks: the distance to one process, and the decisions of both."""
    found, plain, pipe = {}, build(model), build(model)
    SHARD[how](pipe)
    for method in methods:
        one, of_one = cached(plain, model, method)
        image, decisions = cached(pipe, model, method)
        found[method] = (distance(image, one), decisions, of_one)
    return found


def notes(how: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The cache's notes on the constants it uses, for a plain transformer and for one with split weights."""
    plain, pipe = build("flux"), build("flux")
    SHARD[how](pipe)
    with holdover.enable(plain, "mag_cache") as one, holdover.enable(pipe, "mag_cache") as other:
        return one.stats().notes, other.stats().notes


def two_requests_on_shared_weights(methods: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """A request on each rank, with weights they share: the decisions."""
    pipe, prompt = build("flux"), 1 + dist.get_rank()
    SHARD["fully_shard"](pipe)
    return {method: cached(pipe, "flux", method, prompt, **more)[1] for method, more in methods.items()}


def unreadable_signal() -> str:
    """The error where a signal cannot be computed from wrapped weights."""
    pipe = build("flux")
    SHARD["wrapper"](pipe)
    try:
        holdover.enable(pipe, "tea_cache")
    except EnableError as error:
        return str(error)
    return "nothing"


def new_shape_on_one_rank() -> tuple[dict[str, str], dict[str, str]]:
    """Weights are shared, and in the second generation one rank generates an image of a size it has not seen."""
    pipe = build("qwen")
    SHARD["fully_shard"](pipe)
    side = 96 if dist.get_rank() else 64
    with holdover.enable(pipe, "mag_cache", **settings("mag_cache", "qwen")) as cache:
        generate(pipe, "qwen")
        first = traces(cache)
        generate(pipe, "qwen", height=side, width=side)
        return first, traces(cache)


# Errors


class CountingModel(nn.Module):
    """On rank 1 the output grows with each call, so that a held step cannot replay a computed one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.calls = 0

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        self.calls += dist.get_rank()
        return hidden_states + self.calls


def unsupported_model() -> str:
    """The error for a model that only one rank must refuse."""
    model = CountingModel().eval()
    ranks = holdover.Ranks(sequence=dist.group.WORLD)
    with holdover.enable(model, "mag_cache", mag_ratios=[1.0] * STEPS, ranks=ranks), torch.no_grad():
        try:
            model(torch.ones(1, 3, 4), torch.tensor([1.0]))
        except UnsupportedModelError as error:
            return str(error)
    return "nothing was refused"


def split_server() -> list[tuple[list[int], str]] | None:
    """A served model over two processes: images and decisions, before, during and after a cancelled generation."""
    pipe, settings = prompted_flux(), Settings(tensor_parallel_size=2, device="cpu")
    cache = own_config("mag_cache", {"mag_ratios": [1.0] * 6, "mag_max_skip_steps": 2})
    batch = [ImageSpec("red apple", None, 1, (64, 64), (64, 64), 6, (("guidance_scale", 2.0),), cache)]
    alone = ServedModel("tiny", pipe)
    with CacheSwitch(pipe, cache).use(cache) as backend:
        images = [(alone.generate(batch, lambda step, latents: None), backend.stats().last.trace("cond"))]
    holdover.disable(pipe)
    split_pipeline(pipe, settings, dist.get_rank(), torch.device("cpu"))
    messages = Messages()
    if dist.get_rank() > 0:
        follow(ServedModel("tiny", pipe), messages)
        return None
    model, switch = SplitModel("tiny", pipe, messages, []), CacheSwitch(pipe, cache)

    def cancel(step: int, latents: torch.Tensor) -> None:
        if step == 2:
            raise CancelledGenerationError

    for on_step in (lambda step, latents: None, cancel, lambda step, latents: None):
        with switch.use(cache) as backend, contextlib.suppress(CancelledGenerationError):
            images.append((model.generate(batch, on_step), backend.stats().last.trace("cond")))
    messages.send(None)
    return [(pixels.astype(int).ravel().tolist(), trace) for pixels, trace in images]


def invalid_groups() -> list[str]:
    """The errors for groups that cannot be; four ranks."""
    mesh, first = mesh_of_four("data"), dist.new_group([0])
    pipe = split_tokens(build("flux"), mesh, ulysses_degree=2)
    errors = []
    for wrong in (
        lambda: holdover.Ranks(cfg="world"),
        lambda: holdover.Ranks(sequence=mesh),
        lambda: holdover.Ranks(cfg=first),
        lambda: holdover.enable(pipe, "none", ranks=holdover.Ranks(sequence=dist.group.WORLD)),
    ):
        try:
            wrong()
            errors.append("nothing")
        except ConfigError as error:
            errors.append(str(error))
    holdover.enable(pipe, "none").disable()  # nothing was left on it
    return errors
