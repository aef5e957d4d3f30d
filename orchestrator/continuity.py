"""Whether a run that goes on is the run that was stopped: same options, same data, same cursor."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .background import BackgroundThread
from .config import differences
from .errors import DeadlineError, RunError, RunErrorCode, TaskError, boundary
from .resolve import ResolvedNode, ResolvedPipeline
from .seeds import derive_seed
from .wire import prompt_digest
from .worker import check_prompts

if TYPE_CHECKING:
    from ..storage.records import CommitInfo
    from ..storage.repository import PolicyRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedConfig:
    """The options that versions were made with, and their digest."""

    config: Mapping[str, Any]
    digest: str


def recorded_config(repository: PolicyRepository, info: CommitInfo) -> RecordedConfig:
    """The options a version was trained with: stored by v0, and by the first version of a branch
    that changed them. Raises `RunError` if that version was expired."""
    for ancestor in repository.ancestors(info, over_gaps=True):
        if "config" in ancestor.attributes:
            attributes = ancestor.attributes
            return RecordedConfig(config=attributes["config"], digest=attributes["config_digest"])
    raise RunError(
        f"the version that recorded the options of version {info.version} was expired.",
        code=RunErrorCode.RUN_NOT_FOUND,
    )


def recorded_overlay(pipeline: ResolvedPipeline, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recorded options that training depends on, as an overlay over a pipeline file."""
    names = [node.name for role in ("train", "rollout") for node in pipeline.by_role(role)]
    return {key: config[key] for key in ("pipeline", "model", *names) if key in config}


def check_same_options(
    recorded: RecordedConfig, pipeline: ResolvedPipeline, *, run_dir: str, branch: str
) -> None:
    """Refuse to go on with options that would have made another run. Raises `RunError`."""
    if recorded.digest == pipeline.config_digest:
        return
    changed = differences(recorded.config, pipeline.config)
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
    repository: PolicyRepository, head: CommitInfo, pipeline: ResolvedPipeline
) -> str:
    """How the prompts of the last trained step differ from those in the ledger; empty if not.

    The source is called for that step again, with its own seed and its own deadline. Raises
    `TaskError` or `DeadlineError`. Pipelines that change prompts on the way are not checked.
    """
    source = _direct_source(pipeline)
    if source is None or "ledger" not in head.record.tables:
        return ""
    values, _ = repository.read_table(head.snapshot_id, "ledger")
    known = dict(zip(values["group_id"], values.get("prompt_digest", []), strict=False))
    if not known:
        return ""
    now = _prompt_digests(source, pipeline, step=head.version)
    return describe_changes(known, {f"{head.version}/{i}": d for i, d in enumerate(now)})


def describe_changes(known: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which groups have another prompt than recorded, in words; empty if none has."""
    if len(known) != len(now):
        return f"{len(now)} prompts instead of {len(known)}"
    changed = [group for group, digest in known.items() if now.get(group) != digest]
    return f"{len(changed)} of {len(known)} prompts, first {changed[0]}" if changed else ""


def check_same_data(
    repository: PolicyRepository, head: CommitInfo, pipeline: ResolvedPipeline
) -> None:
    """Refuse another dataset than the run's. Raises `RunError`, `TaskError`, `DeadlineError`."""
    changed = changed_prompts(repository, head, pipeline)
    if changed:
        raise RunError(
            f"the source gives other prompts for step {head.version} than the run was trained "
            f"on: {changed}.",
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


def _prompt_digests(
    source: ResolvedNode, pipeline: ResolvedPipeline, *, step: int
) -> Sequence[str]:
    def work() -> Sequence[str]:
        rng = random.Random(derive_seed(pipeline.options.seed, source.name, step))
        with boundary(TaskError, f"source {source.name!r} at step {step}"):
            prompts = source.spec.functions[0](step, rng)
        tokenizer = pipeline.model.create().tokenizer()
        checked = check_prompts(prompts, node=source.name, step=step, tokenizer=tokenizer)
        return [prompt_digest(prompt) for prompt in checked]

    thread = BackgroundThread("data check", notify=lambda: None)
    thread.submit(step, work)
    done = thread.wait(timeout_seconds=source.options.timeout_seconds)
    if done is None:
        raise DeadlineError(
            f"source {source.name!r} took longer than {source.options.timeout_seconds:g} s for "
            f"step {step}.",
            code=RunErrorCode.NO_PROGRESS,
        )
    thread.close(timeout_seconds=0.0)
    if done.error is not None:
        raise done.error
    digests: Sequence[str] = done.result
    return digests
