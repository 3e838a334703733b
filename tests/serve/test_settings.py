"""The settings of the Ray application, and the errors of wrong ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdover.errors import ConfigError
from holdover.serve.ray import RaySettings, app
from holdover.serve.ray.backend import pack_cache

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, PAGE = ROOT / "examples" / "ray.yaml", ROOT / "docs" / "scale.md"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"max_bach": 3}, "RaySettings has no setting 'max_bach'. Did you mean 'max_batch'?"),
        ({"replicas": 0}, "RaySettings.replicas must be at least 1, not 0."),
        ({"replicas": "two"}, "RaySettings.replicas must be int, not 'two' (str)."),
        ({"port": 8001}, "'port' is not an argument of the application: it is set in http_options."),
        ({"cache_backend": "magcache"}, "There is no caching method 'magcache'. Did you mean 'mag_cache'?"),
        (
            {"cache_backend": "mag_cache", "cache_config": {"mag_treshold": 1}},
            "MagCacheConfig has no setting 'mag_treshold'. Did you mean 'mag_threshold'?",
        ),
        ({"cache_config": "{"}, "cache_config is not JSON: "),
        ({"header_timeout": 3.0}, "header_timeout is not for Ray, whose own proxy accepts the connections."),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        app(args)
    assert str(refused.value).startswith(said)


def test_arguments_of_a_command_line_are_parsed() -> None:
    settings = RaySettings.from_args({"replicas": "2", "prompt_cache": "true", "model": "emoji", "max_wait": "0.5"})
    assert (settings.replicas, settings.prompt_cache, settings.max_wait) == (2, True, 0.5)


def test_a_mapping_and_json_are_equivalent() -> None:
    both = [{"mag_threshold": 0.1}, '{"mag_threshold": 0.1}']
    one, other = (RaySettings.from_args({"cache_backend": "mag_cache", "cache_config": config}) for config in both)
    assert one == other


def test_replicas_are_added_only_with_max_replicas() -> None:
    assert RaySettings(replicas=2).autoscaling_config is None
    scaling = RaySettings(replicas=2, max_replicas=5, target_requests=3).autoscaling_config
    assert scaling is not None
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (2, 5, 3)


def test_the_queue_of_a_replica_holds_all_it_is_sent() -> None:
    settings = RaySettings(max_batch=3, max_images=4, queue_size=10)
    own = settings.worker_settings({"cache_backend": "mag_cache", "cache_config": "{}"})
    assert own.queue_size == settings.max_ongoing_requests * 4 == 24
    assert own.cache_backend == "mag_cache"


def test_the_example_is_valid() -> None:
    (application,) = yaml.safe_load(EXAMPLE.read_text())["applications"]
    settings = RaySettings.from_args(application["args"])
    (ingress,) = application["deployments"]
    assert (settings.replicas, settings.max_replicas, ingress["name"]) == (2, 8, "Ingress")
    assert pack_cache(ingress["user_config"])["cache_backend"] == "mag_cache"
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert yaml.safe_load(shown) == yaml.safe_load(EXAMPLE.read_text("utf-8"))


def test_only_modules_of_the_ray_package_import_ray() -> None:
    code = (
        "import sys, holdover.serve.app, holdover.serve.launch, holdover.cli, holdover.serve.ray; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    loaded = set(done.stdout.split())
    assert "holdover.serve.ray" in loaded
    assert "ray" not in loaded
