"""Processes that stay together for a whole module of tests; one that waits for ever is found out and ended."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT = 60.0  # seconds for one case, on a machine that is busy with other things
START = 240.0  # seconds to import torch and diffusers there
TESTS = Path(__file__).resolve().parents[1]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["parallel.cases"])  # imported once for all processes


class LeftWaitingError(Exception):
    """Not every process came to an end in time."""


class Company:
    """A number of processes in one process group; `run` has all of them run one of parallel/cases.py."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        # The server that forks them is told where modules are by the environment alone.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        store = Path(self._folder.name) / f"store-{time.monotonic_ns()}"
        for rank in range(self.size):
            ours, theirs = _FORKS.Pipe()
            process = _FORKS.Process(target=_work, args=(rank, self.size, str(store), theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: str, *args: Any, limit: float = LIMIT) -> list[Any]:
        """What the case of that name returned on each rank; an error of a rank is raised here, with its text."""
        if not self._processes:
            self._start()
            self._answers("the start", START)
        for pipe in self._pipes:
            pipe.send((case, args))
        return self._answers(case, limit)

    def _answers(self, case: str, limit: float) -> list[Any]:
        until = time.monotonic() + limit
        late = [rank for rank, pipe in enumerate(self._pipes) if not pipe.poll(max(0.0, until - time.monotonic()))]
        answers = [_received(pipe) for rank, pipe in enumerate(self._pipes) if rank not in late]
        failed = [text for ok, text in answers if not ok]
        if failed or late:
            self.end()
        if failed:
            raise AssertionError("\n".join(failed))
        if late:
            raise LeftWaitingError(f"ranks {late} were still in {case} after {limit:.0f} s")
        return [answer for _, answer in answers]

    def end(self) -> None:
        """End all processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "a rank has died"
    return answer


def _work(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from parallel import cases

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    pipe.send((True, None))
    while True:
        case, args = pipe.recv()
        try:
            pipe.send((True, getattr(cases, case)(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
