"""The plan of a soak run: one small JSON record per generation, fixed by a seed before the run starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

PIPELINES = (
    "FluxPipeline",
    "FluxPipeline[true_cfg]",
    "FluxImg2ImgPipeline",
    "FluxControlNetPipeline",
    "StableDiffusion3Pipeline",
    "QwenImagePipeline",
    "WanPipeline[2.2]",
    "WanVACEPipeline",
    "LTXPipeline",
    "CogVideoXPipeline",
    "LongCatImagePipeline",
    "Lumina2Pipeline",
)
BATCHED = frozenset(PIPELINES) - {"FluxImg2ImgPipeline", "FluxControlNetPipeline", "WanVACEPipeline"}
TEXT_PROMPTS = frozenset({"LongCatImagePipeline"})  # takes prompts as text, and no callback
PROFILED = frozenset({"FluxPipeline", "FluxImg2ImgPipeline"})  # coefficients ship, for thresholds from 0.2
TWO_SIGNALS = frozenset({"WanPipeline[2.2]", "WanVACEPipeline"})
PROMPTS = ("a cat", "an owl", "a pear")
# Pipelines made with from_pipe, which share the transformer. One with a scheduler of its own generates another image,
# because the cache is told neither its steps nor how many there are.
SHARING = ("from_pipe", "own scheduler")

Cache = dict[str, Any]  # {"method": "tea_cache", "settings": {...}}
# Their cache is never disabled, as in a server: only using() and off() change it.
RESIDENT: dict[str, Cache] = {
    "FluxPipeline[true_cfg]": {"method": "tea_cache", "settings": {"rel_l1_thresh": 0.3, "coefficients": [1.0, 0.0]}},
    "LTXPipeline": {"method": "mag_cache", "settings": {"mag_ratios": [1.0, 0.95, 1.02, 0.97], "mag_threshold": 0.2}},
}


@dataclass(frozen=True)
class State:
    """What stays on a pipeline from one generation to the next."""

    cache: Cache | None = None
    lora: dict[str, Any] | None = None  # {"seed": 3, "rank": 2, "scale": 0.5}
    prompt_cache: bool = False

    @classmethod
    def at_rest(cls, pipeline: str) -> State:
        """Everything disabled that is ever disabled."""
        return cls(cache=RESIDENT.get(pipeline))


@dataclass(frozen=True)
class Record:
    """One generation. It does not depend on the records before it."""

    index: int
    pipeline: str
    steps: int
    seed: int
    size: int = 0
    guidance: bool = True
    batch: int = 1
    prompt: str = PROMPTS[0]
    state: State = field(default_factory=State)
    override: dict[str, Any] | None = None  # settings for using(), or {} for off()
    abort: dict[str, Any] | None = None  # {"in": "callback", "at": 5, "error": "KeyboardInterrupt"}
    switch: int | None = None  # the step after which a callback replaces the prompt
    through: str | None = None  # another pipeline with the same transformer generates: one of SHARING
    again: bool = False  # disable and enable the cache, though it is the same
    refresh: bool = False  # call refresh() before
    compare: bool = False  # with the image of a fresh process

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        values = json.loads(text)
        return cls(**values | {"state": State(**values["state"])})

    def without_detours(self) -> Record:
        """The same image by the direct way: the override's settings enabled, no aborts, other pipelines or caches."""
        cache = self.state.cache
        if self.override == {} or (cache is not None and cache["method"] == "none"):
            cache = None
        elif cache is not None and self.override is not None:
            cache = cache | {"settings": cache["settings"] | self.override}
        state = replace(self.state, cache=cache, prompt_cache=False)
        return replace(self, state=state, override=None, abort=None, through=None, again=False, refresh=False)


def make_plan(generations: int, seed: int, steps: tuple[int, int] = (4, 40), compare_every: int = 25) -> list[Record]:
    """The records of a run.

    A generation that is compared follows one of the same pipeline, half of which are aborted, under a cache that holds.
    """
    random = Random(seed)
    states = {name: State.at_rest(name) for name in PIPELINES}
    records: list[Record] = []
    for index in range(generations):
        compare, before = ((index + ahead) % compare_every == 0 for ahead in (1, 2))
        name = records[-1].pipeline if compare and records else random.choice(PIPELINES)
        states[name] = state = _next_state(random, name, states[name], compare, before)
        records.append(_record(random, index, name, state, random.randint(*steps), compare, before))
    return records


