"""The picture of one record, made by a process that makes nothing else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .. import ROOT
from .place import Place
from .plan import Record


class Fresh:
    """A fresh process at work on one record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._folder = tempfile.TemporaryDirectory()
        self._picture = Path(self._folder.name) / "picture.safetensors"
        command = [sys.executable, "-m", __name__, record.alone().as_json(), str(self._picture)]
        self._process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def picture(self) -> torch.Tensor:
        """Wait for the picture."""
        with self._folder, self._process as process:
            errors = process.communicate()[1]
            if process.returncode != 0:
                raise RuntimeError(f"The fresh process failed on {self.record.as_json()}:\n{errors}")
            return load_file(self._picture)["picture"]


def main(record: str, path: str) -> None:
    torch.set_num_threads(1)
    wanted = Record.from_json(record)
    picture = Place(wanted.pipeline).generate(wanted)
    assert picture is not None
    save_file({"picture": picture.contiguous()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
