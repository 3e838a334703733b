"""MagCache's rule, against two re-computations of it and by its properties; ratios taken to other grids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import pytest
import torch
from diffusers.hooks import mag_cache as upstream
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdover.grid import Grid
from holdover.policies.base import NOTHING_HELD, OFF, schedule
from holdover.policies.magcache import (
    BEYOND,
    ERROR,
    HELD,
    KEPT,
    LONGEST,
    RETAINED,
    ErrorAccumulator,
    MagCachePolicy,
    nearest_ratios,
    rescaled_ratios,
)
from holdover.profiles import shipped

relaxed = settings(deadline=None)
ratio_lists = st.lists(st.floats(0.5, 1.5), min_size=1, max_size=40)
limits = st.integers(0, 8)
thresholds = st.floats(1e-3, 2.0)
retentions = st.floats(0, 1)
FLUX = tuple(upstream.FLUX_MAG_RATIOS.tolist())


@st.composite
def policies(draw: st.DrawFn, ratios: st.SearchStrategy[list[float]] = ratio_lists) -> MagCachePolicy:
    """Any settings on any grid, of which all steps run."""
    drawn = tuple(draw(ratios))
    return MagCachePolicy(draw(thresholds), draw(limits), draw(retentions), drawn, Grid(len(drawn)))


def computed(policy: MagCachePolicy) -> list[bool]:
    return [decision.compute for decision in schedule(policy, policy.grid)]


def published_rule(policy: MagCachePolicy, ratios: Sequence[float]) -> list[bool]:
    """The rule as it was published, over the steps that run."""
    retained = int(policy.retention_ratio * len(ratios) + 0.5)
    ratio, error, count, residual = 1.0, 0.0, 0, False
    decisions = []
    for step, step_ratio in enumerate(ratios):
        hold = False
        if step >= retained:
            ratio *= step_ratio
            error += abs(1.0 - ratio)
            count += 1
            hold = residual and error <= policy.threshold and count <= policy.max_skip_steps
        if not hold:
            ratio, error, count, residual = 1.0, 0.0, 0, True
        decisions.append(not hold)
    return decisions


class _Block(nn.Module):
    """A block that counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[int] = []

    def forward(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        self.runs.append(step)
        return hidden_states + 1.0


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([_Block(), _Block()])

    def forward(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        for block in self.transformer_blocks:
            hidden_states = block(hidden_states, step)
        return hidden_states


TransformerBlockRegistry.register(_Block, TransformerBlockMetadata(return_hidden_states_index=0))


def upstream_decisions(policy: MagCachePolicy) -> list[bool]:
    """What diffusers' own hooks compute with these settings."""
    model, steps = _Transformer(), len(policy.ratios)
    config = upstream.MagCacheConfig(
        threshold=policy.threshold,
        max_skip_steps=policy.max_skip_steps,
        retention_ratio=policy.retention_ratio,
        num_inference_steps=steps,
        mag_ratios=torch.tensor(policy.ratios, dtype=torch.float64),
    )
    upstream.apply_mag_cache(model, config)
    for step in range(steps):
        model(torch.zeros(1), step)
    return [step in model.transformer_blocks[0].runs for step in range(steps)]


# The rule


@relaxed
@given(policy=policies())
def test_decisions_are_the_published_ones(policy: MagCachePolicy) -> None:
    assert computed(policy) == published_rule(policy, policy.ratios)


@relaxed
@given(policy=policies())
def test_decisions_are_those_of_diffusers(policy: MagCachePolicy) -> None:
    assert computed(policy) == upstream_decisions(policy)


@pytest.mark.parametrize("steps", [4, 20, 28, 50])
@pytest.mark.parametrize(("threshold", "limit", "retention"), [(0.24, 5, 0.1), (0.06, 3, 0.2), (0.12, 4, 0.0)])
def test_flux_decides_as_in_diffusers(steps: int, threshold: float, limit: int, retention: float) -> None:
    policy = MagCachePolicy(threshold, limit, retention, nearest_ratios(FLUX, steps), Grid(steps))
    assert computed(policy) == upstream_decisions(policy)
    assert not all(computed(policy)) or steps == 4


@relaxed
@given(policy=policies(), before=st.integers(1, 10), after=st.integers(0, 10))
def test_only_the_steps_that_run_count(policy: MagCachePolicy, before: int, after: int) -> None:
    """Image-to-image and the experts of two transformers: the rule begins at their first step, with its ratios."""
    inner, length = policy.ratios, len(policy.ratios)
    padded = (1.3,) * before + inner + (1.3,) * after
    grid = Grid(len(padded), first=before, last=before + length - 1)
    shifted = replace(policy, ratios=padded, grid=grid)
    assert computed(shifted) == published_rule(policy, inner)


@relaxed
@given(policy=policies())
def test_never_more_held_in_a_row_than_allowed(policy: MagCachePolicy) -> None:
    runs = [len(list(run)) for compute, run in groupby(computed(policy)) if not compute]
    assert max(runs, default=0) <= policy.max_skip_steps


@relaxed
@given(policy=policies(st.lists(st.just(1.0), min_size=1, max_size=40)))
def test_as_many_are_held_in_a_row_as_allowed(policy: MagCachePolicy) -> None:
    """Where the magnitude never changes only the limit and the retention count."""
    begin = max(policy.retained, 1)
    expected = [step < begin or (step - begin + 1) % (policy.max_skip_steps + 1) == 0 for step in range(40)]
    assert computed(policy) == expected[: policy.grid.count]


@relaxed
@given(policy=policies())
def test_retained_steps_are_computed(policy: MagCachePolicy) -> None:
    retained = int(policy.retention_ratio * policy.grid.count + 0.5)
    assert policy.retained == retained
    assert all(computed(policy)[: max(retained, 1)])


@relaxed
@given(policy=policies())
def test_threshold_zero_holds_nothing(policy: MagCachePolicy) -> None:
    assert all(computed(replace(policy, threshold=0.0)))


@relaxed
@given(count=st.integers(1, 40))
def test_threshold_zero_holds_nothing_even_where_nothing_changes(count: int) -> None:
    assert all(computed(MagCachePolicy(0.0, 5, 0.0, (1.0,) * count, Grid(count))))


def _no_later(fewer: Iterable[bool], more: Iterable[bool]) -> bool:
    """By any step, no more were computed in the one than in the other."""
    return all(a <= b for a, b in zip(accumulate(fewer), accumulate(more), strict=True))


falling = st.lists(st.floats(0.5, 1.0), min_size=1, max_size=40)
rising = st.lists(st.floats(1.0, 1.5), min_size=1, max_size=40)


@relaxed
@given(policy=st.one_of(policies(falling), policies(rising)), other=thresholds)
def test_a_larger_threshold_never_computes_more_where_the_magnitude_moves_one_way(
    policy: MagCachePolicy, other: float
) -> None:
    low, high = sorted((policy.threshold, other))
    assert _no_later(computed(replace(policy, threshold=high)), computed(replace(policy, threshold=low)))


@relaxed
@given(policy=st.one_of(policies(falling), policies(rising)), other=limits)
def test_a_larger_limit_never_computes_more_where_the_magnitude_moves_one_way(
    policy: MagCachePolicy, other: int
) -> None:
    low, high = sorted((policy.max_skip_steps, other))
    assert _no_later(computed(replace(policy, max_skip_steps=high)), computed(replace(policy, max_skip_steps=low)))


@relaxed
@given(policy=policies(), other=thresholds)
def test_a_larger_threshold_holds_the_first_steps_no_shorter(policy: MagCachePolicy, other: float) -> None:
    """True of all ratios: up to the first step that is computed after a held one, what is held stays held."""
    low, high = sorted((policy.threshold, other))
    less, more = (computed(replace(policy, threshold=threshold)) for threshold in (low, high))
    begin = max(policy.retained, 1)
    first_run = next((step for step in range(begin, len(less)) if less[step]), len(less))
    assert more[begin:first_run] == less[begin:first_run] == [False] * max(first_run - begin, 0)


def test_a_larger_threshold_may_compute_more() -> None:
    """The published rule is not monotone, not even on FLUX: held longer, a step is anchored at a worse place."""
    strict, loose = (MagCachePolicy(threshold, 5, 0.1, FLUX, Grid(28)) for threshold in (0.08, 0.09))
    assert computed(strict).count(True) == 11
    assert computed(loose).count(True) == 12
    assert computed(loose) == upstream_decisions(loose)


@relaxed
@given(policy=policies(), never=st.frozensets(st.integers(0, 39), max_size=5))
def test_some_steps_are_never_held(policy: MagCachePolicy, never: frozenset[int]) -> None:
    kept = replace(policy, never_hold=never)
    decisions = computed(kept)
    assert all(decisions[step] for step in never if step < len(decisions))
    first = min((step for step in never if step < len(decisions)), default=len(decisions))
    assert decisions[:first] == computed(policy)[:first]


@relaxed
@given(policy=policies(), order=st.lists(st.sampled_from(("cond", "uncond")), max_size=80))
def test_branches_are_independent(policy: MagCachePolicy, order: list[str]) -> None:
    """Two states taken forward in any order decide as one run of its own."""
    states = {name: policy.start() for name in ("cond", "uncond")}
    taken: dict[str, list[bool]] = {name: [] for name in states}
    alone = computed(policy)
    for name in order:
        step = len(taken[name])
        if step < policy.grid.count:
            taken[name].append(policy.decide(step, None, states[name]).compute)
    for decisions in taken.values():
        assert decisions == alone[: len(decisions)]


@relaxed
@given(policy=policies(), data=st.data())
def test_steps_on_which_a_branch_did_not_run_count_all_the_same(policy: MagCachePolicy, data: st.DataObject) -> None:
    """Guidance intervals: the error is that of the whole way from the last computed step to this one."""
    steps_run = sorted(data.draw(st.sets(st.integers(0, policy.grid.count - 1), min_size=1)))
    state, anchor = policy.start(), None
    for step in steps_run:
        error = ratio = math.nan
        if anchor is not None:
            products = list(accumulate(policy.ratios[anchor + 1 : step + 1], lambda a, b: a * b, initial=1.0))[1:]
            error, ratio = sum(abs(1.0 - p) for p in products), products[-1]
        hold = (
            anchor is not None
            and step >= policy.retained
            and error <= policy.threshold
            and step - anchor <= policy.max_skip_steps
        )
        assert policy.decide(step, None, state).compute != hold
        if hold:
            assert state.accumulated_ratio == ratio
            assert state.accumulated_steps == step - anchor
        else:
            anchor = step
            assert state == ErrorAccumulator(anchor=step, seen=step)


@relaxed
@given(count=st.integers(3, 40), data=st.data())
def test_a_missing_anchor_means_compute(count: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(1, count - 1))
    policy = MagCachePolicy(1.0, 100, 0.0, (1.0,) * count, Grid(count))
    state = policy.start()
    for step in range(count):
        if step == lost:
            state.anchor = None
        decision = policy.decide(step, None, state)
        assert decision.compute == (step in (0, lost))
        assert (decision is NOTHING_HELD) == decision.compute


def test_steps_beyond_the_announced_ones_are_computed() -> None:
    policy = MagCachePolicy(1.0, 100, 0.0, (1.0,) * 4, Grid(4))
    state = policy.start()
    decisions = [policy.decide(step, None, state) for step in range(6)]
    assert [d.compute for d in decisions] == [True, False, False, False, True, True]
    assert decisions[4] is decisions[5] is BEYOND


def test_reasons() -> None:
    """Why a step was computed is what users see in the statistics."""
    policy = MagCachePolicy(0.15, 1, 0.2, (1.0, 1.1, 1.1, 1.0, 1.2, 1.0), Grid(6), frozenset({5}))
    assert schedule(policy, policy.grid) == [RETAINED, HELD, ERROR, HELD, ERROR, KEPT]
    longest = replace(policy, ratios=(1.0,) * 6, never_hold=frozenset())
    assert schedule(longest, longest.grid) == [RETAINED, HELD, LONGEST, HELD, LONGEST, HELD]
    assert schedule(replace(policy, threshold=0.0, retention_ratio=0.0), policy.grid) == [OFF] * 6


def test_the_schedule_needs_no_signal() -> None:
    assert MagCachePolicy.needs_signal is False


# Ratios for another number of steps

ratios = st.lists(st.floats(0.3, 3.0), min_size=1, max_size=60)


@relaxed
@given(ratios=ratios, count=st.integers(1, 150))
def test_nearest_ratios_are_nearest(ratios: list[float], count: int) -> None:
    taken = nearest_ratios(list(range(len(ratios))), count)
    ends = (len(ratios) - 1) / max(count - 1, 1)
    assert len(taken) == count
    if count == 1:
        assert taken == (len(ratios) - 1,)
    else:
        assert all(abs(index - step * ends) <= 0.5 + 1e-9 for step, index in enumerate(taken))
    assert nearest_ratios(ratios, count) == tuple(ratios[int(index)] for index in taken)


@relaxed
@given(ratios=ratios)
def test_nearest_ratios_on_the_same_grid_are_the_same(ratios: list[float]) -> None:
    assert nearest_ratios(ratios, len(ratios)) == tuple(ratios)


@pytest.mark.parametrize("length", sorted({profile.num_inference_steps for profile in shipped("mag_cache")}))
def test_nearest_ratios_are_those_of_diffusers_for_common_step_counts(length: int) -> None:
    indices = torch.arange(length, dtype=torch.float64)
    for count in (1, 4, 8, 20, 25, 28, 30, 40, 50, 100):
        assert list(nearest_ratios(indices.tolist(), count)) == upstream.nearest_interp(indices, count).tolist()


def test_nearest_ratios_are_those_of_diffusers_for_all_lengths() -> None:
    differing = []
    for length in range(1, 101):
        indices = torch.arange(length, dtype=torch.float64)
        listed = indices.tolist()
        for count in range(1, 101):
            if list(nearest_ratios(listed, count)) != upstream.nearest_interp(indices, count).tolist():
                differing.append((length, count))
    assert differing == []


@relaxed
@given(ratios=ratios)
def test_rescaling_to_the_same_number_of_steps_changes_nothing(ratios: list[float]) -> None:
    assert rescaled_ratios(ratios, Grid(len(ratios))) == tuple(ratios)


@st.composite
def levels(draw: st.DrawFn, count: int) -> tuple[float, ...]:
    """Falling noise levels, as a scheduler has them."""
    falls = draw(st.lists(st.floats(0.01, 1.0), min_size=count, max_size=count))
    total = sum(falls)
    return tuple(1.0 - passed / (total * 1.1) for passed in accumulate(falls[:-1], initial=0.0))


@relaxed
@given(ratios=ratios, data=st.data())
def test_rescaling_to_the_same_noise_levels_changes_nothing(ratios: list[float], data: st.DataObject) -> None:
    noise = data.draw(levels(len(ratios)))
    assert rescaled_ratios(ratios, Grid(len(ratios), noise), noise) == pytest.approx(tuple(ratios))


@relaxed
@given(ratios=ratios, count=st.integers(2, 100))
def test_rescaling_keeps_the_cumulative_product(ratios: list[float], count: int) -> None:
    taken = rescaled_ratios(ratios, Grid(count))
    assert len(taken) == count
    assert taken[0] == ratios[0]
    assert math.prod(taken) == pytest.approx(math.prod(ratios))


@relaxed
@given(ratios=ratios, count=st.integers(2, 60), data=st.data())
def test_rescaling_over_noise_levels_keeps_the_product_between_the_ends(
    ratios: list[float], count: int, data: st.DataObject
) -> None:
    """Where the new grid ends at levels of the old one, the product in between is that of the old one."""
    noise = data.draw(levels(len(ratios)))
    begin, end = sorted((data.draw(st.integers(0, len(ratios) - 1)), data.draw(st.integers(0, len(ratios) - 1))))
    width = noise[begin] - noise[end]
    between = tuple(noise[begin] - width * i / (count - 1) for i in range(count - 1))
    taken = rescaled_ratios(ratios, Grid(count, (*between, noise[end])), noise)
    assert len(taken) == count
    assert math.prod(taken[1:]) == pytest.approx(math.prod(ratios[begin + 1 : end + 1]))


@relaxed
@given(ratios=ratios, factor=st.integers(1, 6))
def test_rescaling_passes_through_every_step_of_the_old_grid(ratios: list[float], factor: int) -> None:
    """With steps a whole number of times finer, the product at each old step is the old one."""
    count = (len(ratios) - 1) * factor + 1
    products = list(accumulate(rescaled_ratios(ratios, Grid(count)), lambda a, b: a * b))
    assert products[::factor] == pytest.approx(list(accumulate(ratios, lambda a, b: a * b)))


def test_beyond_the_measured_noise_levels_nothing_changes() -> None:
    taken = rescaled_ratios((1.0, 2.0, 2.0), Grid(5, (1.0, 0.9, 0.5, 0.1, 0.05)), (0.9, 0.5, 0.1))
    assert taken == pytest.approx((1.0, 1.0, 2.0, 2.0, 1.0))


def test_one_step_takes_one_ratio() -> None:
    assert rescaled_ratios((1.0, 1.1, 1.2), Grid(1)) == (1.0,)
    assert nearest_ratios((1.0, 1.1, 1.2), 1) == (1.2,)