def _record(random: Random, index: int, name: str, state: State, steps: int, compare: bool, before: bool) -> Record:
    abort_rate = 0.0 if compare else 0.5 if before else 0.12
    override_rate = 0.6 if name in RESIDENT else 0.25
    return Record(
        index,
        name,
        steps,
        seed=random.randrange(1000),
        size=random.randrange(2),
        guidance=random.random() < 0.8,
        batch=random.choice((1, 1, 2)) if name in BATCHED else 1,
        prompt=random.choice(PROMPTS),
        state=state,
        override=_override(random, state.cache) if random.random() < override_rate else None,
        abort=_abort(random, name, steps) if random.random() < abort_rate else None,
        switch=random.randrange(steps) if name not in TEXT_PROMPTS and random.random() < 0.15 else None,
        through=random.choice(SHARING[: 1 if compare else 2]) if random.random() < 0.2 else None,
        again=name not in RESIDENT and random.random() < 0.15,
        refresh=random.random() < 0.1,
        compare=compare,
    )


def _next_state(random: Random, name: str, state: State, compare: bool, before: bool) -> State:
    if name not in RESIDENT and not compare:
        if random.random() < 0.35:
            state = replace(state, cache=_cache(random, name))
        while before and not _holds(state.cache):
            state = replace(state, cache=_cache(random, name))
    if random.random() < 0.3:
        state = replace(state, lora=_lora(random, state.lora))
    if name in TEXT_PROMPTS and random.random() < 0.3:
        state = replace(state, prompt_cache=not state.prompt_cache)
    return state


def _holds(cache: Cache | None) -> bool:
    """Whether a cache probably holds some steps."""
    return cache is not None and any(cache["settings"].get(key) for key in ("rel_l1_thresh", "mag_threshold"))


def _cache(random: Random, name: str) -> Cache | None:
    method = random.choices((None, "none", "tea_cache", "mag_cache"), (3, 1, 5, 4))[0]
    if method is None:
        return None
    settings = _tea(random, name) if method == "tea_cache" else _mag(random) if method == "mag_cache" else {}
    return {"method": method, "settings": settings}


def _tea(random: Random, name: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"rel_l1_thresh": random.choice((0.0, 0.1, 0.2, 0.4, 0.8))}
    if name not in PROFILED or settings["rel_l1_thresh"] < 0.2 or random.random() < 0.5:
        settings["coefficients"] = random.choice(([1.0, 0.0], [0.5, 0.02], [2.0, 1.0, 0.0]))
    if name in TWO_SIGNALS:
        settings["signal"] = random.choice(("e", "e0"))
    return settings


def _mag(random: Random) -> dict[str, Any]:
    ratios = [round(random.uniform(0.9, 1.06), 3) for _ in range(random.randint(8, 16))]
    return _mag_override(random) | {"mag_ratios": ratios, "interpolation": random.choice(("log", "nearest"))}


def _mag_override(random: Random) -> dict[str, Any]:
    return {
        "mag_threshold": random.choice((0.0, 0.06, 0.12, 0.24, 0.6)),
        "mag_max_skip_steps": random.randint(0, 6),
        "mag_retention_ratio": random.choice((0.0, 0.1, 0.2)),
    }


def _override(random: Random, cache: Cache | None) -> dict[str, Any] | None:
    if cache is None or cache["method"] == "none":
        return None
    if random.random() < 0.4:
        return {}
    if cache["method"] == "mag_cache":
        return _mag_override(random)
    return {"rel_l1_thresh": random.choice((0.0, 0.3, 0.6))}


def _lora(random: Random, current: dict[str, Any] | None) -> dict[str, Any] | None:
    """Another adapter, the same one at another scale, or none."""
    choice = random.random()
    if choice < 0.35:
        return None
    scale = random.choice((0.3, 0.7, 1.0))
    if current is not None and choice < 0.65:
        return current | {"scale": scale}
    return {"seed": random.randrange(5), "rank": random.choice((2, 4)), "scale": scale}


def _abort(random: Random, name: str, steps: int) -> dict[str, Any]:
    """An error in the step's callback or in a block (not raised if that block is held), or the pipeline's own stop."""
    where = "block" if name in TEXT_PROMPTS else random.choice(("block", "callback", "interrupt"))
    error = None if where == "interrupt" else random.choice(("RuntimeError", "KeyboardInterrupt"))
    return {"in": where, "at": random.randrange(steps), "block": round(random.random(), 2), "error": error}
