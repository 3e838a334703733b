"""Train the emoji model by flow matching (arXiv 2209.03003), with logit-normal times (arXiv 2403.03206) and an EMA.

    python training/emoji/train.py build/emoji --out build/emoji/run --minutes 9

Matrices of the blocks are trained by Muon, everything else by AdamW. The learning rate follows the share of the
planned minutes (or steps) that has passed, so a run fits its budget on any machine. The EMA with the lowest held-out
loss (early stopping), or the last one, is written, as weights-*.safetensors in bfloat16, with tokenizer.json and
run.json; export.py makes the pipeline. `--stop-after` ends one process early and keeps a checkpoint in --state; the
same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from dataset import Emoji, load_split, pixel_statistics, read, tokenizer_texts
from model import (
    TINY,
    Shape,
    Velocity,
    keep_times_exact,
    make_text_encoder,
    make_transformer,
    save_shards,
    train_tokenizer,
    wrap_tokenizer,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

EVAL_TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
KINDS = ("model", "ema", "best")


@dataclass(frozen=True)
class Settings:
    """What the training depends on besides data and seed."""

    batch: int = 512
    rate: float = 2e-3  # of Muon; AdamW has half of it
    warmup: int = 300
    decay: float = 0.05
    ema: float = 0.9995
    dropout: float = 0.1  # of whole captions
    unknown: float = 0.08  # of the tokens of the others, replaced by [UNK]
    text_dropout: float = 0.1  # in the text encoder
    time_std: float = 1.2
    clip: float = 1.0


@dataclass
class Clock:
    """Progress of the planned training, over all its processes."""

    planned_steps: int | None
    planned_seconds: float | None
    step: int = 0
    seconds: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """Exclude the time until now (compilation)."""
        self._since = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        self.step, self.seconds, self._since = self.step + 1, self.seconds + now - self._since, now

    @property
    def progress(self) -> float:
        shares = [0.0]
        if self.planned_steps:
            shares.append(self.step / self.planned_steps)
        if self.planned_seconds:
            shares.append(self.seconds / self.planned_seconds)
        return min(max(shares), 1.0)


def rate_factor(settings: Settings, clock: Clock) -> float:
    """Linear warm-up, then a cosine to zero at the end of the plan."""
    warm = min(1.0, (clock.step + 1) / settings.warmup)
    return warm * 0.5 * (1 + math.cos(math.pi * clock.progress))


def flow_loss(
    model: Callable[..., torch.Tensor],
    images: torch.Tensor,
    captions: torch.Tensor,
    times: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Mean squared error of the velocity `noise - image` on the straight line between the two."""
    share = times.view(-1, 1, 1)
    noisy = (1 - share) * images + share * noise
    with torch.autocast(images.device.type, torch.bfloat16):
        velocity = model(noisy, times, captions)
    return (velocity.float() - (noise - images)).square().mean()


