"""Inter-stage fusion in real runs: groups go on while others are drawn; all else is the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deltaloom.orchestrator.errors import PluginError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.run import RunRequest, prepare

from .ppo_support import TINY_PPO
from .run_support import deltaloom, tiny_pipeline, versions

FUSED = ("--set", 'pipeline.fusion=["fusion-inter"]')

MARKED = """
import os
from pathlib import Path

SIGNALS = Path(__file__).parent / "signals"

def marked(rollout):
    pipe = SIGNALS / rollout.prompt.id.replace("/", "-")
    if pipe.exists():
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"scored")
        os.close(descriptor)
    return position_match(rollout)
"""

ENGINES = """
import os
import select
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from deltaloom.orchestrator import hookimpl
from deltaloom.orchestrator.interfaces import FusionPlan, Replacement
from deltaloom.plugins.engines.torch_engine import TorchEngine
from deltaloom.plugins.trainers.torch_trainer import TorchTrainer

SIGNALS = Path(__file__).parent.parent / "signals"

class Waiting(TorchEngine):
    '''Goes on with the first task of step 1 only when its first group was scored, and is killed
    once in step 2 after it handed a group on.'''
    name = "waiting"

    def stream(self, request, *, on_group, between_steps=None):
        def hand_on(index, group):
            step, _, position = request.prompts[index].id.partition("/")
            pipe = SIGNALS / f"{step}-{position}"
            if step == "1" and position in ("0", "1") and not self.waited:
                self.waited = True
                os.mkfifo(pipe)
                descriptor = os.open(pipe, os.O_RDWR)
                on_group(index, group)
                assert select.select([descriptor], [], [], 60)[0], "nobody scored the group"
                return
            on_group(index, group)
            if step == "2" and not (SIGNALS / "killed").exists():
                (SIGNALS / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().stream(request, on_group=hand_on, between_steps=between_steps)

    waited = False

class Dying(TorchEngine):
    '''Is killed whenever it completes the first prompt of step 1.'''
    name = "dying"

    def generate(self, request, *, between_steps=None):
        groups = super().generate(request, between_steps=between_steps)
        if request.prompts[0].id == "1/0":
            os.kill(os.getpid(), signal.SIGKILL)
        return groups

class Altering(TorchEngine):
    '''Returns other rollouts than it handed on.'''
    name = "altering"

    def generate(self, request, *, between_steps=None):
        groups = super().generate(request, between_steps=between_steps)
        return [list(reversed(group)) for group in groups]

class Named(TorchTrainer):
    name = "named"

@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    pass

class Renaming:
    '''Trains by a class of its own that does the same.'''
    name = "renaming"
    Config = Nothing

    def __init__(self, config):
        pass

    def plan(self, pipeline):
        options = asdict(pipeline.nodes["train"].components["trainer"].config)
        part = Replacement(node="train", slot="trainer", name="named", options=options)
        return FusionPlan(replacements=(part,), reason="another name")

@hookimpl
def register_engines():
    return [Waiting, Dying, Altering]

@hookimpl
def register_trainers():
    return [Named]

@hookimpl
def register_fusion_planners():
    return [Renaming]
"""


def contents(run_dir: Path) -> list[Any]:
    """Every version's digests, ledger, batch and rollouts, to the bit."""
    stored = StoredRun(run_dir)
    tables = []
    for info in reversed(stored.repository.log()):
        for name in ("batch", "rollouts") if info.version else ():
            values, arrays = stored.repository.read_table(info.snapshot_id, name)
            columns = {key: (array.dtype.str, array.tobytes()) for key, array in arrays.items()}
            tables.append((info.version, name, values, columns))
    return [versions(run_dir), tables]


def ppo_with_engines(folder: Path) -> tuple[Path, Path]:
    """A PPO pipeline whose scorer tells the engines, and the folder of their plugin."""
    (folder / "signals").mkdir()
    (folder / "plugins").mkdir()
    (folder / "plugins" / "engines.py").write_text(ENGINES, encoding="utf-8")
    pipeline = folder / "ppo.py"
    text = TINY_PPO.replace("\n\npipeline =", f"{MARKED}\n\npipeline =", 1)
    pipeline.write_text(text.replace("by=position_match", "by=marked"), encoding="utf-8")
    return pipeline, folder / "plugins"


@pytest.mark.slow
def test_groups_are_scored_while_others_are_drawn_and_the_run_is_the_same(tmp_path: Path) -> None:
    """With another's planner beside, rollouts one version behind, and a worker killed between two
    groups."""
    pipeline, plugins = ppo_with_engines(tmp_path)
    fused, plain = tmp_path / "fused", tmp_path / "plain"
    options = ("--plugins-dir", plugins, "--set", "rollout.engine=waiting", "--set")
    steps = "pipeline.steps=2"
    both = ("--set", 'pipeline.fusion=["fusion-inter", "renaming"]')
    done = deltaloom("run", pipeline, "--run-dir", fused, *options, steps, *both)
    assert done.status == 0, done.err
    assert (tmp_path / "signals" / "killed").exists()
    lines = [json.loads(line) for line in (fused / "tasks.jsonl").read_text().splitlines()]
    tasks = {line["task"] for line in lines if "seconds" in line}
    nodes = ("score", "values", "reference", "join")
    assert tasks > {f"{node}/{step}/{item}" for node in nodes for step in (1, 2) for item in (0, 3)}
    for pipe in (tmp_path / "signals").iterdir():
        pipe.unlink()
    done = deltaloom("run", pipeline, "--run-dir", plain, *options, steps)
    assert done.status == 0, done.err
    assert contents(fused) == contents(plain)
    profiled = ("plan", pipeline, *options, f"fusion.fusion-inter.profile={plain}", *both)
    forecast = deltaloom(*profiled).out
    assert f"forecast from {plain}: " in forecast
    least = deltaloom(*profiled, "--set", "fusion.fusion-inter.min_speedup=50")
    assert "not fused by fusion-inter: forecast from" in least.out
    assert "fused: train.trainer = named (another name)" in least.out
    simulated = ("simulate", "fusion", "--run", plain, "--num-instances", "2", "--json")
    found = deltaloom(*simulated).json["by_group"]
    assert f"{found['by_task_seconds']:.4g} s a step by task" in forecast
    assert f"{found['by_group_seconds']:.4g} by group" in forecast
    assert found["speedup"] == found["by_task_seconds"] / found["by_group_seconds"] < 2


@pytest.mark.slow
def test_a_rollout_task_that_is_given_up_takes_the_groups_that_went_on_with_it(
    tmp_path: Path,
) -> None:
    pipeline, plugins = ppo_with_engines(tmp_path)
    outcomes = []
    for name, fusion in (("fused", FUSED), ("plain", ())):
        done = deltaloom(
            *("run", pipeline, "--run-dir", tmp_path / name, "--plugins-dir", plugins),
            *("--set", "rollout.engine=dying", "--set", "pipeline.max_attempts=2"),
            *("--set", "pipeline.steps=2", *fusion),
        )
        assert done.status == 0, done.err
        rows = [row for _, _, ledger in versions(tmp_path / name) for row in ledger]
        outcomes.append([(row["group_id"], row["outcome"], row["invalid"]) for row in rows])
    assert outcomes[0] == outcomes[1]
    assert [row[1:] for row in outcomes[0][:2]] == [("invalid", 4), ("invalid", 4)]


@pytest.mark.slow
def test_an_engine_that_hands_on_other_rollouts_than_it_returns_is_named(tmp_path: Path) -> None:
    pipeline, plugins = ppo_with_engines(tmp_path)
    done = deltaloom(
        *("run", pipeline, "--run-dir", tmp_path / "run", "--plugins-dir", plugins),
        *("--set", "rollout.engine=altering", *FUSED),
    )
    assert done.status == 1
    # Which task is first depends on which worker is.
    assert re.search(r"'altering' handed on other rollouts of group \d/\d", done.err), done.err


@pytest.mark.slow
def test_a_fused_run_that_is_stopped_goes_on_unfused_and_ends_the_same(tmp_path: Path) -> None:
    pipeline = tmp_path / "ppo.py"
    pipeline.write_text(TINY_PPO, encoding="utf-8")
    mixed, plain = tmp_path / "mixed", tmp_path / "plain"
    assert deltaloom("run", pipeline, "--run-dir", plain).status == 0
    done = deltaloom("run", pipeline, "--run-dir", mixed, "--set", "pipeline.steps=2", *FUSED)
    assert done.status == 0, done.err
    done = deltaloom("resume", mixed, "--steps", "4", "--set", "pipeline.fusion=[]")
    assert done.status == 0, done.err
    assert contents(mixed) == contents(plain)


def set_task_seconds(run_dir: Path, seconds: float) -> None:
    """Have a run's record say that every task after a rollout took so much by itself, beside 0.1 s
    of work."""
    path = run_dir / "tasks.jsonl"
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line.get("role") in ("score", "infer", "function"):
            line |= {"run_seconds": 0.1, "pack_seconds": 0.0, "seconds": 0.1 + seconds}
            line["driver_seconds"] = 0.0
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


@pytest.mark.slow
def test_the_plan_fuses_or_not_by_what_a_task_cost_in_the_profile(tmp_path: Path) -> None:
    pipeline, profile = tmp_path / "ppo.py", tmp_path / "profile"
    pipeline.write_text(TINY_PPO, encoding="utf-8")
    options = ("--set", "rollout.prompts_per_task=4", "--set")
    done = deltaloom("run", pipeline, "--run-dir", profile, *options, "pipeline.steps=2")
    assert done.status == 0, done.err
    plan = ("plan", pipeline, *FUSED, *options, f"fusion.fusion-inter.profile={profile}")
    set_task_seconds(profile, 0.001)
    assert "fused: each group goes on by itself to score" in (cheap := deltaloom(*plan).out)
    assert "and 1 ms a task by itself" in cheap
    set_task_seconds(profile, 0.5)
    dear = deltaloom(*plan).out
    assert "not fused by fusion-inter: forecast from" in dear
    assert "and 500 ms a task by itself, less than min_speedup 1" in dear


def planned(folder: Path, *, options: str = "", **parts: Any) -> Any:
    """The plan of a small pipeline with the planner chosen."""
    overlay = {"pipeline": {"fusion": ["fusion-inter"]}}
    pipeline = tiny_pipeline(folder, options=options, **parts)
    return prepare(RunRequest(pipeline_path=pipeline, run_dir=None, overlay=overlay)).plan


def reason(plan: Any, node: str) -> str:
    return next(str(entry.reason) for entry in plan.entries if entry.node == node)


def test_the_plan_says_what_goes_by_group_and_why(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert reason(plan, "score") == "each group as soon as it is generated"
    assert plan.notes[-1].startswith("fused: each group goes on by itself to score (")


def test_the_plan_says_where_groups_come_with_their_task(tmp_path: Path) -> None:
    plan = planned(tmp_path, options='executor="dask",')
    assert reason(plan, "score") == (
        "each group, when its task ends: executor dask delivers none before"
    )


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (
            {
                "functions": "def keep(groups):\n    return groups",
                "nodes": 'node(keep, "groups", to="kept", kind="groups"),',
                "scored_port": "kept",
            },
            "no score, infer or join node reads rollouts alone",
        ),
        ({"train": "ready_share=0.5", "options": "late_steps=1,"}, "ready_share is below 1"),
    ],
)
def test_what_cannot_go_by_group_is_left_as_it_is(
    tmp_path: Path, parts: dict[str, str], why: str
) -> None:
    plan = planned(tmp_path, **parts)
    assert not any(node.by_group for node in plan.template.nodes)
    assert why in plan.notes[-1]


