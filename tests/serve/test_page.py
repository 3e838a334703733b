"""The page in a real browser. Chromium comes from the system: apt-get install chromium."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdover.selector import methods
from holdover.serve import running
from holdover.serve.model import ServedModel
from tiny.prompted import prompted_qwen, prompted_wan

from .servers import PATIENCE, Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ARTIFACTS = Path(os.environ.get("HOLDOVER_ARTIFACTS", Path(__file__).resolve().parents[2] / ".pytest_cache" / "page"))

expect.set_options(timeout=1000 * PATIENCE)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Watched:
    """A page, its console messages and its requests."""

    def __init__(self, browser: Browser, url: str, **options: object) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page: Page = browser.new_context(**options).new_page()  # type: ignore[arg-type]
        self.page.on("console", lambda m: self.messages.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.goto(url)
        expect(self.page.locator("[name=method]").first).to_be_attached()

    def wait_for_the_result(self) -> None:
        expect(self.page.locator("#psnr")).not_to_have_text("–")

    def cells(self, side: str) -> str:
        """The strip's first branch: `C` computed, `h` held."""
        classes = (
            self.page.locator(f"#{side} .branch")
            .first.locator(".cell")
            .evaluate_all("cells => cells.map(cell => cell.className)")
        )
        return "".join(name.split()[-1] for name in classes)


def set_up(page: Page, prompt: str, steps: int = 6) -> None:
    page.fill("#prompt", prompt)
    page.fill("#steps", str(steps))
    page.fill("#guidance", "1")


def test_a_prompt_is_generated_without_and_with_a_cache(browser: Browser, server: Server) -> None:
    watched = Watched(browser, server.url, viewport={"width": 1240, "height": 1000})
    page = watched.page
    set_up(page, "ghost")
    page.press("#prompt", "Enter")
    watched.wait_for_the_result()
    for side in ("plain", "cached"):
        assert page.locator(f"#{side} img").evaluate("image => image.naturalWidth") == 64
    assert watched.cells("plain") == "CCCCCC"
    held = watched.cells("cached")
    assert "h" in held
    assert held.startswith("C")
    assert re.fullmatch(r"\d+\.\d\d×", page.inner_text("#speed"))
    assert re.fullmatch(r"\d+\.\d dB", page.inner_text("#psnr"))
    assert page.inner_text("#forwards") == f"{held.count('C')} of 6"

    page.check("[value=tea_cache]", force=True)
    expect(page.locator("[data-setting=rel_l1_thresh]")).to_be_visible()
    page.click("#generate")
    watched.wait_for_the_result()
    assert page.locator("#plot circle").count() == 2
    assert "method=tea_cache" in page.url

    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTIFACTS / "page.png", full_page=True)
    assert watched.messages == []
    assert [url for url in watched.requests if not url.startswith((server.url, "data:"))] == []


def test_a_link_has_the_settings_and_starts_generating(browser: Browser, server: Server) -> None:
    query = "?prompt=rocket&style=&size=64x64&steps=4&guidance=1&seed=3&method=mag_cache&cache.mag_max_skip_steps=1"
    watched = Watched(browser, f"{server.url}/{query}")
    watched.wait_for_the_result()
    page = watched.page
    fields = {name: page.input_value(f"#{name}") for name in ("prompt", "style", "size", "steps", "guidance", "seed")}
    assert fields == {"prompt": "rocket", "style": "", "size": "64x64", "steps": "4", "guidance": "1", "seed": "3"}
    assert page.input_value("[data-setting=mag_max_skip_steps]") == "1"
    assert page.url.endswith(query)
    assert watched.messages == []


