"""holdover's methods become selectable in vLLM-Omni, and nothing else there changes."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import holdover
from holdover import selector
from holdover.vllm_omni import method_names, register, unregister
from holdover.vllm_omni.plugin import Selector

GROUP = "vllm_omni.general_plugins"


def test_the_installed_package_is_found_by_its_entry_point():
    (point,) = [p for p in entry_points(group=GROUP) if p.dist is not None and p.dist.name == "holdover"]
    assert point.name == "holdover"
    assert point.load() is register


@pytest.mark.parametrize("first", ["plugin", "runner"])
def test_both_names_of_the_selector_are_replaced_whichever_is_imported_first(omni, first):
    if first == "runner":
        assert not isinstance(omni.runner_module.get_cache_backend, Selector)
    omni.plugins.load_omni_general_plugins()
    assert isinstance(omni.selector.get_cache_backend, Selector)
    assert isinstance(omni.runner_module.get_cache_backend, Selector)


@pytest.mark.parametrize("first", ["plugin", "runner"])
def test_unregister_restores_the_same_functions(omni, first):
    selector = omni.selector
    plain = selector.get_cache_backend
    if first == "runner":
        assert omni.runner_module.get_cache_backend is plain
    register()
    assert omni.runner_module.get_cache_backend is not plain
    unregister()
    assert selector.get_cache_backend is plain
    assert omni.runner_module.get_cache_backend is plain
    unregister()
    assert selector.get_cache_backend is plain


def test_registering_again_changes_nothing(omni):
    register()
    once = omni.selector.get_cache_backend, omni.runner_module.get_cache_backend
    register()
    assert (omni.selector.get_cache_backend, omni.runner_module.get_cache_backend) == once
    assert not isinstance(once[0].original, Selector)


def test_a_selector_that_another_plugin_put_in_the_runner_is_kept_beneath(omni):
    def other(cache_backend, cache_config):
        return f"the other plugin's {cache_backend}"

    omni.runner_module.get_cache_backend = other
    register()
    assert omni.runner_module.get_cache_backend("tea_cache", None) == "the other plugin's tea_cache"
    unregister()
    assert omni.runner_module.get_cache_backend is other


def test_its_own_backends_and_its_own_errors_are_untouched(omni):
    register()
    get = omni.runner_module.get_cache_backend
    assert get(None, {}) is None
    assert get("none", {}) is None
    own = get("tea_cache", {"rel_l1_thresh": 0.3})
    assert type(own) is omni.selector.TeaCacheBackend
    assert own.config.rel_l1_thresh == 0.3
    with pytest.raises(ValueError, match="Unsupported cache backend: deep_cache"):
        get("deep_cache", {})


@pytest.mark.parametrize(("name", "method"), method_names().items())
def test_every_method_is_selectable_under_its_name(omni, name, method):
    register()
    backend = omni.runner_module.get_cache_backend(name, {})
    assert backend.config.method == method
    assert not backend.is_enabled()
    assert repr(backend).startswith(f"OmniBackend({name!r}, ")


def test_a_misspelt_name_is_an_error_that_names_the_right_one(omni):
    register()
    with pytest.raises(holdover.ConfigError, match="Did you mean 'holdover_mag_cache'"):
        omni.selector.get_cache_backend("holdover_magcache", {})


def test_a_vllm_omni_without_the_selector_is_refused_by_name(omni):
    del omni.selector.get_cache_backend
    with pytest.raises(holdover.EnableError, match="selector has no get_cache_backend.*VLLM_PLUGINS"):
        register()


WITHOUT = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "vllm_omni"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Refused())
import holdover, holdover.api, holdover.plan, holdover.teacache, holdover.magcache, holdover.cli
assert "holdover.vllm_omni" not in sys.modules
import holdover.vllm_omni
import holdover.vllm_omni.backend
assert not [name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_omni")]
try:
    holdover.vllm_omni.register()
except ImportError as error:
    print(error)
"""


def test_importing_the_plugin_does_not_import_torch():
    code = "import sys, holdover.vllm_omni; print({'torch', 'diffusers', 'cache_dit'} & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "none", done.stderr


def test_the_names_come_from_the_methods():
    assert method_names() == {f"holdover_{method}": method for method in selector.methods() if method != "none"}


def test_nothing_in_holdover_needs_vllm_before_it_is_registered(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "must not be imported" in done.stdout
