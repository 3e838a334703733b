"""What every process of a company runs; each case returns what is compared in the tests."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdover
from holdover.engine.parallel import Groups
from holdover.errors import ConfigError, EnableError, UnsupportedModelError
from holdover.models.registry import get_family
from holdover.plan.guard import Guard
from plan.trajectories import falling, measurements_of, outputs
from tiny.pipelines_image import WIDTH, noise

from .guidance import Loop
from .setting import STEPS, build, decided, draw, far, settings, split, two_by_two
from .sharding import HOW

Found = dict[str, tuple[Any, ...]]


def answers() -> int:
    """Whose answer this is."""
    return dist.get_rank()


def waits_alone() -> None:
    """The first rank waits for the others, who do not come."""
    if dist.get_rank() == 0:
        dist.barrier()


def cached(pipe: Any, model: str, method: str, prompt: int = 0, **more: Any) -> tuple[torch.Tensor, dict[str, str]]:
    """A generation under a method, and what was decided; what is drawn depends on `prompt`."""
    words = {"pooled_prompt_embeds": 3 * noise(1, WIDTH, seed=prompt)} if model == "flux" and prompt else {}
    with holdover.enable(pipe, method, **settings(method, model) | more) as cache:
        return draw(pipe, model, prompt, **words), decided(cache)


# Guidance


def guidance(model: str, methods: tuple[str, ...], named: bool = True) -> Found:
    """Each branch on a rank of its own: whether it is one process' picture, and the decisions of both."""
    found = {}
    for method in methods:
        one, of_one = Loop(model, named).draw(method)
        picture, decisions = Loop(model, named).draw(method, dist.group.WORLD)
        found[method] = (torch.equal(picture, one), decisions, of_one)
    return found


def drifting_guidance() -> dict[str, str]:
    """Nothing but the rank tells the branch: no name, and the conditioning is another at each step."""
    return Loop("qwen", named=False, drifting=True).draw("mag_cache", dist.group.WORLD)[1]


# Sequence


def sequence(model: str, how: dict[str, Any], methods: tuple[str, ...], more: dict[str, Any] | None = None) -> Found:
    """The tokens split over all ranks: the distance to one process, and the decisions of both."""
    found = {}
    pipe = split(build(model), **how)
    for method in methods:
        one, of_one = cached(build(model), model, method, **more or {})
        picture, decisions = cached(pipe, model, method, **more or {})
        found[method] = (far(picture, one), decisions, of_one)
    return found


def guidance_and_sequence(model: str, methods: tuple[str, ...]) -> Found:
    """Two branches on two ranks each."""
    mesh = two_by_two("cfg")
    found = {}
    for method in methods:
        one, of_one = Loop(model).draw(method)
        loop = Loop(model)
        split(loop, mesh, ulysses_degree=2)
        picture, decisions = loop.draw(method, mesh["cfg"])
        found[method] = (far(picture, one), decisions, of_one)
    return found


def two_requests(methods: dict[str, dict[str, Any]]) -> Found:
    """Two requests on two ranks each, with different prompts."""
    mesh = two_by_two("data")
    prompt = 1 + mesh["data"].get_local_rank()
    found = {}
    for method, more in methods.items():
        one, of_one = cached(build("flux"), "flux", method, prompt, **more)
        pipe = split(build("flux"), mesh, ulysses_degree=2)
        picture, decisions = cached(pipe, "flux", method, prompt, **more)
        found[method] = (far(picture, one), decisions, of_one)
    return found


def two_processes(methods: dict[str, dict[str, Any]]) -> Found:
    """A request on each rank, and no group."""
    prompt = 1 + dist.get_rank()
    return {method: cached(build("flux"), "flux", method, prompt, **more)[1:] for method, more in methods.items()}


def parted_signal(threshold: float) -> tuple[dict[str, str], list[float]]:
    """The tokens of one rank change more than those of the other: what was decided, and what this rank alone saw."""
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
        pipe = split(build("flux"), ulysses_degree=2)
        latents = noise(1, 16, 16, seed=5)
        latents[:, 8:] *= 0.05
        with holdover.enable(pipe, "tea_cache", coefficients=(1.0, 0.0), rel_l1_thresh=threshold) as cache:
            draw(pipe, "flux", latents=latents)
            changes = [float((b - a).abs().mean() / a.abs().mean()) for a, b in pairwise(seen)]
            return decided(cache), changes
    finally:
        holdover.unregister_family(probe)


