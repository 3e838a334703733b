"""Train the motion model by flow matching (arXiv 2209.03003), with shifted logit-normal times (arXiv 2403.03206).

    python training/motion/train.py build/emoji --out build/motion/run --seconds 300

Muon for the matrices of the blocks, AdamW for everything else, an EMA of both. The learning rate follows the share of
the planned seconds (or steps) that has passed, so a run fits its budget on any machine. Every `--save-every` seconds a
checkpoint is written to --state, and the same command goes on from there. Writes OUT/last and OUT/best (the EMA at the
end, and where the held-out pairs had the lowest loss; bfloat16), tokenizer.json and run.json, for export.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from clips import Clips, chosen_rows, load_split, normalize, tokenizer_texts
from network import SHARD_BYTES, SHIFT, TINY, Shape, Velocity, make_text_encoder, make_transformer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emoji"))

from dataset import read
from model import save_shards
from train import Clock, Muon, keep_tokenizer

EVAL_TIMES = (0.3, 0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True)
class Settings:
    """What the training depends on besides data and seed."""

    batch: int = 256
    rate: float = 1.5e-3  # of AdamW
    muon_rate: float = 3e-3
    warmup: int = 200
    decay: float = 0.02
    ema: float = 0.999
    dropout: float = 0.1
    time_std: float = 1.2
    clip: float = 1.0


def rate_share(settings: Settings, clock: Clock) -> float:
    """Share of the learning rates: linear warm-up, constant, then linear to zero over the last 60 % of the plan."""
    return min(1.0, (clock.step + 1) / settings.warmup, (1 - clock.progress) / 0.6)


def flow_loss(
    model: Callable[..., torch.Tensor],
    clips: torch.Tensor,
    captions: torch.Tensor,
    times: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Mean squared error of the velocity `noise - clip` on the straight line between the two."""
    share = times.view(-1, 1, 1, 1, 1)
    noisy = (1 - share) * clips + share * noise
    with torch.autocast(clips.device.type, torch.bfloat16):
        velocity = model(noisy, times, captions)
    return (velocity.float() - (noise - clips)).square().mean()


def embed_by_product(patches: nn.Conv3d) -> None:
    """Compute the patch embedding as a matrix product; some versions of cuDNN are slow at conv3d in bfloat16."""
    _, height, width = patches.kernel_size

    def forward(clips: torch.Tensor) -> torch.Tensor:
        cut = clips.unflatten(4, (-1, width)).unflatten(3, (-1, height)).permute(0, 2, 3, 5, 1, 4, 6)
        return nn.functional.linear(cut.flatten(4), patches.weight.flatten(1), patches.bias).permute(0, 4, 1, 2, 3)

    patches.forward = forward  # type: ignore[method-assign]


