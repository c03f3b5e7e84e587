"""The report in a real browser: charts drawn, no error, no request, on a phone, in the dark, and on paper."""

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from megabench.doctor import examine
from megabench.report import write_report
from tests.report.report_studies import FINDINGS, STUDIES, yesterday

pytestmark = pytest.mark.e2e

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LEAST_CONTRAST = 4.5  # WCAG 2.2, level AA, for text

CONTRASTS = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parts(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("p, h1, h2, h3, li, dt, dd, td, th, button, summary, .chip, text")) {
    if (!element.textContent.trim() || element.closest(".hidden, .skip") || element.matches(".inside")) continue;
    const style = getComputedStyle(element);
    const ink = light(parts(element.matches("text") ? style.fill : style.color));
    const back = light(parts(behind(element).map(String).join(" ")));
    const ratio = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
    found.push([ratio, element.tagName + "." + element.getAttribute("class") + " " + element.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]).slice(0, 5);
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not path:
        pytest.fail(f"these tests need a browser: apt-get install chromium (looked for {', '.join(BROWSERS)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page that is open, with what it said and asked for."""

    def __init__(self, browser, path: Path, width: int = 1100, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def column(self, head: str) -> list[str]:
        """The cells of the table of figures under `head`."""
        table = self.page.locator("#trials")
        number = [words.strip() for words in table.locator("thead th").all_inner_texts()].index(head)
        return [row.locator("th, td").nth(number).inner_text().strip() for row in table.locator("tbody tr").all()]


@pytest.fixture
def show(chromium, tmp_path) -> Iterator[object]:
    opened: list[Opened] = []

    def open_study(name: str, **settings) -> Opened:
        path = tmp_path / f"{name}.html"
        study = STUDIES[name]()
        findings = [*FINDINGS, *examine(study.records, study.reference)]
        write_report(path, study, findings, yesterday() if name == "normal" else None)
        opened.append(Opened(chromium, path, **settings))
        return opened[-1]

    yield open_study
    for one in opened:
        one.context.close()


@pytest.mark.parametrize("name", STUDIES)
def test_charts_are_drawn_without_an_error_or_a_request(show, name):
    opened = show(name)
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
    charts = opened.page.locator("figure svg.chart").all()
    assert bool(charts) == (name != "all_failed")
    for chart in charts:
        box = chart.bounding_box()
        assert box["width"] > 200 and box["height"] > 50
        assert chart.evaluate("e => e.querySelector('title').textContent && e.querySelector('desc').textContent")
        marks = chart.evaluate("e => [...e.querySelectorAll('rect, circle, path')].map(m => m.getBBox().width)")
        assert max(marks) > 1


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("width", [375, 320])
def test_nothing_overflows_on_a_phone(show, name, width):
    page = show(name, width=width).page
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        f"""() => [...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll, .hidden, .skip, defs")
        && e.getBoundingClientRect().right > {width} + 1).map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert outside == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["normal", "faults", "profiled", "on_cpu"])
def test_text_has_contrast(show, name, scheme):
    page = show(name, scheme=scheme).page
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    worst = page.evaluate(CONTRASTS)
    assert worst[0][0] >= LEAST_CONTRAST, worst


def test_the_table_sorts_by_mouse_and_by_keyboard(show):
    opened = show("faults")
    assert opened.column("tok/s per GPU") == ["8,000", "6,000", "9,900", "–", "–"]
    head = opened.page.locator("#trials thead th", has_text="tok/s per GPU")
    head.get_by_role("button").click()
    assert opened.column("tok/s per GPU") == ["9,900", "8,000", "6,000", "–", "–"]
    assert head.get_attribute("aria-sort") == "descending"
    head.get_by_role("button").focus()
    opened.page.keyboard.press("Enter")
    assert opened.column("tok/s per GPU") == ["6,000", "8,000", "9,900", "–", "–"]
    opened.page.keyboard.press("Shift+Tab")
    opened.page.keyboard.press("Space")
    assert [name.split()[-1] for name in opened.column("trial")] == ["dp16", "pp4-hung", "tp4-lr", "tp8", "zero3"]
    assert opened.page.locator("#said").inner_text() == "sorted by trial, ascending"
    assert opened.errors == []


def test_the_table_and_the_commands_can_be_copied(show):
    opened = show("zero3_wins")
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.page.get_by_role("button", name="Copy for a spreadsheet").click()
    opened.page.get_by_role("button", name="Copied").wait_for()
    lines = opened.page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0].startswith("trial\ttok/s per GPU\t× ZeRO-3\tparity") and lines[1].startswith("zero3\t8,000\t")
    assert "\tspread of tok/s\t" in lines[0], "a spreadsheet gets the hidden columns, too"
    opened.page.get_by_role("button", name="Copy", exact=True).first.click()
    opened.page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('torchrun')")


def test_more_columns_are_shown_on_request(show):
    page = show("zero3_wins").page
    head = page.locator("#trials thead th", has_text="spread of tok/s")
    assert not head.is_visible()
    page.get_by_role("button", name="more columns").click()
    assert head.is_visible()
    page.get_by_role("button", name="Fewer columns").click()
    assert not head.is_visible()


def test_a_wide_table_says_that_it_scrolls(show):
    hint = "Scroll the table sideways to see all columns."
    assert show("zero3_wins", width=400).page.get_by_text(hint).is_visible()
    assert not show("zero3_wins", width=1800).page.get_by_text(hint).is_visible()


def test_paper_shows_what_is_folded_away_and_no_button(show):
    page = show("normal", scheme="dark").page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    buttons = page.locator("button:not(th button)")
    assert buttons.count() > 5 and not any(button.is_visible() for button in buttons.all())
    assert page.evaluate("[...document.querySelectorAll('details')].every((part) => part.open)")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(page.pdf()) > 10_000


def test_a_screen_reader_finds_its_way(show):
    page = show("normal").page
    assert page.locator("h1").count() == 1 and page.locator("main").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((head) => Number(head.tagName[1]))")
    assert all(after <= before + 1 for before, after in pairwise(levels))
    unnamed = page.evaluate(
        "[...document.querySelectorAll('svg.chart')].filter((e) => e.getAttribute('aria-labelledby').split(' ')"
        ".some((id) => !document.getElementById(id)?.textContent)).length"
    )
    assert unnamed == 0