# Weights


def weights(how: str, model: str, methods: tuple[str, ...]) -> Found:
    """The weights spread over all ranks: whether, and how far, it is one process' picture; the decisions of both."""
    found = {}
    for method in methods:
        one, of_one = cached(build(model), model, method)
        pipe = build(model)
        HOW[how](pipe)
        picture, decisions = cached(pipe, model, method)
        found[method] = (far(picture, one), decisions, of_one)
    return found


def recognised(how: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a cache says of a transformer, plain and with its weights spread: which constants it found for it."""
    plain, pipe = build("flux"), build("flux")
    HOW[how](pipe)
    with holdover.enable(plain, "mag_cache") as one, holdover.enable(pipe, "mag_cache") as other:
        return one.stats().notes, other.stats().notes


def two_requests_on_shared_weights(methods: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """A request on each rank, with weights they share: what was decided."""
    pipe, prompt = build("flux"), 1 + dist.get_rank()
    HOW["fully_shard"](pipe)
    return {method: cached(pipe, "flux", method, prompt, **more)[1] for method, more in methods.items()}


def unreadable() -> str:
    """What is said where a signal cannot be read off wrapped weights."""
    pipe = build("flux")
    HOW["wrapper"](pipe)
    try:
        holdover.enable(pipe, "tea_cache")
    except EnableError as error:
        return str(error)
    return "nothing"


def a_new_kind_on_one_rank() -> tuple[dict[str, str], dict[str, str]]:
    """Weights are shared, and in the second generation one rank draws a picture of a size it has not seen."""
    pipe = build("qwen")
    HOW["fully_shard"](pipe)
    side = 96 if dist.get_rank() else 64
    with holdover.enable(pipe, "mag_cache", **settings("mag_cache", "qwen")) as cache:
        draw(pipe, "qwen")
        first = decided(cache)
        draw(pipe, "qwen", height=side, width=side)
        return first, decided(cache)


# Refusing


class Counting(nn.Module):
    """On one rank it is another function each time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.calls = 0

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        self.calls += dist.get_rank()
        return hidden_states + self.calls


def refused() -> str:
    """What the refusal says."""
    model = Counting().eval()
    ranks = holdover.Ranks(sequence=dist.group.WORLD)
    with holdover.enable(model, "mag_cache", mag_ratios=[1.0] * STEPS, ranks=ranks), torch.no_grad():
        try:
            model(torch.ones(1, 3, 4), torch.tensor([1.0]))
        except UnsupportedModelError as error:
            return str(error)
    return "nothing was refused"


def misstated() -> list[str]:
    """What is said of groups that cannot be; four ranks."""
    mesh, first = two_by_two("data"), dist.new_group([0])
    pipe = split(build("flux"), mesh, ulysses_degree=2)
    said = []
    for wrong in (
        lambda: holdover.Ranks(cfg="world"),
        lambda: holdover.Ranks(sequence=mesh),
        lambda: holdover.Ranks(cfg=first),
        lambda: holdover.enable(pipe, "none", ranks=holdover.Ranks(sequence=dist.group.WORLD)),
    ):
        try:
            wrong()
            said.append("nothing")
        except ConfigError as error:
            said.append(str(error))
    holdover.enable(pipe, "none").disable()  # nothing was left on it
    return said


def guarded() -> tuple[list[bool], list[bool]]:
    """The outputs are smooth on one rank and noise on the other: when a guard of each, and one of all, is alarmed."""
    levels = falling(STEPS)
    measured = measurements_of(levels, [outputs(levels, seed) for seed in (1, 2)])
    smooth = torch.from_numpy(outputs(levels, 1))
    seen = torch.stack([noise(*row.shape, seed=i) for i, row in enumerate(smooth)]) if dist.get_rank() else smooth
    return _alarms(Guard(measured), seen), _alarms(Guard(measured, groups=Groups(cfg=dist.group.WORLD)), seen)


def _alarms(guard: Guard, seen: torch.Tensor) -> list[bool]:
    alarms = []
    for step, output in enumerate(seen):
        guard.observe(step, output[None])
        alarms.append(guard.is_alarmed())
    return alarms
