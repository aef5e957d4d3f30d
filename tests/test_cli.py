"""The command line as a person meets it: verbs, JSON, refusals, exit statuses."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from deltaloom import __version__
from deltaloom.orchestrator import StoredBranch, StoredRun
from deltaloom.orchestrator.cli.run_commands import unused_run_dir
from deltaloom.orchestrator.run_dir import is_run

from .run_support import REPOSITORY, command, deltaloom, tiny_pipeline


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run under an awkward name."""
    folder = tmp_path_factory.mktemp("cli")
    path = folder / "runs" / "é 模型 %d {x} $HOME #1"
    done = deltaloom("run", tiny_pipeline(folder), "--run-dir", path)
    assert done.status == 0, done.err
    assert "next: deltaloom log" in done.out
    return path


def test_log_lists_versions_newest_first(run_dir: Path) -> None:
    lines = deltaloom("log", run_dir, "--json").json
    assert [line["version"] for line in lines] == [3, 2, 1, 0]
    assert len(deltaloom("log", run_dir, "--limit", "2", "--json").json) == 2
    assert "snapshot" in deltaloom("log", run_dir).out


def test_the_newest_run_is_meant_when_none_is_named(run_dir: Path) -> None:
    named = deltaloom("log", run_dir, "--json").json
    assert deltaloom("log", "--json", cwd=run_dir.parent.parent).json == named


def test_show_tells_a_version_and_its_groups(run_dir: Path) -> None:
    shown = deltaloom("show", "2", "--run", run_dir, "--json").json
    assert shown["version"] == 2
    assert [row["group_id"] for row in shown["ledger"]] == ["2/0", "2/1", "2/2", "2/3"]
    assert "2/0" in deltaloom("show", "2", "--run", run_dir).out
    base = deltaloom("show", "0", "--run", run_dir, "--json").json
    assert base["attributes"]["environment"]["packages"]["torch"]


def test_show_tells_a_group_and_the_version_it_made(run_dir: Path) -> None:
    shown = deltaloom("show", "2/1", "--run", run_dir, "--json").json
    assert shown["version"] == 2
    assert len(shown["rollouts"]) == 4
    assert all(set(r["versions"]) == {0} for r in shown["rollouts"])
    assert shown["prompt"] == shown["answer"][::-1] + "="
    digits = {r["text"] for r in shown["rollouts"] if len(r["tokens"]) == len(r["text"])}
    seen = deltaloom("show", "2/1", "--run", run_dir).out
    assert all(repr(text) in seen for text in digits)
    assert f"prompt  {shown['prompt']}" in seen


def test_a_store_alone_answers_as_its_run_does(run_dir: Path, tmp_path: Path) -> None:
    store = ("--store", run_dir / "store")
    for words in (("log", "--limit", "2"), ("show", "2"), ("show", "2/1"), ("diff", "1", "3")):
        place = (run_dir,) if words[0] == "log" else ("--run", run_dir)
        of_run = deltaloom(*words, *place, "--json")
        assert deltaloom(*words, *store, "--json", cwd=tmp_path).json == of_run.json
    assert "(main)" in deltaloom("log", "--graph", *store, cwd=tmp_path).out
    refused = deltaloom("show", "2", "--run", run_dir, *store)
    assert (refused.status, "ambiguous-option" in refused.err) == (2, True)


def test_a_run_is_read_by_a_program(run_dir: Path) -> None:
    for stored in (StoredRun(run_dir), StoredBranch.open(str(run_dir / "store"))):
        assert [line["version"] for line in stored.metrics()] == [1, 2, 3]
        assert all(0 <= line["reward"] <= 1 for line in stored.metrics())
        rows = stored.rollouts(3)
        assert [(row["group"], row["at"]) for row in rows] == [
            (f"3/{group}", at) for group in range(4) for at in range(4)
        ]
        assert all(row["prompt"] == row["answer"][::-1] + "=" for row in rows)
        trained = [row for row in rows if not row["outcome"]]
        assert sum(row["reward"] for row in trained) / len(trained) == pytest.approx(
            stored.metrics()[-1]["reward"]
        )


