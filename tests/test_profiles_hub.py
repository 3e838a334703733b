"""Profiles are pushed to and loaded from the Hub, by huggingface_hub itself against a small hub on loopback.

huggingface_hub reads its settings when it is imported, so every client is a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from typer.testing import CliRunner

import holdover
from holdover import Profile, ProfileError, loading
from holdover.cli import app
from holdover.compare import Comparison, MethodCandidate, compare
from holdover.profiles import measured, save
from hub import TOKEN, Hub, Repository, serving
from plan.tuned import measured as calibrated
from serve.servers import Server
from tiny.prompted import prompted_flux

T = TypeVar("T")
PROFILE = measured()[0]
FILE = "profile.safetensors"


class Client:
    """A process that runs functions with the settings of huggingface_hub in its environment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path, endpoint: str, **settings: str) -> None:
        names = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        with monkeypatch.context() as environment:
            for name, value in (names | settings).items():
                environment.setenv(name, value)
            self._pool = ProcessPoolExecutor(1, get_context("spawn"))
            self(int)  # starts the process

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        return self._pool.submit(function, *arguments).result()

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: Hub) -> Iterator[Callable[..., Client]]:
    """Starts clients of the hub, which share a cache."""
    clients: list[Client] = []

    def start(endpoint: str = hub.url, **settings: str) -> Client:
        clients.append(Client(monkeypatch, tmp_path / "cache", endpoint, **settings))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def content(tmp_path: Path, name: str) -> bytes:
    return PROFILE.with_facts(name=name).save(tmp_path / f"{name}.safetensors").read_bytes()


def test_a_profile_goes_to_the_hub_and_comes_back_with_its_commit(start, hub, tmp_path):
    client = start()
    pushed = client(PROFILE.push_to_hub, "me/profiles")
    commit = hub.repositories["me/profiles"].branches["main"]
    assert pushed == f"hf://me/profiles@{commit}/{FILE}"
    loaded = client(Profile.load, "hf://me/profiles")
    assert loaded.facts.origin == pushed
    assert pushed in repr(loaded)
    assert loaded.with_facts(origin="") == PROFILE
    assert loaded != PROFILE  # the digest has the commit
    assert Profile.load(loaded.save(tmp_path / "copy.safetensors")).facts.origin == pushed

    hub.lfs = True  # as the Hub has large files
    second = client(PROFILE.with_facts(name="second").push_to_hub, "me/profiles", "more/second.safetensors")
    assert client(Profile.load, second).name == "second"
    assert hub.repositories["me/profiles"].commits[second.split("@")[1].split("/")[0]].keys() == {
        FILE,
        "more/second.safetensors",
    }


def test_a_branch_moves_and_a_commit_stays(start, hub, tmp_path):
    client, repository = start(), hub.repositories.setdefault("me/profiles", Repository())
    first = repository.commit({FILE: content(tmp_path, "first")})
    client(Profile.load, "hf://me/profiles")
    repository.commit({FILE: content(tmp_path, "second")})
    repository.commit({FILE: content(tmp_path, "third")}, "my/branch")
    assert client(Profile.load, f"hf://me/profiles/{FILE}").name == "second"
    assert client(Profile.load, "hf://me/profiles@my%2Fbranch").name == "third"
    count = len(hub.requests)
    pinned = client(Profile.load, f"hf://me/profiles@{first}/{FILE}")
    assert (pinned.name, len(hub.requests)) == ("first", count)  # it is in the cache


def test_the_cache_is_used_offline_and_while_the_hub_is_down(start, hub, tmp_path):
    online = start()
    pushed = online(PROFILE.push_to_hub, "me/profiles")
    online(Profile.load, "hf://me/profiles")
    count = len(hub.requests)
    offline = start(HF_HUB_OFFLINE="1")
    for address in ("hf://me/profiles", f"hf://me/profiles/{FILE}", pushed):
        assert offline(Profile.load, address).facts.origin == pushed
    for address in ("hf://me/others", "hf://me/profiles/other.safetensors", "hf://me/profiles@v2"):
        with pytest.raises(ProfileError, match=r"is not in the local cache, and .* HF_HUB_OFFLINE is set"):
            offline(Profile.load, address)
    with pytest.raises(ProfileError, match="cannot be uploaded: HF_HUB_OFFLINE is set"):
        offline(PROFILE.push_to_hub, "me/profiles")
    assert len(hub.requests) == count
    hub.broken = True
    assert online(Profile.load, "hf://me/profiles").facts.origin == pushed
    with pytest.raises(ProfileError, match=r"me/others is not in the local cache, and .*503"):
        online(Profile.load, "hf://me/others")
    nothing = start("http://127.0.0.1:9")  # a port that no one listens on
    assert nothing(Profile.load, f"hf://me/profiles/{FILE}").facts.origin == pushed
    with pytest.raises(ProfileError, match=r"is not in the local cache, and the Hub was not reached: .*refused"):
        nothing(Profile.load, "hf://me/others")
    with pytest.raises(ProfileError, match="The Hub was not reached for hf://me/profiles"):
        nothing(PROFILE.push_to_hub, "me/profiles")


