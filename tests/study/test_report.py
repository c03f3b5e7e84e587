"""The page people send each other: what it says, and what a browser makes of it."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from megabench.record import (
    Communication,
    Group,
    HostRanks,
    LayoutSizes,
    PlacementUsed,
    Probe,
    RecordError,
    RunRecord,
    StepProfile,
    StepSeconds,
    read_records,
    write_records,
)
from megabench.study.doctor import examine
from megabench.study.parity import judge_parity
from megabench.study.report import StudyRecords, read_folder, render
from megabench.study.summary import summarize, write_csv
from tests.study.compare_process import REPOSITORY, finish, start
from tests.study.records import make_record, work_class

GPU = {"device": "NVIDIA H200", "world_size": 4, "num_hosts": 1}


def trial(name: str, speed: float, losses: tuple[float, ...] = (6.0, 5.0, 4.5, 4.2), **changes: object) -> RunRecord:
    seconds = 1000 / speed
    steps = StepSeconds(median=seconds, p10=0.99 * seconds, p90=1.02 * seconds, all=[seconds, 0.99 * seconds] * 5)
    return make_record(list(losses), speed, trial=name, step_seconds=steps, **GPU | changes)


def zero3(name: str = "zero3", speed: float = 900.0, **changes: object) -> RunRecord:
    options = {"zero_stage": 3, "recompute": "none"}
    return trial(name, speed, engine="deepspeed", options=options, **changes)


def lost(name: str, status: str, error: str) -> RunRecord:
    nothing = {"work_class": None, "step_seconds": None, "tokens_per_second_per_device": None, "peak_memory_gib": None}
    return make_record([], trial=name, status=status, error=error, tokens_per_second=None, **GPU | nothing)


def placed(record: RunRecord) -> RunRecord:
    """The same on two emulated hosts, profiled, with what was tried for its micro-batch."""
    hosts = [HostRanks(name="node/0", ranks=[0, 1]), HostRanks(name="node/1", ranks=[2, 3])]
    groups = [Group(kind="tp", ranks=[0, 1], link="nvlink", transport="P2P/CUMEM")]
    parts = {"matrix products": 0.6, "attention": 0.1, "exposed tp": 0.2, "idle": 0.1}
    update = {
        "num_hosts": 2,
        "emulated_hosts": 2,
        "layout": LayoutSizes(tp=2, cp=1, pp=2, vp=1, dp=1),
        "placement": PlacementUsed(policy="topology", launcher_ranks=[0, 1, 2, 3], hosts=hosts),
        "groups": groups,
        "profile": StepProfile(
            step_seconds=1.0, seconds=parts, communication={"tp": Communication(seconds=0.5, exposed_seconds=0.2)}
        ),
        "probes": [Probe(micro_batch=1, recompute="none", global_batch=16, status="ok", step_seconds=1.5)],
    }
    return record.model_copy(update=update)


STUDIES: dict[str, list[RunRecord]] = {
    "layouts": [zero3(), placed(trial("tp2-pp2", 1500)), trial("tp4", 700), trial("dp4", 1200)],
    "repeats": [*(zero3(speed=s, repeat=n) for n, s in enumerate((900, 910))), trial("tp4", 905)],
    "zero3-wins": [zero3(speed=2000), trial("tp4", 900)],
    "faults": [
        zero3(),
        trial("tp4", 1200),
        trial("drifted", 3000, losses=(6.0, 5.0, 4.5, 9.0)),
        lost("huge", "oom", "rank 1 ran out of memory after step 2 of 20: CUDA out of memory"),
        lost("stuck", "timeout", "no result after 60 s (timeout_seconds): rank 2 in all_reduce, 3 of 20 steps done"),
    ],
    "two-classes": [zero3(), trial("tp4", 1000), trial("tp4-64", 1400, work_class=work_class(global_batch=64))],
    "scaling": [
        zero3(f"zero3-{size}", 900 - 50 * size, world_size=size, layout=LayoutSizes(tp=1, cp=1, pp=1, vp=1, dp=size))
        for size in (1, 2, 4)
    ],
    "alone": [zero3()],
    "all-failed": [
        lost("zero3", "failed", "rank 0 failed: ValueError: <b>no</b> & never"),
        lost("tp4", "oom", "memory"),
    ],
    "cpu": [make_record([6.0, 5.0], trial="zero3", options={"zero_stage": 3}), make_record([6.0, 5.0], 1200)],
    "long-names": [zero3("zero3-" + "with-everything-offloaded-" * 4), trial("tp4-" + "x" * 90, 1000)],
}


def study(name: str) -> StudyRecords:
    records = STUDIES[name]
    reference = records[0].trial
    return StudyRecords(name, f"Which is fastest in {name}?", reference, tuple(judge_parity(records, reference)))


def page_of(name: str, other: str | None = None) -> str:
    mine = study(name)
    return render(mine, examine(mine.records, mine.reference), study(other) if other else None)


def words_of(html: str) -> str:
    body = re.sub(r"<(style|script).*?</\1>", "", html, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layouts", ["tp2-pp2 trains fastest: 1,500 tokens/s per GPU, 1.67 × ZeRO-3", "The hosts are emulated"]),
        ("layouts", ["torchrun --nproc-per-node 2 launch/pretrain.py", "micro-batch", "exposed tp", "node/1"]),
        ("zero3-wins", ["zero3 (ZeRO-3) trains fastest: 2,000 tokens/s per GPU. No layout beat it; the next, tp4"]),
        ("repeats", ["zero3 (ZeRO-3) and tp4 are equal within their spread"]),
        ("faults", ["tp4 trains fastest", "drifted diverged", "huge ran out of memory", "stuck hit its time limit"]),
        ("faults", ["rank 2 in all_reduce, 3 of 20 steps done", "do not use its speed"]),
        ("two-classes", ["tp4 trains fastest", "tp4-64 is the only trial with a result"]),
        ("alone", ["There was nothing to compare it with"]),
        ("all-failed", ["No trial has a result that counts", "&lt;b&gt;no&lt;/b&gt; &amp; never"]),
        ("cpu", ["These are CPU timings: no evidence about GPUs."]),
    ],
)
def test_what_the_page_says(name: str, words: list[str]) -> None:
    said = words_of(page_of(name))
    assert all(word in said for word in words), said[:3000]


def test_nothing_bad_is_called_fastest() -> None:
    headline = re.findall(r'class="headline">(.*?)<', page_of("faults"))
    assert len(headline) == 1 and "drifted" not in headline[0]


def test_two_studies_side_by_side() -> None:
    said = words_of(page_of("layouts", other="zero3-wins"))
    assert "layouts and zero3-wins" in said and "second ÷ first" in said


def test_records_and_summary_read_back_to_the_same_table(tmp_path: Path) -> None:
    for name in ("faults", "layouts"):
        mine = study(name)
        write_records(tmp_path / "results.jsonl", list(mine.records))
        again = read_records(tmp_path / "results.jsonl")
        assert again == list(mine.records)
        tables = []
        for number, records in enumerate((mine.records, again)):
            write_csv(tmp_path / f"{number}.csv", summarize(records, mine.reference))
            tables.append((tmp_path / f"{number}.csv").read_text())
        assert tables[0] == tables[1] and tables[0].count("\n") == 1 + len(mine.records)


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in REPOSITORY.glob("benchmarks/*/results.jsonl")))
def test_older_records_are_drawn(folder: str) -> None:
    """Those of benchmarks/ were written by earlier versions, which knew fewer fields."""
    mine = read_folder(REPOSITORY / "benchmarks" / folder)
    assert words_of(render(mine, [], mine)).count(mine.name) >= 2


def test_newer_records_are_refused(tmp_path: Path) -> None:
    text = zero3().model_copy(update={"schema_version": 99}).model_dump_json()
    (tmp_path / "results.jsonl").write_text(text + "\n")
    with pytest.raises(RecordError, match="line 1 has record schema 99, and this megabench reads schemas up to"):
        read_folder(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megabench.cli", "report"]
    status, out, err = finish(start(command, tmp_path))
    assert (status, out) == (2, "") and "holds no results.jsonl" in err
    write_records(tmp_path / "results.jsonl", STUDIES["layouts"])
    status, out, err = finish(start(command, tmp_path, "--compare", REPOSITORY / "benchmarks/engines-bf16"))
    assert (status, err) == (0, "") and Path(out.strip()) == tmp_path / "report.html"
    assert "tp2-pp2 trains fastest" in (tmp_path / "report.html").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "the report's tests need a browser; install it: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that is open, with what it asked for and complained about."""

    def __init__(self, browser: Browser, html: str, folder: Path, width: int = 1200, dark: bool = False) -> None:
        (folder / "report.html").write_text(html)
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = (folder / "report.html").as_uri()
        self.page.goto(self.url)

    def close(self) -> None:
        self.page.context.close()
        assert self.complaints == []
        assert [url for url in self.requests if url != self.url and not url.startswith("data:")] == []


