"""What a trial on held-back prompts proves, and that it proves no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from holdover.tuning.certify import allowed, fastest, fewest, p_value

relaxed = settings(deadline=None, max_examples=60)


@relaxed
@given(tried=st.integers(1, 300), share=st.floats(0.01, 0.99), data=st.data())
def test_p_values_are_binomial(tried, share, data):
    below = data.draw(st.integers(0, tried))
    assert p_value(below, tried, share) == pytest.approx(binom.cdf(below, tried, 1 - share), rel=1e-6, abs=1e-12)


def test_sixty_prompts_without_a_violation_certify_95_of_100_and_58_do_not():
    assert allowed(60, 0.95, 0.95) == 0
    assert allowed(58, 0.95, 0.95) is None
    assert fewest(0.95, 0.95) == 59
    assert p_value(0, 60, 0.95) < 0.05 < p_value(1, 60, 0.95)


@relaxed
@given(tried=st.integers(1, 200), share=st.floats(0.3, 0.97), confidence=st.floats(0.3, 0.97))
def test_as_many_may_be_below_as_the_p_value_lets(tried, share, confidence):
    most = allowed(tried, share, confidence)
    if most is None:
        assert p_value(0, tried, share) > 1 - confidence
        assert tried < fewest(share, confidence)
    else:
        assert p_value(most, tried, share) <= 1 - confidence
        assert most == tried or p_value(most + 1, tried, share) > 1 - confidence


def test_the_sequence_stops_at_the_first_failure():
    tried = []

    def passes(candidate):
        tried.append(candidate)
        return candidate != "c"

    assert fastest("abcde", passes) == "b"
    assert tried == ["a", "b", "c"]
    assert fastest("c", passes) is None
    assert fastest("ab", passes) == "b"
    assert fastest("", passes) is None


@pytest.mark.parametrize(("share", "confidence", "prompts"), [(0.95, 0.95, 60), (0.9, 0.9, 40), (0.8, 0.95, 30)])
def test_certificates_are_wrong_no_more_often_than_promised(share, confidence, prompts):
    """Random prompts from a population in which each candidate's true share is known, many times over.

    The qualities of one prompt under all candidates are correlated, as they are in pictures.
    """
    random = np.random.default_rng(0)
    population, target, rounds = 4000, 40.0, 2000
    hardness = random.normal(scale=3.0, size=population)
    levels = np.linspace(52.0, 41.0, 9)  # mean quality, from slow to fast
    quality = levels[:, None] - hardness + random.normal(scale=1.5, size=(len(levels), population))
    honest = (quality >= target).mean(axis=1) >= share
    assert honest[0]
    assert not honest[-1]
    most = allowed(prompts, share, confidence)
    wrong = certified = 0
    for _ in range(rounds):
        drawn = random.choice(population, prompts)
        below = (quality[:, drawn] < target).sum(axis=1)
        best = fastest(range(len(levels)), lambda candidate, below=below: below[candidate] <= most)
        certified += best is not None
        wrong += best is not None and not honest[best]
    promised = 1 - confidence
    assert wrong / rounds <= promised + 3 * np.sqrt(promised * (1 - promised) / rounds)
    assert certified > rounds / 2
