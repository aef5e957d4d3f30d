"""Whether a run that goes on is the run that was stopped: same options, same data, same cursor."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..storage.errors import NotFoundError
from .background import BackgroundThread
from .config import effects
from .errors import DeadlineError, RunError, RunErrorCode, TaskError, boundary
from .inspect import last_json_line
from .resolve import ResolvedNode, ResolvedPipeline
from .run_dir import RunDir
from .sameness import aligned, changes_of
from .seeds import derive_seed
from .wire import prompt_digest
from .worker import check_prompts

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository

MAX_CHECKED_STEPS: Final = 8
"""Steps of a branch for which the source is asked again when it is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedConfig:
    """The options that versions were made with, and the environment then.

    `version` is the one that recorded them.
    """

    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    version: int


def check_has_no_version(run_dir: RunDir, store_url: str) -> None:
    """Refuse to begin anew a run whose store is gone: `RunError` unless it had no version yet."""
    for place in (run_dir, RunDir(run_dir.path)):
        line = last_json_line(place.metrics_file) or {}
        if "snapshot_id" in line:
            raise RunError(
                f"the run has committed version {line['version']}, but there is none of it at "
                f"{store_url}.",
                code=RunErrorCode.RUN_MISMATCH,
                remedy="Bring the store back to where it was, or to 'store' in the run's folder.",
            )


def recorded_config(repository: PolicyRepository, info: CommitInfo) -> RecordedConfig:
    """The options a version was trained with: stored by v0, and by the first version of a branch
    that changed them. Raises `RunError` if that version was expired."""
    for ancestor in repository.ancestors(info, over_gaps=True):
        if "config" in ancestor.attributes:
            attributes = ancestor.attributes
            return RecordedConfig(
                config=attributes["config"],
                environment=attributes["environment"],
                version=ancestor.version,
            )
    raise RunError(
        f"the version that recorded the options of version {info.version} was expired.",
        code=RunErrorCode.RUN_NOT_FOUND,
    )


