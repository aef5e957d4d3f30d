"""The report in a real browser: drawn, legible at two widths and in the dark, used by keyboard.

The pictures it takes are those of docs/.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from .browser_support import (
    capture,
    chromium,
    console_faults,
    draw_everything,
    open_page,
    wait_until,
)
from .resume_support import copy_run
from .run_support import REPOSITORY, deltaloom
from .test_guard_runs import failing_pipeline
from .test_review import fill_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DOCS = REPOSITORY / "docs"
LOOKS = pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (400, False), (400, True)]
)
CONTRAST = 4.5
"""WCAG 2.1, level AA, for text."""

# Text whose colour is too near that of what is behind it, as [text, contrast].
_CONTRAST_SCRIPT = """
const channel = (byte) => {
  const v = byte / 255;
  return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
};
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const parts = parse(getComputedStyle(at).backgroundColor);
    if (parts.length === 3 || parts[3] === 1) return parts;
  }
  return parse(getComputedStyle(document.body).backgroundColor);
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || node.closest("script,style,noscript,svg")) continue;
  if (!node.getClientRects().length) continue;
  const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < arguments[0]) found.push([walker.currentNode.data.trim().slice(0, 40), contrast]);
}
return found;
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the quick start with a branch and a tag, and its report."""
    run = tmp_path_factory.mktemp("demo") / "quickstart"
    pipeline = REPOSITORY / "pipelines" / "quickstart.py"
    for command in (
        ("run", pipeline, "--run-dir", run, "--steps", "30"),
        ("tag", run, "first-half", "15"),
        ("resume", run, "--from", "18", "--branch", "gentle", "--set", "train.optimizer.lr=1e-3"),
        ("report", run, "--branch", "main"),
    ):
        done = deltaloom(*command, timeout_seconds=800)
        assert done.status == 0, done.err
    return run / "report.html"


@pytest.fixture(scope="module")
def reviewed(seen_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two people reviewed, one as the reward does and one the other way round."""
    folder = tmp_path_factory.mktemp("reviewed")
    run = copy_run(seen_run, folder / "run")
    for by, favour_low in (("ann", False), ("ben", True)):
        sheet = folder / f"{by}.jsonl"
        made = deltaloom("review", run, "export", "--branch", "main", "--out", sheet)
        assert made.status == 0, made.err
        fill_in(sheet, by=by, favour_low=favour_low)
        taken = deltaloom("review", run, "import", sheet)
        assert taken.status == 0, taken.err
    assert deltaloom("report", run, "--branch", "main").status == 0
    return run


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every version is evaluated, and whose third the guard rolled back."""
    folder = tmp_path_factory.mktemp("judged")
    run = folder / "run"
    done = deltaloom("run", failing_pipeline(folder, steps=3), "--run-dir", run)
    assert done.status == 3, done.err
    assert deltaloom("report", run, "--branch", "main").status == 0
    return run


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def drawn_points(browser: Chrome) -> list[int]:
    """Points of the longest line of each chart in #charts, as drawn: straight pieces need two."""
    found: list[int] = browser.execute_script(
        "return [...document.querySelectorAll('#charts .plot')].map((p) =>"
        " Math.max(...[...p.querySelectorAll('path.js-line')]"
        ".map((line) => line.getAttribute('d').split('L').length)))"
    )
    return found


def assert_legible(browser: Chrome) -> None:
    """Nothing is complained of, too wide, too pale or too small."""
    assert console_faults(browser) == []
    inner = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert inner[0] <= inner[1], "the page scrolls sideways"
    assert browser.execute_script(_CONTRAST_SCRIPT, CONTRAST) == []
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('.plot text, main p, main td, main th')]"
        ".filter((n) => n.getClientRects().length)"
        ".map((n) => parseFloat(getComputedStyle(n).fontSize))"
    )
    assert min(sizes) >= 11