def test_what_cannot_be_loaded_is_an_error_that_says_why(start, hub, tmp_path):
    ours = content(tmp_path, "ours")
    other = {"a.safetensors": b"no profile", "b.safetensors": ours, "model.bin": b"", "ratios.json": b"{}"}
    hub.repositories |= {name: Repository() for name in ("me/many", "me/none", "me/private", "me/gated")}
    hub.repositories["me/many"].commit(other)
    hub.repositories["me/none"].commit({"README.md": b""})
    hub.repositories["me/private"].commit({FILE: ours})
    hub.repositories["me/gated"].commit({FILE: ours})
    hub.repositories["me/private"].private = hub.repositories["me/gated"].gated = True
    known, unknown = start(), start(HF_TOKEN="", HF_HOME=str(tmp_path / "empty"))
    for name in ("me/private", "me/gated"):
        assert known(Profile.load, f"hf://{name}").name == "ours"
    expected = {
        "hf://me/missing": "There is no repository me/missing on the Hub, or it is private. If it is, log in",
        "hf://me/many": r"me/many has 2 .safetensors files: a.safetensors, b.safetensors. Name one, as in hf://me/many/a",
        "hf://me/none": "me/none has no .safetensors file, so no profile",
        "hf://me/many/c.safetensors": r"has no file 'c.safetensors'. Did you mean '\w.safetensors'",
        "hf://me/many@v2/b.safetensors": "me/many has no revision 'v2'",
        "hf://me/many/a.safetensors": r"hf://me/many@\w{40}/a.safetensors is not a profile",
        "hf://me/many/ratios.json": "hf://me/many@.* is not a profile",
        "hf://me/many/model.bin": "profiles are .safetensors or .json files",
        "hf://me/many/../b.safetensors": "cannot be a profile",
        "hf://me": "'hf://me' is not an address on the Hub. An address looks like hf://owner/name",
        "hf:/me/many": "is not an address on the Hub",
        "hf://me/many@": "is not an address on the Hub",
        "hf://datasets/me/many": "names no model repository",
        "hf://me/a--b": "hf://me/a--b is not an address on the Hub",
    }
    for address, message in expected.items():
        with pytest.raises(ProfileError, match=message):
            known(Profile.load, address)
    with pytest.raises(ProfileError, match="There is no repository me/private on the Hub, or it is private"):
        unknown(Profile.load, "hf://me/private")
    with pytest.raises(ProfileError, match="me/gated is gated: ask for access"):
        unknown(Profile.load, "hf://me/gated")


def test_what_cannot_be_pushed_is_an_error_that_says_why(start, hub):
    known, unknown = start(), start(HF_TOKEN="")
    with pytest.raises(ProfileError, match="You may not create you/profiles.* log in with `hf auth login`"):
        known(PROFILE.push_to_hub, "you/profiles")
    with pytest.raises(ProfileError, match="log in with `hf auth login`"):
        unknown(PROFILE.push_to_hub, "me/profiles")
    for repository, file in (("profiles", FILE), ("me/profiles", "profile.json"), ("me/profiles", "profile")):
        with pytest.raises(ProfileError):
            known(PROFILE.push_to_hub, repository, file)
    assert hub.repositories == {}


def use_everywhere(address: str, ratios: str, out: Path) -> dict[str, Any]:
    """What enable, compare and the command line say about a profile on the Hub."""
    torch.set_num_threads(1)
    pipe, said = prompted_flux(), dict[str, Any]()
    for name, method, profile in (
        ("plan", "plan", address),
        ("mag_cache", "mag_cache", address),
        ("tea_cache", "tea_cache", address),
        ("JSON", "mag_cache", ratios),
    ):
        with holdover.enable(pipe, method, profile=profile) as cache:
            said[name] = " ".join(cache.stats().notes)
    plan = MethodCandidate("plan", (("budget", 2), ("profile", address)))
    said["compare"] = str(compare(pipe, Comparison(("red apple",), (plan,), steps=4, output="latent")).rows[0])
    arguments = ["tune", address, "--num", "2", "--share", "0.5", "--confidence", "0.7", "--target", "psnr>=1"]
    loading.load_pipeline = lambda model: pipe
    said["tune without --out"] = CliRunner().invoke(app, arguments).output
    said["tune"] = CliRunner().invoke(app, [*arguments, "--out", str(out)]).output
    return said


def test_an_address_is_accepted_wherever_a_profile_is_and_the_commit_is_shown(start, hub, tmp_path):
    profile = calibrated().save(tmp_path / FILE).read_bytes()
    save(calibrated().facts.mag_cache[0][1], tmp_path / "ratios.json")
    repository = hub.repositories.setdefault("me/profiles", Repository())
    commit = repository.commit({FILE: profile, "ratios.json": (tmp_path / "ratios.json").read_bytes()})
    said = start()(use_everywhere, "hf://me/profiles", "hf://me/profiles/ratios.json", tmp_path / "tuned.safetensors")
    pinned = f"hf://me/profiles@{commit}/{FILE}"
    for where in ("plan", "mag_cache", "tea_cache", "compare"):
        assert pinned in said[where], where
    assert f"hf://me/profiles@{commit}/ratios.json" in said["JSON"]
    assert "--out is missing" in said["tune without --out"]
    assert "50% of images meet psnr>=1" in said["tune"]
    tuned = Profile.load(tmp_path / "tuned.safetensors").facts
    assert (tuned.origin, len(tuned.certificates)) == (pinned, 1)


def test_a_server_keeps_the_commit_it_started_with(hub, tmp_path):
    repository = hub.repositories.setdefault("me/profiles", Repository())
    commit = repository.commit({FILE: content(tmp_path, "emoji")})
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
    flags = ("--cache-backend", "plan", "--cache-config", '{"profile": "hf://me/profiles"}')
    server = Server(*flags, environment=environment).wait_until_ready()
    try:
        report = server.http.get("/v1/cache").json()
        count = len(hub.requests)
        server.generate(steps=2)
    finally:
        server.stop()
    pinned = f"hf://me/profiles@{commit}/{FILE}"
    assert (report["settings"]["profile"], report["profile"]["source"]["origin"]) == (pinned, pinned)
    assert len(hub.requests) == count