@pytest.mark.e2e
@pytest.mark.parametrize("name", STUDIES)
def test_a_browser_draws_it_and_nothing_overflows(browser: Browser, tmp_path: Path, name: str) -> None:
    for width in (375, 1200):
        visit = Visit(browser, page_of(name), tmp_path, width)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        pictures = visit.page.locator("figure svg[role=img]")
        for number in range(pictures.count()):
            box = pictures.nth(number).bounding_box()
            assert box and box["width"] > 100 and box["height"] > 20, f"chart {number} of {name} is not drawn"
            assert pictures.nth(number).locator("title").count() >= 1
        if name == "layouts":
            assert pictures.count() >= 5
        visit.close()


@pytest.mark.e2e
def test_the_table_sorts_by_click_and_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    visit = Visit(browser, page_of("layouts"), tmp_path)
    table = visit.page.locator("table.sortable").first
    rows = table.locator("tbody th[scope=row]")
    by_speed = rows.all_inner_texts()
    head = table.locator("thead button", has_text="tok/s per GPU").first
    head.click()
    assert rows.all_inner_texts() == by_speed
    head.focus()
    visit.page.keyboard.press("Enter")
    assert rows.all_inner_texts() == by_speed[::-1]
    assert table.locator("th[aria-sort=ascending]").inner_text().startswith("tok/s per GPU")
    assert "sorted by tok/s per GPU, ascending" in visit.page.locator("#said").inner_text()
    visit.close()


