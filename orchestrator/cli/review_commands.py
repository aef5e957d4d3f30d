"""`review`: rollouts to people, their verdicts back into the store, and what they add up to."""

from __future__ import annotations

import json as json_text
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, RunError, RunErrorCode
from .output import (
    BranchOption,
    DebugFlag,
    JsonFlag,
    PluginsDirOption,
    StoreOption,
    print_json,
    print_pairs,
    print_table,
)
from .store_target import StoreTarget, open_target, version_range

if TYPE_CHECKING:
    from ...storage.records import CommitInfo
    from ..review.verdicts import Subject, SubjectReader

EXPORT, IMPORT, PAIRS, SUMMARY = "export", "import", "pairs", "summary"
DEFAULT_FILES = {EXPORT: "review.jsonl", PAIRS: "pairs.jsonl"}
DEFAULT_PER_VERSION, DEFAULT_PER_GROUP = 4, 2


def register(app: typer.Typer) -> None:
    """Add the verb of this module."""
    app.command()(review)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked for; None where an option was not given."""

    action: str
    run: Path | None
    file: Path | None
    out: Path | None
    versions: str | None
    per_version: int | None
    per_group: int | None
    seed: int | None
    by_reward: bool
    blind: bool
    reviewer: str | None
    json: bool


def review(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [export | import FILE | pairs | summary]",
            help="Run directory, the newest in runs/ if left out, and what to do.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="export, pairs: the file; in the run if left out.")
    ] = None,
    versions: Annotated[
        str | None, typer.Option("--versions", help="A:B, both included; all if left out.")
    ] = None,
    per_version: Annotated[
        int | None, typer.Option("--per-version", min=1, help="export: rollouts a version [4].")
    ] = None,
    per_group: Annotated[
        int | None, typer.Option("--per-group", min=1, help="export: rollouts of one prompt [2].")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="export: of the sample [0].")] = None,
    by_reward: Annotated[
        bool, typer.Option("--by-reward", help="export: low, middle and high rewards in turn.")
    ] = False,
    blind: Annotated[bool, typer.Option("--blind", help="export: without the rewards.")] = False,
    reviewer: Annotated[
        str | None, typer.Option("--reviewer", help="import: name for lines without one.")
    ] = None,
    store: StoreOption = None,
    branch: BranchOption = None,
    plugins_dir: PluginsDirOption = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Have people judge rollouts: write a sample, store their verdicts, see who agrees."""
    action, run, file = _split(what or [])
    request = _Request(
        action=action,
        run=run,
        file=file,
        out=out,
        versions=versions,
        per_version=per_version,
        per_group=per_group,
        seed=seed,
        by_reward=by_reward,
        blind=blind,
        reviewer=reviewer,
        json=json,
    )
    _check_options(request)
    target = open_target(
        run, store, branch=branch, plugins_dir=plugins_dir, read_only=action != IMPORT
    )
    _ACTIONS[action](request, target)


def _split(words: Sequence[str]) -> tuple[str, Path | None, Path | None]:
    """Action, run and file. Raises `ConfigError` for other words."""
    simple = (EXPORT, PAIRS, SUMMARY)
    match list(words):
        case []:
            return SUMMARY, None, None
        case ["import", file]:
            return IMPORT, None, Path(file)
        case [run, "import", file]:
            return IMPORT, Path(run), Path(file)
        case [action] if action in simple:
            return action, None, None
        case [run] if run != IMPORT:
            return SUMMARY, Path(run), None
        case [run, action] if action in simple:
            return action, Path(run), None
    raise ConfigError(
        f"expected [RUN] and one of: {EXPORT}, {IMPORT} FILE, {PAIRS}, {SUMMARY}; "
        f"got: {' '.join(words)}.",
        code=RunErrorCode.WRONG_TYPE,
    )


