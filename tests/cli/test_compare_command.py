"""`holdover compare`: a YAML file or flags, results and a report, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdover.cli import app
from holdover.compare import Results

STUDY = """
prompts: ["red apple, glossy 3d style", "ghost, noto"]
seeds: [5]
steps: 6
batch_size: 2
methods:
  - mag_cache:mag_threshold=0.24
  - tea_cache: {rel_l1_thresh: 0.3}
"""


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout, result.stderr


def study(folder: Path, text: str = STUDY) -> str:
    path = folder / "study.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_becomes_results_images_and_a_report_and_is_resumed(tmp_path: Path) -> None:
    out_folder = tmp_path / "out"
    out, _ = run(study(tmp_path), "--out", str(out_folder))
    results = Results.load(out_folder / "results.json")
    assert [row.label for row in results.rows[:2]] == ["mag_cache 0.24", "tea_cache 0.3"]
    assert {row.kind for row in results.rows[2:]} == {"fewer_steps", "second_order"}
    assert results.settings["prompts"] == ["red apple, glossy 3d style", "ghost, google noto style"]
    assert "mag_cache 0.24" in out
    assert str(out_folder / "report.html") in out
    assert "tea_cache 0.3" in (out_folder / "report.html").read_text()
    again, _ = run(study(tmp_path), "--out", str(out_folder))
    assert again.count("(from an earlier run)") == 1 + len(results.rows)
    _, err = run(study(tmp_path), "--steps", "7", "--out", str(out_folder), code=2)
    assert "steps 6 there and 7 here. Use another folder." in err


def test_flags_alone(tmp_path: Path) -> None:
    run(
        "--prompt", "dog", "--method", "mag_cache", "--steps", "4", "--seed", "1", "--seed", "2", "--out", str(tmp_path)
    )
    results = Results.load(tmp_path / "results.json")
    assert results.settings["seeds"] == [1, 2]
    assert results.rows[0].label == "mag_cache"
    assert len(results.rows[0].seconds) == 2


def test_a_quality_is_a_candidate(tmp_path: Path) -> None:
    methods = ("--method", "plan:quality=draft", "--method", "plan:target=psnr>=30")
    run("--prompt", "dog", *methods, "--steps", "6", "--guidance", "1", "--out", str(tmp_path))
    named, given = Results.load(tmp_path / "results.json").rows[:2]
    assert (named.label, given.label) == ("plan draft", "plan psnr>=30")
    assert named.computed_steps == given.computed_steps < 6
    assert named.values == given.values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts: [dog", "is not YAML: expected ',' or ']'"),
        ("- dog", "must have keys such as prompts"),
        ("", "must have keys such as prompts"),
        ("promts: [dog]", "A comparison has no 'promts'. Did you mean 'prompts'?"),
        ("prompts: [dog]\nmethod: [tea_cache]", "Did you mean 'methods'?"),
        ("prompts: [dog]\nsteps: 0", "steps must be a whole number of at least 1, not 0."),
        ("prompts: ['']", "The prompt is empty"),
        ("prompts: ['dog, glosy 3d style']", "Did you mean 'glossy 3d style'?"),
        ("prompts: [dog]\nmethods: [teacache]", "Did you mean 'tea_cache'?"),
        ("prompts: [dog]\nmethods: [{tea_cache: {rel: 1}}]", "Did you mean 'rel_l1_thresh'?"),
        ("prompts: [dog]\nmodel: emojy", "Did you mean 'emoji'?"),
        ("prompts: [dog]\narguments: {heigth: 64}", "EmojiPipeline takes no 'heigth'. Did you mean 'height'?"),
    ],
)
def test_a_bad_file_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    out, err = run(study(tmp_path, text), "--out", str(tmp_path / "out"), code=2)
    assert out == ""
    assert message in err
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    _, err = run(str(tmp_path / "none.yaml"), code=2)
    assert err == f"Error: {tmp_path / 'none.yaml'}: No such file or directory\n"


def test_no_prompt_at_all(tmp_path: Path) -> None:
    _, err = run("--out", str(tmp_path), code=2)
    assert err == "Error: A comparison needs prompts: a list of at least one.\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, err = run("--prompt", "dog", "--out", str(tmp_path / "file" / "x"), code=2)
    assert err.startswith("Error: Cannot write to ")
    assert err.count("\n") == 1
