"""`log`, `show`, `diff`, `status`, `workers`, `replay`, `doctor`: runs and the machine, seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .output import (
    BranchOption,
    DebugFlag,
    JsonFlag,
    PluginsDirOption,
    RunArgument,
    StoreOption,
    print_json,
    print_pairs,
    print_table,
    show_bytes,
)
from .store_target import open_stored, version_bounds

MAX_FINDINGS = 5
"""Findings of the guard that `status` prints, the newest ones."""

RunOption = Annotated[
    Path | None, typer.Option("--run", help="Run directory; the newest in runs/ if left out.")
]


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(log)
    app.command()(show)
    app.command()(diff)
    app.command()(status)
    app.command()(workers)
    app.command()(replay)
    app.command()(doctor)


def log(
    run: RunArgument = None,
    store: StoreOption = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Newest versions.")
    ] = None,
    branch: BranchOption = None,
    graph: Annotated[bool, typer.Option("--graph", help="Draw all branches and tags.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """List a run's versions, newest first."""
    from .store_commands import print_history

    if graph:
        print_history(run, store, limit=limit, json=json)
        return
    lines = open_stored(run, store, branch=branch).log(limit=limit)
    if json:
        print_json(lines)
        return
    extra = [name for name in ("evaluations", "guard") if any(line[name] for line in lines)]
    print_table(
        ("version", "snapshot", "reward", "published", "changed", "anchor", *extra),
        [
            (
                line["version"],
                line["snapshot_id"],
                line["reward"],
                show_bytes(line["weight_bytes"]),
                f"{line['changed'] / max(1, line['elements']):.2%}",
                "anchor" if line["is_anchor"] else "",
                *(_NOTE_CELLS[name](line) for name in extra),
            )
            for line in lines
        ],
    )


def _evaluation_cell(line: Mapping[str, Any]) -> str:
    """The scores of a version's evaluations."""
    scores = [
        f"{node} {values['score'][0]:.3f}"
        for node, values in line["evaluations"].items()
        if values["score"]
    ]
    return ", ".join(scores)


def _guard_cell(line: Mapping[str, Any]) -> str:
    """What the guard found at a version."""
    return "; ".join(f"{finding['action']}: {finding['reason']}" for finding in line["guard"])


_NOTE_CELLS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "evaluations": _evaluation_cell,
    "guard": _guard_cell,
}


