"""The page in a real browser: Debian's chromium, driven by Playwright (the extra `browser`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import gpt2_step, hostile, relu

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
WIDTHS = (390, 820, 1440)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        made = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


class Files(dict[str, Path]):
    """The pages by name, each made when it is first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        make = {"relu": lambda _: relu(), "gpt2": gpt2_step, "hostile": hostile}[name]
        self[name] = self.folder / f"{name}.html"
        self[name].write_text(make(self.folder), encoding="utf-8")
        return self[name]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("pages"))


class Opened:
    """A page in the browser, with all that went wrong in it."""

    def __init__(self, browser: Any, path: Path, width: int = 1440, **options: Any):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.context.set_offline(True)
        self.tab = self.context.new_page()
        self.wrong: list[str] = []
        self.tab.on("console", lambda m: self.wrong.append(m.text))
        self.tab.on("pageerror", lambda e: self.wrong.append(str(e)))
        self.tab.on("request", lambda r: r.url.startswith("file:") or self.wrong.append(r.url))
        self.tab.goto(path.as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert not self.wrong

    def lit(self, rung: str) -> list[str]:
        return [x.strip() for x in self.tab.locator(f"#rung-{rung} .lit").all_inner_texts()]

    def here(self) -> str:
        return str(self.tab.locator(".ladder .here").inner_text()).split()[0]


def test_a_click_lights_counterparts_on_every_rung(browser: Any, files: Files) -> None:
    with Opened(browser, files["relu"]) as page:
        page.tab.get_by_text("y[i,j] = relu(mm + x2[j])").first.click()
        for rung in ("python", "torch", "program", "tensor", "loop", "tile", "kernel", "plan",
                     "source"):
            assert page.lit(rung), rung
        assert any("aten.add.Tensor" in x for x in page.lit("torch"))
        assert not any("aten.mm" in x for x in page.lit("torch"))
        assert all("fma" not in x for x in page.lit("kernel"))
        assert page.tab.locator(".ladder .has").count() == 9
        page.tab.keyboard.press("Escape")
        assert not page.lit("torch")


def test_up_from_a_line_of_source(browser: Any, files: Files) -> None:
    with Opened(browser, files["relu"]) as page:
        line = page.tab.locator("#rung-source span[data-s]").filter(has_text="fma_f32x16").first
        line.click()
        assert page.lit("torch") and all("aten.mm" in x for x in page.lit("torch"))
        assert any("contract" in x for x in page.lit("loop"))


def test_the_keyboard_moves(browser: Any, files: Files) -> None:
    with Opened(browser, files["relu"]) as page:
        for name in ("ATen", "Program", "Tensor"):
            page.tab.keyboard.press("ArrowDown")
            assert page.here() == name
        page.tab.keyboard.press("ArrowRight")
        assert page.lit("tensor") and page.tab.locator("#rung-tensor .picked").count() == 1
        first = page.tab.locator(".picked").inner_text()
        page.tab.keyboard.press("ArrowRight")
        assert page.tab.locator(".picked").inner_text() != first
        page.tab.keyboard.press("ArrowUp")
        assert page.here() == "Program"
        page.tab.keyboard.press("f")
        assert page.tab.locator("#rung-torch span:visible").count() == len(page.lit("torch"))


def test_search_marks_and_filters(browser: Any, files: Files) -> None:
    with Opened(browser, files["gpt2"]) as page:
        rows = page.tab.locator("#kernels details.kernel:visible").count()
        page.tab.keyboard.press("/")
        page.tab.keyboard.type("layer_norm")
        assert page.tab.locator(".hit").count() > 5
        left = page.tab.locator("#kernels details.kernel:visible").count()
        assert 0 < left < rows
        page.tab.keyboard.press("Enter")
        assert page.tab.locator(".picked").count() == 1
        assert "layer_norm" in page.tab.locator(".picked").inner_text()
        page.tab.keyboard.press("Escape")
        assert page.tab.locator("#kernels details.kernel:visible").count() == rows


def test_forward_and_backward_of_one_line(browser: Any, files: Files) -> None:
    with Opened(browser, files["gpt2"]) as page:
        page.tab.locator("#rung-python span[data-s]").filter(
            has_text="self.bias, x.view").first.click()
        around = "#rung-kernel details.some > summary"
        graphs = {x.split()[0] for x in page.tab.locator(around).all_inner_texts()}
        assert graphs >= {"forward", "backward"}
        page.tab.locator("#kernels details.kernel > summary").first.click()
        assert page.tab.get_by_text("Price of a launch").first.is_visible()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["relu", "gpt2"])
def test_widths_and_themes(browser: Any, files: Files, name: str, width: int,
                           tmp_path: Path) -> None:
    with Opened(browser, files[name], width) as page:
        seen = []
        for theme in ("light", "dark"):
            wide = page.tab.evaluate("document.documentElement.scrollWidth")
            assert wide <= width
            seen.append(page.tab.evaluate("getComputedStyle(document.body).backgroundColor"))
            page.tab.screenshot(path=tmp_path / f"{name}-{width}-{theme}.png")
            page.tab.locator("#theme").click()
        assert seen[0] != seen[1]


def test_the_theme_of_the_system(browser: Any, files: Files) -> None:
    with Opened(browser, files["relu"], color_scheme="dark") as page:
        before = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        page.tab.keyboard.press("t")
        assert page.tab.evaluate("document.documentElement.dataset.theme") == "light"
        assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_text_without_scripts(browser: Any, files: Files) -> None:
    with Opened(browser, files["relu"], java_script_enabled=False) as page:
        assert page.tab.get_by_text("run_mm_relu(const float").is_visible()
        page.tab.locator("#passes summary").first.click()
        assert page.tab.locator("#passes details[open]").count() == 1


def test_hostile_names(browser: Any, files: Files) -> None:
    with Opened(browser, files["hostile"]) as page:
        assert "broken" not in page.tab.title()
        assert page.tab.locator("img").count() == 0
        page.tab.locator("#rung-python span[data-s]").first.click()
        assert page.lit("source")
