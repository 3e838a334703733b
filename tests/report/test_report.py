"""The report: one file that fetches nothing, shows what the results contain, and works by keyboard."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image

from holdover.compare import Comparison, Custom, FewerSteps, Folder, MethodCandidate, Results, Row, compare
from holdover.report import view, write_report
from holdover.report.plots import Point, _label_points, _spread, assign_colors, find_frontier
from holdover.selector import config_class
from holdover.video import write_video
from tiny.prompted import prompted_flux, prompted_wan

SETTINGS = {"mag_threshold": 0.5, "mag_ratios": [1.0] * 8, "mag_retention_ratio": 0.2, "mag_max_skip_steps": 2}


def broken(pipe: Any) -> Any:
    raise RuntimeError("no <luck> here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    candidates = (
        MethodCandidate("mag_cache", tuple(SETTINGS.items()), "mag <b>"),
        MethodCandidate("none"),
        Custom("peer", broken),
    )
    return compare(prompted_flux(), Comparison(("red <i>apple</i>", "dog"), candidates, steps=8), folder)


@pytest.fixture(scope="module")
def html(results: Results, folder: Path) -> str:
    return write_report(results, folder).read_text("utf-8")


class Elements(HTMLParser):
    """All start tags with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_nothing_is_fetched(html: str) -> None:
    for tag, attributes in Elements(html).found:
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            value = attributes.get(name) or ""
            assert value == "" or value.startswith(("data:", "#")), f"{tag} {name}={value[:60]}"
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)


def test_every_image_is_there_with_its_description_and_its_difference(html: str, results: Results) -> None:
    images = Elements(html).all("img")
    measured = [row for row in results.rows if row.error is None]
    assert len(images) == 2 + 2 * 2 * len(measured)
    named = [image["alt"] for image in images if image["class"] == "image"]
    assert named[0] == "red <i>apple</i>, uncached"
    assert all(named)


def test_words_of_users_are_text_and_not_markup(html: str) -> None:
    assert "mag <b>" not in html
    assert "<i>apple" not in html
    assert "mag &lt;b&gt;" in html
    assert "Failed. RuntimeError: no &lt;luck&gt; here" in html


def test_the_table_has_a_row_for_each_candidate(html: str, results: Results) -> None:
    body = html[html.index("<tbody>") : html.index("</tbody>")]
    assert body.count("<tr") == 1 + len(results.rows)
    row = results.row("mag <b>")
    assert f"{row.summary('psnr').mean:.1f}" in body
    assert f"{results.speedup(row):.2f}\u00d7" in body
    assert "equal" in body


def test_a_strip_shows_each_step_of_each_branch(html: str, results: Results) -> None:
    steps = html[html.index('id="steps"') : html.index('id="table"')]
    letters = "".join(letters for row in results.rows for letters in row.strips.values())
    assert steps.count('class="computed"') == letters.count("C")
    assert steps.count('class="held"') == letters.count("h")
    assert letters.count("h") > 0


def test_the_plots_take_their_colors_from_the_page(html: str) -> None:
    plots = re.findall(r"<svg.*?</svg>", html[html.index('id="frontier"') : html.index('id="steps"')], re.DOTALL)
    assert len(plots) == 2
    for svg in plots:
        assert "currentColor" in svg
        assert "var(--violet)" in svg
        assert not re.search(r"#0[14a]0[25b]", svg), "a placeholder color is left"
        assert "<svg" in svg
        assert not re.search(r"<svg[^>]* width=", svg)
    ids = [re.findall(r' id="(p[0-9a-f]{6,})"', svg) for svg in plots]
    assert not set(ids[0]) & set(ids[1])


def test_the_same_results_give_the_same_file(html: str, results: Results, folder: Path) -> None:
    assert write_report(results, folder, "again.html").read_text("utf-8") == html


def test_results_from_a_file_give_the_same_report(html: str, folder: Path) -> None:
    loaded = Results.load(folder / "results.json")
    assert write_report(loaded, folder, "loaded.html").read_text("utf-8") == html


