"""The cache settings that are sent to replicas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import holdover.profiles
from holdover.errors import ConfigError
from holdover.serve.ray import backend
from holdover.serve.ray.backend import pack_cache, packed_profile, unpack_cache, unpack_config

PROFILE = Path(holdover.profiles.__file__).with_name("emoji.safetensors")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backend.tempfile, "gettempdir", lambda: str(tmp_path))


def test_settings_arrive_as_they_were_sent() -> None:
    sent = pack_cache({"cache_backend": "mag_cache", "cache_config": {"mag_threshold": 0.1}})
    assert json.loads(json.dumps(sent)) == sent == pack_cache(sent)
    assert unpack_config(sent).as_dict()["mag_threshold"] == 0.1
    assert packed_profile(sent) is None


def test_a_profile_goes_along_and_needs_no_file_where_it_arrives(tmp_path: Path) -> None:
    mine = tmp_path / "mine.safetensors"
    shutil.copy(PROFILE, mine)
    sent = json.loads(json.dumps(pack_cache({"cache_backend": "plan", "cache_config": {"profile": str(mine)}})))
    mine.unlink()
    path = Path(json.loads(unpack_cache(sent)["cache_config"])["profile"])
    assert path.read_bytes() == PROFILE.read_bytes()
    assert path.name.endswith("-mine.safetensors")
    assert (path.parent.stat().st_mode & 0o077) == 0
    assert unpack_cache(sent) == unpack_cache(sent)
    assert unpack_config(sent).method == "plan"


def test_a_profile_by_name_stays_a_name() -> None:
    sent = pack_cache({"cache_backend": "plan", "cache_config": {"profile": "emoji"}})
    assert "profile" not in sent
    assert json.loads(unpack_cache(sent)["cache_config"]) == {"profile": "emoji"}


def test_a_profile_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_PROFILE_BYTES", 1000)
    with pytest.raises(ConfigError, match="at most 1000 are sent"):
        pack_cache({"cache_backend": "plan", "cache_config": {"profile": str(PROFILE)}})


def test_what_cannot_change_while_replicas_run_is_named() -> None:
    with pytest.raises(
        ConfigError, match="'cache_backnd' cannot change while replicas run. Did you mean 'cache_backend'?"
    ):
        pack_cache({"cache_backnd": "none"})