@LOOKS
def test_everything_is_drawn_and_legible(
    browser: Chrome, demo: Path, width: int, dark: bool
) -> None:
    open_page(browser, demo, width=width, dark=dark)
    draw_everything(browser)
    points = drawn_points(browser)
    assert (min(points) >= 2, max(points)) == (True, 30)
    assert_legible(browser)
    choose(browser, version=4, group=3)
    name = f"{'dark' if dark else 'light'}-{width}"
    for section in ("curves", "rollouts", "timeline") if width == 1280 else ("rollouts",):
        capture(browser, f"#{section}", DOCS / f"report-{section}-{name}.png")


def test_curves_can_be_read_over_time(browser: Chrome, demo: Path) -> None:
    open_page(browser, demo, width=1280)
    draw_everything(browser)
    last = "return document.querySelector('#charts .plot').data[0].x.at(-1)"
    assert browser.execute_script(last) == 30
    browser.execute_script("document.querySelector('input[name=axis][value=s]').click()")
    assert browser.execute_script(last) != 30
    assert console_faults(browser) == []


def choose(browser: Chrome, *, version: int, group: int) -> None:
    """Pick the version and the group at these places of their lists."""
    for name, place in (("version", version), ("group", group)):
        browser.execute_script(
            "const pick = document.getElementById(arguments[0]); pick.value = arguments[1];"
            "pick.dispatchEvent(new Event('change'))",
            f"pick-{name}",
            place,
        )


def keys(browser: Chrome, *pressed: str) -> None:
    for key in pressed:
        browser.switch_to.active_element.send_keys(key)


def state(browser: Chrome) -> dict[str, Any]:
    """What the viewer shows at this moment."""
    found: dict[str, Any] = browser.execute_script(
        "const value = (id) => document.getElementById(id).value;"
        "const chosen = document.querySelector('.rollout[aria-selected=true]');"
        "return {version: value('pick-version'), group: value('pick-group'),"
        " rollout: chosen && chosen.id, token: document.querySelectorAll('.tokens .at').length,"
        " words: document.getElementById('token').textContent,"
        " focus: document.activeElement.id}"
    )
    return found


def test_the_viewer_is_used_by_keyboard_alone(browser: Chrome, demo: Path) -> None:
    open_page(browser, demo, width=1280)
    keys(browser, Keys.TAB)
    assert browser.switch_to.active_element.text == "Skip to the rollouts"
    for _ in range(60):
        if state(browser)["focus"] == "list":
            break
        keys(browser, Keys.TAB)
    first = state(browser)
    assert (first["focus"], first["rollout"]) == ("list", "rollout-0")
    keys(browser, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_RIGHT)
    moved = state(browser)
    assert (moved["rollout"], moved["token"]) == ("rollout-1", 1)
    assert moved["words"].startswith("token 1 of ")
    assert "trainer's minus engine's" in moved["words"]
    keys(browser, "n")
    assert state(browser)["group"] == str(int(first["group"]) + 1)
    keys(browser, "[")
    after = state(browser)
    assert after["version"] == str(int(first["version"]) - 1)
    assert after["focus"] == "list"
    assert console_faults(browser) == []


def test_tokens_are_coloured_by_what_is_chosen(browser: Chrome, demo: Path) -> None:
    open_page(browser, demo, width=1280)
    choose(browser, version=1, group=0)
    seen = set()
    for mode in ("difference", "version", "logprob"):
        browser.execute_script(
            "document.querySelector(`input[name=colour][value=${arguments[0]}]`).click()", mode
        )
        tones = browser.execute_script(
            "return [...document.querySelectorAll('#list [data-token]')]"
            ".map((span) => span.style.background)"
        )
        assert any(tones)
        seen.add(tuple(tones))
        assert browser.execute_script("return document.getElementById('legend').textContent")
    assert len(seen) == 3


def test_a_filter_leaves_the_rollouts_of_a_kind(browser: Chrome, seen_run: Path) -> None:
    page = seen_run / "report.html"
    assert deltaloom("report", seen_run, "--branch", "main").status == 0
    open_page(browser, page, width=1280)
    browser.execute_script(
        "const pick = document.getElementById('pick-filter'); pick.value = 'invalid';"
        "pick.dispatchEvent(new Event('change'))"
    )
    told = browser.execute_script(
        "return [...document.querySelectorAll('.rollout')].map((row) => row.textContent)"
    )
    assert all("invalid: first token divisible by three" in text for text in told)
    assert console_faults(browser) == []