def test_show_tells_the_rollouts_that_were_left_out_and_why(tmp_path: Path) -> None:
    functions = """
def but_for_the_second(rollout):
    return Invalid("no verdict") if rollout.seed % 2 else 1.0
"""
    pipeline = tiny_pipeline(
        tmp_path, functions=functions, by="but_for_the_second", train="min_group_size=1", steps=1
    )
    assert deltaloom("run", pipeline, "--run-dir", tmp_path / "run").status == 0
    for index in range(4):
        shown = StoredRun(tmp_path / "run").show_group(f"1/{index}")
        left = {line["at"]: line["outcome"] for line in shown["left_out"]}
        assert set(left.values()) <= {"invalid: no verdict"}
        assert len(left) == shown["row"]["invalid"]
        kept = {line["at"] for line in shown["rollouts"]}
        assert kept | set(left) == set(range(4))
    text = deltaloom("status", tmp_path / "run").out
    assert re.search(r"\n +\d+ invalid: no verdict\n", text)


def test_the_version_is_told() -> None:
    assert deltaloom("--version").out == f"deltaloom {__version__}\n"


def test_diff_counts_changed_elements_by_tensor(run_dir: Path) -> None:
    result = deltaloom("diff", "1", "3", "--run", run_dir, "--json").json
    assert result["changed"] == sum(row["changed"] for row in result["tensors"])
    assert 0 < result["changed"] <= result["elements"]
    assert len(result["ledger_rows"]) == 2 * 4
    same = deltaloom("diff", "2", "2", "--run", run_dir, "--json").json
    assert same["changed"] == 0


def test_status_closes_the_account(run_dir: Path) -> None:
    result = deltaloom("status", run_dir, "--json").json
    assert result["closed"]
    assert result["finished"]
    assert result["accounting"]["dispatched"] == 3 * 4 * 4


def test_doctor_and_plugins_answer_in_both_forms() -> None:
    checks = deltaloom("doctor", "--json").json
    assert {check["verdict"] for check in checks} <= {"ok", "warn"}
    assert {"python", "torch", "store", "plugins", "disk"} <= {check["name"] for check in checks}
    provided = [
        name for record in deltaloom("plugins", "--json").json for name in record["provides"]
    ]
    assert {"codec:raw", "engine:torch", "trainer:torch", "executor:local"} <= set(provided)
    assert "algorithm:grpo" in deltaloom("plugins").out