def test_a_report_without_images_or_rows(results: Results, tmp_path: Path) -> None:
    rows = (replace(results.row("mag <b>"), images=(), differences=()),)
    bare = replace(results, rows=rows, reference=replace(results.reference, images=()))
    assert "<img" not in write_report(bare, tmp_path).read_text("utf-8")
    assert "No method has been measured." in write_report(replace(bare, rows=()), tmp_path).read_text("utf-8")


def dump_document(page: Path, profile: Path, *more: str) -> str:
    """The document that Chromium leaves behind; skips the test where there is none."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", *more]
    done = subprocess.run(
        [chromium, *flags, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestBrowser:
    """In Chromium itself: what the script does, seen in the document it leaves behind."""

    @pytest.fixture(scope="class")
    def document(self, html: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
        acts = """<script>
        document.querySelector("input[value=differences]").click();
        document.querySelector("button.tile").click();
        document.querySelectorAll("thead button")[4].click();
        const cell = row => row.children[4] || row.children[1];
        const column = [...document.querySelectorAll("tbody tr")].map(row => cell(row).textContent);
        document.body.dataset.sorted = column.join("|");
        document.querySelectorAll("thead button")[4].click();
        document.body.dataset.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
        </script></body>"""
        page = folder / "acted.html"
        page.write_text(html.replace("</body>", acts), "utf-8")
        return dump_document(page, tmp_path_factory.mktemp("profile"), "--window-size=390,844")

    def test_the_switch_and_a_pressed_image_show_differences(self, document: str) -> None:
        (section,) = [a for a in Elements(document).all("section") if a["id"] == "images"]
        assert section["class"] == "differences"
        pressed = [a["aria-pressed"] for a in Elements(document).all("button") if a.get("class") == "tile"]
        assert pressed[0] == "true"
        assert set(pressed[1:]) == {"false"}

    def test_a_header_sorts_by_value_with_failures_last(self, document: str, results: Results) -> None:
        (body,) = Elements(document).all("body")
        column = (body["data-sorted"] or "").split("|")
        finite = [float(text) for text in column if re.fullmatch(r"[\d.]+", text)]
        assert len(finite) == len([r for r in results.rows if r.error is None and r.label != "none"])
        assert finite == sorted(finite)
        assert column[-1].startswith("Failed.")
        sorts = [a["aria-sort"] for a in Elements(document).all("th") if "aria-sort" in a]
        assert sorts[4] == "descending"
        assert set(sorts[:4] + sorts[5:]) == {"none"}

    def test_nothing_is_wider_than_a_phone(self, document: str) -> None:
        (body,) = Elements(document).all("body")
        assert body["data-wide"] == "false"


class TestVideos:
    """Clips of every method side by side, in step."""

    @pytest.fixture(scope="class")
    def clips(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
        folder = tmp_path_factory.mktemp("videos")
        held = MethodCandidate("plan", (("schedule", (0, 2)), ("predictor", "hold")), "held")
        spec = Comparison(("a cat runs",), (held,), steps=4, arguments=(("num_frames", 9),), fps=8)
        results = compare(prompted_wan(), spec, folder)
        return results, write_report(results, folder)

    def test_every_clip_is_in_the_page_with_its_worst_frame(self, clips: tuple[Results, Path]) -> None:
        results, page = clips
        html, row = page.read_text("utf-8"), results.row("held")
        assert [other.label for other in results.rows] == ["held", "2 steps"]  # Wan's solver is of second order
        videos = Elements(html).all("video")
        assert len(videos) == 1 + 2 * len(results.rows)
        assert all((video["src"] or "").startswith("data:video/mp4;base64,") for video in videos)
        assert f"worst frame {row.worst_frames[0] + 1}" in html
        for word in ("1 video, 4 steps", "per video", "Frames"):
            assert word in html

    def test_they_play_and_stop_at_a_frame(
        self, clips: tuple[Results, Path], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        acts = """<script>
        addEventListener("load", () => {
          document.body.dataset.playing = play.textContent;
          const slider = document.getElementById("frame");
          slider.value = 7;
          slider.dispatchEvent(new Event("input"));
          document.body.dataset.stopped = play.textContent + ": " + document.getElementById("at").textContent;
          document.body.dataset.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
        });
        </script></body>"""
        page = clips[1].with_name("acted.html")
        page.write_text(clips[1].read_text("utf-8").replace("</body>", acts), "utf-8")
        document = dump_document(page, tmp_path_factory.mktemp("profile"), "--window-size=390,844")
        (body,) = Elements(document).all("body")
        assert (body["data-playing"], body["data-wide"]) == ("Pause", "false")
        assert body["data-stopped"] == "Play: frame 7 of 9"

    def test_large_clips_are_reduced_and_small_ones_are_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_video(tmp_path / "large.mp4", torch.rand(3, 3, 90, 400), 8)
        monkeypatch.setattr(view, "_EMBEDDED_CLIP", 200)
        (tmp_path / "reduced.mp4").write_bytes(view._read_clip(tmp_path / "large.mp4"))
        with av.open(str(tmp_path / "reduced.mp4")) as clip:
            stream = clip.streams.video[0]
            assert (stream.width, stream.height, stream.frames, stream.average_rate) == (200, 46, 3, 8)
        assert view._read_clip(tmp_path / "reduced.mp4") == (tmp_path / "reduced.mp4").read_bytes()

    def test_without_pyav_clips_are_webp(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        folder = Folder(tmp_path)
        folder.prepare()
        name = folder.save_image({"label": "x"}, 0, torch.rand(3, 3, 16, 24))
        assert name.endswith(".webp")
        with Image.open(tmp_path / name) as image:
            assert (image.n_frames, image.size) == (3, (24, 16))
        assert view.embed_image(tmp_path / name).startswith("data:image/webp;base64,")


SERIES = ("plan", "mag_cache", "tea_cache", "ours")


@pytest.fixture(scope="module")
def many(results: Results) -> Results:
    """Forty rows: ten settings of each of four series, at different speeds."""
    row = results.row("mag <b>")
    rows = []
    for series in SERIES:
        for number in range(10):
            candidate = row.candidate | {"series": series, "label": f"{series} {number}"}
            rows.append(replace(row, candidate=candidate, seconds=tuple(s * (1 + number) for s in row.seconds)))
    return replace(results, rows=(*rows, results.row("peer")))


class TestManyRows:
    def test_one_row_of_each_series_is_shown_and_the_others_are_folded(self, many: Results, folder: Path) -> None:
        groups = view.build_page(many, folder, None)["groups"]
        assert [group["name"] for group in groups] == [*SERIES, "peer"]
        for group in groups[:-1]:
            labels = [row["label"] for row in (group["shown"], *group["more"])]
            assert sorted(labels) == [f"{group['name']} {number}" for number in range(10)]
            assert labels[0].endswith((" 4", " 5"))  # next to the median
        assert groups[-1]["more"] == []
        assert groups[-1]["shown"]["error"]  # what failed is not hidden

    def test_few_rows_are_not_folded(self, results: Results, folder: Path) -> None:
        groups = view.build_page(results, folder, None)["groups"]
        assert [group["shown"]["label"] for group in groups] == [row.label for row in results.rows]
        assert all(group["more"] == [] for group in groups)

    def test_the_page_is_not_long_and_the_table_unfolds(
        self, many: Results, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        acts = """<script>
        const shown = () => [...document.querySelectorAll("#table tbody tr")].filter(row => row.offsetHeight).length;
        document.body.dataset.height = document.documentElement.scrollHeight;
        document.body.dataset.shown = shown();
        unfold.click();
        document.body.dataset.all = shown();
        </script></body>"""
        page = write_report(many, folder, "many.html")
        page.write_text(page.read_text("utf-8").replace("</body>", acts), "utf-8")
        (body,) = Elements(dump_document(page, tmp_path_factory.mktemp("profile"))).all("body")
        assert int(body["data-height"] or 0) < 6000
        assert (body["data-shown"], body["data-all"]) == ("14", "42")


class TestParts:
    def test_labels_keep_apart_and_off_the_axes(self) -> None:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        places = [(2 + k, 30 + k) for k in range(10)]  # with room, and a crowd without
        places += [(9 + k % 8 / 20, 31 + k // 8 / 20) for k in range(64)]
        points = [Point(f"plan {k}", "plan", "method", x, y, y) for k, (x, y) in enumerate(places)]
        figure = Figure(figsize=(4.3, 4.8), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.plot([p.speed for p in points], [p.mean for p in points], "o")
        _label_points(figure, axes, points, {"plan": "#000000"})
        boxes, inside = [text.get_window_extent() for text in axes.texts], axes.get_window_extent()
        assert 10 <= len(boxes) < len(points)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert all(inside.x0 <= b.x0 and b.x1 <= inside.x1 and inside.y0 <= b.y0 and b.y1 <= inside.y1 for b in boxes)
        assert axes.texts[0].get_text().isdigit()  # without the name of the series, which the color shows

    def test_names_of_curves_are_spread_between_the_limits(self) -> None:
        assert _spread([1.0, 5.0, 9.0], 1.0, 0.0, 10.0) == [1.0, 5.0, 9.0]
        spread = _spread([9.0, 9.1, 9.2, 9.9], 1.0, 0.0, 10.0)
        assert spread == [7.0, 8.0, 9.0, 10.0]
        assert _spread([-3.0, 0.2], 1.0, 0.0, 10.0) == [0.0, 1.0]

    def test_formats(self) -> None:
        assert [view.format_seconds(value) for value in (0.0123, 0.41, 5.678, 12.34, 123.4)] == [
            "12.3 ms",
            "0.41 s",
            "5.68 s",
            "12.3 s",
            "123 s",
        ]
        assert [view.format_bytes(count) for count in (0, 12, 3_400_000)] == ["", "12 B", "3.4 MB"]
        assert [view.format_steps(value) for value in (9.0, 11.5)] == ["9", "11.5"]
        assert [view.format_decibels(value) for value in (28.04, math.inf)] == ["28.0 dB", "equal"]

    def test_the_frontier_is_what_nothing_beats(self) -> None:
        def point(speed: float, mean: float) -> Point:
            return Point("", "", "method", speed, mean, mean)

        slow, fast, beaten, tied = point(1.5, 45), point(3, 25), point(2, 20), point(3, 24)
        assert find_frontier([fast, beaten, slow, tied]) == [slow, fast]
        assert find_frontier([]) == []

    def test_every_series_has_its_own_color(self) -> None:
        names = ["tea_cache", "mag_cache", "cache_dit", "plan"]
        rows = [Row({"kind": "method", "name": name, "label": name}) for name in names]
        rows += [Row({"kind": "custom", "label": label}) for label in ("a", "b", "c")]
        rows += [Row(FewerSteps(3).as_dict()), Row(FewerSteps(3, second_order=True).as_dict())]
        found = assign_colors(Results({}, {}, "", Row({}), tuple(rows)))
        assert len(found) == len(set(found.values())) == len(rows)

    def test_the_first_series_of_a_method_has_the_color_of_the_method(self) -> None:
        entries = [("plan", "hold, uniform"), ("plan", "plan"), ("cache_dit", "cache_dit DBCache"), ("gone", "gone")]
        rows = tuple(Row({"kind": "method", "name": name, "series": s, "label": s}) for name, s in entries)
        found = assign_colors(Results({}, {}, "", Row({}), rows))
        assert found["plan"] == config_class("plan").color
        assert found["cache_dit DBCache"] == config_class("cache_dit").color
        assert len(set(found.values())) == len(rows)

    def test_large_images_are_reduced_and_small_ones_are_not(self, tmp_path: Path) -> None:
        Image.effect_noise((64, 64), 50).save(tmp_path / "small.png")
        Image.effect_noise((1024, 1024), 50).save(tmp_path / "large.png")
        assert view.embed_image(tmp_path / "small.png").startswith("data:image/png")
        large = view.embed_image(tmp_path / "large.png")
        assert large.startswith("data:image/webp")
        assert len(large) < (tmp_path / "large.png").stat().st_size
