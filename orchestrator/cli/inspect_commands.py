"""`log`, `show`, `diff`, `status` and `doctor`: looking at runs and at the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import (
    DebugFlag,
    JsonFlag,
    PluginsDirOption,
    print_json,
    print_pairs,
    print_table,
    show_bytes,
)

RunArgument = Annotated[
    Path | None, typer.Argument(help="Run directory; the newest in runs/ if left out.")
]
RunOption = Annotated[
    Path | None, typer.Option("--run", help="Run directory; the newest in runs/ if left out.")
]


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(log)
    app.command()(show)
    app.command()(diff)
    app.command()(status)
    app.command()(doctor)


def log(
    run: RunArgument = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Newest versions.")] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """List a run's versions, newest first."""
    from ..inspect import StoredRun, find_run

    lines = StoredRun(find_run(run)).log(limit=limit)
    if json:
        print_json(lines)
        return
    print_table(
        ("version", "snapshot", "reward", "published", "changed", "anchor"),
        [
            (
                line["version"],
                line["snapshot_id"],
                line["reward"],
                show_bytes(line["weight_bytes"]),
                f"{line['changed'] / max(1, line['elements']):.2%}",
                "anchor" if line["is_anchor"] else "",
            )
            for line in lines
        ],
    )


def show(
    what: Annotated[str, typer.Argument(help="Version, tag, snapshot id, or group STEP/INDEX.")],
    run: RunOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show one version, or one group and the version it went into."""
    from ..inspect import StoredRun, find_run

    stored = StoredRun(find_run(run))
    if "/" in what:
        _print_group(stored.show_group(what), json=json)
    else:
        _print_version(stored.show(what), json=json)


def diff(
    first: Annotated[str, typer.Argument(help="Version to compare from.")],
    second: Annotated[str, typer.Argument(help="Version to compare to.")],
    run: RunOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Say what changed between two versions: elements, reward, ledger rows."""
    from ..inspect import StoredRun, find_run
    from ..plugin_manager import create_plugins
    from ..worker_weights import codec_lookup

    stored = StoredRun(find_run(run))
    directory = stored.manifest.plugins_dir
    plugins = create_plugins(plugins_dir=Path(directory) if directory else None)
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


def status(run: RunArgument = None, json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """Say where a run stands, with its accounting."""
    from ..inspect import StoredRun, find_run

    result = StoredRun(find_run(run)).status()
    if json:
        print_json(result)
        return
    state = "finished" if result["finished"] else "not finished"
    print_pairs(
        [
            ("run", result["run_dir"]),
            ("store", result["store"]),
            ("version", f"{result['version']} of {result['steps']} ({state})"),
            ("reward", result["metrics"].get("reward")),
            ("rollouts", result["accounting_line"]),
        ]
    )
    for reason, number in sorted(result["accounting"]["reasons"].items()):
        typer.echo(f"  {number:>8}  {reason}")


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


def _print_version(shown: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(shown)
        return
    plain = ("version", "snapshot_id", "parent_snapshot_id", "written_at", "codec", "is_anchor")
    more = ("anchor_version", "state_version", "state_digest", "weight_bytes", "dense_bytes")
    print_pairs([(name, shown[name]) for name in (*plain, *more)])
    print_pairs(sorted(shown["attributes"].get("metrics", {}).items()) or [("metrics", "none")])
    if shown["ledger"]:
        columns = ("group_id", "prompt_id", "outcome", "trained", "reward_mean", "oldest_version")
        print_table(columns, [[row[name] for name in columns] for row in shown["ledger"]])


def _print_group(shown: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(shown)
        return
    print_pairs([("version", shown["version"]), *shown["row"].items()])
    columns = ("reward", "advantage", "tokens", "versions")
    print_table(columns, [[rollout[name] for name in columns] for rollout in shown["rollouts"]])