def test_it_works_on_a_phone_in_the_dark_and_by_keyboard(browser: Browser, server: Server) -> None:
    phone = {"width": 390, "height": 844}
    watched = Watched(browser, server.url, viewport=phone, color_scheme="dark", is_mobile=True, has_touch=True)
    page = watched.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", ground)[:3])) < 150
    set_up(page, "ghost", steps=60)
    page.focus("#generate")
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_focused()
    expect(page.locator("#plain .cell.C").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#generate")).to_be_focused()
    assert watched.messages == []


def test_an_error_is_shown(browser: Browser, server: Server) -> None:
    watched = Watched(browser, server.url)
    page = watched.page
    set_up(page, "ghost", steps=3)
    page.locator("#steps").evaluate("input => { input.max = 1000; input.value = 500; }")
    page.click("#generate")
    expect(page.locator("#messages")).to_contain_text("steps is 500; this server allows at most 100.")
    page.click("#messages button")
    expect(page.locator("#messages li")).to_have_count(0)


def test_every_field_is_sent_and_any_number_is_taken(browser: Browser, server: Server) -> None:
    watched = Watched(browser, server.url)
    page = watched.page
    set_up(page, "ghost", steps=3)
    page.fill("#guidance", "0.123")
    page.fill("#negative", "blur")
    page.fill("#size", "96x96")
    page.fill("#seed", "9007199254740991")
    page.fill("[data-setting=mag_threshold]", "1234.5678")
    with page.expect_request("**/v1/images/generations") as plain:
        page.click("#generate")
    watched.wait_for_the_result()
    sent = plain.value.post_data_json
    assert (sent["guidance"], sent["size"], sent["seed"], sent["steps"]) == (0.123, "96x96", 2**53 - 1, 3)
    assert sent["negative_prompt"] == "blur"
    assert "cfg_scale" not in sent
    assert "size=96x96" in page.url
    assert "cache.mag_threshold=1234.5678" in page.url
    assert page.locator("#cached img").evaluate("image => image.naturalWidth") == 96
    page.check("[value=tea_cache]", force=True)
    page.click("summary")
    page.fill("[data-setting=coefficients]", "[1, 0]")
    with page.expect_request(lambda request: "tea_cache" in (request.post_data or "")) as cached:
        page.click("#generate")
    assert cached.value.post_data_json["cache"] == {"method": "tea_cache", "coefficients": [1, 0]}
    watched.wait_for_the_result()
    assert watched.messages == []


def test_a_plan_aims_for_a_quality_a_psnr_or_a_speed_up(browser: Browser, server: Server) -> None:
    watched = Watched(browser, f"{server.url}/?method=plan&steps=6&guidance=1")
    page = watched.page
    watched.wait_for_the_result()
    shown = {"quality": {"quality": "high"}, "target": {"target": "psnr>=40"}, "budget": {"budget": "3x"}}
    for aim, settings in shown.items():
        page.select_option("#aim", aim)
        for name in shown:
            expect(page.locator(f"[data-setting={name}]")).to_be_visible(visible=name == aim)
        with page.expect_request(lambda request: '"plan"' in (request.post_data or "")) as cached:
            page.click("#generate")
        assert cached.value.post_data_json["cache"] == {"method": "plan", **settings}
        watched.wait_for_the_result()
    page.select_option("#aim", "quality")
    assert (
        page.locator("[data-setting=quality]").evaluate("list => [...list.options].filter(o => !o.hidden).length") == 4
    )
    page.select_option("[data-setting=quality]", label="draft")
    assert "cache.quality=%22draft%22" in page.url
    linked = Watched(browser, page.url)
    linked.wait_for_the_result()
    assert linked.page.input_value("#aim") == "quality"
    assert linked.page.locator("[data-setting=quality]").evaluate("list => list.selectedOptions[0].label") == "draft"
    assert watched.messages + linked.messages == []


def test_every_method_has_a_form_and_generates(browser: Browser, server: Server) -> None:
    watched = Watched(browser, server.url)
    page = watched.page
    set_up(page, "ghost", steps=4)
    shown = page.locator("[name=method]").evaluate_all("inputs => inputs.map(input => input.value)")
    assert shown == [method for method in methods() if method != "none"]
    for method in shown:
        page.check(f"[value={method}]", force=True)
        page.click("#generate")
        watched.wait_for_the_result()
        assert page.locator("#messages li").count() == 0, (method, page.inner_text("#messages"))
    assert watched.messages == []


def test_a_message_about_a_link_is_kept_while_its_image_is_generated(browser: Browser, server: Server) -> None:
    query = "?prompt=rocket&style=&steps=3&guidance=1&seed=3&method=mag_cache&cache.mag_threshold=oops"
    watched = Watched(browser, f"{server.url}/{query}")
    watched.wait_for_the_result()
    expect(watched.page.locator("#messages")).to_contain_text("cache.mag_threshold in the link is not a valid value.")


@pytest.fixture(scope="module")
def qwen() -> Iterator[str]:
    """A tiny Qwen-Image pipeline behind a key: it has true classifier-free guidance, no other, and no styles."""
    model = ServedModel("tiny", prompted_qwen())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdover.serve.worker.load_model", lambda settings: model)
        patch.setenv("HOLDOVER_API_KEYS", "right")
        with running(model="tiny") as server:
            yield server.url


def test_a_wrong_key_is_called_wrong_and_another_model_has_other_fields(browser: Browser, qwen: str) -> None:
    page = browser.new_context().new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(qwen)
    expect(page.locator("#messages")).to_contain_text("This server requires a key.")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#messages")).to_contain_text("This key is wrong.")
    page.fill("#key", "right")
    page.press("#key", "Enter")
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#messages li")).to_have_count(0)
    expect(page.locator("#key")).to_be_hidden()
    expect(page.locator("#style")).to_be_hidden()
    expect(page.locator("#guidance")).to_be_hidden()
    assert page.input_value("#cfg_scale") == "4"  # the default of the pipeline
    page.fill("#steps", "4")
    page.fill("#size", "96x64")
    page.fill("#negative", "blur")
    page.check("[value=tea_cache]", force=True)
    with page.expect_request("**/v1/images/generations") as request:
        page.click("#generate")
    sent = request.value.post_data_json
    assert (sent["negative_prompt"], sent["size"], sent["cfg_scale"]) == ("blur", "96x64", 4)
    assert "guidance" not in sent
    expect(page.locator("#plain img")).to_have_js_property("naturalWidth", 96)
    assert "negative=blur" in page.url


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny Wan 2.2 behind a key."""
    model, folder = ServedModel("tiny", prompted_wan()), tmp_path_factory.mktemp("videos")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdover.serve.worker.load_model", lambda settings: model)
        patch.setenv("HOLDOVER_API_KEYS", "right")
        with running(model="tiny", video_dir=str(folder)) as server:
            yield server.url


def test_videos_play_side_by_side(browser: Browser, wan: str) -> None:
    page, messages = browser.new_context().new_page(), list[str]()
    page.on("console", lambda m: messages.append(m.text) if "401" not in m.text else None)
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(wan)
    page.fill("#key", "right")
    page.press("#key", "Enter")
    expect(page.locator("#frames")).to_have_value("81")
    for field, value in {"size": "96x64", "frames": "9", "steps": "12", "guidance": "1"}.items():
        page.fill(f"#{field}", value)
    page.check("[value=easy_cache]", force=True)
    page.fill("[data-setting=threshold]", "0.5")
    page.click("#generate")
    expect(page.locator("#psnr")).to_contain_text("dB")
    shown = page.locator("video").evaluate_all(
        "all => all.map((v) => [v.videoWidth, v.videoHeight, v.duration, v.paused])"
    )
    assert shown == [[96, 64, 0.5625, False]] * 2
    assert page.locator("#plain .cell.h").count() == 0
    assert page.locator("#cached .cell.h").count() > 0
    assert "frames=9" in page.url
    expect(page.locator("#ssim")).to_be_hidden()
    page.fill("#steps", "100")
    page.click("#generate")
    expect(page.locator("#plain .time")).to_contain_text("of 100")
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    assert messages == []
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTIFACTS / "videos.png", full_page=True)


def test_the_api_page_works_without_the_internet(browser: Browser, server: Server) -> None:
    page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(f"{server.url}/docs")
    generations = page.locator("#post-v1-images-generations")
    expect(generations).to_contain_text("negative_prompt")
    expect(page.locator("#post-v1-images-edits")).to_contain_text("multipart/form-data")
    for method in methods():
        expect(generations.locator("summary", has_text=re.compile(f"^{method}$"))).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert messages == []
    assert [url for url in requests if not url.startswith(server.url)] == []