def _check_options(request: _Request) -> None:
    """Refuse options that the action would not look at. Raises `ConfigError`."""
    owners: Mapping[str, tuple[str, ...]] = {
        "out": (EXPORT, PAIRS),
        "per_version": (EXPORT,),
        "per_group": (EXPORT,),
        "seed": (EXPORT,),
        "by_reward": (EXPORT,),
        "blind": (EXPORT,),
        "reviewer": (IMPORT,),
        "versions": (EXPORT, PAIRS, SUMMARY),
    }
    for name, actions in owners.items():
        given = getattr(request, name) not in (None, False)
        if given and request.action not in actions:
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of {' and '.join(actions)}, "
                f"not of {request.action}.",
                code=RunErrorCode.WRONG_TYPE,
            )


def _export(request: _Request, target: StoreTarget) -> None:
    from ..review.verdicts import question_line

    reader = _reader(target)
    chosen = [s for info in _versions(request, target) for s in _sample(request, reader, info)]
    if not chosen:
        raise _nothing(f"no version {request.versions or ''} has rollouts to review")
    place = _new_file(request, target)
    _write_lines(place, [question_line(subject, blind=request.blind) for subject in chosen])
    numbers = [subject.version for subject in chosen]
    made = {
        "file": str(place.absolute()),
        "rollouts": len(chosen),
        "versions": [min(numbers), max(numbers)],
    }
    if request.json:
        print_json(made)
        return
    typer.echo(f"{place}: {len(chosen)} rollouts of versions {made['versions']}")
    typer.echo("fill in score, veto, preferred_over, comment and reviewer, then:")
    words = (*_run_words(request, target), "import", str(place))
    typer.echo(f"  deltaloom review {shlex.join(words)}")


def _import(request: _Request, target: StoreTarget) -> None:
    from ...storage.backend import translated
    from ..review.lines import decode_lines, read_verdicts
    from ..review.stored import store_verdicts

    file = request.file or Path()
    with translated("read the review", location=str(file)):
        data = file.read_bytes()
    verdicts = read_verdicts(
        decode_lines(data, source=str(file)),
        source=str(file),
        find=_finder(target),
        reviewer=(request.reviewer or "").strip(),
    )
    if not verdicts:
        raise _nothing(f"nothing is filled in in {str(file)!r}")
    stored = store_verdicts(target.repository, verdicts)
    made = {
        "verdicts": len(verdicts),
        "new": sum(info.num_lines for info in stored),
        "reviews": [
            {"id": info.id, "reviewer": info.author, "verdicts": info.num_lines} for info in stored
        ],
    }
    if request.json:
        print_json(made)
        return
    typer.echo(f"{made['verdicts']} verdicts, {made['new']} of them new")
    for info in stored:
        typer.echo(f"  review {info.id}: {info.num_lines} verdicts of {info.author}")


def _pairs(request: _Request, target: StoreTarget) -> None:
    from ..review.pairs import pair_line
    from ..review.summary import preferred_pairs

    pairs = preferred_pairs(_verdicts(request, target))
    if not pairs:
        raise _nothing("no reviewer preferred one rollout over another")
    place = _new_file(request, target)
    _write_lines(place, [pair_line(pair) for pair in pairs])
    made = {"file": str(place.absolute()), "pairs": len(pairs)}
    if request.json:
        print_json(made)
    else:
        typer.echo(f"{place}: {len(pairs)} pairs")


def _summary(request: _Request, target: StoreTarget) -> None:
    from ..review.stored import stored_reviews
    from ..review.summary import summarize

    summary = summarize(_verdicts(request, target))
    reviews = [
        {"id": i.id, "reviewer": i.author, "at": i.written_at, "verdicts": i.num_lines}
        for i in stored_reviews(target.repository)
    ]
    if request.json:
        print_json({"reviews": reviews, **summary})
        return
    if not reviews:
        typer.echo("no review is stored; deltaloom review RUN export writes a sample")
        return
    print_table(tuple(reviews[0]), [tuple(row.values()) for row in reviews])
    _print_summary(summary)