@pytest.mark.parametrize(
    ("plan", "parts", "why"),
    [
        ("by_group=('rollout',)", {}, "no score, infer or join node"),
        ("by_group=('score',), chains=(('rollout', 'score'),)", {}, "is in a chain"),
        (
            "by_group=('score',)",
            {"train": "ready_share=0.5", "options": "late_steps=1,"},
            "late groups go by rollout task",
        ),
        (
            "by_group=('score',)",
            {
                "functions": "def keep(groups):\n    return groups",
                "nodes": 'node(keep, "groups", to="kept", kind="groups"),',
                "scored_port": "kept",
            },
            "'keep' works on whole tasks",
        ),
    ],
)
def test_a_plan_by_group_that_cannot_be_is_refused(
    tmp_path: Path, plan: str, parts: dict[str, str], why: str
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "fuse.py").write_text(
        "from deltaloom.orchestrator import hookimpl\n"
        "from deltaloom.orchestrator.interfaces import FusionPlan\n"
        f"@hookimpl\ndef plan_fusion(graph):\n    return FusionPlan({plan}, reason='')\n"
    )
    request = RunRequest(
        pipeline_path=tiny_pipeline(tmp_path, **parts),  # type: ignore[arg-type]
        run_dir=None,
        overlay={},
        plugins_dir=plugins,
    )
    with pytest.raises(PluginError, match=why):
        prepare(request)
