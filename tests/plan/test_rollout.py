"""What a plan does on paper is what it does to tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan import rollout
from holdover.plan.response import euler
from holdover.plan.rollout import DEPTH, LED_BACK, Course, Weights, error_of, fit, least_squares, ridged

from .trajectories import WIDTH, branched_kernel, falling, kernel_of, mean_square, multistep, outputs, smooth_kernel

relaxed = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 10**6)


@relaxed
@given(steps=st.integers(3, 40), seed=seeds, data=st.data())
def test_the_gram_error_is_the_error_of_real_tensors(steps, seed, data):
    step = data.draw(st.integers(1, steps - 1))
    anchors = sorted(data.draw(st.sets(st.integers(0, step - 1), min_size=1, max_size=4)))
    values = data.draw(st.lists(st.floats(-3, 3), min_size=len(anchors), max_size=len(anchors)))
    vectors = outputs(falling(steps), seed)
    wrong = vectors[step] - np.asarray(values) @ vectors[anchors]
    found = error_of(Weights(tuple(anchors), tuple(values)), step, vectors @ vectors.T / WIDTH)
    assert found == pytest.approx(mean_square(wrong), rel=1e-9, abs=1e-9)


@relaxed
@given(steps=st.integers(6, 40), seed=seeds, data=st.data())
def test_no_other_weights_predict_better(steps, seed, data):
    step = data.draw(st.integers(2, steps - 1))
    anchors = sorted(data.draw(st.sets(st.integers(0, step - 1), min_size=1, max_size=4)))
    gram = smooth_kernel(steps, seed).mean
    best = least_squares(anchors, step, gram)
    error = error_of(best, step, gram)
    random = np.random.default_rng(seed)
    slack = 1e-6 * gram[step, step]  # the ridge gives away so much
    for size in (1e-3, 1e-1, 1.0):
        other = np.asarray(best.values) + size * random.normal(size=len(anchors))
        assert error <= error_of(Weights(best.anchors, tuple(other)), step, gram) + slack


def test_fitting_finds_weights_that_are_there():
    gram = smooth_kernel(12, 5).mean
    features = np.eye(12)[[0, 4, 9]]
    assert fit(features, np.array([0.5, -0.25, 2.0]) @ features, gram) == pytest.approx([0.5, -0.25, 2.0], abs=1e-3)


def made_by(vectors, table):
    """The outputs of a generation by the table."""
    made = np.zeros_like(vectors)
    for step in range(len(vectors)):
        held = table.get(step)
        made[step] = vectors[step] if held is None else np.asarray(held.values) @ made[list(held.anchors)]
    return made


def rolled_out(vectors, response, table):
    """The generation itself: outputs by the table, latents by the response; the start is zero."""
    return response @ made_by(vectors, table)


@pytest.mark.parametrize("grid", ["euler", "multistep"])
@settings(deadline=None, max_examples=10)
@given(seed=seeds, data=st.data())
def test_errors_on_paper_are_those_of_a_rollout(grid, seed, data):
    noise, response = (falling(14), euler(falling(14))) if grid == "euler" else multistep(14)
    computed = {0, *data.draw(st.sets(st.integers(0, 13), max_size=7))}
    generations = [outputs(noise, seed + i) for i in range(3)]
    course = Course(kernel_of(noise, generations), response)
    table = course.weights(computed, ((0, 13),))
    assert set(table) == set(range(14)) - computed
    paper = course.errors(table)
    for errors, vectors in zip(paper, generations, strict=True):
        apart = rolled_out(vectors, response, table) - response @ vectors
        assert errors == pytest.approx([mean_square(row) for row in apart], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("grid", ["euler", "multistep"])
def test_each_held_step_leads_back_as_well_as_it_can(grid):
    """Changing its weights never brings the next latent nearer to the uncached one, less what is left to the model."""
    noise, response = (falling(14), euler(falling(14))) if grid == "euler" else multistep(14)
    vectors = outputs(noise, 7)
    course = Course(kernel_of(noise, [vectors]), response)
    table = course.weights({0, 2, 5, 9}, ((0, 13),))
    random = np.random.default_rng(0)
    for step, held in table.items():
        before = {s: w for s, w in table.items() if s < step}
        seen = slice(0, held.anchors[-1])  # by the last computed step
        left = (1 - LED_BACK) * response[step + 1, seen] @ (made_by(vectors, table) - vectors)[seen]
        aim = response[step + 1] @ vectors + left

        def missed(weights, before=before, step=step, aim=aim):
            return mean_square(rolled_out(vectors, response, {**before, step: weights})[step + 1] - aim)

        for size in (1e-3, 1e-1):
            values = np.asarray(held.values) + size * random.normal(size=len(held.values))
            assert missed(held) <= missed(Weights(held.anchors, tuple(values))) + 1e-9


def test_errors_that_a_computed_step_has_seen_are_led_back_in_part(monkeypatch):
    """Step 3 is the first held one after a computed one: it alone knows of what step 1 missed."""
    vectors, response = outputs(falling(14), 7), euler(falling(14))
    course = Course(kernel_of(falling(14), [vectors]), response)

    def missed() -> np.ndarray:
        table = course.weights({0, 2}, ((0, 13),))
        return (rolled_out(vectors, response, table) - response @ vectors)[4]

    in_part = missed()
    monkeypatch.setattr(rollout, "LED_BACK", 1.0)
    assert mean_square(missed()) < mean_square(in_part)
    assert 0.0 < LED_BACK < 1.0


def test_held_steps_are_made_of_the_last_computed_steps_of_their_own_range():
    course = Course(smooth_kernel(12, 1), euler(falling(12)))
    table = course.weights({0, 1, 2, 3, 4, 6, 9}, ((0, 5), (6, 11)))
    assert {step: weights.anchors for step, weights in table.items()} == {
        5: (1, 2, 3, 4),
        7: (6,),
        8: (6,),
        10: (6, 9),
        11: (6, 9),
    }
    assert DEPTH == 4


def test_nothing_held_has_no_error():
    course = Course(smooth_kernel(12, 1), euler(falling(12)))
    assert not course.errors({}).any()


GUIDED = (3.0, -2.0)


def two_branches(noise, seed):
    """Outputs of a conditional and an unconditional branch, which have much in common."""
    common = outputs(noise, seed)
    return [common + 0.3 * outputs(noise, seed + 1), common + 0.3 * outputs(noise, seed + 2)]


def branches_rolled_out(branches, response, table):
    """The generation itself, each branch by its own weights, mixed for the scheduler."""
    mixed = 0.0
    for index, (vectors, share) in enumerate(zip(branches, GUIDED, strict=True)):
        made = np.zeros_like(vectors)
        for step in range(len(vectors)):
            held = table.get(step)
            made[step] = vectors[step] if held is None else np.asarray(held.of(index)) @ made[list(held.anchors)]
        mixed = mixed + share * made
    return response @ mixed


@settings(deadline=None, max_examples=10)
@given(seed=seeds, data=st.data())
def test_errors_on_paper_are_those_of_a_rollout_of_several_branches(seed, data):
    noise, response = falling(14), euler(falling(14))
    computed = {0, *data.draw(st.sets(st.integers(0, 13), max_size=7))}
    generations = [two_branches(noise, seed + 10 * i) for i in range(3)]
    course = Course(branched_kernel(noise, generations, GUIDED), response)
    table = course.weights(computed, ((0, 13),))
    for errors, branches in zip(course.errors(table), generations, strict=True):
        uncached = response @ (GUIDED[0] * branches[0] + GUIDED[1] * branches[1])
        apart = branches_rolled_out(branches, response, table) - uncached
        assert errors == pytest.approx([mean_square(row) for row in apart], rel=1e-9, abs=1e-9)


def test_branches_with_weights_of_their_own_come_nearer_than_with_the_same():
    noise, response = falling(20), euler(falling(20))
    course = Course(branched_kernel(noise, [two_branches(noise, 10 * i) for i in range(4)], GUIDED), response)
    computed = {0, 1, 3, 7, 12}
    apart, alike = course.weights(computed, ((0, 19),)), course.merged.weights(computed, ((0, 19),))
    assert {len(w.values) for w in apart.values()} == {4, 6, 8}
    assert {len(w.values) for w in alike.values()} == {2, 3, 4}
    assert course.errors(apart)[:, -1].mean() < course.errors(alike)[:, -1].mean()


def test_the_same_weights_for_all_branches_are_those_of_the_mix():
    """One set of weights has the same error whether branches are told apart or not."""
    noise, response = falling(14), euler(falling(14))
    course = Course(branched_kernel(noise, [two_branches(noise, 4)], GUIDED), response)
    table = course.merged.weights({0, 2, 5, 9}, ((0, 13),))
    assert course.errors(table) == pytest.approx(course.merged.errors(table), rel=1e-9)


def test_branches_are_tied_together():
    """However different they are, a strong tie gives them all but the same weights."""
    normal = np.diag([4.0, 3.0, 2.0, 1.0])
    known = np.array([4.0, 0.0, 0.0, 1.0])
    loose, tied = ridged(normal, known, branches=2, tie=0.0), ridged(normal, known, branches=2, tie=1e6)
    assert loose == pytest.approx([1.0, 0.0, 0.0, 1.0], abs=1e-6)
    assert tied[:2] == pytest.approx(tied[2:], abs=1e-5)
