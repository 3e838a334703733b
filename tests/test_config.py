"""Settings: every field is checked, errors for unknown keys name the right one, JSON round-trips."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.base import DiffusionCacheConfig
from holdover.config import Config, allowed_values, setting
from holdover.engine.method import NoneConfig
from holdover.errors import ConfigError
from holdover.magcache import MagCacheConfig
from holdover.profiles import measured
from holdover.selector import own_config
from holdover.teacache import TeaCacheConfig

CONFIGS: tuple[type[Config], ...] = (DiffusionCacheConfig, TeaCacheConfig, MagCacheConfig)
NAN, INF = math.nan, math.inf

# Values that no field of a kind accepts. A bool is not a number here, and a number is not a bool.
WRONG: dict[str, tuple[Any, ...]] = {
    "float": ("0.1", None, True, False, [0.1], 1j),
    "float or None": ("0.1", True, False, [0.1], 1j),
    "int": ("1", None, True, False, 1.0, 2.5, NAN, [1]),
    "int or None": ("1", True, False, 1.0, NAN, [1]),
    "bool": (1, 0, "true", None, 1.0),
    "str": (3, None, True, b"x", ["x"]),
    "str or None": (3, True, b"x", ["x"]),
    "floats or None": (0.1, "0.1", True, ["0.1"], [True], [None], [0.1, None], {"cond": [0.1]}),
    "ratios or None": (1.0, "1.0", True, [True], [None], {"cond": 1.0}, {3: [1.0]}, {"cond": ["1.0"]}),
}

# Every setting: its kind, and values of that kind that are out of range.
FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "rel_l1_thresh": ("float or None", (-0.1, -INF, NAN)),
    "coefficients": ("floats or None", ()),
    "transformer_type": ("str", ()),
    "profile": ("str or None", ()),
    "signal": ("str or None", ()),
    "mag_threshold": ("float", (-0.1, -INF, NAN)),
    "mag_max_skip_steps": ("int", (-1,)),
    "mag_retention_ratio": ("float", (-0.1, 1.1, INF, NAN)),
    "mag_ratios": ("ratios or None", ()),
    "num_inference_steps": ("int", (0, -1)),
    "calibrate": ("bool", ()),
    "mag_calibrate": ("bool", ()),
    "interpolation": ("str", ("linear", "", "LOG")),
    "calibration_path": ("str or None", ()),
    "hold_in": ("str", ("disk", "", "FP8")),
    "read": ("str", ("soon", "", "LATE")),
    "clamp": ("bool", ()),
    "compute_last": ("bool", ()),
    "Fn_compute_blocks": ("int", (0, -1)),
    "Bn_compute_blocks": ("int", (-1,)),
    "max_warmup_steps": ("int", (-1,)),
    "max_cached_steps": ("int", (-2,)),
    "max_continuous_cached_steps": ("int", (-2,)),
    "residual_diff_threshold": ("float", (-0.1, NAN)),
    "enable_taylorseer": ("bool", ()),
    "taylorseer_order": ("int", (0, 5)),
    "scm_steps_mask_policy": ("str or None", ("fats", "")),
    "scm_steps_policy": ("str", ("sometimes", "")),
    "force_refresh_step_hint": ("int or None", (-1,)),
    "force_refresh_step_policy": ("str", ("twice", "")),
}


def every(values: dict[str, tuple[Any, ...]]) -> list[Any]:
    """One case for each config, field and value."""
    return [
        pytest.param(config, name, value, id=f"{config.__name__}.{name}={value!r}")
        for config in CONFIGS
        for name in config.field_names()
        for value in values[name]
    ]


def test_the_table_has_every_field() -> None:
    assert {name for config in CONFIGS for name in config.field_names()} == FIELDS.keys()


@pytest.mark.parametrize(("config", "name", "value"), every({n: WRONG[kind] for n, (kind, _) in FIELDS.items()}))
def test_a_wrong_type_is_an_error(config: type[Config], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{config.__name__}\.{name} must be ") as caught:
        config(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("config", "name", "value"), every({n: wrong for n, (_, wrong) in FIELDS.items()}))
def test_a_value_out_of_range_is_an_error_that_says_the_range(config: type[Config], name: str, value: Any) -> None:
    field = next(f for f in config.settings() if f.name == name)
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    finite = "" if not isinstance(value, float) or math.isfinite(value) else "a finite number of "
    wanted = finite + allowed_values(field)
    assert str(caught.value).startswith(f"{config.__name__}.{name} must be {wanted}, not {value!r}.")
    assert allowed_values(field)


def test_a_choice_with_a_typo_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'ultra', not 'fats'\. Did you mean 'fast'\?$"):
        DiffusionCacheConfig(scm_steps_mask_policy="fats")


LIMITS = [
    ("rel_l1_thresh", 0.0),
    ("mag_threshold", 0.0),
    ("mag_max_skip_steps", 0),
    ("mag_retention_ratio", 0.0),
    ("mag_retention_ratio", 1.0),
    ("num_inference_steps", 1),
    ("Fn_compute_blocks", 1),
    ("Bn_compute_blocks", 0),
    ("max_warmup_steps", 0),
    ("max_cached_steps", -1),
    ("max_continuous_cached_steps", -1),
    ("residual_diff_threshold", 0.0),
    ("taylorseer_order", 1),
    ("taylorseer_order", 4),
    ("scm_steps_mask_policy", "ultra"),
    ("scm_steps_mask_policy", None),
    ("force_refresh_step_hint", 0),
    ("force_refresh_step_hint", None),
]


@pytest.mark.parametrize(("name", "value"), LIMITS)
def test_the_ends_of_the_range_belong_to_it(name: str, value: Any) -> None:
    assert getattr(DiffusionCacheConfig(**{name: value}), name) == value


def test_a_whole_number_is_a_float_where_one_is_wanted() -> None:
    config = TeaCacheConfig(rel_l1_thresh=1)
    assert type(config.rel_l1_thresh) is float
    assert config == TeaCacheConfig(rel_l1_thresh=1.0)


def test_a_number_too_large_for_a_float_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        TeaCacheConfig(rel_l1_thresh=10**400)


# Lists of numbers


@pytest.mark.parametrize(
    "given",
    [[1, 1.5, 0.75], (1.0, 1.5, 0.75), torch.tensor([1.0, 1.5, 0.75]), np.array([1.0, 1.5, 0.75], dtype=np.float32)],
    ids=["list", "tuple", "tensor", "array"],
)
def test_lists_tensors_and_arrays_are_taken(given: Any) -> None:
    expected = (1.0, 1.5, 0.75)
    assert TeaCacheConfig(coefficients=given).coefficients == expected
    for config in (MagCacheConfig(mag_ratios=given), DiffusionCacheConfig(mag_ratios=given, coefficients=given)):
        assert config.mag_ratios == expected
        assert all(type(ratio) is float for ratio in config.mag_ratios)
        assert config == config.from_dict(config.as_dict())
    assert MagCacheConfig(mag_ratios=given).ratios_by_branch == {"": expected}


@pytest.mark.parametrize("config", [MagCacheConfig, DiffusionCacheConfig])
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_ratios_by_branch_are_taken(config: type[Config], kind: Any) -> None:
    given = {"cond": kind([1.0, 1.5]), "uncond": kind([1.0, 0.75])}
    made = config(mag_ratios=given)
    assert made.as_dict()["mag_ratios"] == {"cond": [1.0, 1.5], "uncond": [1.0, 0.75]}
    assert config.from_json(json.dumps(made.as_dict())) == made
    assert hash(config.from_dict(made.as_dict())) == hash(made)


def test_ratios_by_branch_differ_from_ratios_for_all() -> None:
    ratios = {"cond": [1.0, 1.5], "uncond": [1.0, 0.75]}
    assert MagCacheConfig(mag_ratios=ratios).ratios_by_branch == {"cond": (1.0, 1.5), "uncond": (1.0, 0.75)}
    assert MagCacheConfig().ratios_by_branch == {}
    assert MagCacheConfig(mag_ratios=ratios) != MagCacheConfig(mag_ratios=ratios["cond"])


@pytest.mark.parametrize(
    "ratios", [[], {}, [0.0], [1.0, -1.0], [NAN], [1.0, INF], {"cond": []}, {"cond": [1.0], "uncond": [0.0]}]
)
def test_ratios_that_are_no_magnitudes_are_errors(ratios: Any) -> None:
    with pytest.raises(ConfigError, match="mag_ratios must be positive numbers"):
        MagCacheConfig(mag_ratios=ratios)


@pytest.mark.parametrize("ratios", [[], [0.0], [1.0, -1.0], [NAN]])
def test_the_union_of_all_settings_refuses_them_too(ratios: Any) -> None:
    with pytest.raises(ConfigError, match="mag_ratios"):
        DiffusionCacheConfig(mag_ratios=ratios)


@pytest.mark.parametrize("ratios", [["1.0", "1.1"], [[1.0, 1.1, 1.2]], torch.ones(2, 3), [("cond", [1.0], 3)]])
def test_ratios_that_are_no_row_of_numbers_are_a_config_error(ratios: Any) -> None:
    with pytest.raises(ConfigError, match="mag_ratios must be"):
        MagCacheConfig(mag_ratios=ratios)


@pytest.mark.parametrize("config", [TeaCacheConfig, DiffusionCacheConfig])
@pytest.mark.parametrize("coefficients", [[], [NAN], [1.0, INF]])
def test_coefficients_that_are_no_polynomial_are_errors(config: type[Config], coefficients: list[float]) -> None:
    with pytest.raises(ConfigError, match="coefficients"):
        config(coefficients=coefficients)


# Unknown keys

TYPOS = [
    (MagCacheConfig, "mag_treshold", "mag_threshold"),
    (MagCacheConfig, "threshold", "mag_threshold"),
    (MagCacheConfig, "max_skip_steps", "mag_max_skip_steps"),
    (MagCacheConfig, "retention_ratio", "mag_retention_ratio"),
    (MagCacheConfig, "mag_ratio", "mag_ratios"),
    (MagCacheConfig, "calibrated", "calibrate"),
    (TeaCacheConfig, "rel_l1_tresh", "rel_l1_thresh"),
    (TeaCacheConfig, "rel_l1_threshold", "rel_l1_thresh"),
    (TeaCacheConfig, "coeficients", "coefficients"),
    (TeaCacheConfig, "transformer", "transformer_type"),
    (DiffusionCacheConfig, "mag_treshold", "mag_threshold"),
    (DiffusionCacheConfig, "rel_l1_tresh", "rel_l1_thresh"),
    (DiffusionCacheConfig, "num_inference_step", "num_inference_steps"),
    (DiffusionCacheConfig, "fn_compute_blocks", "Fn_compute_blocks"),
    (DiffusionCacheConfig, "residual_threshold", "residual_diff_threshold"),
    (DiffusionCacheConfig, "taylorseer_oder", "taylorseer_order"),
]


@pytest.mark.parametrize(("config", "typo", "meant"), TYPOS)
def test_an_unknown_key_names_the_right_one(config: type[Config], typo: str, meant: str) -> None:
    message = f"^{config.__name__} has no setting '{typo}'. Did you mean '{meant}'\\?$"
    with pytest.raises(ConfigError, match=message):
        config.from_dict({typo: 0.1})
    with pytest.raises(ConfigError, match=message):
        config.from_json(json.dumps({typo: 0.1}))
    with pytest.raises(ConfigError, match=message):
        config().replaced(**{typo: 0.1})


@pytest.mark.parametrize("config", CONFIGS)
def test_a_key_like_no_other_lists_the_known_ones(config: type[Config]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.from_dict({"zzz": 1})
    assert all(name in str(caught.value) for name in config.field_names())


def test_one_unknown_key_among_known_ones_is_an_error() -> None:
    with pytest.raises(ConfigError, match="mag_treshold"):
        MagCacheConfig.from_dict({"mag_threshold": 0.1, "mag_treshold": 0.1})


@pytest.mark.parametrize(
    ("method", "key", "owner"),
    [
        ("tea_cache", "mag_threshold", "mag_cache"),
        ("tea_cache", "interpolation", "mag_cache"),
        ("mag_cache", "rel_l1_thresh", "tea_cache"),
        ("mag_cache", "coefficients", "tea_cache"),
        ("none", "rel_l1_thresh", "tea_cache"),
    ],
)
def test_a_key_of_another_method_is_named_as_such(method: str, key: str, owner: str) -> None:
    with pytest.raises(ConfigError, match=f"^'{key}' is a setting of '{owner}', not of '{method}'\\.$"):
        own_config(method, {key: 0.1})


def test_a_key_of_a_method_that_is_not_there_names_some_owner() -> None:
    with pytest.raises(ConfigError, match="'residual_diff_threshold'") as caught:
        own_config("tea_cache", {"residual_diff_threshold": 0.1})
    assert "''" not in str(caught.value)


# JSON


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high) | st.integers(math.ceil(low), math.floor(high))


ratios = st.lists(st.floats(0.1, 3.0), min_size=1, max_size=6)
names = st.text(min_size=1, max_size=8)
configs = st.one_of(
    st.builds(
        TeaCacheConfig,
        rel_l1_thresh=numbers(0, 5),
        coefficients=st.none() | st.lists(st.floats(-9, 9), min_size=1, max_size=6),
        transformer_type=names,
        profile=st.none() | names,
        signal=st.none() | names,
    ),
    st.builds(
        MagCacheConfig,
        mag_threshold=numbers(0, 5),
        mag_max_skip_steps=st.integers(0, 20),
        mag_retention_ratio=numbers(0, 1),
        num_inference_steps=st.integers(1, 200),
        mag_ratios=st.none() | ratios | st.dictionaries(names, ratios, min_size=1, max_size=3),
        calibrate=st.booleans(),
        interpolation=st.sampled_from(["log", "nearest"]),
    ),
    st.builds(
        DiffusionCacheConfig,
        rel_l1_thresh=numbers(0, 5),
        mag_ratios=st.none() | ratios | st.dictionaries(names, ratios, min_size=1, max_size=3),
        scm_steps_mask_policy=st.sampled_from([None, "slow", "medium", "fast", "ultra"]),
        force_refresh_step_hint=st.none() | st.integers(0, 50),
        enable_taylorseer=st.booleans(),
    ),
    st.just(NoneConfig()),
)


@settings(deadline=None)
@given(config=configs)
def test_json_and_back(config: Config) -> None:
    text = json.dumps(config.as_dict(), allow_nan=False)
    again = type(config).from_json(text)
    assert again == config
    assert hash(again) == hash(config)
    assert again.as_dict() == json.loads(text)


@pytest.mark.parametrize("text", ["", "{", "{'rel_l1_thresh': 0.2}", '{"rel_l1_thresh": }', "rel_l1_thresh=0.2"])
def test_malformed_json_is_an_error_not_the_defaults(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^This is not JSON: "):
        TeaCacheConfig.from_json(text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"rel_l1_thresh"', '[["rel_l1_thresh", 0.2]]'])
def test_json_that_is_no_object_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^Settings must be a JSON object"):
        TeaCacheConfig.from_json(text)


@pytest.mark.parametrize("text", ['{"rel_l1_thresh": NaN}', '{"rel_l1_thresh": -Infinity}', '{"rel_l1_thresh": "0.2"}'])
def test_json_values_are_checked_too(text: str) -> None:
    with pytest.raises(ConfigError, match="rel_l1_thresh must be"):
        TeaCacheConfig.from_json(text)


# Plain values


@pytest.mark.parametrize("config", [*CONFIGS, NoneConfig])
def test_equal_hashable_frozen(config: type[Config]) -> None:
    assert config() == config()
    assert hash(config()) == hash(config())
    assert len({config(), config()}) == 1
    for name in (*config.field_names(), "something_new"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config(), name, 1)


def test_other_values_are_not_equal() -> None:
    assert TeaCacheConfig() != TeaCacheConfig(rel_l1_thresh=0.3)
    assert TeaCacheConfig(coefficients=[1.0, 0.0]) != TeaCacheConfig()
    assert MagCacheConfig(calibrate=True) != MagCacheConfig(mag_calibrate=True)


def test_repr_is_valid_code() -> None:
    config = MagCacheConfig(mag_ratios={"cond": [1.0, 1.1]}, mag_max_skip_steps=3)
    assert eval(repr(config)) == config


def test_replaced_is_a_copy() -> None:
    config = MagCacheConfig(mag_threshold=0.1)
    changed = config.replaced(mag_max_skip_steps=2)
    assert config == MagCacheConfig(mag_threshold=0.1)
    assert changed == MagCacheConfig(mag_threshold=0.1, mag_max_skip_steps=2)
    with pytest.raises(ConfigError, match="mag_max_skip_steps must be at least 0"):
        config.replaced(mag_max_skip_steps=-1)


def test_the_users_objects_are_not_changed() -> None:
    coefficients, ratios = [1, 0], {"cond": [1, 2], "uncond": torch.ones(2)}
    values = {"coefficients": coefficients, "mag_ratios": ratios}
    config = DiffusionCacheConfig.from_dict(values)
    assert values == {"coefficients": coefficients, "mag_ratios": ratios}
    assert (coefficients, ratios["cond"]) == ([1, 0], [1, 2])
    before = config.as_dict()
    coefficients.append(5)
    ratios["cond"].append(5)
    ratios["uncond"].mul_(3)
    assert config.as_dict() == before


def test_what_is_given_out_is_not_the_configs_own() -> None:
    config = TeaCacheConfig(coefficients=[1.0, 0.0])
    config.as_dict()["coefficients"].append(5.0)
    assert config.coefficients == (1.0, 0.0)


@pytest.mark.parametrize("config", [TeaCacheConfig, MagCacheConfig])
def test_a_method_takes_its_own_part_of_the_union(config: type[Config]) -> None:
    whole = DiffusionCacheConfig(rel_l1_thresh=0.4, mag_threshold=0.1, num_inference_steps=7)
    part = whole.part(config)
    assert part.keys() == set(config.field_names()) & set(whole.field_names())
    own = config(**part)
    assert all(getattr(own, name) == getattr(whole, name) for name in part)


@pytest.mark.parametrize("config", [TeaCacheConfig, MagCacheConfig])
def test_defaults_of_the_union_are_those_of_the_methods(config: type[Config]) -> None:
    assert config(**DiffusionCacheConfig().part(config)) == config()


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_says_what_it_does(config: type[Config]) -> None:
    for field in config.settings():
        assert field.metadata["doc"]
        assert "\n" not in field.metadata["doc"]


# A config of one's own


@dataclasses.dataclass(frozen=True)
class _Own(Config):
    above: float = setting(1.0, gt=0, le=2)
    choice: str = setting("a", choices=("a", "b"))
    free: Any = setting(None)
    unbounded: float = setting(0.0)


def test_allowed_values_in_words() -> None:
    assert [allowed_values(field) for field in _Own.settings()] == [
        "more than 0 and at most 2",
        "one of 'a', 'b'",
        "",
        "",
    ]


@pytest.mark.parametrize("value", [0, 0.0, -1, 2.1, NAN])
def test_a_bound_that_is_excluded(value: float) -> None:
    with pytest.raises(ConfigError, match="above must be (a finite number of )?more than 0 and at most 2"):
        _Own(above=value)
    assert _Own(above=2).above == 2.0


def test_not_a_number_is_refused_where_there_are_no_bounds() -> None:
    assert _Own(unbounded=-1e9).unbounded == -1e9
    with pytest.raises(ConfigError, match="unbounded must be"):
        _Own(unbounded=NAN)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)], ids=type)
def test_a_number_of_numpy_or_torch_becomes_a_float(value: Any) -> None:
    assert repr(TeaCacheConfig(rel_l1_thresh=value).rel_l1_thresh) == "0.5"


def test_a_list_nested_however_deep_is_a_config_error() -> None:
    nested: list[Any] = [1.0]
    for _ in range(900):
        nested = [nested]
    with pytest.raises(ConfigError, match="mag_ratios must be"):
        MagCacheConfig(mag_ratios=nested)


@pytest.mark.parametrize("profile", [{}, {"facts": {}}, 3, Path("p.safetensors")])
def test_a_profile_is_an_object_or_a_name(profile: Any) -> None:
    with pytest.raises(ConfigError, match=r"^TeaCacheConfig\.profile must be .*Profile \| str \| None, not "):
        TeaCacheConfig(profile=profile)
    shipped = measured()[0]
    assert TeaCacheConfig(profile=shipped).profile is shipped
    assert TeaCacheConfig(profile=shipped).as_dict()["profile"] == shipped.name


def test_a_field_of_any_type_takes_anything() -> None:
    value = object()
    assert _Own(free=value).free is value
