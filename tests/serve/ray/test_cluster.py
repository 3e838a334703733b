"""A Ray cluster on this machine with two replicas: the same API, and what only several replicas can do."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from diffusers import WanPipeline
from openai import OpenAI

from holdover.serve import running
from tiny.pipelines_image import byte_tokenizer
from tiny.prompted import prompted_wan

from ..conftest import MAG
from ..servers import PATIENCE, Client, eventually, image_bytes, nearly_equal
from .conftest import BUSY_MACHINE

ENVIRONMENT = {
    **os.environ,
    **BUSY_MACHINE,
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
    "RAY_USAGE_STATS_ENABLED": "0",
}
STARTED = "mag_cache", json.loads(MAG)
ARGS: dict[str, Any] = {
    "replicas": 2,
    "num_cpus": 0.3,
    "num_gpus": 0,
    "max_wait": 0,
    "max_batch": 2,
    "prompt_cache": True,
    "grace": 20,
    "max_previews": 60,
}
FAILURE = """
import ray, time
from ray import serve

ray.init()
while (found := serve.status().applications["holdover"]).status != "DEPLOY_FAILED":
    time.sleep(0.1)
print(found.message)
"""


class Cluster(Client):
    """Ray on this machine without its dashboard, and the application deployed from a YAML file, as an operator does."""

    def __init__(self, folder: Path) -> None:
        self._file, self._log, (port, self._http) = folder / "app.yaml", folder / "ray.log", free_ports()
        self._address = f"127.0.0.1:{port}"
        start = [program("ray"), "start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port)]
        sizes = ["--num-cpus", "1", "--num-gpus", "0", "--object-store-memory", "100000000"]
        without = ["--include-dashboard", "false", "--include-log-monitor", "false", "--no-monitor"]
        with self._log.open("w") as log:
            self.process = psutil.Popen([*start, *sizes, *without], env=ENVIRONMENT, stdout=log, stderr=log)
        try:
            assert eventually(lambda: "Ray runtime started" in self._log.read_text() or self.process.poll() is not None)
            assert self.process.poll() is None, self._log.read_text()
            self.deploy(*STARTED)
            super().__init__(f"http://127.0.0.1:{self._http}")
            assert eventually(self._ready), self._log.read_text()
        except BaseException:
            self.end()  # nothing would stop it otherwise
            raise

    def _ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200 and self.metric("holdover_ready") == 2
        except httpx.HTTPError:
            return False

    def deploy(self, method: str, settings: dict[str, Any], **args: Any) -> None:
        """Write the file and run it."""
        application = {"name": "holdover", "route_prefix": "/", "import_path": "holdover.serve.ray:app"}
        cache = {"name": "Ingress", "user_config": {"cache_backend": method, "cache_config": settings}}
        application |= {"args": ARGS | args, "deployments": [cache]}
        http = {"host": "127.0.0.1", "port": self._http}
        self._file.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
        self.run(program("serve"), "run", "--non-blocking", "--address", self._address, str(self._file))

    def failure(self) -> str:
        """Why the last deployment failed, as Serve says."""
        return self.run(sys.executable, "-c", FAILURE)

    def run(self, *command: str) -> str:
        where = ENVIRONMENT | {"RAY_ADDRESS": self._address}
        done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def replicas(self) -> set[int]:
        """The processes of the replicas."""
        family = [one for one in self.process.children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
        return {one.pid for one in family if "Replica:holdover:Replica" in title(one)}

    def busy_replica(self) -> int:
        """The process of the replica that works while the other is idle, by the processor time they use."""
        before = {pid: self._seconds(pid) for pid in self.replicas()}

        def used() -> dict[int, float]:
            return {pid: self._seconds(pid) - seconds for pid, seconds in before.items()}

        assert eventually(lambda: max(used().values()) > 0.2 + 2 * min(used().values()))
        return max(before, key=lambda pid: used()[pid])

    def _seconds(self, pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        family = self.process.children(recursive=True)
        self.process.terminate()
        _, left = psutil.wait_procs([self.process, *family], timeout=5)
        for one in left:
            one.kill()


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("ray"))
    yield cluster
    cluster.end()


def by_replica(server: Cluster, name: str, **labels: str) -> dict[str, float]:
    """The value of a metric for each replica."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    found: dict[str, float] = {}
    for seen, value in server.samples(name):
        if wanted <= seen:
            replica = next(label for label in seen if label.startswith("replica="))
            found[replica] = found.get(replica, 0) + value
    return found