def recorded_overlay(pipeline: ResolvedPipeline, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recorded options that training depends on, as an overlay over a pipeline file.

    Those that decide nothing are the pipeline's: where a trainer had its processes, say, there
    may be nothing left.
    """
    names = [node.name for role in ("train", "rollout") for node in pipeline.by_role(role)]
    recorded = {key: config[key] for key in ("pipeline", "model", *names) if key in config}
    return aligned(
        recorded,
        pipeline.config,
        defaults={},
        decides=pipeline.by_option(effects),
        taking=("nothing",),
    )


def check_same_options(
    config: Mapping[str, Any],
    pipeline: ResolvedPipeline,
    *,
    run_dir: str,
    branch: str,
) -> None:
    """Refuse to go on with options that would have made another run. Raises `RunError`."""
    changed = changes_of(pipeline, config)
    if not changed:
        return
    raise RunError(
        f"the pipeline of branch {branch!r} of {run_dir!r} has changed since its last version: "
        f"{'; '.join(changed)}.",
        code=RunErrorCode.RUN_MISMATCH,
        remedy="Restore it, or go on with it on a branch of its own: --branch NAME.",
    )


def check_cursor(head: CommitInfo) -> None:
    """A version must say that the step after it comes next. Raises `RunError`."""
    expected, found = head.version + 1, head.attributes["cursor"]["next_step"]
    if found != expected:
        raise RunError(
            f"version {head.version} says that step {found} comes next; expected {expected}.",
            code=RunErrorCode.RUN_MISMATCH,
            remedy="Run `deltaloom verify`.",
        )


def changed_prompts(
    repository: PolicyRepository, head: CommitInfo, pipeline: ResolvedPipeline, *, first: int
) -> str:
    """How prompts differ from those in the ledger of versions `first` to `head`; empty if not.

    The source is called again for some steps of the range, each with its own seed and deadline.
    Raises `TaskError` or `DeadlineError`. Pipelines that change prompts on the way are not
    checked, nor are versions that were expired.
    """
    source = _direct_source(pipeline)
    if source is None:
        return ""
    steps = spread(max(first, 1), head.version, limit=MAX_CHECKED_STEPS)
    known = {step: _recorded_prompts(repository, step, branch=head.branch) for step in steps}
    known = {step: prompts for step, prompts in known.items() if prompts}
    if not known:
        return ""
    (train,) = pipeline.by_role("train")
    whole = train.options.ready_share == 1.0
    changes = {}
    for step, prompts in _prompts_now(source, pipeline, steps=list(known)):
        own = {g: d for g, d in prompts.items() if whole or g in known[step]}
        changes[step] = describe_changes(known[step], own)
    changed = {step: words for step, words in changes.items() if words}
    if not changed:
        return ""
    step, words = next(iter(changed.items()))
    return f"step {step}: {words}; {len(changed)} of {len(known)} steps looked at are changed"


def spread(first: int, last: int, *, limit: int) -> list[int]:
    """At most `limit` numbers from `first` to `last`, both included, evenly spread."""
    count = min(limit, last - first + 1)
    if count <= 1:
        return [last] if last >= first else []
    return [first + round(place * (last - first) / (count - 1)) for place in range(count)]


def _recorded_prompts(repository: PolicyRepository, step: int, *, branch: str) -> Mapping[str, str]:
    """Digests of the step's own prompts by group as its version's ledger has them.

    Empty if the version is not kept. Late groups of earlier steps are left out.
    """
    try:
        info = repository.info(step, branch=branch)
    except NotFoundError:
        return {}
    if "ledger" not in info.record.tables:
        return {}
    values, _ = repository.read_table(info.snapshot_id, "ledger")
    rows = zip(values["group_id"], values.get("prompt_digest", []), strict=False)
    return {group: digest for group, digest in rows if group.startswith(f"{step}/")}


def describe_changes(known: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which groups have another prompt than recorded, in words; empty if none has."""
    if len(known) != len(now):
        return f"{len(now)} prompts instead of {len(known)}"
    changed = [group for group, digest in known.items() if now.get(group) != digest]
    return f"{len(changed)} of {len(known)} prompts, first {changed[0]}" if changed else ""


def check_same_data(
    repository: PolicyRepository, head: CommitInfo, pipeline: ResolvedPipeline, *, first: int
) -> None:
    """Refuse another dataset than the branch's, by the prompts of versions `first` to `head`.

    Raises `RunError`, `TaskError`, `DeadlineError`.
    """
    changed = changed_prompts(repository, head, pipeline, first=first)
    if changed:
        raise RunError(
            f"the source gives other prompts than the run was trained on: {changed}.",
            code=RunErrorCode.RUN_MISMATCH,
            remedy="Restore the data, or go on with it on a branch of its own: --branch NAME.",
        )


def _direct_source(pipeline: ResolvedPipeline) -> ResolvedNode | None:
    """The source that feeds rollouts, or training without them, if nothing stands between."""
    readers = pipeline.by_role("rollout") or pipeline.by_role("train")
    if not readers:
        return None
    producers = [pipeline.nodes[name] for name in pipeline.graph.producers(readers[0].name)]
    sources = [node for node in producers if node.spec.role == "source"]
    return sources[0] if len(sources) == 1 else None


def _prompts_now(
    source: ResolvedNode, pipeline: ResolvedPipeline, *, steps: Sequence[int]
) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Prompt digests by group of each step, as the source gives them now."""
    tokenizer = pipeline.model.create().tokenizer()

    def work(step: int) -> Mapping[str, str]:
        rng = random.Random(derive_seed(pipeline.options.seed, source.name, step))
        with boundary(TaskError, f"source {source.name!r} at step {step}"):
            prompts = source.spec.functions[0](step, rng)
        checked = check_prompts(prompts, node=source.name, step=step, tokenizer=tokenizer)
        return {f"{step}/{row}": prompt_digest(prompt) for row, prompt in enumerate(checked)}

    thread = BackgroundThread("data check", notify=lambda: None)
    for step in steps:
        thread.submit(step, partial(work, step))
        done = thread.wait(timeout_seconds=source.options.timeout_seconds)
        if done is None:
            raise DeadlineError(
                f"source {source.name!r} took longer than {source.options.timeout_seconds:g} s "
                f"for step {step}.",
                code=RunErrorCode.NO_PROGRESS,
            )
        if done.error is not None:
            raise done.error
        yield step, done.result
    thread.close(timeout_seconds=0.0)