def _print_summary(summary: Mapping[str, Any]) -> None:
    from ..review.wording import agreement_rows

    if summary["reviewers"]:
        people = [{k: v for k, v in row.items() if k != "last_at"} for row in summary["reviewers"]]
        print_table(tuple(people[0]), [tuple(row.values()) for row in people])
    rows = agreement_rows(summary)
    if rows:
        print_pairs([(row.name, f"{_figure(row.value)}  ({row.of})") for row in rows])
    for veto in summary["vetoed"]:
        comment = f": {veto['comment']}" if veto["comment"] else ""
        typer.echo(
            f"vetoed by {veto['reviewer']}: version {veto['version']}, group {veto['group']}, "
            f"rollout {veto['rollout']}{comment}"
        )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _sample(request: _Request, reader: SubjectReader, info: CommitInfo) -> list[Subject]:
    from ..review.sampling import Candidate, sample_rollouts

    subjects = reader.subjects(info)
    chosen = sample_rollouts(
        [
            Candidate(
                group=subject.group,
                at=subject.rollout,
                reward=math.nan if subject.reward is None else subject.reward,
            )
            for subject in subjects.values()
        ],
        num_rollouts=request.per_version or DEFAULT_PER_VERSION,
        per_group=request.per_group or DEFAULT_PER_GROUP,
        by_reward=request.by_reward,
        seed=request.seed or 0,
        version=info.version,
    )
    return [subjects[candidate.place] for candidate in chosen]


def _versions(request: _Request, target: StoreTarget) -> list[CommitInfo]:
    """The versions asked for, oldest first."""
    wanted = version_range(request.versions)
    infos = reversed(target.repository.log(target.branch))
    return [info for info in infos if wanted is None or info.version in wanted]


def _verdicts(request: _Request, target: StoreTarget) -> list[Any]:
    from ..review.stored import stored_verdicts

    wanted = version_range(request.versions)
    return [
        verdict
        for verdict in stored_verdicts(target.repository)
        if wanted is None or verdict.version in wanted
    ]


def _reader(target: StoreTarget) -> SubjectReader:
    from ..review.verdicts import SubjectReader
    from ..stored_rollouts import tokenizer_of

    tokenizer = tokenizer_of(target.config, target.plugins())
    if tokenizer is None:
        name = target.config.get("model", {}).get("name", "unknown")
        raise RunError(
            f"the tokenizer of model {name!r} is not at hand, so rollouts have no text.",
            code=RunErrorCode.UNKNOWN_PLUGIN,
            remedy="Install the model's plugin, or name its folder with --plugins-dir.",
        )
    lengths = [
        node["max_new_tokens"]
        for node in target.config.values()
        if isinstance(node, Mapping) and "max_new_tokens" in node
    ]
    longest = max(lengths, default=0)
    return SubjectReader(target.repository, tokenizer, max_new_tokens=longest)


def _finder(target: StoreTarget) -> Callable[[str], Mapping[Any, Subject] | None]:
    from ...storage.errors import NotFoundError

    reader = _reader(target)

    def find(snapshot_id: str) -> Mapping[Any, Subject] | None:
        try:
            return reader.subjects(target.repository.info(str(snapshot_id)))
        except NotFoundError:
            return None

    return find


def _new_file(request: _Request, target: StoreTarget) -> Path:
    """Where lines go; never over a file in which a person may have written. Raises `RunError`."""
    from ..inspect import find_run

    folder = find_run(request.run) if target.is_run else Path()
    place = request.out or folder / DEFAULT_FILES[request.action]
    if place.exists():
        raise RunError(
            f"{str(place)!r} exists already; somebody may be at work on it.",
            code=RunErrorCode.FILE_EXISTS,
            remedy="Choose another place with --out.",
        )
    return place


def _write_lines(place: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    from ...storage.backend import translated

    text = "".join(json_text.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with translated("write the file", location=str(place)):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def _run_words(request: _Request, target: StoreTarget) -> tuple[str, ...]:
    """How the run or store was named, for a command to type next."""
    if target.is_run:
        return (str(request.run),) if request.run else ()
    return "--store", target.repository.location


def _nothing(words: str) -> RunError:
    return RunError(f"{words}.", code=RunErrorCode.RUN_NOT_FOUND)


_ACTIONS: Mapping[str, Callable[[_Request, StoreTarget], None]] = {
    EXPORT: _export,
    IMPORT: _import,
    PAIRS: _pairs,
    SUMMARY: _summary,
}
