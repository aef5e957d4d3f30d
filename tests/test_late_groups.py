"""Early stop and late groups: nothing is lost, nothing is too old, and a stopped run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.audit import audit_run
from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.plan import Plan
from deltaloom.orchestrator.run import RunRequest, prepare

from .resume_support import killed_at, resume, start
from .run_support import tiny_pipeline

HOLD = '''
import threading
from pathlib import Path

FOLDER = Path({folder!r})


def hold(groups):
    """Keep step 1's second task back until step {until} has begun."""
    (FOLDER / f"begun-{{groups[0].step}}").touch()
    if groups[0].id == "1/2":
        while not (FOLDER / "begun-{until}").exists():
            threading.Event().wait(0.02)
    return groups
'''


def held_pipeline(folder: Path, *, until: int, options: str, steps: int) -> Path:
    """Two tasks of two prompts a step; a step needs one of them."""
    return tiny_pipeline(
        folder,
        functions=HOLD.format(folder=str(folder), until=until),
        nodes='node(hold, "groups", to="held", kind="groups"),',
        scored_port="held",
        train="ready_share=0.5",
        options=options,
        steps=steps,
    )


def closed_by(run_dir: Path) -> dict[str, tuple[int, dict[str, Any]]]:
    """Version and ledger row of every group; fails for one that is closed twice."""
    stored = StoredRun(run_dir)
    rows: dict[str, tuple[int, dict[str, Any]]] = {}
    for info in stored.repository.log():
        for row in stored.ledger(info):
            assert row["group_id"] not in rows
            rows[row["group_id"]] = (info.version, row)
    return rows


def metrics_of(run_dir: Path, version: int) -> dict[str, float]:
    return dict(StoredRun(run_dir).info(str(version)).attributes["metrics"])


def test_a_straggler_is_trained_one_step_late_even_if_the_run_is_killed_between(
    tmp_path: Path,
) -> None:
    options = "max_staleness=1, late_steps=1,"
    pipeline = held_pipeline(tmp_path, until=2, options=options, steps=3)
    run_dir = tmp_path / "run"
    killed_at("committed", 2, run_dir=run_dir, pipeline=pipeline, steps=3)
    head = StoredRun(run_dir).info("1")
    assert head.attributes["cursor"] == {"next_step": 2, "late": [[1, 1]]}
    assert metrics_of(run_dir, 1)["num_rollouts"] == 8
    resume(run_dir)
    rows = closed_by(run_dir)
    assert rows.keys() == {f"{step}/{index}" for step in (1, 2, 3) for index in range(4)}
    assert [rows[group][0] for group in ("1/0", "1/1", "1/2", "1/3")] == [1, 1, 2, 2]
    assert metrics_of(run_dir, 2)["late_groups"] == 2.0
    assert metrics_of(run_dir, 2)["staleness"] == 1.0
    status = StoredRun(run_dir).status()
    assert status["closed"]
    assert status["accounting"]["trained"] == 3 * 4 * 4
    assert StoredRun(run_dir).show_group("1/2")["trained_by"] == [2]
    assert audit_run(run_dir)["identical"]


@pytest.mark.slow
def test_a_branch_leaves_late_groups_to_the_one_it_came_from(tmp_path: Path) -> None:
    options = "max_staleness=1, late_steps=1,"
    pipeline = held_pipeline(tmp_path, until=2, options=options, steps=2)
    run_dir = tmp_path / "run"
    start(pipeline, run_dir, workers=2)
    assert StoredRun(run_dir).info("1").attributes["cursor"]["late"] == [[1, 1]]
    assert closed_by(run_dir)["1/2"][0] == 2
    resume(run_dir, from_ref="1", branch="fork")
    fork = StoredRun(run_dir)
    assert fork.branch == "fork"
    closed = {row["group_id"] for v in ("1", "2") for row in fork.ledger(fork.info(v))}
    assert closed == {"1/0", "1/1", *(f"2/{index}" for index in range(4))}
    status = fork.status()
    assert status["closed"]
    assert status["accounting"]["dispatched"] == status["accounting"]["trained"] == (2 + 4) * 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop", "admit"])
def test_what_is_too_old_is_dropped_by_name_or_admitted_and_measured(
    tmp_path: Path, policy: str
) -> None:
    options = f"max_staleness=0, staleness_policy={policy!r},"
    pipeline = held_pipeline(tmp_path, until=3, options=options, steps=4)
    run_dir = tmp_path / "run"
    summary = start(pipeline, run_dir, workers=2)
    rows = closed_by(run_dir)
    assert len(rows) == 4 * 4
    version, row = rows["1/2"]
    assert version in (3, 4)
    late = metrics_of(run_dir, version)
    assert late["late_groups"] >= 2.0
    assert late["staleness"] == version - 1
    assert summary["dispatched"] == 4 * 4 * 4
    assert summary["length_finished"] == pytest.approx(summary["length_trained"], rel=0.9)
    if policy == "drop":
        assert row["reasons"] == {"drop: stale": 4}
        assert summary["reasons"]["drop: stale"] >= 8
    else:
        assert row["trained"] == 4
        assert summary["trained"] == summary["dispatched"]


HANGING = """
import threading

from deltaloom.orchestrator import hookimpl
from deltaloom.plugins.engines.torch_engine import TorchEngine


class Hanging(TorchEngine):
    name = "hanging"

    def generate(self, request, *, between_steps):
        if any(prompt.id == "1/2" for prompt in request.prompts):
            threading.Event().wait()
        return super().generate(request, between_steps=between_steps)


@hookimpl
def register_engines():
    return [Hanging]
"""


@pytest.mark.slow
def test_a_rollout_that_never_returns_holds_up_no_step_and_is_counted_once(tmp_path: Path) -> None:
    """Six prompts of four rollouts, four groups a step; one member never comes back."""
    plugins, run_dir = tmp_path / "plugins", tmp_path / "run"
    plugins.mkdir()
    (plugins / "hanging.py").write_text(HANGING)
    pipeline = tiny_pipeline(
        tmp_path,
        steps=3,
        rollout="timeout_seconds=12.0",
        train="ready_share=0.66",
        options="max_attempts=1, max_staleness=2, late_steps=2,",
    )
    text = pipeline.read_text().replace('engine="torch"', 'engine="hanging"')
    text = text.replace("range(4)", "range(6)").replace("prompts_per_task=2", "prompts_per_task=1")
    pipeline.write_text(text)
    start(pipeline, run_dir, plugins_dir=plugins, workers=2)
    rows = closed_by(run_dir)
    assert rows["1/2"][1]["reasons"] == {"invalid: no progress before the deadline": 4}
    assert rows["1/2"][0] <= 3, "it is waited for while it could still be used, and no longer"
    resume(run_dir, steps=4)
    status = StoredRun(run_dir).status()
    assert status["closed"]
    assert status["accounting"]["invalid"] == 4
    assert status["accounting"]["trained"] == 4 * 6 * 4 - 4


def planned(folder: Path, overlay: dict[str, Any]) -> Plan:
    request = RunRequest(pipeline_path=tiny_pipeline(folder), run_dir=None, overlay=overlay)
    return prepare(request).plan


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"train": {"ready_share": 0.5}}, "with late_steps 0 and staleness_policy 'wait'"),
        ({"pipeline": {"late_steps": 1}}, "pipeline.late_steps is of no use"),
        ({"pipeline": {"staleness_policy": "drop"}}, "pipeline.staleness_policy is of no use"),
        ({"train": {"ready_share": 0}}, "ready_share must be above 0 and at most 1, got 0"),
        ({"pipeline": {"late_steps": 2}}, "late_steps must be at most max_staleness 1, got 2"),
    ],
)
def test_options_that_could_have_no_effect_are_refused(
    tmp_path: Path, overlay: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, overlay)


def test_the_plan_says_that_the_run_is_not_deterministic(tmp_path: Path) -> None:
    early = planned(tmp_path, {"train": {"ready_share": 0.5}, "pipeline": {"late_steps": 1}})
    assert "depends on which groups finish first" in " ".join(early.notes)
    assert (early.template.lag, early.template.max_staleness) == (0, 1)
    flights = planned(tmp_path, {"rollout": {"in_flight": True}})
    assert "depends on when newer versions reach the engines" in " ".join(flights.notes)
    assert "same seed, same ledger" in " ".join(planned(tmp_path, {}).notes)
