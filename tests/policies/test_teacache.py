"""TeaCache's rule, against a re-computation of it and by its properties."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdover.engine.signals import relative_change
from holdover.grid import Grid
from holdover.policies.base import FIRST, LAST, NOTHING_HELD, OFF
from holdover.policies.teacache import CHANGED, HELD, RETAINED, Polynomial, TeaCachePolicy
from holdover.profiles import TeaCacheProfile, shipped

LINE = Polynomial((1.0, 0.0))
PUBLISHED = shipped("tea_cache")
relaxed = settings(deadline=None)

changes = st.lists(st.floats(0, 1.5), min_size=1, max_size=40)
thresholds = st.floats(0, 3)
coefficients = st.lists(st.floats(-50, 50).map(lambda c: round(c, 3)), min_size=1, max_size=5).map(tuple)


@st.composite
def polynomials(draw: st.DrawFn) -> Polynomial:
    low, high = sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1))))
    return Polynomial(draw(coefficients), low, high)


def policy_for(signal: list[float], threshold: float, rescale: Polynomial = LINE, retained: int = 1) -> TeaCachePolicy:
    return TeaCachePolicy(threshold, rescale, Grid(len(signal)), retained)


def computed(policy: TeaCachePolicy, signal: list[float]) -> list[bool]:
    """Which steps of one branch are computed, where step i sees signal[i]."""
    state = policy.start()
    return [policy.decide(step, change, state).compute for step, change in enumerate(signal, policy.grid.first)]


def published_rule(signal: np.ndarray, threshold: float, rescale: Polynomial) -> tuple[list[bool], float]:
    """The rule as it was published, on the signals themselves, and how near it came to deciding otherwise."""
    decisions, total, margin = [], 0.0, math.inf
    for step in range(len(signal)):
        if step in (0, len(signal) - 1):
            hold = False
        else:
            distance = np.abs(signal[step] - signal[step - 1]).mean() / np.abs(signal[step - 1]).mean()
            total += max(0.0, float(np.polyval(rescale.coefficients, np.clip(distance, rescale.low, rescale.high))))
            margin = min(margin, abs(total - threshold))
            hold = total < threshold
        if not hold:
            total = 0.0
        decisions.append(not hold)
    return decisions, margin


# The rule


@relaxed
@given(
    rows=st.lists(st.lists(st.floats(0.1, 4.0), min_size=3, max_size=3), min_size=1, max_size=30),
    threshold=st.floats(0.01, 5),
    rescale=polynomials(),
)
def test_decisions_are_the_published_ones(rows: list[list[float]], threshold: float, rescale: Polynomial) -> None:
    signal = np.array(rows)
    expected, margin = published_rule(signal, threshold, rescale)
    assume(margin > 1e-9 * (1 + threshold))  # two ways to add up may round to either side
    tensors = torch.from_numpy(signal)
    moved = [0.0, *(float(relative_change(b, a)) for a, b in pairwise(tensors))]
    assert computed(policy_for(moved, threshold, rescale), moved) == expected


@relaxed
@given(signal=changes, threshold=thresholds, rescale=polynomials())
def test_first_and_last_step_are_computed(signal: list[float], threshold: float, rescale: Polynomial) -> None:
    steps = computed(policy_for(signal, threshold, rescale), signal)
    assert steps[0]
    assert steps[-1]


@relaxed
@given(signal=changes, first=st.integers(1, 20), after=st.integers(0, 5), retained=st.integers(0, 5))
def test_first_and_last_are_those_that_run(signal: list[float], first: int, after: int, retained: int) -> None:
    last = first + len(signal) - 1
    policy = TeaCachePolicy(math.inf, LINE, Grid(last + 1 + after, first=first, last=last), retained)
    kept = {first, last, *range(first, first + retained)}
    assert computed(policy, signal) == [step in kept for step in range(first, last + 1)]


def test_reasons() -> None:
    """Why a step was computed is what users see in the statistics."""
    policy = TeaCachePolicy(0.5, LINE, Grid(8, first=1), retained=2)
    state = policy.start()
    moved = (0.0, 0.0, 0.1, 0.6, None, 0.1, 0.1)
    reasons = [policy.decide(step, change, state) for step, change in enumerate(moved, 1)]
    assert reasons == [FIRST, RETAINED, HELD, CHANGED, NOTHING_HELD, HELD, LAST]
    assert replace(policy, threshold=0.0).decide(3, 0.1, state) is OFF


@relaxed
@given(signal=changes, rescale=polynomials())
def test_threshold_zero_holds_nothing(signal: list[float], rescale: Polynomial) -> None:
    assert all(computed(policy_for(signal, 0.0, rescale), signal))


@relaxed
@given(signal=changes, retained=st.integers(0, 45))
def test_retained_steps_are_computed(signal: list[float], retained: int) -> None:
    steps = computed(policy_for(signal, math.inf, retained=retained), signal)
    last = len(signal) - 1
    assert steps == [step in (0, last) or step < retained for step in range(len(signal))]


@relaxed
@given(signal=changes, one=thresholds, other=thresholds, rescale=polynomials())
def test_a_larger_threshold_never_computes_more(
    signal: list[float], one: float, other: float, rescale: Polynomial
) -> None:
    """Nothing negative is added, so each computed step comes later: by any step, no more of them have come."""
    low, high = sorted((one, other))
    inner = signal[:-1]  # the last step is computed in any case
    fewer = accumulate(computed(policy_for(signal, high, rescale), inner))
    more = accumulate(computed(policy_for(signal, low, rescale), inner))
    assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_a_larger_threshold_may_compute_other_steps() -> None:
    """Fewer steps, not a subset of them."""
    signal = [0.0, 0.5, 0.5, 0.5, 0.0]
    assert computed(policy_for(signal, 0.75), signal) == [True, False, True, False, True]
    assert computed(policy_for(signal, 1.25), signal) == [True, False, False, True, True]


@relaxed
@given(signal=changes, threshold=thresholds)
def test_what_was_held_stayed_below_the_threshold(signal: list[float], threshold: float) -> None:
    policy = policy_for(signal, threshold)
    state = policy.start()
    total = 0.0
    for step, change in enumerate(signal):
        decision = policy.decide(step, change, state)
        total = 0.0 if decision.compute else total + min(change, 1.0)
        assert decision.compute or total < threshold
        assert state.accumulated_rel_l1_distance == total


@relaxed
@given(one=changes, other=changes, threshold=thresholds, data=st.data())
def test_branches_are_independent(one: list[float], other: list[float], threshold: float, data: st.DataObject) -> None:
    """Two states taken forward in any order decide as two runs of their own."""
    signals = {"cond": one, "uncond": other}
    order = data.draw(st.permutations([name for name, signal in signals.items() for _ in signal]))
    policy = TeaCachePolicy(threshold, LINE, Grid(40))
    states = {name: policy.start() for name in signals}
    taken: dict[str, list[bool]] = {name: [] for name in signals}
    for name in order:
        step = len(taken[name])
        taken[name].append(policy.decide(step, signals[name][step], states[name]).compute)
    assert taken == {name: computed(policy, signal) for name, signal in signals.items()}


@relaxed
@given(signal=st.lists(st.floats(0, 0.01), min_size=4, max_size=30), data=st.data())
def test_a_missing_anchor_means_compute(signal: list[float], data: st.DataObject) -> None:
    lost = data.draw(st.integers(1, len(signal) - 2))
    policy = policy_for(signal, math.inf)
    state = policy.start()
    for step, change in enumerate(signal):
        if step == lost:
            state.anchor = None
        decision = policy.decide(step, change, state)
        assert decision.compute == (step in (0, lost, len(signal) - 1))
        if step == lost:
            assert decision is NOTHING_HELD
            assert state.anchor == lost
            assert state.accumulated_rel_l1_distance == 0.0


def test_a_step_without_a_signal_is_computed() -> None:
    policy = TeaCachePolicy(math.inf, LINE, Grid(4))
    state = policy.start()
    decisions = [policy.decide(step, change, state) for step, change in enumerate((None, 0.1, None, 0.1))]
    assert [d.compute for d in decisions] == [True, False, True, True]
    assert decisions[2] is NOTHING_HELD


def test_a_change_that_is_no_number_is_computed() -> None:
    signal = [0.0, 0.1, math.nan, 0.1, 0.1]
    assert computed(policy_for(signal, 1.0), signal)[2]


def test_an_infinite_change_counts_as_the_largest() -> None:
    """A signal that was all zeros before: the relative change is infinite."""
    signal = [0.0, math.inf, 0.1, 0.1]
    assert computed(policy_for(signal, 1.0), signal) == [True, True, False, True]


def test_a_loop_of_unknown_length_has_no_last_step() -> None:
    policy = TeaCachePolicy(math.inf, LINE, Grid.unbounded())
    assert computed(policy, [0.1] * 60) == [True] + [False] * 59


# The polynomials


@relaxed
@given(rescale=polynomials(), change=st.floats(0, 10))
def test_a_value_is_never_negative(rescale: Polynomial, change: float) -> None:
    assert rescale(change) >= 0.0


@relaxed
@given(rescale=polynomials(), change=st.floats(0, 10))
def test_the_argument_is_clamped_to_the_range(rescale: Polynomial, change: float) -> None:
    inside = float(np.clip(change, rescale.low, rescale.high))
    assert rescale(change) == max(0.0, float(np.polyval(rescale.coefficients, inside)))


@relaxed
@given(coefficients=coefficients)
def test_a_trusted_polynomial_never_gives_nothing_for_more(coefficients: tuple[float, ...]) -> None:
    trusted = Polynomial.trusted(coefficients)
    values = [trusted(i / 1000) for i in range(1200)]
    begun = next((i for i, value in enumerate(values) if value > 0), len(values))
    assert all(value > 0 for value in values[begun:])


def published(name: str) -> tuple[float, ...]:
    return next(profile for profile in PUBLISHED if profile.name == name).fit("").coefficients


@pytest.mark.parametrize("profile", PUBLISHED, ids=lambda p: p.name)
def test_a_published_polynomial_never_gives_nothing_for_more(profile: TeaCacheProfile) -> None:
    trusted = Polynomial.trusted(profile.fit("").coefficients)
    values = [trusted(i / 2500) for i in range(3000)]
    begun = next(i for i, value in enumerate(values) if value > 0)
    assert min(values) >= 0.0
    assert all(value > 0 for value in values[begun:])
    assert trusted.high <= 1.0
    assert trusted(50.0) == trusted(trusted.high) > 0


def test_qwens_polynomial_does_not_fall_to_its_root() -> None:
    trusted = Polynomial.trusted(published("vllm.QwenImageTransformer2DModel"))
    assert trusted.raw(0.4255) > 0 > trusted.raw(0.4265)
    assert 0.3 < trusted.high < 0.426
    assert trusted(0.426) == trusted(0.6) == trusted(trusted.high) == pytest.approx(0.862, abs=1e-3)


def test_hidreams_polynomial_does_not_turn_negative() -> None:
    trusted = Polynomial.trusted(published("tc.hidream-i1-full"))
    assert trusted.raw(0.2) == pytest.approx(-52, abs=1)
    assert trusted(0.2) == trusted(trusted.high) > trusted(0.0) > 0


def test_wans_polynomial_is_negative_at_both_ends() -> None:
    trusted = Polynomial.trusted(published("tc.wan2.1-t2v-14B"))
    assert trusted.raw(0.0) == pytest.approx(-13, abs=0.1)
    assert trusted.raw(0.5) < -18
    assert trusted(0.0) == 0.0
    assert trusted(0.5) == trusted(trusted.high) > 1.6


def test_a_polynomial_that_is_fine_is_left_alone() -> None:
    assert Polynomial.trusted([1.0, 0.0]) == Polynomial((1.0, 0.0), 0.0, 1.0)


@pytest.mark.parametrize("profile", [p for p in PUBLISHED if p.thresholds], ids=lambda p: p.name)
def test_a_published_polynomial_can_hold_at_a_published_threshold(profile: TeaCacheProfile) -> None:
    assert Polynomial.trusted(profile.fit("").coefficients).minimum() < max(profile.thresholds)


def _exact_minimum(rescale: Polynomial) -> float:
    turning = np.roots(np.polyder(np.array(rescale.coefficients)))
    inside = [r.real for r in turning if abs(r.imag) < 1e-12 and rescale.low <= r.real <= rescale.high]
    points = [rescale.low, rescale.high, *inside]
    return max(0.0, min(float(np.polyval(rescale.coefficients, x)) for x in points))


@pytest.mark.parametrize("profile", PUBLISHED, ids=lambda p: p.name)
def test_minimum_of_a_published_polynomial(profile: TeaCacheProfile) -> None:
    trusted = Polynomial.trusted(profile.fit("").coefficients)
    assert trusted.minimum() == pytest.approx(_exact_minimum(trusted), rel=0.01, abs=1e-3)


@relaxed
@given(rescale=polynomials())
def test_minimum_is_the_least_it_adds(rescale: Polynomial) -> None:
    assert rescale.minimum() == pytest.approx(_exact_minimum(rescale), abs=0.01)


@relaxed
@given(rescale=polynomials(), signal=changes)
def test_below_the_minimum_nothing_is_held(rescale: Polynomial, signal: list[float]) -> None:
    threshold = max(0.0, _exact_minimum(rescale) - 1e-9)
    assert all(computed(policy_for(signal, threshold, rescale), signal))


def test_flux_never_holds_below_its_minimum() -> None:
    """FLUX's polynomial never falls below 0.18: thresholds under that do nothing."""
    trusted = Polynomial.trusted(published("tc.flux1-dev"))
    assert trusted.minimum() == pytest.approx(0.180, abs=1e-3)
    signal = [i / 1000 for i in range(1000)]
    assert all(computed(policy_for(signal, 0.18, trusted), signal))
    assert not all(computed(policy_for(signal, 0.19, trusted), signal))
