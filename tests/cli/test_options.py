"""The options that every command with a model has, the loader behind them, and errors that come before any work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from typer.testing import CliRunner

from holdover import loading
from holdover.cli import app, options
from holdover.compare import Results
from holdover.errors import ConfigError
from holdover.loading import ModelSettings, choose_device, image_size, load_pipeline
from holdover.plan.generation import fingerprint
from holdover.profiles import Profile
from holdover.serve.model import load_model
from holdover.serve.settings import Settings
from tiny.prompted import prompted_flux

COMMANDS = ("generate", "compare", "calibrate", "tune", "serve")
OPTIONS = ("--device", "--dtype", "--offload", "--height", "--width", "--negative-prompt", "--lora", "--compile")


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX pipeline as a folder."""
    folder = tmp_path_factory.mktemp("flux")
    prompted_flux().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of its transformer."""
    transformer = prompted_flux().transformer
    torch.manual_seed(0)
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False))
    folder = tmp_path_factory.mktemp("lora")
    FluxPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(transformer))
    return folder / "pytorch_lora_weights.safetensors"


# The options


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_with_a_model_has_the_same_options(command: str) -> None:
    out, _ = run(command, "--help")
    for option in (*OPTIONS, "--quantize"):
        assert f" {option} " in out, option
    assert "one of 'none', 'model', 'group', 'sequential'" in " ".join(out.split())


def test_size_and_negative_prompt_reach_the_pipeline_and_the_file(tmp_path: Path) -> None:
    size = ("--height", 32, "--width", 48, "--negative-prompt", "blue", "--steps", 2)
    run("generate", "dog", *size, "--out", tmp_path)
    with Image.open(tmp_path / "dog-seed0.png") as image:
        assert image.size == (48, 32)
        settings = json.loads(image.text["holdover"])
    assert (settings["height"], settings["width"], settings["negative_prompt"]) == (32, 48, "blue")
    run("generate", "dog", "--height", 32, "--width", 48, "--steps", 2, "--out", tmp_path / "other")
    assert (tmp_path / "other" / "dog-seed0.png").read_bytes() != (tmp_path / "dog-seed0.png").read_bytes()


def test_a_file_of_a_comparison_may_have_them_and_a_flag_overrides_it(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text("prompts: [dog]\nmethods: [none]\nsteps: 2\nheight: 32\nwidth: 32\ndtype: float32\n")
    run("compare", study, "--width", 48, "--out", tmp_path / "out")
    results = Results.load(tmp_path / "out" / "results.json")
    assert results.settings["arguments"] == {"height": 32, "width": 48}
    study.write_text("prompts: [dog]\ndtype: float31\n")
    _, err = run("compare", study, "--out", tmp_path / "none", code=2)
    allowed = "'auto', 'float32', 'bfloat16', 'float16'"
    assert err == f"Error: --dtype must be one of {allowed}, not 'float31'. Did you mean 'float32'?\n"


def test_a_profile_is_measured_and_tuned_at_the_size_that_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    run(
        "calibrate",
        "--effort",
        "quick",
        "--num",
        2,
        "--steps",
        4,
        "--batch-size",
        2,
        "--height",
        32,
        "--width",
        32,
        "--out",
        out,
    )
    assert dict(Profile.load(out).facts.call) == {"height": 32, "width": 32}
    few = ("--num", 2, "--share", 0.5, "--confidence", 0.7, "--batch-size", 2, "--target", "psnr>=5")
    run("tune", out, *few, "--height", 32, "--width", 32)
    assert Profile.load(out).facts.certificates


# The loader


def test_a_folder_is_loaded_as_its_pipeline_in_the_dtype_that_is_asked_for(flux_folder: Path) -> None:
    pipe = load_pipeline(ModelSettings(model=str(flux_folder), dtype="bfloat16", device="cpu"))
    assert isinstance(pipe, FluxPipeline)
    assert pipe.transformer.dtype == torch.bfloat16
    assert load_pipeline(ModelSettings(dtype="auto")).transformer.dtype == torch.float32


def test_loras_are_added_with_their_weights(flux_folder: Path, lora_file: Path) -> None:
    def generate(*loras: str) -> torch.Tensor:
        pipe = load_pipeline(ModelSettings(model=str(flux_folder), lora=loras, height=16, width=16))
        pipe.set_progress_bar_config(disable=True)
        noise = torch.Generator().manual_seed(0)
        size = {"height": 16, "width": 16, "num_inference_steps": 2}
        latents: torch.Tensor = pipe("dog", **size, generator=noise, output_type="latent").images
        return latents

    plain = generate()
    assert torch.allclose(generate(f"{lora_file}=0"), plain, atol=1e-6)
    assert not torch.allclose(generate(str(lora_file)), plain, atol=1e-6)
    assert not torch.equal(generate(f"{lora_file}=0.5"), generate(str(lora_file)))


def test_blocks_are_compiled_where_the_class_knows_them() -> None:
    transformer = load_pipeline(ModelSettings(compile=True)).transformer
    assert all(block._compiled_call_impl is not None for block in transformer.transformer_blocks)
    assert transformer._compiled_call_impl is None
    plain = load_pipeline(ModelSettings()).transformer
    assert all(block._compiled_call_impl is None for block in plain.transformer_blocks)


def test_quantized_weights_are_recognized_as_other_weights() -> None:
    pytest.importorskip("torchao")
    plain, quantized = (load_pipeline(ModelSettings(quantize=kind)).transformer for kind in ("none", "int8"))
    weight = quantized.transformer_blocks[0].attn.to_q.weight
    assert "dequantize" in vars(type(weight.data))
    assert fingerprint(quantized) != fingerprint(plain)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
@pytest.mark.parametrize("offload", ["model", "group", "sequential"])
def test_offloading_needs_an_accelerator(offload: str) -> None:
    with pytest.raises(ConfigError, match=f"offload '{offload}' moves weights between the host and an accelerator"):
        load_pipeline(ModelSettings(offload=offload))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_device_that_is_not_there_is_an_error() -> None:
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="There is no cuda device here: use cpu, or auto"):
        choose_device("cuda:1")
    with pytest.raises(ConfigError, match="not 'gpu'"):
        choose_device("gpu")


def test_the_size_of_the_images_of_a_pipeline(flux_folder: Path) -> None:
    assert image_size(load_pipeline(ModelSettings())) == (64, 64)
    pipe = prompted_flux()
    side = pipe.default_sample_size * pipe.vae_scale_factor
    assert image_size(pipe) == (side, side)


def test_the_server_loads_the_same_way(flux_folder: Path) -> None:
    model = load_model(Settings(model=str(flux_folder), width=48, height=32, dtype="bfloat16"))
    assert model.info.size == (48, 32)
    assert model.pipeline.transformer.dtype == torch.bfloat16


# Errors before work

NEVER = {"load": "nothing may be loaded"}


@pytest.fixture
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError(NEVER["load"])

    monkeypatch.setattr(loading, "_read_pipeline", refuse)


BEFORE = {
    "a folder that is not there": (("generate", "dog", "--model", "./nope"), "The folder './nope' does not exist."),
    "an absolute one": (("calibrate", "--model", "/nope/there"), "The folder '/nope/there' does not exist."),
    "a file as a model": (("generate", "dog", "--model", "file"), "file is a file. Give the folder of a diffusers"),
    "a model for the server": (("serve", "./nope"), "The folder './nope' does not exist."),
    "a LoRA that is not there": (
        ("generate", "dog", "--lora", "./x.safetensors"),
        "The LoRA './x.safetensors' does not",
    ),
    "a weight that is no number": (("generate", "dog", "--lora", "a/b=much"), "FILE=WEIGHT with a finite number"),
    "an unknown offload": (("tune", "p", "--offload", "disk"), "one of 'none', 'model', 'group', 'sequential'"),
    "an unknown dtype": (("generate", "dog", "--dtype", "int4"), "must be one of 'auto', 'float32', 'bfloat16'"),
    "a height of zero": (("generate", "dog", "--height", "0"), "--height must be at least 1, not 0"),
    "a seed that is too large": (("generate", "dog", "--seed", str(2**64)), "from 0 to 18446744073709551615, not"),
    "steps of a calibration": (("calibrate", "--steps", "0"), "--steps must be 1 or more, not 0."),
    "batches of a calibration": (("calibrate", "--batch-size", "0"), "--batch-size must be 1 or more, not 0."),
    "a place to store": (("calibrate", "--store", "disc"), "--store must be one of device, cpu, disk, not 'disc'. Did"),
    "a share above 1": (("tune", "p", "--share", "95"), "--share must be between 0.01 and 0.9999, not 95."),
    "images in a file": (("generate", "dog", "--out", "file/x"), "Cannot write to file/x: "),
    "a comparison in a file": (("compare", "--prompt", "dog", "--out", "file/x"), "Cannot write to file/x: "),
    "a profile in a file": (("calibrate", "--out", "file/x.safetensors"), "Cannot write to file: "),
    "a report in a file": (("tune", "p", "--report", "file/x.html"), "Cannot write to file/x: "),
}


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize("case", BEFORE)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    arguments, message = BEFORE[case]
    out, err = run(*arguments, code=2)
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    _, err = run("generate", "dog", "--out", tmp_path / "images", code=2)
    assert "permission denied" in err


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("torchao", ("generate", "dog", "--quantize", "int8"), "quantize"),
        ("peft", ("generate", "dog", "--lora", "owner/name"), "lora"),
        ("matplotlib", ("compare", "--prompt", "dog"), "report"),
        ("jinja2", ("tune", "p.safetensors", "--report", "r.html"), "report"),
        ("uvicorn", ("serve",), "server"),
    ],
)
def test_a_missing_extra_is_named_before_anything_is_loaded(
    missing: str, arguments: tuple[str, ...], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    find = loading.importlib.util.find_spec
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    _, err = run(*arguments, code=2)
    assert err.endswith(f" needs {missing}: pip install 'holdover[{extra}]'.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_before_the_first_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(options.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    for command in (("generate", "dog"), ("compare", "--prompt", "dog", "--method", "none")):
        _, err = run(*command, "--out", tmp_path, code=2)
        assert f"The disk of {tmp_path} has 0 kB of room, and about " in err
    assert list(tmp_path.rglob("*.png")) == []


@pytest.mark.parametrize(("free", "said"), [(41_200, "41 kB"), (1_000_000, "1 MB")])
def test_sizes_on_a_disk_are_in_units_that_show_them(
    free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(ConfigError, match=f"has {said} of room, and about 12 MB are needed"):
        options.check_room(tmp_path, 12e6)
    options.check_room(tmp_path, free)


def test_arguments_that_a_pipeline_does_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        def __call__(self, prompt: str) -> None: ...

    monkeypatch.setattr(loading, "_read_pipeline", lambda *_: Plain())
    with pytest.raises(ConfigError, match="Plain takes no 'negative_prompt'"):
        load_pipeline(ModelSettings(negative_prompt="blue"))


def test_a_pipeline_that_takes_no_lora_says_so(lora_file: Path) -> None:
    with pytest.raises(ConfigError, match="EmojiPipeline takes no LoRA weights"):
        load_pipeline(ModelSettings(lora=(str(lora_file),)))


def test_a_lora_of_another_model_is_an_error(flux_folder: Path, tmp_path: Path) -> None:
    shutil.copy(flux_folder / "model_index.json", tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="Cannot load the LoRA"):
        load_pipeline(ModelSettings(model=str(flux_folder), lora=(str(tmp_path / "x.safetensors"),)))


# Quick answers

QUICK = [
    (("methods",), 0),
    (("methods", "plan"), 0),
    (("methods", "tee_cache"), 2),
    (("generate", "dog", "--cache", "teacache"), 2),
    (("generate", "dog", "--cache", "mag_cache", "--set", "mag_treshold=1"), 2),
    (("generate", "dog", "--cache", "mag_cache", "--set", "rel_l1_thresh=1"), 2),
    (("generate", "dog", "--model", "emojy"), 2),
    (("generate", "dog", "--quantise", "int8"), 2),
    (("compare", "--prompt", "dog", "--model", "./nope"), 2),
    (("calibrate", "--num", "0"), 2),
    (("tune", "p.safetensors", "--share", "2"), 2),
    (("serve", "--cache-backend", "teacache"), 2),
]


def test_methods_and_typos_are_answered_without_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom holdover.cli import app\n"
        f"for arguments, code in {QUICK!r}:\n"
        "    done = CliRunner().invoke(app, list(arguments))\n"
        "    assert done.exit_code == code, (arguments, done.output)\n"
        "    heavy = {'torch', 'diffusers', 'transformers', 'cache_dit', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, (arguments, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("always::holdover.errors.HoldoverWarning")
def test_a_warning_is_one_line(tmp_path: Path) -> None:
    _, err = run("generate", "dog", "--cache", "mag_cache", "--steps", "4", "--out", tmp_path)
    (line,) = [line for line in err.splitlines() if "arning" in line]
    assert line.startswith("Warning: With 4 steps there is little to hold")
