"""The report: figures, thinning, the timeline's causes, and a page that is whole by itself."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.figures import figures_of
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.report import spans
from deltaloom.orchestrator.report.charts import CHARTS, charts_for
from deltaloom.orchestrator.report.page import amount, flat_options, seconds, share, size
from deltaloom.orchestrator.report.spans import Times, find_gaps, idle_seconds, task_spans
from deltaloom.orchestrator.report.thinning import spread, thinned
from deltaloom.orchestrator.report.timeline import run_times, timeline_of
from deltaloom.orchestrator.report.viewer import token_text

from .run_support import REPOSITORY, deltaloom


def data_of(page: Path) -> Any:
    """What the page's script draws from."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', text)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


@pytest.fixture(scope="module")
def page(seen_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    done = deltaloom("report", seen_run, "--branch", "main", "--out", path)
    assert done.status == 0, done.err
    assert str(path) in done.out
    return path


def test_the_page_needs_nothing_but_itself(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    head, _, _ = text.partition('<script type="text/plain" id="library">')
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "@import" not in head
    assert page.stat().st_size < 10e6


def test_the_page_says_what_the_run_is(page: Path, seen_run: Path) -> None:
    text = page.read_text(encoding="utf-8")
    stored = StoredRun(seen_run, branch="main")
    head = stored.info("3")
    for expected in (head.snapshot_id, head.state_digest, head.attributes["config_digest"]):
        assert expected in text
    assert "invalid: first token divisible by three" in text
    assert "The account is closed" in text
    assert "train.optimizer.lr: 0.01 -&gt; 0.02" in text
    assert "<code>best</code> at 2" in text
    assert "packages.torch" in text
    assert 'id="reviews"' not in text
    assert "rollout.max_new_tokens" in text


def test_the_curves_are_the_commits_metrics(page: Path, seen_run: Path) -> None:
    data = data_of(page)
    (run,) = data["runs"]
    titles = [chart["title"] for chart in data["charts"]]
    reward = run["lines"][titles.index("Reward")][0]
    stored = StoredRun(seen_run, branch="main")
    values = [stored.info(str(v)).attributes["metrics"]["reward"] for v in reward["v"]]
    assert reward["v"] == [1, 2, 3]
    assert reward["y"] == pytest.approx(values, rel=1e-4)
    lags = run["lines"][titles.index("Publish lag")]
    assert [line["name"] for line in lags] == ["trained until committed", "training itself"]
    published = run["bytes"][0]
    assert published["y"] == [stored.info(str(v)).weight_bytes for v in (1, 2, 3)]


def test_density_by_kind_adds_up_to_what_the_commit_says(page: Path, seen_run: Path) -> None:
    density = data_of(page)["runs"][0]["density"]
    info = StoredRun(seen_run, branch="main").info("2")
    column = density["v"].index(2)
    counted = sum(
        row[column] * elements
        for row, elements in zip(density["z"], density["elements"], strict=True)
    )
    assert counted == pytest.approx(info.num_changed, rel=1e-3)


def test_the_viewer_holds_every_rollout_with_its_fate(page: Path, seen_run: Path) -> None:
    (run,) = data_of(page)["runs"]
    stored = StoredRun(seen_run, branch="main")
    assert [version["version"] for version in run["rollouts"]] == [1, 2, 3]
    for version in run["rollouts"]:
        rows = {row["group_id"]: row for row in stored.ledger(stored.info(str(version["version"])))}
        for group in version["groups"]:
            row = rows[group["id"]]
            assert [rollout["at"] for rollout in group["rollouts"]] == [0, 1, 2, 3]
            kept = [rollout for rollout in group["rollouts"] if "outcome" not in rollout]
            assert len(kept) == row["trained"]
            assert all(len(r["differences"]) == len(r["tokens"]) for r in kept)
            prompt = "".join(run["pieces"][str(token)] for token in group["prompt"])
            assert prompt == group["answer"][::-1] + "="
    shown = stored.show_group("2/1")["rollouts"]
    (group,) = [g for g in run["rollouts"][1]["groups"] if g["id"] == "2/1"]
    trained = [rollout for rollout in group["rollouts"] if "outcome" not in rollout]
    assert [r["tokens"] for r in trained] == [r["tokens"] for r in shown]


def test_the_timeline_accounts_for_every_worker_s_time(page: Path) -> None:
    timeline = data_of(page)["runs"][0]["timeline"]
    assert timeline["lanes"][-2:] == ["trainer", "committer"]
    workers = [lane for lane in timeline["lanes"] if lane.startswith("local-")]
    assert workers
    kinds = {span[3] for window in timeline["windows"] for span in window["spans"]}
    assert {"rollout", "score", "train", "publish"} <= kinds
    for row in timeline["table"]:
        if row["lane"] in workers:
            assert row["busy"] + row["idle"] <= timeline["seconds"] + 0.05
            assert row["idle"] == pytest.approx(sum(c["seconds"] for c in row["causes"]))


def test_a_store_alone_and_a_range_of_versions_make_a_page(seen_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    store = str(seen_run / "store")
    done = deltaloom(
        "report", "--store", store, "--versions", "2:3", "--out", path, "--json", cwd=tmp_path
    )
    assert done.status == 0, done.err
    assert done.json["size_bytes"] == path.stat().st_size
    (run,) = data_of(path)["runs"]
    assert run["timeline"] is None
    assert [version["version"] for version in run["rollouts"]] == [2, 3]
    none = deltaloom("report", "--store", store, "--versions", "7:9", "--out", path)
    assert (none.status, "no version in that range" in none.err) == (2, True)


def test_two_runs_are_compared(seen_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    done = deltaloom("report", seen_run, seen_run, "--branch", "main", "--out", path)
    assert done.status == 0, done.err
    text = path.read_text(encoding="utf-8")
    assert "are the same, bit for bit" in text
    assert "No option differs" in text
    assert len(data_of(path)["runs"]) == 2
    refused = deltaloom("report", seen_run, seen_run, seen_run, "--out", path)
    assert refused.status == 2


def test_figures_follow_the_commits(seen_run: Path) -> None:
    stored = StoredRun(seen_run, branch="main")
    figures = figures_of([*reversed(stored.repository.log("main"))])
    assert figures.versions == (0, 1, 2, 3)
    assert figures.metrics["reward"][0] is None
    assert figures.seconds[0] == 0.0
    assert all(later > 0 for later in figures.seconds[1:])
    assert figures.published[0] == sum(stored.info(str(v)).weight_bytes for v in (1, 2, 3))
    assert figures.accounting.is_closed
    empty = figures_of([])
    assert (empty.versions, empty.published, empty.last) == ((), (0, 0), {})


def test_a_metric_nobody_foresaw_gets_a_chart_if_it_moves(seen_run: Path) -> None:
    stored = StoredRun(seen_run, branch="main")
    figures = figures_of([*reversed(stored.repository.log("main"))])
    other = {"odd": (None, 1.0, 2.0, 2.0), "still": (1.0, 1.0, 1.0, 1.0), "tokens": (1.0, 2.0)}
    changed = replace(figures, metrics={**figures.metrics, **other})
    titles = [chart.title for chart in charts_for([figures, changed])]
    assert titles[: len(CHARTS)] == [chart.title for chart in CHARTS]
    assert "odd" in titles
    assert not {"still", "tokens"} & set(titles)


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300),
    st.integers(4, 60),
)
def test_thinning_keeps_ends_and_extremes(values: list[float | None], limit: int) -> None:
    kept = thinned(values, limit=limit)
    known = [at for at, value in enumerate(values) if value is not None]
    assert kept == sorted(set(kept))
    assert set(kept) <= set(known)
    assert len(kept) <= max(limit, 0)
    if known:
        assert {known[0], known[-1]} <= set(kept)
        numbers = [values[at] for at in known]
        shown = [values[at] for at in kept]
        assert max(shown) == max(numbers)  # type: ignore[type-var]
        assert min(shown) == min(numbers)  # type: ignore[type-var]


@given(st.lists(st.integers(), unique=True, max_size=80), st.integers(1, 20))
def test_spreading_takes_first_and_last(items: list[int], limit: int) -> None:
    chosen = spread(items, limit=limit)
    assert len(chosen) == min(len(items), limit)
    assert [item for item in items if item in set(chosen)] == chosen
    if items:
        assert chosen[-1] == items[-1]
        assert limit == 1 or chosen[0] == items[0]


def line(task: str, worker: str, start: float, seconds: float) -> dict[str, Any]:
    role = task.partition("/")[0]
    return {"task": task, "worker": worker, "role": role, "time": start, "seconds": seconds}


LINES = [
    {"worker": "w0", "event": "joined", "reason": "", "time": 0.0},
    {"worker": "w1", "event": "joined", "reason": "", "time": 0.0},
    line("source/1/0", "w0", 0.0, 1.0),
    line("rollout/1/0", "w0", 1.0, 4.0),
    line("rollout/1/1", "w1", 1.0, 2.0),
    line("score/1/1", "w1", 3.0, 1.0),
    line("score/1/0", "w1", 5.5, 0.5),
    line("rollout/2/0", "w0", 9.0, 1.0),
    {"task": "rollout/9/0", "worker": "spool", "role": "rollout", "time": 0.0, "seconds": 0.0},
]
TIMES = Times(trained={1: (6.0, 8.0)}, committed={1: (8.0, 8.8)})


def test_a_gap_is_blamed_on_what_its_next_task_waited_for() -> None:
    work = [*task_spans(LINES), *spans.driver_spans(TIMES)]
    gaps = find_gaps(work, TIMES, lag=0, joined=spans.joins(LINES))
    idle = idle_seconds(gaps)
    assert idle["w0", "training"] == pytest.approx(3.0)
    assert idle["w0", "publishing"] == pytest.approx(0.8)
    assert idle["w0", "dispatch"] == pytest.approx(0.2)
    assert idle["w1", "prompts"] == pytest.approx(1.0)
    assert idle["w1", "rollouts"] == pytest.approx(1.0)
    assert idle["w1", "dispatch"] == pytest.approx(0.5)
    assert idle["w1", "end of run"] == pytest.approx(4.0)
    (blamed,) = [gap for gap in gaps if gap.cause == "rollouts"]
    assert "rollout 1/0" in blamed.words


def test_an_evaluation_waits_for_its_version_and_nobody_for_it() -> None:
    lines = [*LINES[:6], line("score/1/0", "w1", 5.5, 0.5), line("evaluate/1/0", "w1", 9.0, 1.0)]
    times = Times(trained={1: (6.0, 8.0), 2: (10.5, 11.0)}, committed={1: (8.0, 8.8)})
    work = [*task_spans(lines), *spans.driver_spans(times)]
    gaps = find_gaps(work, times, lag=0, joined=spans.joins(lines))
    idle = idle_seconds(gaps)
    assert idle["w1", "training"] == pytest.approx(2.0)
    assert idle["w1", "publishing"] == pytest.approx(0.8)
    assert not any("evaluate" in gap.words for gap in gaps)


def test_a_group_s_task_waited_for_the_rollouts_of_its_step() -> None:
    lines = [
        {"worker": "w0", "event": "joined", "time": 0.0},
        line("rollout/1/0", "w1", 0.0, 4.0),
        line("source/1/0", "w0", 0.0, 1.0),
        line("score/1/3", "w0", 3.0, 0.5),
    ]
    times = Times(trained={}, committed={})
    gaps = find_gaps(task_spans(lines), times, lag=0, joined=spans.joins(lines))
    (blamed,) = [gap for gap in gaps if gap.lane == "w0" and gap.cause == "rollouts"]
    assert (blamed.start, blamed.end) == (1.0, 3.0)
    assert "rollout tasks of step 1" in blamed.words


def test_a_lane_is_not_idle_while_a_task_goes_on_that_began_before_its_last_one() -> None:
    lines = [
        line("rollout/1/0", "w0", 0.0, 4.0),
        line("source/2/0", "w0", 0.1, 0.1),
        line("score/1/0", "w0", 5.0, 1.0),
    ]
    times = Times(trained={}, committed={})
    gaps = find_gaps(task_spans(lines), times, lag=0, joined=spans.joins(lines))
    assert [(gap.start, gap.end) for gap in gaps] == [(4.0, 5.0)]


def test_a_resumed_run_is_not_idle_while_it_was_stopped() -> None:
    lines = [
        {"worker": "w0", "event": "joined", "time": 0.0},
        line("rollout/1/0", "w0", 0.0, 1.0),
        {"worker": "w0", "event": "joined", "time": 100.0},
        line("rollout/2/0", "w0", 101.0, 1.0),
    ]
    gaps = find_gaps(
        task_spans(lines), Times(trained={}, committed={}), lag=0, joined=spans.joins(lines)
    )
    assert [(gap.cause, gap.end - gap.start) for gap in gaps] == [
        ("start-up", 99.0),
        ("dispatch", 1.0),
    ]


def test_times_prefer_what_the_run_wrote() -> None:
    stored = {1: {"trained_at": 10.0, "train_seconds": 2.0}, 2: {}}
    times = run_times(
        stored, {1: 11.0, 2: 12.0}, [{"version": 1, "time": 11.5, "commit_seconds": 1.25}]
    )
    assert times.trained == {1: (8.0, 10.0)}
    assert times.committed == {1: (10.25, 11.5)}
    assert run_times(stored, {1: 11.0}, []).committed == {1: (10.0, 11.0)}


def test_a_run_without_times_has_no_timeline() -> None:
    assert timeline_of([{"task": "rollout/1/0", "worker": "w0"}], TIMES, lag=0) is None


def test_the_shares_of_the_timeline_fill_the_workers_time() -> None:
    drawn = timeline_of(LINES, TIMES, lag=0)
    assert drawn is not None
    states = drawn["shares"]["states"]
    for column in zip(*states.values(), strict=True):
        assert sum(column) == pytest.approx(1.0, abs=0.02)


class DropsFirstSpace:
    """A tokenizer like sentencepiece's: a first word loses its space."""

    def decode(self, tokens: list[int]) -> str:
        return "".join({1: " the", 2: "s"}.get(token, "") for token in tokens).lstrip(" ")


def test_a_token_keeps_the_space_it_has_within_a_sentence() -> None:
    tokenizer: Any = DropsFirstSpace()
    assert [token_text(token, tokenizer) for token in (1, 2, 3)] == [" the", "s", ""]
    assert token_text(1, None) == ""


def test_numbers_are_shown_in_units_that_fit() -> None:
    assert [amount(v) for v in (None, 3, 12345, 0.123456)] == ["-", "3", "12,345", "0.1235"]
    assert [size(v) for v in (999, 1500, 2.5e9)] == ["999 B", "1.5 kB", "2.5 GB"]
    assert [share(v) for v in (0.0123, 0.5)] == ["1.23%", "50%"]
    assert [seconds(v) for v in (1.5, 600, 7200)] == ["1.5 s", "10.0 min", "2.0 h"]
    assert flat_options({"a": {"b": 1}, "c": None}) == [("a.b", "1"), ("c", "null")]


def test_the_page_on_metrics_explains_every_figure_and_cause(seen_run: Path) -> None:
    text = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    (*_, last) = (seen_run / "metrics.jsonl").read_text().splitlines()
    own = {"step", "time", "version", "snapshot_id", "is_anchor"}
    names = {name for name in json.loads(last) if not name.startswith("rollouts_")} - own
    shown = {metric for chart in CHARTS for metric, _ in chart.lines}
    causes = {value for name, value in vars(spans).items() if name.isupper() and name[0] != "_"}
    lanes = {spans.TRAINER, spans.COMMITTER, spans.SPOOL}
    for name in names | shown | (causes - lanes):
        assert f"`{name}`" in text, name
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (REPOSITORY / "docs" / target).exists(), target