class Load:
    """Clients that request one image after the other until they are stopped."""

    def __init__(self, server: Cluster, clients: int = 4, **request: Any) -> None:
        self.answers: list[list[httpx.Response]] = [[] for _ in range(clients)]
        self._server, self._request, self._stop = server, {"guidance": 1.0, "steps": 6} | request, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(clients)]

    def _ask(self, client: int) -> None:
        seed = 1000 * client
        while not self._stop.is_set():
            answer = self._server.generate(prompt=f"ghost {client}", seed=seed, **self._request)
            self.answers[client].append(answer)
            seed += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self) -> None:
        """Wait until every client has two more answers: to a request that runs, and to one that starts now."""
        until = [len(answers) + 2 for answers in self.answers]
        assert eventually(lambda: all(len(mine) >= n for mine, n in zip(self.answers, until, strict=True)))


def info(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["data"][0]["holdover"]
    return found


# The same API


def test_openais_client_generates_and_streams(server: Cluster) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=PATIENCE)
    asked = {"steps": 4, "guidance": 1.0, "seed": 7}
    answer = client.images.generate(prompt="red apple", n=2, extra_body=asked)
    assert answer.data is not None
    assert [image.holdover["seed"] for image in answer.data] == [7, 8]  # type: ignore[attr-defined]
    events = list(client.images.generate(prompt="red apple", stream=True, partial_images=3, extra_body=asked))
    assert [event.type.rpartition(".")[2] for event in events] == [*["partial_image"] * 3, "completed"]


def test_it_answers_as_a_server_of_one_process_does(server: Cluster) -> None:
    """The same images, errors and OpenAPI document."""
    settings = {name: ARGS[name] for name in ("max_wait", "max_batch", "prompt_cache", "max_previews")}
    settings |= {"cache_backend": "mag_cache", "cache_config": MAG}
    asked = [
        {"prompt": "rocket", "steps": 5, "seed": 3},
        {"prompt": "rocket", "steps": 4, "seed": 3, "cache": {"method": "tea_cache"}},
        {"prompt": "rocket", "stps": 4},
        {"prompt": "rocket", "cache": {"mag_treshold": 1}},
        {"prompt": "rocket", "n": 5},
    ]
    with running(**settings) as alone, httpx.Client(base_url=alone.url, timeout=PATIENCE) as one:
        assert one.get("/openapi.json").json() == server.http.get("/openapi.json").json()
        for request in asked:
            here, there = (http.post("/v1/images/generations", json=request) for http in (one, server.http))
            assert here.status_code == there.status_code
            assert here.json().get("error") == there.json().get("error")
            for mine, theirs in zip(here.json().get("data", ()), there.json().get("data", ()), strict=True):
                assert mine["holdover"]["trace"] == theirs["holdover"]["trace"]
                assert nearly_equal(image_bytes(mine["b64_json"]), image_bytes(theirs["b64_json"]))
        for path in ("/v1/models", "/v1/cache"):
            mine, theirs = one.get(path).json(), server.http.get(path).json()
            assert mine.keys() == theirs.keys()
        assert mine["profile"] == theirs["profile"]
        assert one.get("/").text == server.http.get("/").text


def test_every_response_has_one_request_id(server: Cluster) -> None:
    assert server.http.get("/health", headers={"x-request-id": "abc-1"}).headers.get_list("x-request-id") == ["abc-1"]
    assert len(server.http.get("/nothing").headers.get_list("x-request-id")) == 1