def show(
    what: Annotated[str, typer.Argument(help="Version, tag, snapshot id, or group STEP/INDEX.")],
    run: RunOption = None,
    store: StoreOption = None,
    branch: BranchOption = None,
    plugins_dir: PluginsDirOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show one version, or one group and the version it went into."""
    stored = open_stored(run, store, branch=branch, plugins_dir=plugins_dir)
    if "/" in what:
        _print_group(stored.show_group(what), json=json)
    else:
        _print_version(stored.show(what), json=json)


def diff(
    first: Annotated[str, typer.Argument(help="Version or run directory to compare from.")],
    second: Annotated[str, typer.Argument(help="Version or run directory to compare to.")],
    run: RunOption = None,
    store: StoreOption = None,
    branch: BranchOption = None,
    plugins_dir: PluginsDirOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Say what changed between two versions, or where two runs first differ."""
    from ..plugin_manager import create_plugins
    from ..run_dir import is_run
    from ..worker_weights import codec_lookup

    if is_run(Path(first)) and is_run(Path(second)):
        _diff_runs(Path(first), Path(second), branch=branch, json=json)
        return
    stored = open_stored(run, store, branch=branch, plugins_dir=plugins_dir)
    plugins = create_plugins(plugins_dir=stored.plugins_dir)
    result = stored.diff(first, second, codec_lookup(plugins.components["codec"]))
    if json:
        print_json(result)
        return
    share = result["changed"] / max(1, result["elements"])
    print_pairs(
        [
            ("from", f"version {result['from']['version']} ({result['from']['snapshot_id']})"),
            ("to", f"version {result['to']['version']} ({result['to']['snapshot_id']})"),
            ("changed", f"{result['changed']:,} of {result['elements']:,} elements ({share:.2%})"),
            ("reward change", result["reward_change"]),
            ("ledger rows between", len(result["ledger_rows"])),
        ]
    )
    print_table(
        ("tensor", "elements", "changed", "fraction"),
        [
            (row["tensor"], row["elements"], row["changed"], f"{row['fraction']:.2%}")
            for row in result["tensors"]
        ],
    )


def status(
    run: RunArgument = None,
    branch: BranchOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Say where a run stands, with its accounting."""
    from ..inspect import StoredRun, find_run

    result = StoredRun(find_run(run), branch=branch).status()
    if json:
        print_json(result)
        return
    state = "finished" if result["finished"] else "not finished"
    print_pairs(
        [
            ("run", result["run_dir"]),
            ("store", result["store"]),
            ("branch", f"{result['branch']} (of {', '.join(result['branches'])})"),
            ("version", f"{result['version']} of {result['steps']} ({state})"),
            ("reward", result["metrics"].get("reward")),
            ("rollouts", result["accounting_line"]),
            *(
                ("", f"{number} {reason}")
                for reason, number in sorted(result["accounting"]["reasons"].items())
            ),
            *_judged_pairs(result),
        ]
    )


def _judged_pairs(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The newest evaluations and findings, newest first."""
    from ..evaluation import evaluation_words
    from ..version_notes import finding_words

    shown = [("evaluation", evaluation_words(*item)) for item in result["evaluations"].items()]
    return shown + [
        ("guard", f"version {finding['version']}, {finding_words(finding)}")
        for finding in result["guard"][:MAX_FINDINGS]
    ]


def workers(
    run: RunArgument = None,
    branch: BranchOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Say what every worker of a run is doing, and what the run waits for."""
    from ..inspect import find_run
    from ..run_dir import RunDir, open_run
    from ..worker_board import read_board

    run_dir, _ = open_run(find_run(run))
    board = read_board(RunDir(run_dir.path, branch or run_dir.branch))
    if json:
        print_json(board)
        return
    state = "at work" if board["running"] else "not running; as it was last"
    typer.echo(f"driver pid {board['pid']} on {board['host']}: {state}")
    print_table(
        ("worker", "role", "host", "pid", "version", "task", "last progress", "state"),
        [_worker_cells(worker, age=board["age_seconds"]) for worker in board["workers"]],
    )
    for wait in board["waits"]:
        typer.echo(
            f"waits for {wait['what']} from {wait['producer']}: {wait['seconds']:.0f} s of at "
            f"most {wait['deadline_seconds']:g} s"
        )


def _worker_cells(worker: Mapping[str, Any], *, age: float) -> tuple[Any, ...]:
    serves = worker.get("serves", ["any"])
    state = worker.get("refused") or ("ready" if worker["ready"] else "starting")
    return (
        worker["worker"],
        worker["role"] or ",".join(serves) or "-",
        worker["host"],
        worker["pid"],
        worker["version"] if worker["version"] >= 0 else None,
        worker["task"] or None,
        f"{worker['idle_seconds'] + age:.1f} s ago",
        state,
    )


def replay(
    run: RunArgument = None,
    versions: Annotated[
        str | None, typer.Option("--versions", help="A:B, both included; all if left out.")
    ] = None,
    branch: BranchOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Train stored batches again and compare every version; exit 1 at the first that differs."""
    from ..audit import AuditedVersion, audit_run
    from ..inspect import find_run

    def report(version: AuditedVersion) -> None:
        if not json:
            typer.echo(version.words or f"version {version.replayed.version} identical")

    first, last = version_bounds(versions)
    result = audit_run(find_run(run), first=first, last=last, branch=branch, report=report)
    if json:
        print_json(result)
    elif result["identical"]:
        typer.echo(
            f"{result['replayed']} versions trained again in {result['seconds']:.1f} s: "
            "all identical"
        )
    if not result["identical"]:
        raise typer.Exit(1)


def doctor(
    store: Annotated[str | None, typer.Option("--store", help="Store to reach.")] = None,
    plugins_dir: PluginsDirOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Check Python, packages, hardware, disk, store and plugins."""
    from ..doctor import run_checks

    checks = run_checks(store_url=store, plugins_dir=plugins_dir)
    names = ("name", "verdict", "found", "remedy")
    if json:
        print_json([{name: getattr(check, name) for name in names} for check in checks])
    else:
        print_table(names, [[getattr(check, name) for name in names] for check in checks])
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(1)


def _diff_runs(first: Path, second: Path, *, branch: str | None, json: bool) -> None:
    """Compare two runs; exit 1 unless they are identical."""
    from ..comparing import compare_runs
    from ..inspect import StoredRun

    result = compare_runs(StoredRun(first, branch=branch), StoredRun(second, branch=branch))
    if json:
        print_json(result)
    elif result["identical"]:
        typer.echo(f"identical: versions 0 to {result['versions'][0]}")
    else:
        typer.echo(f"different: {result['difference']['words']}")
    if not json:
        for line in result["config"]:
            typer.echo(f"  option {line}")
    if not result["identical"]:
        raise typer.Exit(1)


def _print_version(shown: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(shown)
        return
    plain = ("version", "snapshot_id", "parent_snapshot_id", "written_at", "codec", "is_anchor")
    more = ("anchor_version", "state_version", "state_digest", "weight_bytes", "dense_bytes")
    print_pairs([(name, shown[name]) for name in (*plain, *more)])
    print_pairs(sorted(shown["attributes"].get("metrics", {}).items()) or [("metrics", "none")])
    if judged := _judged_pairs(shown):
        print_pairs(judged)
    if forked := shown["attributes"].get("forked_from"):
        print_pairs(_fork_pairs(forked))
    if facts := shown["attributes"].get("trainer"):
        print_pairs([(f"trainer.{name}", value) for name, value in facts.items()])
    if shown["ledger"]:
        columns = ("group_id", "prompt_id", "outcome", "trained", "reward_mean", "oldest_version")
        print_table(columns, [[row[name] for name in columns] for row in shown["ledger"]])


def _fork_pairs(forked: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where a branch began, with what options, and why if the guard asked for it."""
    from ..version_notes import finding_words

    pairs = [("branch began at", f"version {forked['version']} of {forked['branch']}")]
    pairs += [("with", "; ".join(forked["changed"]) or "no option changed")]
    guard = forked.get("guard")
    return pairs + ([("because of", finding_words(guard))] if guard else [])


def _print_group(shown: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(shown)
        return
    names = ("version", "trained_by", "token_versions")
    print_pairs([*((name, shown[name]) for name in names), *shown["row"].items()])
    print_pairs([("prompt", shown["prompt"]), ("answer", shown["answer"])])
    rollouts = sorted(shown["rollouts"] + shown["left_out"], key=lambda line: int(line["at"]))
    print_table(
        ("rollout", "reward", "advantage", "versions", "outcome", "completion"),
        [_rollout_cells(rollout) for rollout in rollouts],
    )


def _rollout_cells(rollout: Mapping[str, Any]) -> tuple[Any, ...]:
    versions = [f"{version}" for version in dict.fromkeys(rollout["versions"])]
    return (
        rollout["at"],
        rollout["reward"],
        rollout["advantage"],
        ", ".join(versions),
        rollout["outcome"] or "trained",
        rollout["tokens"] if rollout["text"] is None else repr(rollout["text"]),
    )
