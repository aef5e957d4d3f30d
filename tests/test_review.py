"""The verb `review` on a real run: out, in, what it adds up to, and nothing else is touched."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.plugins.scorers.reviewed import ReviewedPairs
from deltaloom.storage.errors import NotFoundError

from .run_support import deltaloom, versions
from .test_report import data_of


@pytest.fixture
def run(seen_run: Path, tmp_path: Path) -> Path:
    """A copy of the run to look at, on its first branch, to change."""
    copy = tmp_path / "run"
    shutil.copytree(seen_run, copy)
    manifest = (copy / "run.json").read_text(encoding="utf-8")
    (copy / "run.json").write_text(manifest.replace(str(seen_run), str(copy)), encoding="utf-8")
    return copy


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fill_in(path: Path, *, by: str, favour_low: bool = False) -> list[dict[str, Any]]:
    """Judge every line as the reward does, or the other way round, and veto the first."""
    lines = read_lines(path)
    for number, line in enumerate(lines):
        mates = [m for m in lines if (m["version"], m["group"]) == (line["version"], line["group"])]
        sign = -1 if favour_low else 1
        worth = {m["rollout"]: sign * (m["reward"] or 0.0) for m in mates}
        line["reviewer"] = by
        line["score"] = worth[line["rollout"]]
        line["veto"] = number == 0
        line["preferred_over"] = [at for at, w in worth.items() if w < worth[line["rollout"]]]
    lines[0]["comment"] = "not like this"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return lines


def test_reviews_go_out_come_back_and_leave_the_run_as_it_is(run: Path, tmp_path: Path) -> None:
    before = versions(run)
    sheet = tmp_path / "sheet.jsonl"
    export = ("review", run, "export", "--branch", "main", "--per-version", "6", "--by-reward")
    made = deltaloom(*export, "--out", sheet, "--json")
    assert made.status == 0, made.err
    assert (made.json["rollouts"], made.json["versions"]) == (18, [1, 3])
    again = deltaloom(*export, "--out", tmp_path / "again.jsonl")
    assert again.status == 0
    assert f"import {tmp_path / 'again.jsonl'}" in again.out
    assert (tmp_path / "again.jsonl").read_bytes() == sheet.read_bytes()
    _check_sheet(read_lines(sheet), StoredRun(run, branch="main"))
    kept = deltaloom(*export, "--out", sheet)
    assert (kept.status, "somebody may be at work" in kept.err) == (2, True)

    fill_in(sheet, by="ann <b>")
    taken = deltaloom("review", run, "import", sheet, "--json")
    assert taken.status == 0, taken.err
    (review,) = taken.json["reviews"]
    assert (review["reviewer"], review["verdicts"]) == ("ann <b>", 18)
    same = deltaloom("review", run, "import", sheet, "--json").json
    assert (same["verdicts"], same["new"], same["reviews"]) == (18, 0, [])
    other = tmp_path / "again.jsonl"
    fill_in(other, by="ben", favour_low=True)
    assert deltaloom("review", run, "import", other).status == 0

    summary = deltaloom("review", run, "--json").json
    assert [item["reviewer"] for item in summary["reviews"]] == ["ann <b>", "ben"]
    ann, ben = summary["reviewers"]
    assert ann["preference_accuracy"] == 1.0
    assert ben["preference_accuracy"] == 0.0
    assert ann["score_tau_b"] == pytest.approx(1.0)
    between = summary["between_reviewers"]
    assert between["preference"]["alpha"] < 0
    assert between["score"]["units"] == 18
    assert between["veto"]["alpha"] == 1.0
    assert {veto["comment"] for veto in summary["vetoed"]} == {"not like this"}
    text = deltaloom("review", run, "summary").out
    assert "Krippendorff's alpha of 36 scores on 18 rollouts" in text
    assert re.search(r"scores and reward +(-|\S+)  \(Kendall's tau-b over \d+ rollouts\)", text)
    assert "vetoed by ann" in text

    assert versions(run) == before
    _check_report(run, tmp_path / "page.html", read_lines(sheet)[0])


@pytest.mark.slow
def test_a_reviewed_run_is_replayed_resumed_compared_and_collected(
    run: Path, tmp_path: Path
) -> None:
    untouched = tmp_path / "untouched"
    shutil.copytree(run, untouched)
    manifest = (untouched / "run.json").read_text(encoding="utf-8")
    manifest = manifest.replace(str(run), str(untouched))
    (untouched / "run.json").write_text(manifest, encoding="utf-8")
    sheet = tmp_path / "sheet.jsonl"
    assert deltaloom("review", run, "export", "--branch", "main", "--out", sheet).status == 0
    fill_in(sheet, by="ann")
    assert deltaloom("review", run, "import", sheet).status == 0
    summary = deltaloom("review", run, "--json").json
    replayed = deltaloom("replay", run, "--branch", "main")
    assert replayed.status == 0, replayed.err
    for path in (run, untouched):
        resumed = deltaloom("resume", path, "--branch", "main", "--steps", "4", "--json")
        assert (resumed.status, resumed.json["versions"]) == (0, 4)
    assert versions(run) == versions(untouched)
    compared = deltaloom("diff", run, untouched, "--branch", "main")
    assert compared.status == 0, compared.err
    assert deltaloom("gc", run, "--keep-last", "1", "--apply").status == 0
    assert deltaloom("verify", run, "--branch", "main").status == 0
    assert deltaloom("review", run, "--json").json == summary


def _check_report(run: Path, page: Path, first: dict[str, Any]) -> None:
    """The page has the agreement, and beside each rollout what was said of it."""
    done = deltaloom("report", run, "--branch", "main", "--out", page)
    assert done.status == 0, done.err
    text = page.read_text(encoding="utf-8")
    for expected in ('id="reviews"', "scores and reward", "ann &lt;b&gt;", "not like this"):
        assert expected in text
    (shown,) = data_of(page)["runs"]
    (group,) = [
        group
        for version in shown["rollouts"]
        for group in version["groups"]
        if (version["version"], group["id"]) == (first["version"], first["group"])
    ]
    said = group["rollouts"][first["rollout"]]["reviews"]
    assert [words.partition(":")[0] for words in said] == ["ann <b>", "ben"]
    assert "veto" in said[0]


def _check_sheet(lines: list[dict[str, Any]], stored: StoredRun) -> None:
    blanks = ("score", "veto", "preferred_over", "comment", "reviewer")
    for line in lines:
        assert [line[name] for name in blanks] == [None] * 5
        group = stored.show_group(line["group"])
        assert group["version"] == line["version"]
        assert line["prompt"] == line["answer"][::-1] + "="
        assert line["ended"] == (len(line["completion"]) < 3)
        outcome = line["outcome"]
        assert (line["reward"] is None) == outcome.startswith("invalid: first token")
    pairs = [(line["version"], line["group"]) for line in lines]
    assert all(pairs.count(pair) > 1 for pair in pairs)
    assert any(line["reward"] is None for line in lines)


@pytest.mark.slow
def test_a_store_alone_is_reviewed_and_its_pairs_are_those_of_the_file(
    run: Path, tmp_path: Path
) -> None:
    store, sheet = run / "store", tmp_path / "sheet.jsonl"
    export = ("review", "export", "--store", store, "--versions", "2:3", "--per-version", "12")
    assert deltaloom(*export, "--per-group", "4", "--out", sheet).status == 0
    judged = fill_in(sheet, by="")
    nobody = deltaloom("review", "import", sheet, "--store", store)
    assert (nobody.status, "line 1, field 'reviewer'" in nobody.err) == (2, True)
    taken = deltaloom("review", "import", sheet, "--store", store, "--reviewer", "ann", "--json")
    (review,) = taken.json["reviews"]
    from_file = ReviewedPairs.from_file(sheet)
    num_pairs = sum(len(line["preferred_over"]) for line in judged)
    assert len(from_file) == num_pairs > 3
    from_store = ReviewedPairs.from_store(store, reviews=[review["id"]])
    assert from_store.preferences == from_file.preferences
    pairs = tmp_path / "pairs.jsonl"
    made = deltaloom("review", "pairs", "--store", store, "--out", pairs, "--json")
    assert made.json["pairs"] == num_pairs
    assert ReviewedPairs.from_file(pairs).preferences == from_file.preferences
    with pytest.raises(NotFoundError, match="no review note 'other'"):
        ReviewedPairs.from_store(store, reviews=["other"])
    none = deltaloom(
        "review", "pairs", "--store", store, "--versions", "1", "--out", tmp_path / "x"
    )
    assert (none.status, "no reviewer preferred" in none.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("review", "a", "b"), "expected [RUN] and one of"),
        (("review", "summary", "--out", "x"), "--out is an option of export and pairs"),
        (("review", "export", "--reviewer", "ann"), "--reviewer is an option of import"),
    ],
)
def test_words_that_make_no_sense_are_refused(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    done = deltaloom(*arguments, cwd=tmp_path)
    assert done.status == 2
    assert expected in done.err


@pytest.mark.slow
def test_there_must_be_something_to_review(run: Path, tmp_path: Path) -> None:
    empty = deltaloom("review", run, "export", "--versions", "0", "--out", tmp_path / "x")
    assert (empty.status, "has rollouts to review" in empty.err) == (2, True)
    blank = tmp_path / "sheet.jsonl"
    assert deltaloom("review", run, "export", "--branch", "main", "--out", blank).status == 0
    nothing = deltaloom("review", run, "import", blank)
    assert (nothing.status, "nothing is filled in" in nothing.err) == (2, True)
    assert "no review is stored" in deltaloom("review", run).out


@pytest.mark.slow
def test_a_branch_goes_on_without_what_was_vetoed(run: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.jsonl"
    export = ("review", run, "export", "--branch", "main", "--versions", "2:3", "--out", sheet)
    assert deltaloom(*export, "--per-version", "16").status == 0
    lines = read_lines(sheet)
    for line in lines:
        bad = (line["group"], line["rollout"]) == ("2/1", 0)
        line |= {"reviewer": "ann", "veto": bad, "comment": "taken back later" if bad else ""}
    sheet.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (review,) = deltaloom("review", run, "import", sheet, "--json").json["reviews"]
    fork = ("resume", run, "--from", "main@1", "--branch", "clean", "--json")
    unknown = deltaloom(*fork, "--set", 'train.vetoes=["nothing"]')
    assert (unknown.status, "no review note 'nothing'" in unknown.err) == (2, True)
    done = deltaloom(*fork, "--set", f'train.vetoes=["{review["id"]}"]')
    assert done.status == 0, done.err
    stored = StoredRun(run, branch="clean")
    rows = {row["group_id"]: row for row in stored.ledger(stored.info("2"))}
    assert rows["2/1"]["reasons"]["drop: vetoed by ann"] == 4 - rows["2/1"]["invalid"] > 0
    others = [row for group, row in rows.items() if group != "2/1"]
    assert all("vetoed" not in str(row["reasons"]) for row in others)
    before = {r["group_id"]: r for r in StoredRun(run, branch="main").show("2")["ledger"]}
    assert rows["2/1"]["content_digest"] == before["2/1"]["content_digest"]
    replayed = deltaloom("replay", run, "--branch", "clean")
    assert replayed.status == 0, replayed.err
    # One rollout is dropped with its group: a later word does not change the run that named this.
    for line in lines:
        line["veto"] = False
    sheet.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert deltaloom("review", run, "import", sheet).status == 0
    again = deltaloom("resume", run, "--branch", "clean", "--steps", "4", "--json")
    assert (again.status, again.json["versions"]) == (0, 4)