def test_plan_and_graph_have_no_side_effects(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    plan = deltaloom("plan", pipeline, "--run-dir", tmp_path / "run", "--json")
    assert all(node["reason"] for node in plan.json["nodes"])
    assert deltaloom("graph", pipeline, "--format", "svg").out.startswith("<svg")
    assert deltaloom("graph", pipeline, "--json").json["edges"][-1]["carried"]
    after = [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)]
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "train.lrr=1"], "Did you mean 'lr'?"),
        (["--set", "publish.codec=rawr"], "Did you mean 'raw'?"),
        (["--to-nodes", "scor"], "Did you mean 'score'?"),
        (["--set", "publish.anchor_every=-1"], "anchor_every"),
        (["--set", "pipeline.max_staleness=-2"], "max_staleness"),
    ],
)
def test_plan_and_run_refuse_the_same_things(
    tmp_path: Path, arguments: list[str], part: str
) -> None:
    pipeline = tiny_pipeline(tmp_path)
    planned = deltaloom("plan", pipeline, *arguments)
    ran = deltaloom("run", pipeline, "--run-dir", tmp_path / "run", *arguments)
    assert planned.status == ran.status == 2
    assert part in planned.err
    assert planned.err == ran.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("x = 1 / 0\npipeline = None\n", ["ZeroDivisionError", "line 1"]),
        ("import no_such_thing\n", ["no_such_thing"]),
        ("def (:\n", ["SyntaxError", "line 1"]),
        ("pipeline = 3\n", ["pipeline = Pipeline(...)", "int"]),
        ("raise SystemExit(0)\n", ["SystemExit"]),
    ],
)
def test_a_pipeline_file_that_does_not_load_is_one_clear_error(
    tmp_path: Path, content: str, parts: list[str]
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(content)
    done = deltaloom("run", path, "--run-dir", tmp_path / "run")
    assert done.status == 2
    assert done.err.startswith("error [bad-pipeline-file]")
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err
    assert "Traceback" in deltaloom("run", path, "--run-dir", tmp_path / "run", "--debug").err


def test_a_module_beside_the_pipeline_that_is_not_found_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def right(rollout):\n    return 1.0\n")
    path = tmp_path / "pipeline.py"
    path.write_text("from rewards import right\n")
    done = deltaloom("plan", path)
    assert (done.status, f"PYTHONPATH={tmp_path}" in done.err) == (2, True)


def test_a_missing_file_and_a_missing_run_are_named(tmp_path: Path) -> None:
    assert "does not exist" in deltaloom("plan", tmp_path / "none.py").err
    for verb in ("log", "status", "resume"):
        done = deltaloom(verb, tmp_path / "none")
        assert done.status == 2
        assert "run-not-found" in done.err
        assert len(done.err.splitlines()) == 2, "the message and its remedy"


def test_a_run_that_is_given_no_folder_gets_one_of_its_pipelines_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert unused_run_dir(Path("folder/count.py")) == Path("runs/count")
    done = deltaloom("run", tiny_pipeline(tmp_path), "--steps", "0", "--json")
    assert (done.status, is_run(tmp_path / "runs" / "pipeline")) == (0, True)
    assert unused_run_dir(Path("pipeline.py")) == Path("runs/pipeline-2")


def test_an_existing_run_is_refused_and_says_how_to_resume(run_dir: Path, tmp_path: Path) -> None:
    done = deltaloom("run", tiny_pipeline(tmp_path), "--run-dir", run_dir)
    assert done.status == 2
    assert "run-exists" in done.err
    assert f"deltaloom resume '{run_dir}'" in done.err


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    done = deltaloom("run", tiny_pipeline(tmp_path), "--run-dir", tmp_path / "full")
    assert done.status == 2
    assert (tmp_path / "full" / "precious").read_text() == "x"


def test_a_place_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    """As an unprivileged user, in a read-only mount, so that it holds for root too."""
    pipeline = tiny_pipeline(tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    program = " ".join(f"'{part}'" for part in command("run", pipeline, "--run-dir", place / "run"))
    script = f"mount -t tmpfs -o ro tmpfs {place} && {program}"
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
    done = subprocess.run(
        [*unshare, "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "run-unwritable" in done.stderr
    assert str(place) in done.stderr


def test_a_plugin_that_fails_at_import_does_not_brick_the_command_line(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "sad.py").write_text("raise RuntimeError('boom')\n")
    done = deltaloom("plugins", "--plugins-dir", plugins)
    assert done.status == 0
    assert "boom" in done.out
    assert deltaloom("plan", tiny_pipeline(tmp_path), "--plugins-dir", plugins).status == 0


def test_zero_steps_is_an_explicit_no_op(tmp_path: Path) -> None:
    done = deltaloom("run", tiny_pipeline(tmp_path), "--run-dir", tmp_path / "r", "--steps", "0")
    assert done.status == 0
    assert "0 versions" in done.out


def test_paths_are_resolved_against_the_launch_folder(tmp_path: Path) -> None:
    tiny_pipeline(tmp_path, steps=1)
    done = deltaloom("run", "pipeline.py", "--run-dir", "sub/run", cwd=tmp_path)
    assert done.status == 0, done.err
    assert str(tmp_path / "sub" / "run" / "store") in done.out
    assert (tmp_path / "sub" / "run" / "summary.json").exists()


def test_the_verbs_are_the_declared_ones() -> None:
    out = deltaloom("--help").out
    listed = {
        line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line.strip()
    }
    assert {"run", "resume", "log", "show", "diff", "graph", "plan", "plugins", "status"} <= listed
    assert REPOSITORY.is_dir()
