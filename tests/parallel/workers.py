"""Worker processes in one process group that run the functions of parallel/cases.py; a rank that hangs is an error.

All processes are forked from one server that has imported torch and diffusers, so that only it pays for the import.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT = 300.0  # seconds until the first rank answers, on a machine that is busy with other things
LAG = 120.0  # seconds between the first answer and the last
TESTS = Path(__file__).resolve().parents[1]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["parallel.cases"])


class RankTimeoutError(Exception):
    """Some ranks did not answer in time."""


class WorkerGroup:
    """Processes of one process group; `run` calls a function of parallel/cases.py on every rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, case: str, *args: Any, lag: float = LAG) -> list[Any]:
        """The return value of the case on each rank; an error of a rank is raised here with its traceback."""
        if not self._processes:
            self._start()
            self._receive("the start", LAG)
        for pipe in self._pipes:
            pipe.send((case, args))
        return self._receive(case, lag)

    def _start(self) -> None:
        store = Path(self._folder.name) / f"store-{time.monotonic_ns()}"
        for rank in range(self.size):
            ours, theirs = _FORKS.Pipe()
            self._pipes.append(ours)
            self._processes.append(start_process(_work, rank, self.size, str(store), theirs))
            theirs.close()  # so that reading from a rank that has died raises EOFError

    def _receive(self, case: str, lag: float) -> list[Any]:
        """Wait for the first answer, then at most `lag` seconds for the others."""
        wait(self._pipes, LIMIT)
        until = time.monotonic() + lag
        late = [rank for rank, pipe in enumerate(self._pipes) if not pipe.poll(max(0.0, until - time.monotonic()))]
        answers = [_read(pipe) for rank, pipe in enumerate(self._pipes) if rank not in late]
        failed = [text for ok, text in answers if not ok]
        if failed or late:
            self.stop()
        if failed:
            raise AssertionError("\n".join(failed))
        if late:
            raise RankTimeoutError(f"ranks {late} were still in {case} {lag:.0f} s after the first answer")
        return [answer for _, answer in answers]

    def stop(self) -> None:
        """Kill all processes, whatever they are doing; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def start_process(target: Any, *args: Any) -> Any:
    """Fork a process from the server, which finds modules by the environment alone."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(TESTS), *path]))
    process = _FORKS.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def run_under_torchrun(size: int, script: Path, *args: str) -> str:
    """Run a script on `size` ranks in the environment that torchrun gives it; returns what rank 0 printed."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has the store, too
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.txt" for rank in range(size)]
        processes = [
            start_process(
                _run_script, [str(script), *args], shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, output
            )
            for rank, output in enumerate(outputs)
        ]
        for process in processes:
            process.join(LIMIT)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        texts = [output.read_text() for output in outputs]
    assert codes == [0] * size, f"exit codes {codes}:\n" + "\n".join(texts)
    return texts[0]


def _run_script(argv: list[str], environment: dict[str, str], output: Path) -> None:
    os.environ.update(environment)
    with output.open("w", buffering=1) as stream:
        sys.stdout, sys.argv = stream, argv
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except BaseException:
            stream.write(traceback.format_exc())
            raise


def _read(pipe: Connection) -> tuple[bool, Any]:
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