def test_when_a_client_gives_up_the_generation_stops(server: Cluster) -> None:
    """One that gives up before the generation starts stops nothing: the next one has more patience."""

    def stopped() -> float:
        return server.metric("holdover_cancelled_images_total")

    before, asked = stopped(), {"prompt": "rocket", "steps": 100, "cache": {"method": "none"}}
    for patience in (1.5, 3.0, 6.0, 12.0):
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=patience) as impatient:
            impatient.post("/v1/images/generations", json=asked)
        if eventually(lambda: stopped() == before + 1, 20):
            break
    assert stopped() == before + 1
    assert eventually(lambda: server.metric("holdover_requests_total", status="499") >= 1)


# Many replicas


def test_metrics_of_all_replicas_add_up(server: Cluster) -> None:
    def counted() -> tuple[float, ...]:
        computed = server.metric("holdover_steps_total", kind="computed")
        requests = server.metric("holdover_requests_total", route="/v1/images/generations", status="200")
        totals = server.http.get("/v1/cache").json()["totals"]["mag_cache"]["images"]
        return server.metric("holdover_images_total", method="mag_cache"), requests, totals, computed

    before, spread = counted(), by_replica(server, "holdover_images_total", method="mag_cache")
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda seed: server.generate(prompt=f"cat {seed}", seed=seed), range(6)))
    forwards = sum(sum(info(answer)["computed"].values()) / info(answer)["batch"] for answer in answers)
    expected = [6, 6, 6, pytest.approx(forwards)]
    assert eventually(lambda: [now - then for now, then in zip(counted(), before, strict=True)] == expected)
    after = by_replica(server, "holdover_images_total", method="mag_cache")
    assert len([name for name in after if after[name] > spread.get(name, 0)]) == 2
    assert sorted(by_replica(server, "holdover_ready").values()) == [1, 1]
    assert server.metric("holdover_queue_length") == 0


def test_a_prompt_goes_where_its_embeddings_are(server: Cluster) -> None:
    def prompts(result: str) -> dict[str, float]:
        return by_replica(server, "holdover_prompt_cache_total", result=result)

    for prompt in ("cactus", "pizza", "robot", "whale"):
        hits, misses = prompts("hit"), prompts("miss")
        for seed in range(3):
            assert server.generate(prompt=prompt, seed=seed, steps=1).status_code == 200
        grown = {name: prompts("hit")[name] - hits[name] for name in hits}
        assert sorted(grown.values()) == [0, 2]
        assert sum(prompts("miss").values()) - sum(misses.values()) == 1


