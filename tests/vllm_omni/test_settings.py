"""`--cache-config` becomes a method's own settings, in each form vLLM-Omni passes it."""

from __future__ import annotations

import dataclasses
import json

import pytest

import holdover
from constant_free import HOLD
from holdover.selector import config_class
from holdover.vllm_omni import config_for, method_names
from holdover.vllm_omni.backend import request_settings

SAID = {
    "plan": {"budget": "4x", "predictor": "newton"},
    "tea_cache": {"rel_l1_thresh": 0.3, "signal": "e0", "hold_in": "cpu"},
    "mag_cache": {"mag_threshold": 0.1, "mag_ratios": [1.0, 0.9], "interpolation": "nearest"},
    "cache_dit": {"Fn_compute_blocks": 2, "residual_diff_threshold": 0.1},
    **HOLD,
}


@pytest.fixture
def configured(omni):
    def configured(**settings):
        return omni.data.OmniDiffusionConfig("", json.dumps(settings)).cache_config

    return configured


@pytest.mark.parametrize("method", method_names().values())
def test_keys_with_and_without_a_field_there_arrive(configured, method):
    wanted = config_class(method).from_dict(SAID[method])
    assert config_for(method, configured(**SAID[method])) == wanted
    assert config_for(method, SAID[method]) == wanted


@pytest.mark.parametrize("method", method_names().values())
def test_nothing_said_is_the_methods_defaults(configured, method):
    default = config_class(method)()
    assert config_for(method, {}) == config_for(method, None) == default
    if method == "tea_cache":
        default = default.replaced(rel_l1_thresh=None)  # vLLM-Omni's default: that of the model
    assert config_for(method, configured()) == default


@pytest.mark.parametrize("method", method_names().values())
def test_its_defaults_and_ours_agree_where_both_have_a_setting(omni, method):
    """Otherwise a user without settings would not get the documented defaults."""
    theirs, ours = omni.data.DiffusionCacheConfig(), config_class(method)()
    both = {f.name for f in dataclasses.fields(theirs)} & set(ours.field_names())
    differing = [n for n in both if getattr(theirs, n) is not None and getattr(theirs, n) != getattr(ours, n)]
    assert differing == []


@pytest.mark.parametrize(
    ("method", "said", "message"),
    [
        ("tea_cache", {"rel_l1_tresh": 0.3}, "Did you mean 'rel_l1_thresh'"),
        ("plan", {"buget": 9}, "Did you mean 'budget'"),
        ("plan", {"quality": "hihg"}, "Did you mean 'high'"),
        ("plan", {"rel_l1_thresh": 0.3}, "'rel_l1_thresh' is a setting of 'tea_cache', not of 'plan'"),
        ("tea_cache", {"mag_threshold": 0.3}, "'mag_threshold' is a setting of 'mag_cache', not of 'tea_cache'"),
        ("mag_cache", {"sea_threshold": 0.5}, "MagCacheConfig has no setting 'sea_threshold'"),
        ("mag_cache", {"mag_threshold": -1}, "mag_threshold must be at least 0"),
        ("plan", {"target": "psnr>40", "budget": 5}, "one of budget, target, quality and schedule"),
    ],
)
def test_what_a_method_does_not_have_is_an_error(configured, method, said, message):
    with pytest.raises(holdover.ConfigError, match=message):
        config_for(method, configured(**said))


def test_a_config_of_another_kind_is_an_error():
    with pytest.raises(holdover.ConfigError, match="must be a JSON object, not list"):
        config_for("plan", ["budget"])


def batch(omni, *wishes):
    from vllm_omni.diffusion.request import DiffusionRequestBatch

    return DiffusionRequestBatch([omni.request(extra={} if wish is None else {"holdover": wish}) for wish in wishes])


def test_requests_bring_settings_of_their_own(omni):
    assert request_settings(batch(omni, None)) == [{}]
    assert request_settings(batch(omni, {"budget": 5}, {"budget": 5})) == [{"budget": 5}]
    assert request_settings(batch(omni, {"budget": 5}, None, "off")) == [{"budget": 5}, {}, "off"]


@pytest.mark.parametrize("wish", ["on", 3, ["budget"], True])
def test_a_wish_that_is_no_setting_is_an_error(omni, wish):
    with pytest.raises(holdover.ConfigError, match="must be an object of settings, or 'off'"):
        request_settings(batch(omni, wish))