def tables_of(browser: Chrome, section: str) -> list[list[list[str]]]:
    """The rows of a section's tables, as they are read, without their heads."""
    tables: list[list[list[str]]] = browser.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]} tbody`)].map((body) =>"
        " [...body.rows].map((row) => [...row.cells].map((cell) => cell.innerText)))",
        section,
    )
    return tables


@LOOKS
def test_reviews_are_told_and_legible(
    browser: Chrome, reviewed: Path, width: int, dark: bool
) -> None:
    summary = deltaloom("review", reviewed, "--json").json
    open_page(browser, reviewed / "report.html", width=width, dark=dark)
    assert_legible(browser)
    link = "return document.querySelector('nav a[href=\"#reviews\"]').innerText"
    assert browser.execute_script(link) == "Reviews"
    agreement, reviewers, vetoed = tables_of(browser, "reviews")
    assert len(agreement) > 2
    assert all(figure and of for _, figure, of in agreement)
    assert [row[0] for row in reviewers] == ["ann", "ben"]
    assert [row[6] for row in reviewers] == ["1", "0"]
    told = [(str(v["version"]), v["group"], str(v["rollout"])) for v in summary["vetoed"]]
    assert [tuple(row[:3]) for row in vetoed] == told
    assert {row[5] for row in vetoed} == {"not like this"}


@LOOKS
def test_evaluations_and_findings_are_told_and_legible(
    browser: Chrome, judged: Path, width: int, dark: bool
) -> None:
    log = deltaloom("log", judged, "--branch", "main", "--json").json
    open_page(browser, judged / "report.html", width=width, dark=dark)
    draw_everything(browser)
    assert_legible(browser)
    evaluations, findings = tables_of(browser, "quality")
    assert [row[:3] for row in evaluations] == [
        ["evaluate", str(line["version"]), f"{line['evaluations']['evaluate']['score'][0]:g}"]
        for line in log
    ]
    (found,) = [finding for line in log for finding in line["guard"]]
    assert findings == [["rollback", "3", found["reason"], found["rule"]]]
    titles = browser.execute_script(
        "return [...document.querySelectorAll('#charts figcaption')].map((t) => t.innerText)"
    )
    assert any("evaluate" in title for title in titles)


def test_a_verdict_stands_beside_its_rollout(browser: Chrome, reviewed: Path) -> None:
    veto = deltaloom("review", reviewed, "--json").json["vetoed"][0]
    open_page(browser, reviewed / "report.html", width=1280)
    group = int(veto["group"].rpartition("/")[2])
    choose(browser, version=veto["version"] - 1, group=group)
    beside = browser.execute_script(
        "return [...document.querySelectorAll(`#rollout-${arguments[0]} .review`)]"
        ".map((words) => words.innerText)",
        veto["rollout"],
    )
    assert [words[:5] for words in beside] == ["ann: ", "ben: "]
    assert all("veto" in words and "not like this" in words for words in beside)
    assert console_faults(browser) == []


def test_two_runs_stand_beside_each_other(browser: Chrome, demo: Path, seen_run: Path) -> None:
    page = demo.with_name("both.html")
    assert deltaloom("report", demo.parent, seen_run, "--out", page).status == 0
    open_page(browser, page, width=1280)
    draw_everything(browser)
    assert min(drawn_points(browser)) > 0
    assert (
        browser.execute_script("return document.querySelectorAll('#pick-run option').length") == 2
    )
    assert console_faults(browser) == []


def test_a_scheme_that_changes_is_followed(browser: Chrome, demo: Path) -> None:
    open_page(browser, demo, width=1280)
    draw_everything(browser)
    tone = "return document.querySelector('#charts path.js-line').style.stroke"
    light = browser.execute_script(tone)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    wait_until(browser, f"return (() => {{ {tone} }})() !== {light!r}")