def test_a_killed_replica_loses_no_request(server: Cluster) -> None:
    """The other replica generates the same images; a stream continues after the last preview that was sent."""
    asked = {"prompt": "rocket", "seed": 5, "guidance": 1.0, "cache": {"method": "none"}}
    long, short = (
        image_bytes(server.generate(**asked, steps=steps).json()["data"][0]["b64_json"]) for steps in (60, 6)
    )
    before, events, begun = server.replicas(), list[dict[str, Any]](), threading.Event()
    assert len(before) == 2

    def follow() -> None:
        stream = asked | {"steps": 60, "stream": True, "partial_images": 59}
        with httpx.stream("POST", f"{server.url}/v1/images/generations", json=stream, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    events.append(json.loads(line.removeprefix("data:")))
                    begun.set()

    with ThreadPoolExecutor(5) as pool:
        following = pool.submit(follow)
        assert begun.wait(PATIENCE)
        killed = server.busy_replica()
        others = [pool.submit(server.generate, **asked, steps=6) for _ in range(4)]
        os.kill(killed, signal.SIGKILL)
        following.result()
        answers = [other.result() for other in others]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(nearly_equal(image_bytes(answer.json()["data"][0]["b64_json"]), short) for answer in answers)
    assert [event["step"] for event in events[:-1]] == list(range(1, 60))
    assert nearly_equal(image_bytes(events[-1]["b64_json"]), long)
    assert eventually(lambda: len(server.replicas() - before) == 1 and server.metric("holdover_ready") == 2)
    assert killed not in server.replicas()


# Settings that change


def cache(server: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/v1/cache").json()
    return found


def test_settings_change_under_load_without_a_dropped_request(server: Cluster) -> None:
    before = server.replicas()
    with Load(server) as load:
        load.wait_for_more()
        server.deploy("mag_cache", {"mag_threshold": 0.06, "mag_retention_ratio": 0.1})
        assert eventually(lambda: cache(server)["settings"]["mag_threshold"] == 0.06)
        load.wait_for_more()
    for answers in load.answers:
        assert {answer.status_code for answer in answers} == {200}
        thresholds = [info(answer)["settings"]["mag_threshold"] for answer in answers]
        assert (thresholds[0], thresholds[-1], set(thresholds)) == (0.24, 0.06, {0.24, 0.06})
        assert thresholds == sorted(thresholds, reverse=True)
    assert server.replicas() == before


def test_a_cache_that_is_refused_leaves_the_previous_one(server: Cluster) -> None:
    """Two kinds of error: an unknown setting, and a profile that does not exist."""
    now = cache(server)["settings"]
    server.deploy("mag_cache", {"mag_treshold": 0.1})
    said = "MagCacheConfig has no setting 'mag_treshold'. Did you mean 'mag_threshold'?"
    assert eventually(lambda: any(said in note for note in cache(server)["notes"]))
    server.deploy("mag_cache", {"profile": "no_such_profile"})
    assert eventually(lambda: any("no_such_profile" in note for note in cache(server)["notes"]))
    assert cache(server)["settings"] == now
    assert server.generate().status_code == 200


def test_wrong_settings_fail_with_our_message_and_the_application_goes_on(server: Cluster) -> None:
    server.deploy(*STARTED, max_bach=3)
    assert "RaySettings has no setting 'max_bach'. Did you mean 'max_batch'?" in server.failure()
    assert server.generate().status_code == 200


# Another model


def test_videos_are_known_to_every_ingress(server: Cluster, tmp_path: Path) -> None:
    """Two ingresses share the folder; the replica writes the files."""
    wan = WanPipeline(**prompted_wan().components | {"tokenizer": byte_tokenizer()}, boundary_ratio=0.875)
    wan.save_pretrained(tmp_path / "wan")
    server.deploy("none", {}, model=str(tmp_path / "wan"), replicas=1, fronts=2, video_dir=str(tmp_path / "videos"))

    def serves_videos() -> bool:
        answer = server.http.get("/v1/models")
        return answer.status_code == 200 and answer.json()["data"][0]["video"] is not None

    assert eventually(lambda: all(serves_videos() for _ in range(20)))  # the previous ingress has ended
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=PATIENCE, max_retries=0)
    asked = {"num_frames": 5, "steps": 4, "seed": 1, "guidance": 1.0, "compare": True, "cache": {"method": "none"}}
    with pytest.deprecated_call():
        video = client.videos.create_and_poll(prompt="ghost", size="64x64", extra_body=asked, poll_interval_ms=100)  # type: ignore[arg-type]
    assert (video.status, video.comparison["equal"]) == ("completed", True), video.error  # type: ignore[attr-defined]

    def answered() -> set[str]:
        found = server.http.get(f"/v1/videos/{video.id}").json()
        assert (found["status"], found["holdover"]) == ("completed", video.holdover)  # type: ignore[attr-defined]
        return {*by_replica(server, "holdover_requests_total", route="/v1/videos/{video_id}")}

    assert eventually(lambda: len(answered()) == 2)
    assert server.http.get(f"/v1/videos/{video.id}/content").content[4:8] == b"ftyp"
    assert server.http.delete(f"/v1/videos/{video.id}").json()["deleted"]
    assert server.http.get(f"/v1/videos/{video.id}").status_code == 404
