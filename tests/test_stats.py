"""Statistics: the repr of a cache, HTML and a plot in a notebook, and a pickle that leaves the process."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

import holdover
from holdover.stats import GenerationStats, Stats, StepRecord
from tiny.pipelines import PIPELINES, run
from tiny.prompted import prompted_flux

STEPS = 8


@pytest.fixture(scope="module")
def pipe() -> Any:
    return prompted_flux()


def test_the_repr_of_a_cache_says_method_settings_pipeline_and_state(pipe: Any) -> None:
    ratios = [1.0] * STEPS
    cache = holdover.enable(pipe, "mag_cache", mag_threshold=0.5, mag_ratios=ratios)
    shown = "mag_cache(mag_threshold=0.5, mag_ratios=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ...))"
    assert repr(cache) == (
        f"<MagCacheBackend: {shown} on {type(pipe).__name__}, enabled: 0 generations, 0 of 0 forwards computed>"
    )
    pipe("red apple", num_inference_steps=STEPS, output_type="latent")
    assert f"on {type(pipe).__name__}, enabled: 1 generation, " in repr(cache)
    with cache.off():
        assert repr(cache).startswith("<MagCacheBackend: none() on ")
    cache.disable()
    assert repr(cache) == f"<MagCacheBackend: {shown}, disabled>"
    assert repr(holdover.MagCacheBackend()) == "<MagCacheBackend: mag_cache(), not enabled>"


def test_the_repr_on_a_bare_transformer_names_it(pipe: Any) -> None:
    with holdover.enable(pipe.transformer, "none") as cache:
        assert "none() on FluxTransformer2DModel, enabled" in repr(cache)


def example() -> Stats:
    records = [
        StepRecord(
            "transformer", branch, step, step in (0, 1, 4), "because <it> had to", lambda step=step: 0.001 * (step + 1)
        )
        for step in range(6)
        for branch in ("cond", "un<cond>")
    ]
    return Stats("tea_cache", [GenerationStats("tea_cache", {}, 6, records, 1500, True)], notes=("profile <x>",))


def test_html_has_a_cell_for_every_forward_and_escapes_what_it_shows() -> None:
    html = example()._repr_html_()
    assert html.count("<span ") == 12
    assert html.count('title="step 4: because &lt;it&gt; had to"') == 2
    assert "un&lt;cond&gt;" in html
    assert "profile &lt;x&gt;" in html
    assert "3 computed, 3 held" in html
    assert "<it>" not in html
    assert Stats("none", [])._repr_html_() == "<div>none: 0 generations, 0 of 0 forwards computed</div>"


def test_a_plot_has_the_strip_and_the_time_of_every_forward() -> None:
    figure = example().plot()
    strip, times = figure.axes
    assert [label.get_text() for label in strip.get_yticklabels()] == ["cond", "un<cond>"]
    assert len(strip.patches) == len(times.patches) == 12
    assert sorted({round(bar.get_height(), 6) for bar in times.patches}) == [1, 2, 3, 4, 5, 6]
    assert len({bar.get_facecolor() for bar in strip.patches}) == 2
    assert times.get_ylabel() == "ms per forward"


def test_nothing_to_plot_and_nothing_to_plot_with_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(holdover.HoldoverError, match="no generation has run"):
        Stats("none", []).plot()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(holdover.HoldoverError, match=r"pip install 'holdover\[report\]'"):
        example().plot()


def test_statistics_can_be_pickled():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", mag_ratios=[1.0] * 4, mag_threshold=1.0) as cache:
        run(pipe, **tiny.call(steps=4))
        stats = cache.stats()
        with pytest.raises(TypeError, match=r"pickle cache\.stats\(\) or cache\.settings"):
            pickle.dumps(cache)
        assert pickle.loads(pickle.dumps(cache.settings)) == cache.settings
    assert pickle.loads(pickle.dumps(stats)).as_dict() == stats.as_dict()


def test_a_pickle_has_the_time_and_not_what_measures_it():
    record = StepRecord("transformer", "cond", 0, True, "first step", lambda: 0.25)
    copied = pickle.loads(pickle.dumps(record))
    assert copied.clock() == 0.25
    assert copied.reason == "first step"