def split_losses(model: Callable[..., torch.Tensor], data: Emoji, size: int) -> list[float]:
    """The loss at a few times on fixed noise, for the first rows of a split."""
    images, captions = data.rows(size)
    device = images.device
    noise = torch.randn(images.shape, generator=torch.Generator(device).manual_seed(0), device=device)
    at = [torch.full((len(images),), value, device=device) for value in EVAL_TIMES]
    values = [flow_loss(model, images, captions, times, noise).detach() for times in at]
    return [round(value, 5) for value in torch.stack(values).tolist()]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz iterations (https://kellerjordan.github.io/posts/muon).

    Updates have the size of Adam's (arXiv 2502.16982). Matrices of one shape are updated together.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], rate: float, decay: float, momentum: float = 0.95) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": alike} for alike in shapes.values()]
        super().__init__(groups, {"lr": rate, "weight_decay": decay, "momentum": momentum})
        for matrix in (matrix for alike in shapes.values() for matrix in alike):
            self.state[matrix]["momentum"] = torch.zeros_like(matrix)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            alike, rate, keep = group["params"], group["lr"], group["momentum"]
            gradients = [matrix.grad for matrix in alike]
            averages = [self.state[matrix]["momentum"] for matrix in alike]
            torch._foreach_lerp_(averages, gradients, 1 - keep)
            updates = orthogonalize(torch.stack(torch._foreach_lerp(gradients, averages, keep)))
            torch._foreach_mul_(alike, 1 - rate * group["weight_decay"])
            size = 0.2 * math.sqrt(max(alike[0].shape))
            torch._foreach_add_(alike, list(updates.to(alike[0].dtype).unbind()), alpha=-rate * size)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (B, m, n) with singular values near 1, by five Newton-Schulz iterations in bfloat16."""
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if wide := x.shape[1] > x.shape[2]:
        x = x.mT
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if wide else x


def make_optimizers(model: Velocity, settings: Settings) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices of all blocks, AdamW without weight decay for everything else."""
    blocks = [model.transformer.transformer_blocks, model.transformer.single_transformer_blocks]
    blocks.append(model.text_encoder.encoder)
    matrices = [parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2]
    taken = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    adam = torch.optim.AdamW(others, lr=settings.rate / 2, betas=(0.9, 0.99), weight_decay=0.0, fused=others[0].is_cuda)
    optimizers = Muon(matrices, settings.rate, settings.decay), adam
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return optimizers


class Trainer:
    """Model, EMA, optimizers and clock: the contents of a checkpoint."""

    def __init__(self, model: Velocity, settings: Settings, clock: Clock, seed: int) -> None:
        self.model, self.settings, self.clock, self.seed = model, settings, clock, seed
        self.forward: Callable[..., torch.Tensor] = model
        self.optimizers = make_optimizers(model, settings)
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.best, self.least = self.ema, math.inf
        self.device = self.parameters[0].device
        self.reseed()

    def reseed(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed + self.clock.step)

    def compile(self, how: str) -> None:
        if how == "blocks":
            self.model.transformer.compile_repeated_blocks()
            self.model.text_encoder.compile()
        elif how != "none":
            self.forward = torch.compile(self.model, mode=None if how == "all" else how)

    def step(self, data: Emoji) -> torch.Tensor:
        """One optimizer step; returns the loss without waiting for it."""
        settings = self.settings
        factor = rate_factor(settings, self.clock)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * factor
        images, captions = data.batch(settings.batch, settings.dropout, settings.unknown, self.generator)
        noise = torch.randn(images.shape, generator=self.generator, device=self.device)
        normal = torch.randn(len(images), generator=self.generator, device=self.device)
        loss = flow_loss(self.forward, images, captions, torch.sigmoid(normal * settings.time_std), noise)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        keep = min(settings.ema, (1 + self.clock.step) / (10 + self.clock.step))
        torch._foreach_lerp_(self.ema, [p.detach() for p in self.parameters], 1 - keep)
        return loss.detach()

    def swap(self) -> None:
        """Exchange the weights and their EMA."""
        for parameter, average in zip(self.parameters, self.ema, strict=True):
            kept = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(kept)

    def validate(self, splits: dict[str, Emoji]) -> dict[str, list[float]]:
        """EMA loss at a few times on fixed noise, for the first batch of each split; keeps the best EMA."""
        self.swap()
        self.model.text_encoder.eval()
        losses: dict[str, list[float]] = {}
        for name, data in splits.items():
            losses[name] = split_losses(self.forward, data, self.settings.batch)
        self.model.text_encoder.train()
        self.swap()
        if (loss := sum(losses["val_pair"])) < self.least:
            self.best, self.least = [average.to(torch.bfloat16) for average in self.ema], loss
        return losses

    def save(self, path: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, *kept in zip(self.names, self.parameters, self.ema, self.best, strict=True):
            tensors |= {f"{kind}/{name}": value.detach().clone() for kind, value in zip(KINDS, kept, strict=True)}
            state = next(o.state[kept[0]] for o in self.optimizers if kept[0] in o.state)
            tensors |= {f"{kind}/{name}": value for kind, value in state.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        notes = {"step": str(self.clock.step), "seconds": str(self.clock.seconds), "least": str(self.least)}
        save_file(tensors, path.with_suffix(".new"), metadata=notes)
        path.with_suffix(".new").replace(path)

    def resume(self, path: Path) -> None:
        with safe_open(path, framework="pt", device=str(self.device)) as file:
            notes, stored = file.metadata(), set(file.keys())
            self.clock.step, self.clock.seconds = int(notes["step"]), float(notes["seconds"])
            self.least = float(notes["least"])
            self.best = [file.get_tensor(f"best/{name}") for name in self.names]
            for name, parameter, average in zip(self.names, self.parameters, self.ema, strict=True):
                parameter.data.copy_(file.get_tensor(f"model/{name}"))
                average.copy_(file.get_tensor(f"ema/{name}"))
                muon, adam = self.optimizers
                owner, kinds = (
                    (muon, ("momentum",)) if parameter in muon.state else (adam, ("exp_avg", "exp_avg_sq", "step"))
                )
                owner.state[parameter] = {k: file.get_tensor(f"{k}/{name}") for k in kinds if f"{k}/{name}" in stored}
        self.reseed()

    def start_from(self, folder: Path) -> None:
        """Start with the weights of an exported pipeline and a new optimizer."""
        for name, tensor in read_weights(folder):
            index = self.names.index(name)
            self.parameters[index].data.copy_(tensor)
            self.ema[index].copy_(tensor)

    def weights(self, kept: str, start: Path | None, share: float) -> dict[str, torch.Tensor]:
        """The best or the last EMA, averaged with the weights that training started from (arXiv 2109.01903)."""
        chosen = self.best if kept == "best" else self.ema
        found = {name: average.float() for name, average in zip(self.names, chosen, strict=True)}
        if start is not None and share:
            for name, tensor in read_weights(start):
                found[name].lerp_(tensor.to(self.device).float(), share)
        return {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of an exported pipeline by their names in `Velocity`."""
    for path in sorted(folder.glob("*/*.safetensors")):
        for name, tensor in load_file(path).items():
            yield f"{path.parent.name}.{name}", tensor


def log_entry(trainer: Trainer, splits: dict[str, Emoji], losses: list[torch.Tensor], speed: float) -> dict[str, Any]:
    """Log the progress; ends the process if the loss is not finite."""
    loss, clock = torch.stack(losses).mean().item(), trainer.clock
    if not math.isfinite(loss):
        raise SystemExit(f"the loss is {loss} at step {clock.step}; try a lower --rate")
    entry: dict[str, Any] = {"step": clock.step, "seconds": round(clock.seconds, 1), "loss": round(loss, 5)}
    entry |= {"rate": trainer.settings.rate * rate_factor(trainer.settings, clock), "images_per_second": round(speed)}
    entry |= trainer.validate(splits)
    print(json.dumps(entry), flush=True)
    return entry


def train(trainer: Trainer, splits: dict[str, Emoji], log: list[dict[str, Any]], stop_at: float, every: int) -> None:
    """Train until the plan is done or the process has to end, with regular log entries."""
    clock, mark, marked = trainer.clock, time.monotonic(), -1
    losses: list[torch.Tensor] = []
    while clock.progress < 1 and time.monotonic() < stop_at:
        losses.append(trainer.step(splits["train"]))
        if marked < 0:  # the first step of this process, with the compilation in it
            losses[0].item()
            clock.restart()
            mark, marked = time.monotonic(), clock.step
        clock.tick()
        if clock.step % 100 == 0:
            losses[-1].item()  # synchronizes, so that the host is at most 100 steps ahead of the device
        if clock.step % every == 0 or clock.progress >= 1:
            speed = (clock.step - marked) * trainer.settings.batch / max(time.monotonic() - mark, 1e-9)
            log.append(log_entry(trainer, splits, losses, speed))
            losses, mark, marked = [], time.monotonic(), clock.step


def keep_tokenizer(path: Path, texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """The tokenizer of this run: trained once, then loaded, because training it again may number tokens differently."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(texts, vocabulary).backend_tokenizer.save(str(path))
    return wrap_tokenizer(Tokenizer.from_file(str(path)))


def write_run(folder: Path, trainer: Trainer, weights: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """Write what export.py reads, except the tokenizer: the weights and run.json."""
    clock = trainer.clock
    about = {"settings": asdict(trainer.settings), "torch": torch.__version__} | about
    about |= {"step": clock.step, "seconds": clock.seconds, "progress": clock.progress}
    (folder / "run.json").write_text(json.dumps(about))
    save_shards(weights, folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with images.npz and captions.jsonl (build_data.py)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="checkpoint file (default: OUT/state.safetensors)")
    parser.add_argument("--start-from", type=Path, help="pipeline folder to start from (export.py)")
    parser.add_argument("--start-share", type=float, default=0.0, help="share of those weights in what is written")
    parser.add_argument("--keep", choices=("best", "last"), default="best", help="EMA to write; best: held-out loss")
    parser.add_argument("--minutes", type=float, help="planned training time over all processes")
    parser.add_argument("--steps", type=int, help="planned steps over all processes")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds until this process ends")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--rate", type=float, default=Settings.rate)
    parser.add_argument("--warmup", type=int, default=Settings.warmup)
    parser.add_argument("--decay", type=float, default=Settings.decay)
    parser.add_argument("--unknown", type=float, default=Settings.unknown, help="share of tokens that are hidden")
    parser.add_argument("--text-dropout", type=float, default=Settings.text_dropout)
    parser.add_argument("--log-every", type=int, default=500)
    parser.add_argument("--compile", default="blocks", help="none, blocks, all, or a mode of torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a model of 60 thousand parameters, to try the recipe")
    options = parser.parse_args()
    if options.minutes is None and options.steps is None:
        parser.error("say how long: --minutes or --steps")
    return options


def main() -> None:
    started = time.monotonic()
    options = parse()
    torch.backends.cuda.enable_cudnn_sdp(False)  # no plan for these shapes in the backward pass on some versions
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    device, shape = torch.device(options.device), TINY if options.tiny else Shape()
    state = options.state or options.out / "state.safetensors"
    images, rows = read(options.data)
    if options.start_from and not state.exists():
        shutil.copy(options.start_from / "tokenizer/tokenizer.json", state.with_suffix(".tokenizer.json"))
    tokenizer = keep_tokenizer(state.with_suffix(".tokenizer.json"), tokenizer_texts(rows), shape.vocabulary)
    splits = {name: load_split(images, rows, name, tokenizer, device) for name in ("train", "val_pair", "val_concept")}
    settings = Settings(
        options.batch,
        options.rate,
        options.warmup,
        options.decay,
        unknown=options.unknown,
        text_dropout=options.text_dropout,
    )
    model = Velocity(make_text_encoder(shape, settings.text_dropout), make_transformer(shape)).to(device).train()
    keep_times_exact(model.transformer, torch.bfloat16)
    clock = Clock(options.steps, options.minutes and options.minutes * 60)
    trainer = Trainer(model, settings, clock, options.seed)
    log: list[dict[str, Any]] = []
    if state.exists():
        trainer.resume(state)
        log = json.loads(state.with_suffix(".json").read_text())
    elif options.start_from:
        trainer.start_from(options.start_from)
    trainer.compile(options.compile)
    train(trainer, splits, log, started + options.stop_after, options.log_every)
    trainer.save(state)
    state.with_suffix(".json").write_text(json.dumps(log))
    mean, std = pixel_statistics(images, rows)
    kept = {"keep": options.keep, "start_share": options.start_share if options.start_from else 0.0}
    about = {"shape": asdict(shape), "pixel_mean": mean, "pixel_std": std, "kept": kept, "log": log}
    write_run(options.out, trainer, trainer.weights(options.keep, options.start_from, options.start_share), about)
    tokenizer.backend_tokenizer.save(str(options.out / "tokenizer.json"))
    print(f"step {clock.step}, {clock.progress:.1%} of the plan, {time.monotonic() - started:.0f} s in this process")


if __name__ == "__main__":
    main()
