"""Options of the pipeline and of each role; plugins own the options of their components.

Values out of range are refused when the options are built, so that `plan` finds them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..storage.errors import InputError
from ..storage.weight_place import parse_host
from .config import option
from .errors import ConfigError, RunErrorCode


def check_least(options: Any, **least: float) -> None:
    """Raise `ConfigError` for the first option below its least value."""
    for name, limit in least.items():
        value = getattr(options, name)
        if not value >= limit:
            raise ConfigError(
                f"{name} must be at least {limit:g}, got {value!r}.", code=RunErrorCode.WRONG_TYPE
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Run-wide options; `[pipeline]` in TOML."""

    steps: int = option(100, decides="nothing")
    """Training steps, and so policy versions beyond v0."""
    seed: int = 0
    """Root of every random decision of the run."""
    max_staleness: int = 1
    """Policy versions between the one being trained and the oldest that drew a token of its data:
    0 is synchronous, 1 one step off, and so on. A fixed lag unless `late_steps` is above 0."""
    late_steps: int = 0
    """Part of `max_staleness` that is kept for late groups: rollouts start `max_staleness -
    late_steps` versions behind, and may be trained on so many steps after their own. Of use with
    `train.ready_share` below 1."""
    staleness_policy: Literal["wait", "drop", "admit"] = "wait"
    """What becomes of groups that would be too stale: training waits for them in time, or goes on
    and drops them when they come, or admits them all the same."""
    workers: int = option(2, decides="nothing")
    """Rollout worker processes."""
    executor: str = option("local", decides="nothing")
    """Executor plugin that runs rollout, score and function tasks."""
    fusion: tuple[str, ...] = option((), decides="nothing")
    """Fusion planners that may rewrite the plan, by plugin name; each has its options in
    `[fusion.NAME]`. What is computed stays the same, bit for bit."""
    worker_threads: int = 1
    """Compute threads of each worker; part of what makes rollouts reproducible."""
    trainer_threads: int = 1
    """Compute threads of the trainer; part of what makes training reproducible."""
    max_attempts: int = option(3, decides="nothing")
    """Tries of a task whose worker died or hung before it counts as poison."""
    max_empty_steps: int = option(3, decides="nothing")
    """Consecutive steps that may train on nothing before the run stops."""
    stall_seconds: float = option(600.0, decides="nothing")
    """Longest the run may make no progress at all before it stops with a report of waits."""
    store_bytes_per_second: float = option(0.0, decides="nothing")
    """Most that each process, the trainer's and every worker's, moves to and from the store; 0
    for no limit."""
    store_max_tries: int = option(5, decides="nothing")
    """Tries of one request to the store while it is unavailable, with growing pauses between."""
    weights_cache: str = option("", decides="nothing")
    """Folder in which the workers of a machine share what they have downloaded, so that an
    interrupted download goes on and a second worker fetches nothing; empty for none."""

    def __post_init__(self) -> None:
        check_least(
            self,
            steps=0,
            max_staleness=0,
            late_steps=0,
            workers=1,
            worker_threads=1,
            trainer_threads=1,
            max_attempts=1,
            max_empty_steps=1,
            stall_seconds=1,
            store_bytes_per_second=0,
            store_max_tries=1,
        )
        if self.late_steps > self.max_staleness:
            raise ConfigError(
                f"late_steps must be at most max_staleness {self.max_staleness}, "
                f"got {self.late_steps}.",
                code=RunErrorCode.WRONG_TYPE,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Options of `source`."""

    timeout_seconds: float = option(60.0, decides="nothing")
    """Longest one step's prompts may take."""

    def __post_init__(self) -> None:
        check_least(self, timeout_seconds=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Options of `rollout`."""

    max_new_tokens: int
    """Longest completion, in tokens, the stop token included."""
    group_size: int = 8
    """Rollouts of each prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Share of probability kept, most likely tokens first; 1 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides end-of-sequence."""
    prompts_per_task: int = 8
    """Prompts of one rollout task. Fixes what is batched together, whatever the workers."""
    in_flight: bool = False
    """Go on with a newer policy version as soon as it is there, between two tokens, instead of
    finishing with the one started with. Every token keeps the version that drew it; the engine
    option `recompute_cache_on_update` says what becomes of the cache. Such runs are not
    deterministic."""
    double_buffered: bool = option(False, decides="nothing")
    """With `in_flight`: hold a second copy of the weights, which a newer version is written to
    while the engine decodes with the first. Activating then only exchanges the two; it costs the
    memory of the weights once more."""
    timeout_seconds: float = option(600.0, decides="nothing")
    """Longest one rollout task may go without progress."""
    on_failure: Literal["drop", "stop"] = "drop"
    """What a task that failed `max_attempts` times does: `drop` its groups, or `stop`."""
    verifier: str = ""
    """Verifier plugin that checks groups before admission; empty: none."""

    def __post_init__(self) -> None:
        check_least(
            self,
            max_new_tokens=1,
            group_size=1,
            prompts_per_task=1,
            temperature=0,
            timeout_seconds=0.001,
        )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p must be above 0 and at most 1, got {self.top_p!r}.",
                code=RunErrorCode.WRONG_TYPE,
            )
        if self.double_buffered and not self.in_flight:
            raise ConfigError(
                "double_buffered is of no use without in_flight: nothing is decoded meanwhile.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Set in_flight, or leave double_buffered out.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """Options of `score`."""

    timeout_seconds: float = 10.0
    """Longest one rollout's scoring may take; beyond it the rollout counts as timeout."""
    max_timeouts_per_task: int = 3
    """Timeouts in one task after which its unscored rollouts count as timeouts too."""

    def __post_init__(self) -> None:
        check_least(self, timeout_seconds=0.001, max_timeouts_per_task=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferOptions:
    """Options of `infer`."""

    timeout_seconds: float = option(600.0, decides="nothing")
    """Longest one group may take."""

    def __post_init__(self) -> None:
        check_least(self, timeout_seconds=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """Options of `evaluate`. Sampling is that of the rollout node where nothing else is said."""

    every: int = 10
    """Versions between evaluations. The first and the last version are evaluated too."""
    num_samples: int = 4
    """Completions of each prompt."""
    ks: tuple[int, ...] = (1,)
    """The k of each pass@k to report, at most `num_samples`."""
    pass_score: float = 1.0
    """The least score that counts as a success in pass@k."""
    before_use: bool = False
    """Rollouts of a version wait until it is evaluated and the guard has judged it: one that a
    rule rolls back or pauses at makes none. Otherwise evaluations run on workers that would be
    idle, and training goes on meanwhile, by as many versions as rollouts lag behind and one."""
    max_new_tokens: int | None = None
    """Longest completion, in tokens."""
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    """Share of probability kept, most likely tokens first."""
    prompts_per_task: int = 32
    """Prompts of one evaluation task."""
    timeout_seconds: float = option(600.0, decides="nothing")
    """Longest one evaluation task, or making the prompts, may go without progress."""

    def __post_init__(self) -> None:
        check_least(self, every=1, num_samples=1, prompts_per_task=1, timeout_seconds=0.001)
        if not self.ks or not all(1 <= k <= self.num_samples for k in self.ks):
            raise ConfigError(
                f"ks must be numbers from 1 to num_samples {self.num_samples}, got {self.ks!r}.",
                code=RunErrorCode.WRONG_TYPE,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionOptions:
    """Options of `node`."""

    timeout_seconds: float = option(60.0, decides="nothing")
    """Longest one call may take."""

    def __post_init__(self) -> None:
        check_least(self, timeout_seconds=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of `train`; trainer, algorithm and optimizer have their own."""

    ready_share: float = 1.0
    """Share of a step's rollout tasks that must be finished before it trains, late ones of earlier
    steps included. With 1, a step trains on exactly its own groups. Below 1, it trains on what is
    there, and the others are late: later steps train on them. A source that makes 1 / ready_share
    times the prompts wanted is over-provisioned, and the slowest are not waited for."""
    vetoes: tuple[str, ...] = ()
    """Reviews of the run's store, by id: groups with a rollout that one of them vetoed are dropped
    whenever they are drawn again. Of use on a branch that starts before what was vetoed."""
    timeout_seconds: float = option(3600.0, decides="nothing")
    """Longest one training step may take."""

    def __post_init__(self) -> None:
        check_least(self, timeout_seconds=0.001)
        if not 0 < self.ready_share <= 1:
            raise ConfigError(
                f"ready_share must be above 0 and at most 1, got {self.ready_share!r}.",
                code=RunErrorCode.WRONG_TYPE,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """Options of `publish`."""

    anchor_every: int = option(50, decides="nothing")
    """Versions between full copies of the weights."""
    max_chain_ratio: float = option(1.0, decides="nothing")
    """A full copy is stored earlier once the deltas since the last one cost more than so many
    full copies: what a worker that joins late has to fetch."""
    fold_every: int = option(0, decides="nothing")
    """Versions between folds: one payload in place of all deltas since the full copy, for workers
    that join late, stored where it is smaller than they are; 0 for none."""
    state_every: int = option(10, decides="nothing")
    """Versions between copies of the trainer's state; those between are rebuilt by replay."""
    transport: Literal["store", "direct"] = option("store", decides="nothing")
    """How versions reach workers: through the store, or directly from the process that publishes
    them, with the store for whatever cannot be had so. Every version is committed either way, and
    the run is the same, bit for bit."""
    direct_host: str = option("", decides="nothing")
    """With `transport="direct"`: name or address, IPv4 or IPv6, by which workers reach the
    trainer's machine; empty for the one that it finds by itself."""
    timeout_seconds: float = option(600.0, decides="nothing")
    """Longest one commit may take."""

    def __post_init__(self) -> None:
        check_least(
            self,
            anchor_every=1,
            state_every=1,
            max_chain_ratio=0,
            fold_every=0,
            timeout_seconds=0.001,
        )
        try:
            parse_host(self.direct_host or "localhost")
        except InputError as error:
            raise ConfigError(
                f"direct_host: {error.message}", code=RunErrorCode.WRONG_TYPE, remedy=error.remedy
            ) from error