@pytest.mark.e2e
def test_dark_text_stands_out_and_paper_has_no_buttons(browser: Browser, tmp_path: Path) -> None:
    for dark in (False, True):
        visit = Visit(browser, page_of("faults"), tmp_path, dark=dark)
        for selector in ("h1", "p.faint", "td", ".finding dd", ".headline"):
            assert contrast(visit.page, selector) > 4.5, f"{selector}, dark {dark}"
        visit.close()
    visit = Visit(browser, page_of("faults"), tmp_path)
    assert visit.page.locator("button").first.is_visible()
    visit.page.emulate_media(media="print")
    assert not any(button.is_visible() for button in visit.page.locator(".tools button, .command button").all())
    visit.close()


def contrast(page: Page, selector: str) -> float:
    """Of the text of the first such element with what lies behind it, by WCAG 2."""
    colors = page.locator(selector).first.evaluate(
        """element => {
            const found = [getComputedStyle(element).color];
            for (let at = element; at; at = at.parentElement) {
                const behind = getComputedStyle(at).backgroundColor;
                if (!behind.endsWith(", 0)")) return [...found, behind];
            }
            return [...found, getComputedStyle(document.documentElement).backgroundColor];
        }"""
    )
    light = sorted(luminance([float(part) for part in re.findall(r"[\d.]+", color)[:3]]) for color in colors)
    return (light[1] + 0.05) / (light[0] + 0.05)


def luminance(color: list[float]) -> float:
    parts = [part / 255 for part in color]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
