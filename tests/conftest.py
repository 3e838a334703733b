"""One thread: the models are tiny, and threads would only wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
