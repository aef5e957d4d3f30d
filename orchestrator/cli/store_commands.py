"""`verify`, `export`, `import`, `gc`, `tag` and `branch`: caring for a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from .store_target import (
    StoreTarget,
    as_ref,
    open_target,
    split_words,
    version_range,
    write_model_files,
)

if TYPE_CHECKING:
    from ...storage.records import CommitInfo
    from ...storage.retention import GcReport

WEIGHTS_FILE = "model.safetensors"


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(verify)
    app.command()(export)
    app.command("import")(import_)
    app.command()(gc)
    app.command()(tag)
    app.command()(branch)


def verify(
    run: RunArgument = None,
    store: StoreOption = None,
    branch: BranchOption = None,
    versions: Annotated[
        str | None, typer.Option("--versions", help="A:B, both included; all if left out.")
    ] = None,
    first: Annotated[bool, typer.Option("--first", help="Stop at the first fault.")] = False,
    plugins_dir: PluginsDirOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Rebuild every version and check every digest; exit status 1 if something is damaged."""
    from ...storage.errors import ErrorCode, NotFoundError
    from ...storage.verify import verify as verify_store

    wanted = version_range(versions)
    target = open_target(run, store, branch=branch, plugins_dir=plugins_dir)
    report = verify_store(
        target.repository,
        target.codecs(),
        branch=target.branch,
        versions=wanted,
        stop_at_first=first,
    )
    if not report.num_versions:
        raise NotFoundError(
            f"no version {versions or ''} on branch {target.branch!r} of "
            f"{target.repository.location}; nothing was verified.",
            code=ErrorCode.VERSION_NOT_FOUND,
        )
    faults = [
        {
            "version": fault.version,
            "snapshot_id": fault.snapshot_id,
            "code": fault.error.code,
            "message": str(fault.error),
        }
        for fault in report.faults
    ]
    if json:
        print_json({"versions": report.num_versions, "sound": report.is_sound, "faults": faults})
    else:
        if faults:
            print_table(tuple(faults[0]), [list(fault.values()) for fault in faults])
        verdict = "all digests match" if report.is_sound else f"{len(faults)} faults"
        typer.echo(f"{report.num_versions} versions verified: {verdict}")
    if faults:
        raise typer.Exit(1)


