"""The cache settings that are sent to replicas, and which replica a request is sent to."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdover.profiles
from holdover.errors import ConfigError
from holdover.serve.ray import backend
from holdover.serve.ray.backend import (
    ACTIVE_CALLS,
    PromptRouter,
    pack_cache,
    unpack_cache,
    unpack_config,
)

PROFILE = Path(holdover.profiles.__file__).with_name("emoji.safetensors")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backend.tempfile, "gettempdir", lambda: str(tmp_path))


def test_settings_survive_packing() -> None:
    sent = pack_cache({"cache_backend": "mag_cache", "cache_config": {"mag_threshold": 0.1}})
    assert json.loads(json.dumps(sent)) == sent == pack_cache(sent)
    assert unpack_config(sent).as_dict()["mag_threshold"] == 0.1
    assert "profile" not in sent


def test_a_profile_is_sent_with_its_content(tmp_path: Path) -> None:
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


def test_settings_that_cannot_change_are_errors() -> None:
    with pytest.raises(
        ConfigError, match="'cache_backnd' cannot change while replicas run. Did you mean 'cache_backend'?"
    ):
        pack_cache({"cache_backnd": "none"})


# Routing


@dataclass(frozen=True)
class Replica:
    unique_id: str

    @property
    def replica_id(self) -> Replica:
        return self


A, B = Replica("a"), Replica("b")


class Router:
    """A router of two replicas, without Ray; `cached` are the queue lengths that Serve remembers."""

    def __init__(self, ingresses: int = 1) -> None:
        self.cached: dict[Replica, int] = {}
        self._router = PromptRouter.__new__(PromptRouter)
        self._router._replica_queue_len_cache = self.cached
        self._router.initialize_state(prompts=2, ingresses=ingresses)

    def choose(self, prompt: str) -> Replica:
        """The first choice for a prompt."""
        request = SimpleNamespace(session_id=f"call {prompt}", internal_request_id="id")
        pending: Any = SimpleNamespace(metadata=request, routing_context=SimpleNamespace())
        replicas: Any = [A, B]
        ranked: Any = asyncio.run(self._router.choose_replicas(replicas, pending))
        first: Replica = next(choice for group in ranked for choice in group)
        return first

    def send(self, call: str, prompt: str, replica: Replica) -> None:
        """A replica accepts a call."""
        ACTIVE_CALLS.add(call)
        pending: Any = SimpleNamespace(metadata=SimpleNamespace(session_id=f"{call} {prompt}"))
        self._router.on_request_routed(pending, replica, None)  # type: ignore[arg-type]


@pytest.fixture
def router() -> Iterator[Router]:
    yield Router()
    ACTIVE_CALLS.clear()


@pytest.mark.parametrize("replica", [A, B])
def test_a_prompt_goes_to_the_replica_that_has_it_as_soon_as_that_one_is_idle(router: Router, replica: Replica) -> None:
    """Serve's own count is late: it includes the finished call until its stream is closed, and calls for metrics."""
    other = B if replica is A else A
    router.send("1", "cat", replica)
    router.cached[replica] = 1
    assert router.choose("cat") == other  # the one that has it is busy
    ACTIVE_CALLS.discard("1")
    assert router.choose("cat") == replica
    router.send("2", "dog", other)
    assert router.choose("dog") == replica


def test_while_no_replica_is_idle_a_prompt_may_wait_for_one_more_request(router: Router) -> None:
    for call, replica in (("1", A), ("2", A), ("3", B)):
        router.send(call, "cat" if replica is A else "dog", replica)
    assert router.choose("cat") == A
    router.send("4", "cat", A)
    assert router.choose("cat") == B


def test_a_router_forgets_prompts_that_the_replica_has_forgotten(router: Router) -> None:
    tied = {prompt: router.choose(prompt) for prompt in ("p0", "p1", "p2")}
    other = {prompt: B if replica is A else A for prompt, replica in tied.items()}
    for call, prompt in enumerate(("p0", "p1", "p2")):
        router.send(str(call), prompt, other["p0"])
    ACTIVE_CALLS.clear()
    assert router.choose("p0") == tied["p0"]
    assert [router.choose(prompt) for prompt in ("p1", "p2")] == [other["p0"]] * 2


def test_the_calls_of_other_ingresses_count() -> None:
    router = Router(ingresses=2)
    router.send("1", "cat", A)
    ACTIVE_CALLS.clear()
    assert router.choose("cat") == A
    router.cached[A] = 1
    assert router.choose("cat") == B
