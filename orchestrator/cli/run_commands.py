"""`run` and `resume`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import load_overlays, merge
from ..errors import ConfigError, RunErrorCode
from .output import DebugFlag, JsonFlag, PluginsDirOption, RunArgument, print_json

if TYPE_CHECKING:
    from ..run import RunRequest

Pipeline = Annotated[Path, typer.Argument(help="Python file that defines `pipeline`.")]
ConfigFiles = Annotated[
    list[Path] | None, typer.Option("--config", help="TOML file; later ones win.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="One option, KEY=VALUE, for example train.optimizer.lr=1e-5."),
]
Nodes = Annotated[list[str] | None, typer.Option("--nodes", help="Run only this node; repeatable.")]
FromNodes = Annotated[
    list[str] | None, typer.Option("--from-nodes", help="Run from this node on; repeatable.")
]
ToNodes = Annotated[
    list[str] | None, typer.Option("--to-nodes", help="Run up to this node; repeatable.")
]
Executor = Annotated[
    str | None, typer.Option("--executor", help="Executor plugin: local, dask, or another.")
]
Scheduler = Annotated[
    str | None,
    typer.Option("--scheduler", help="Dask scheduler, tcp://HOST:PORT; with --executor dask."),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--guard",
        help="A rule of the guard, such as 'reward drop=0.2 over=3 action=pause'; repeatable.",
    ),
]
NewStore = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Address of the run's store, a path or s3://BUCKET/PREFIX; in the run if left out.",
    ),
]
Steps = Annotated[int | None, typer.Option("--steps", min=0, help="Training steps in all.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(run)
    app.command()(resume)


def executor_options(executor: str | None, scheduler: str | None) -> Mapping[str, Any]:
    """What the two flags say, as options. Raises `ConfigError` where they contradict."""
    if scheduler is None:
        return {} if executor is None else {"pipeline": {"executor": executor}}
    if executor not in (None, "dask"):
        raise ConfigError(
            f"--scheduler is an address for --executor dask, got --executor {executor}.",
            code=RunErrorCode.WRONG_TYPE,
        )
    return {"pipeline": {"executor": "dask"}, "executor": {"dask": {"scheduler": scheduler}}}


def overlay_of(
    files: Sequence[Path] | None, overrides: Sequence[str] | None, **pipeline_options: Any
) -> Mapping[str, Any]:
    """All options given on the command line as one tree; named flags win over `--set`."""
    given = {key: value for key, value in pipeline_options.items() if value is not None}
    tree = load_overlays(files or (), overrides or ())
    return merge(tree, {"pipeline": given}) if given else tree


def guard_options(rules: Sequence[str] | None) -> Mapping[str, Any]:
    """What `--guard` says, as options."""
    return {"guard": {"more_rules": list(rules)}} if rules else {}


def unused_run_dir(pipeline: Path) -> Path:
    """`runs/NAME` for a pipeline file NAME.py, or the first of `runs/NAME-2`, ... not there yet."""
    names = itertools.chain([pipeline.stem], (f"{pipeline.stem}-{n}" for n in itertools.count(2)))
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def run_request(
    pipeline: Path,
    *,
    run_dir: Path | None,
    store: str | None,
    overlay: Mapping[str, Any],
    plugins_dir: Path | None,
    nodes: Sequence[str] | None,
    from_nodes: Sequence[str] | None,
    to_nodes: Sequence[str] | None,
) -> RunRequest:
    """What `run` carries out, and `plan` checks."""
    from ..plan import Selection
    from ..run import RunRequest

    return RunRequest(
        pipeline_path=pipeline,
        run_dir=run_dir,
        overlay=overlay,
        plugins_dir=plugins_dir,
        selection=Selection(
            from_nodes=tuple(from_nodes or ()),
            to_nodes=tuple(to_nodes or ()),
            nodes=tuple(nodes or ()),
        ),
        store=store,
    )


def run(
    pipeline: Pipeline,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder for the run, a new one; runs/NAME if left out."),
    ] = None,
    store: NewStore = None,
    steps: Steps = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Root of all randomness.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Rollout worker processes.")
    ] = None,
    executor: Executor = None,
    scheduler: Scheduler = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    guard: Rules = None,
    plugins_dir: PluginsDirOption = None,
    nodes: Nodes = None,
    from_nodes: FromNodes = None,
    to_nodes: ToNodes = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Run a pipeline in a new run directory."""
    from ..progress import progress_observer
    from ..run import prepare, start_run

    given = overlay_of(config, overrides, steps=steps, seed=seed, workers=workers)
    request = run_request(
        pipeline,
        run_dir=run_dir or unused_run_dir(pipeline),
        store=store,
        overlay=merge(given, merge(executor_options(executor, scheduler), guard_options(guard))),
        plugins_dir=plugins_dir,
        nodes=nodes,
        from_nodes=from_nodes,
        to_nodes=to_nodes,
    )
    prepared = prepare(request)
    with progress_observer(quiet=json) as observer:
        summary = start_run(prepared, observers=[observer], say=_say(json))
    _close(summary, json=json)


def resume(
    run: RunArgument = None,
    steps: Steps = None,
    from_ref: Annotated[
        str | None,
        typer.Option("--from", help="Start a branch at this version, tag or snapshot."),
    ] = None,
    branch: Annotated[
        str | None, typer.Option("--branch", help="Branch to continue, or a new one's name.")
    ] = None,
    executor: Executor = None,
    scheduler: Scheduler = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    guard: Rules = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Continue a run from its newest version, or start a branch at any version, exactly."""
    from ..inspect import find_run
    from ..progress import progress_observer
    from ..run import ResumeRequest, resume_run

    options = merge(executor_options(executor, scheduler), guard_options(guard))
    request = ResumeRequest(
        path=find_run(run),
        branch=branch,
        from_ref=from_ref,
        steps=steps,
        overlay=merge(overlay_of(config, overrides), options),
    )
    with progress_observer(quiet=json) as observer:
        summary = resume_run(request, observers=[observer], say=_say(json))
    _close(summary, json=json)


def _say(json: bool) -> Callable[[str], None]:
    """Lines for a person: on standard error where standard output is JSON."""
    return lambda line: typer.echo(line, err=json)


def _close(summary: Mapping[str, Any], *, json: bool) -> None:
    from ..progress import closing_text

    if json:
        print_json(summary)
    else:
        typer.echo(closing_text(summary))