def export(
    what: Annotated[
        list[str], typer.Argument(metavar="[RUN] VERSION", help="Version, tag, branch or id.")
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder for the files; made if absent.")],
    store: StoreOption = None,
    branch: BranchOption = None,
    plugins_dir: PluginsDirOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Write a version as safetensors, with config and tokenizer where the model has them."""
    from ...storage.backend import translated
    from ...storage.export import export_safetensors

    run, (version,) = split_words(what, names=["VERSION"])
    target = open_target(run, store, branch=branch, plugins_dir=plugins_dir)
    with translated("export the policy", location=str(to)):
        to.mkdir(parents=True, exist_ok=True)
    info = export_safetensors(
        target.repository,
        as_ref(version),
        to / WEIGHTS_FILE,
        codecs=target.codecs(),
        branch=target.branch,
    )
    files = [WEIGHTS_FILE, *write_model_files(target, to)]
    _print_made(info, {"folder": str(to.absolute()), "files": files}, json=json)


def import_(
    file: Annotated[Path, typer.Argument(help="A safetensors file.")],
    store: Annotated[str, typer.Option("--store", help="Address of the new store.")],
    codec: Annotated[str, typer.Option("--codec", help="Codec of later versions.")] = "context",
    plugins_dir: PluginsDirOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Make a new store whose version 0 holds the tensors of a safetensors file."""
    from ...storage.export import import_safetensors
    from ..plugin_manager import create_plugins

    component = create_plugins(plugins_dir=plugins_dir).component("codec", codec)
    repository = import_safetensors(file, store, codec=component(component.Config()))
    info = repository.head()
    specs, _ = repository.tensor_list(info)
    made = {"store": repository.location, "tensors": len(specs), "bytes": info.dense_bytes}
    _print_made(info, made, json=json)


def gc(
    run: RunArgument = None,
    store: StoreOption = None,
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=1, help="Newest versions to keep of each branch.")
    ] = 10,
    apply: Annotated[
        bool, typer.Option("--apply", help="Delete; without it, only say what would go.")
    ] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Say which versions go and why the others stay; with --apply, remove them."""
    from ...storage.retention import gc as collect

    target = open_target(run, store, read_only=not apply)
    report = collect(
        target.repository,
        keep_last=keep_last,
        dry_run=not apply,
        also_keep=_needed_by_run(target),
    )
    _print_gc(report, json=json)


def tag(
    what: Annotated[
        list[str], typer.Argument(metavar="[RUN] NAME VERSION", help="Name, and what it names.")
    ],
    store: StoreOption = None,
    branch: BranchOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Give a version a permanent name; gc keeps it."""
    run, (name, version) = split_words(what, names=["NAME", "VERSION"])
    target = open_target(run, store, branch=branch, read_only=False)
    info = target.repository.tag(name, as_ref(version), branch=target.branch)
    _print_made(info, {"tag": name}, json=json)


def branch(
    what: Annotated[
        list[str], typer.Argument(metavar="[RUN] NAME VERSION", help="Name, and where it starts.")
    ],
    store: StoreOption = None,
    from_branch: Annotated[
        str | None, typer.Option("--branch", help="Branch the version is on.")
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Start a branch at a version."""
    run, (name, version) = split_words(what, names=["NAME", "VERSION"])
    target = open_target(run, store, branch=from_branch, read_only=False)
    info = target.repository.branch(name, as_ref(version), branch=target.branch)
    _print_made(info, {"branch": name}, json=json)


def print_history(run: Path | None, store: str | None, *, limit: int | None, json: bool) -> None:
    """All branches and tags of a store: `log --graph`."""
    from ...storage.graph import log_graph
    from .graph_text import draw_history

    rows = log_graph(open_target(run, store).repository)[:limit]
    if json:
        names = ("lane", "parent_lane", "branches", "tags")
        print_json(
            [
                {
                    "version": row.info.version,
                    "snapshot_id": row.info.snapshot_id,
                    "parent_snapshot_id": row.info.parent_snapshot_id,
                    "is_anchor": row.info.is_anchor,
                    **{name: getattr(row, name) for name in names},
                }
                for row in rows
            ]
        )
        return
    for line in draw_history(rows):
        typer.echo(line)


def _needed_by_run(target: StoreTarget) -> dict[str, str]:
    """Snapshots without which the run could not be resumed, and why.

    They are those that rollouts of the next steps may ask for, the one that recorded the
    options, and on the way to it both sides of every fork.
    """
    head = target.repository.find_head(target.branch) if target.is_run else None
    if head is None:
        return {}
    oldest = head.version - int(target.config.get("pipeline", {}).get("max_staleness", 1))
    needed: dict[str, str] = {}
    above = head
    for info in target.repository.ancestors(head, over_gaps=True):
        if info.version >= oldest:
            needed[info.snapshot_id] = "resuming the run"
        if info.branch != above.branch:
            needed |= dict.fromkeys((above.snapshot_id, info.snapshot_id), "fork of the run")
        if "config" in info.attributes:
            needed[info.snapshot_id] = "options of the run"
            break
        above = info
    return needed


def _print_made(info: CommitInfo, made: dict[str, Any], *, json: bool) -> None:
    shown = {**made, "version": info.version, "snapshot_id": info.snapshot_id}
    if json:
        print_json({**shown, "state_digest": info.state_digest})
    else:
        print_pairs([(k, " ".join(v) if isinstance(v, list) else v) for k, v in shown.items()])


def _gc_values(report: GcReport) -> dict[str, Any]:
    """What `gc` did or would do, for programs."""
    removed = ("version", "snapshot_id", "weight_bytes")
    return {
        "dry_run": report.dry_run,
        "kept": [
            {"version": i.version, "snapshot_id": i.snapshot_id, "why": list(reasons)}
            for i, reasons in report.plan.kept
        ],
        "removed": [{name: getattr(i, name) for name in removed} for i in report.plan.removed],
        "deleted_objects": report.deleted_objects,
        "deleted_bytes": report.deleted_bytes,
    }


def _print_gc(report: GcReport, *, json: bool) -> None:
    plan = report.plan
    if json:
        print_json(_gc_values(report))
        return
    rows = [
        *((info.version, info.snapshot_id, "stays", "; ".join(why)) for info, why in plan.kept),
        *((info.version, info.snapshot_id, "goes", "nothing needs it") for info in plan.removed),
    ]
    rows.sort(key=lambda row: -row[0])
    print_table(("version", "snapshot", "", "why"), rows)
    if report.dry_run:
        weights = show_bytes(sum(info.weight_bytes for info in plan.removed))
        typer.echo(
            f"{len(plan.removed)} versions would go, {weights} of weights and what came with them; "
            "--apply removes them"
        )
    else:
        freed = show_bytes(report.deleted_bytes)
        typer.echo(
            f"{len(plan.removed)} versions removed, {report.deleted_objects} objects, {freed} freed"
        )