class Trainer:
    """Model, EMA, optimizers and clock: the contents of a checkpoint."""

    def __init__(self, model: Velocity, settings: Settings, clock: Clock, seed: int) -> None:
        self.model, self.settings, self.clock, self.seed = model, settings, clock, seed
        self.forward: Callable[..., torch.Tensor] = model
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.best, self.least = [average.clone() for average in self.ema], math.inf
        self.device = self.parameters[0].device
        blocks = [*model.transformer.blocks, *model.text_encoder.encoder.layer]
        matrices = [parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2]
        taken = {id(matrix) for matrix in matrices}
        others = [parameter for parameter in self.parameters if id(parameter) not in taken]
        adam = torch.optim.AdamW(
            others, lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=self.device.type == "cuda"
        )
        self.optimizers = (Muon(matrices, settings.muon_rate, settings.decay), adam)
        self.reseed()

    def reseed(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed + self.clock.step)

    def compile(self) -> None:
        self.model.transformer.compile_repeated_blocks()
        self.model.text_encoder.compile()

    def step(self, data: Clips) -> torch.Tensor:
        """One optimizer step; returns the loss without waiting for it."""
        settings = self.settings
        for optimizer, rate in zip(self.optimizers, (settings.muon_rate, settings.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_share(settings, self.clock)
        clips, captions = data.batch(settings.batch, settings.dropout, self.generator)
        noise = torch.randn(clips.shape, generator=self.generator, device=self.device)
        normal = torch.randn(len(clips), generator=self.generator, device=self.device)
        times = torch.sigmoid(normal * settings.time_std + math.log(SHIFT))
        loss = flow_loss(self.forward, clips, captions, times, noise)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        keep = min(settings.ema, (1 + self.clock.step) / (10 + self.clock.step))
        torch._foreach_lerp_(self.ema, [parameter.detach() for parameter in self.parameters], 1 - keep)
        return loss.detach()

    def swap(self) -> None:
        """Exchange the weights and their EMA."""
        for parameter, average in zip(self.parameters, self.ema, strict=True):
            kept = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(kept)

    def validate(self, batches: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, list[float]]:
        """EMA loss at a few times on fixed noise for each batch; keeps the best EMA."""
        self.swap()
        losses: dict[str, list[float]] = {}
        for name, (clips, captions) in batches.items():
            noise = torch.randn(clips.shape, generator=torch.Generator(self.device).manual_seed(0), device=self.device)
            at = [torch.full((len(clips),), value, device=self.device) for value in EVAL_TIMES]
            values = torch.stack([flow_loss(self.forward, clips, captions, times, noise).detach() for times in at])
            losses[name] = [round(value, 5) for value in values.tolist()]
        self.swap()
        if (loss := sum(losses["val_pair"])) < self.least:
            self.least = loss
            torch._foreach_copy_(self.best, self.ema)
        return losses

    def save(self, path: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter, average, best in zip(self.names, self.parameters, self.ema, self.best, strict=True):
            tensors |= {f"model/{name}": parameter.detach(), f"ema/{name}": average, f"best/{name}": best}
            state = next(optimizer.state[parameter] for optimizer in self.optimizers if parameter in optimizer.state)
            tensors |= {f"{kind}/{name}": value for kind, value in state.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        notes = {"step": str(self.clock.step), "seconds": str(self.clock.seconds), "least": str(self.least)}
        save_file(tensors, path.with_suffix(".new"), metadata=notes)
        path.with_suffix(".new").replace(path)

    def resume(self, path: Path) -> None:
        with safe_open(path, framework="pt", device=str(self.device)) as file:
            notes, (muon, adam) = file.metadata(), self.optimizers
            self.clock.step, self.clock.seconds = int(notes["step"]), float(notes["seconds"])
            self.least = float(notes["least"])
            for name, parameter, average, best in zip(self.names, self.parameters, self.ema, self.best, strict=True):
                for kind, kept in (("model", parameter.data), ("ema", average), ("best", best)):
                    kept.copy_(file.get_tensor(f"{kind}/{name}"))
                optimizer, kinds = (
                    (muon, ("momentum",)) if parameter in muon.state else (adam, ("step", "exp_avg", "exp_avg_sq"))
                )
                optimizer.state[parameter] = {kind: file.get_tensor(f"{kind}/{name}") for kind in kinds}
        self.reseed()


def train(
    trainer: Trainer, data: Clips, every: float, report: Callable[[list[torch.Tensor], float], None], stop_at: float
) -> None:
    """Train until the plan is done or the process has to end, with a report every so many seconds."""
    clock, losses = trainer.clock, [trainer.step(data)]
    losses[0].item()
    clock.restart()  # without the compilation
    clock.step += 1
    mark, marked, due = time.monotonic(), clock.step, clock.seconds + every
    while clock.progress < 1 and time.monotonic() < stop_at:
        losses.append(trainer.step(data))
        clock.tick()
        if clock.step % 50 == 0:
            losses[-1].item()  # synchronizes, so that the host is at most 50 steps ahead of the device
        if clock.seconds >= due or clock.progress >= 1:
            losses[-1].item()
            report(losses, (clock.step - marked) * trainer.settings.batch / (time.monotonic() - mark))
            losses, due = [], clock.seconds + every
            clock.restart()  # without validation and writing
            mark, marked = time.monotonic(), clock.step


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", type=Path, help="folder with images.npz and captions.jsonl (training/emoji/build_data.py)"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="checkpoint file (default: OUT/state.safetensors)")
    parser.add_argument("--seconds", type=float, help="planned training time over all processes")
    parser.add_argument("--steps", type=int, help="planned steps over all processes")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds until this process ends")
    parser.add_argument("--save-every", type=float, default=30, help="seconds of training between checkpoints")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--rate", type=float, default=Settings.rate, help="of AdamW")
    parser.add_argument("--muon-rate", type=float, default=Settings.muon_rate)
    parser.add_argument("--warmup", type=int, default=Settings.warmup)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="train on so many images only, to try the recipe")
    parser.add_argument("--tiny", action="store_true", help="a model of 150 thousand parameters, to try the recipe")
    options = parser.parse_args()
    if options.seconds is None and options.steps is None:
        parser.error("say how long: --seconds or --steps")
    return options


def main() -> None:
    started, options = time.monotonic(), parse()
    torch.backends.cuda.enable_cudnn_sdp(False)  # no plan for these shapes in the backward pass on some versions
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    device, shape = torch.device(options.device), TINY if options.tiny else Shape()
    state = options.state or options.out / "state.safetensors"
    images, rows = chosen_rows(*read(options.data))
    if options.limit:
        kept = [i for i, row in enumerate(rows) if row["split"] != "train"] + [
            i for i, row in enumerate(rows) if row["split"] == "train"
        ][: options.limit]
        images, rows = images[kept], [rows[i] for i in kept]
    tokenizer = keep_tokenizer(state.with_suffix(".tokenizer.json"), tokenizer_texts(rows), shape.vocabulary)
    splits = {name: load_split(images, rows, name, tokenizer, device) for name in ("train", "val_pair", "val_concept")}
    mean, std = normalize(splits["train"], [splits["val_pair"], splits["val_concept"]])
    settings = Settings(options.batch, options.rate, options.muon_rate, options.warmup)
    clock = Clock(options.steps, options.seconds)
    batches = {name: data.rows(settings.batch) for name, data in splits.items()}
    batches["val_motion"] = splits["train"].rows(settings.batch, held=True)
    model = Velocity(make_text_encoder(shape), make_transformer(shape)).to(device).train()
    embed_by_product(model.transformer.patch_embedding)
    trainer, log = Trainer(model, settings, clock, options.seed), []
    if state.exists():
        trainer.resume(state)
        log = json.loads(state.with_suffix(".json").read_text())
    if not options.no_compile:
        trainer.compile()
    about = {"shape": asdict(shape), "settings": asdict(settings), "pixel_mean": mean, "pixel_std": std}
    about |= {"parameters": sum(parameter.numel() for parameter in model.parameters()), "torch": torch.__version__}
    print(
        f"{about['parameters']:,} parameters, {len(splits['train'].images)} images, ready after "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )

    def report(losses: list[torch.Tensor], speed: float) -> None:
        """Validate, log, write everything; end the process if the loss is not finite."""
        loss = torch.stack(losses).mean().item()
        if not math.isfinite(loss):
            raise SystemExit(f"the loss is {loss} at step {clock.step}; try a lower --rate")
        entry: dict[str, Any] = {"step": clock.step, "seconds": round(clock.seconds, 1), "loss": round(loss, 5)}
        entry |= {"rate_share": round(rate_share(settings, clock), 4), "clips_per_second": round(speed)}
        log.append(entry | trainer.validate(batches))
        print(json.dumps(log[-1]), flush=True)
        trainer.save(state)
        state.with_suffix(".json").write_text(json.dumps(log))
        (options.out / "run.json").write_text(json.dumps(about | {"step": clock.step, "log": log}))
        frozen = {name: p.bfloat16() for name, p in model.named_parameters() if not p.requires_grad}
        for name, weights in (("last", trainer.ema), ("best", trainer.best)):
            tensors = {key: value.bfloat16() for key, value in zip(trainer.names, weights, strict=True)} | frozen
            save_shards(tensors, options.out / name, SHARD_BYTES)

    tokenizer.backend_tokenizer.save(str(options.out / "tokenizer.json"))
    train(trainer, splits["train"], options.save_every, report, started + options.stop_after)
    print(f"step {clock.step}, {clock.progress:.1%} of the plan, {time.monotonic() - started:.0f} s in this process")


if __name__ == "__main__":
    main()
