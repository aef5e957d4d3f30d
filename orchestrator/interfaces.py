"""What each kind of plugin component looks like to the rest of deltaloom.

A component is a class with a `name`, a frozen dataclass `Config` and a constructor that takes a
`Config` instance. Heavy libraries are imported when a component is built, not when its module
is: listing plugins must stay cheap. Kinds, and where their instances live:

    codec, optimizer, algorithm, trainer    the training process
    model                                   training process and every rollout worker
    engine, scorer, inference               rollout workers
    executor, tracker, verifier, fusion     the driver process
    guard                                   the driver process
    simulator                               the command line
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .tail_state import TailPolicy
from .types import (
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    ScoredGroup,
    ScoreResult,
    TrainBatch,
    TrainerState,
)

if TYPE_CHECKING:
    import torch

    from ..storage.bits import PolicyTensors
    from ..storage.codec import Changes
    from .resolve import ResolvedPipeline
    from .sample_spans import SampleSpan


class Component(Protocol):
    """What all kinds share."""

    name: ClassVar[str]
    Config: ClassVar[type[Any]]


class Tokenizer(Protocol):
    """Text to token ids and back. Must import without torch."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises `ValueError` for text it has no tokens for."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion, without padding and end-of-sequence tokens."""
        ...


class Model(Component, Protocol):
    """An architecture with its tokenizer: the recipe of v0 and the shape of every version."""

    def tokenizer(self) -> Tokenizer: ...

    def build(self, *, seed: int) -> torch.nn.Module:
        """A float32 module whose parameters are those of v0, a function of config and seed.

        Its `state_dict` uses HF tensor names. `module(tokens)` with int64 [B, T] gives logits
        [B, T, V], and with `at=places` int64 [n] only [n, V] at those flat places of [B, T].
        `module(tokens, cache=c, positions=p)` continues from a key-value cache made by
        `module.new_cache(batch_size, max_length)`: each token is written at its position in its
        row and sees all up to it, so rows are padded on the right. `cache.select(rows)` is a
        cache of those rows. `module.max_length`, where there is one, bounds prompt and
        completion together.
        """
        ...


@runtime_checkable
class ExportsFiles(Protocol):
    """What a model offers whose exported weights other libraries are to load."""

    def export_files(self, folder: Path) -> Sequence[str]:
        """Write configuration and tokenizer beside the weights; the names of the files."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """A verified policy version, ready to be activated.

    `changes` lists the elements that differ from what the engine holds, or is None when every
    tensor is to be loaded. `tensors` is the whole target state either way.
    """

    version: int
    snapshot_id: str
    tensors: PolicyTensors
    changes: Changes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Prompts to complete, `group_size` times each.

    `seeds` uint64 [num_prompts, group_size]: the only randomness of each rollout, so that a
    rollout does not depend on what it was batched with.
    """

    prompts: tuple[Prompt, ...]
    group_size: int
    seeds: npt.NDArray[np.uint64]
    sampling: SamplingParams


class Engine(Component, Protocol):
    """Generates rollouts. Built as `Engine(config, model=model)`, one per worker process."""

    @property
    def version(self) -> int:
        """The version last activated; -1 before the first."""
        ...

    def activate(self, update: WeightUpdate) -> None:
        """Switch to a version. Caches derived from older weights must not survive it."""
        ...

    def generate(
        self, request: GenerateRequest, *, between_steps: Callable[[], None] | None = None
    ) -> list[list[Rollout]]:
        """Complete every prompt; one list of `group_size` rollouts a prompt, in order.

        `between_steps` is called between decode steps and may call `activate`; tokens drawn
        afterwards carry the new version.
        """
        ...


@runtime_checkable
class PreparesWeights(Protocol):
    """What an engine offers that can ready a version beside the one it generates with."""

    def prepare(self, update: WeightUpdate) -> None:
        """Do what `activate(update)` would have to do, but for the switch itself.

        Called in another thread, while `generate` runs. `update.tensors` may be written to after
        `activate`, or after the next `prepare`. An update that is prepared need not be activated.
        """
        ...


@runtime_checkable
class StreamsGroups(Protocol):
    """What an engine offers that can hand a prompt's rollouts on before the others are done."""

    def stream(
        self,
        request: GenerateRequest,
        *,
        on_group: Callable[[int, list[Rollout]], None],
        between_steps: Callable[[], None] | None = None,
    ) -> list[list[Rollout]]:
        """`generate` to the bit; `on_group(index, rollouts)` is called at most once for each
        prompt, as soon as the last of its rollouts is finished."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What continues the rollouts of a request that are not finished, between two tokens."""

    indices: tuple[int, ...]
    """The prompts of the request whose groups are not whole."""
    num_unfinished: int
    """Rollouts that are not finished."""
    arrays: Mapping[str, npt.NDArray[Any]]
    """The engine's own."""


@runtime_checkable
class LeavesTail(Protocol):
    """What an engine offers whose rollouts have the same bits whatever they are drawn with, so
    that another engine can go on with them."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether it is set up so."""
        ...

    def draw_until(
        self,
        request: GenerateRequest,
        *,
        tails: Sequence[Tail] = (),
        leave: Callable[[int], bool],
        on_group: Callable[[int, list[Rollout]], None],
        between_steps: Callable[[], None] | None = None,
    ) -> Tail | None:
        """`stream`, until `leave` says so of the number of unfinished rollouts; it is asked after
        each token. With `tails`, goes on with them: the request has their prompts, in order.

        Gives what was left, or None when everything is finished.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """What an algorithm makes of one group.

    `values` float32 [n] is one advantage a rollout, 0 for those left out; `mask` bool [n] says
    which rollouts enter the batch; `dropped` is the reason why none does, else empty.
    """

    values: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    dropped: str = ""
    tokens: Sequence[npt.NDArray[np.float32]] = ()
    """Where tokens differ: the advantages [T] of each rollout's tokens, in place of `values`."""
    token_mask: Sequence[npt.NDArray[np.bool_]] = ()
    """Which tokens [T] of each rollout are trained; empty: all."""
    columns: Mapping[str, Sequence[npt.NDArray[np.float32]]] = field(default_factory=dict)
    """Further per-token columns of the batch by name, one array [T] a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch of completions, padded to the longest, on the trainer's device.

    All are [n, T]: `logprobs` of the current policy (with gradient), `rollout_logprobs` of the
    distribution each token was drawn from, `advantages`, `mask` (float, 1 where trained), and
    the critic's current `values` (with gradient) for an algorithm that says `uses_values = True`.
    `num_batch_tokens`, `num_batch_rollouts` and `max_length` describe the whole global batch, so
    that any split into micro-batches sums to the same loss.
    """

    logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    extras: Mapping[str, torch.Tensor]
    num_batch_tokens: int
    num_batch_rollouts: int
    max_length: int
    old_logprobs: torch.Tensor | None = None
    """Of the policy at the start of the step, without gradient; None where that is the current
    policy itself, as in a step's first pass."""
    values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """This micro-batch's share of the global loss, and sums for the metrics.

    `sums` maps a metric's name to (numerator, denominator) tensors, added over micro-batches.
    """

    loss: torch.Tensor
    sums: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def combined_loss(actor: LossOutput, critic: LossOutput) -> LossOutput:
    """Both shares as one: the sum of the losses, and the metrics of both."""
    return LossOutput(loss=actor.loss + critic.loss, sums={**actor.sums, **critic.sums})


class Algorithm(Component, Protocol):
    """Advantages (numpy, before the batch is stored) and the loss (torch, in the trainer)."""

    def advantages(self, groups: Sequence[ScoredGroup]) -> list[GroupAdvantages]: ...

    def loss(self, inputs: LossInputs) -> LossOutput: ...


@runtime_checkable
class SeparatesCritic(Protocol):
    """What an algorithm offers whose loss is a part of the actor plus a part of the critic.

    `loss(inputs)` is `combined_loss(actor_loss(inputs), critic_loss(inputs))`, so that the two
    models can be trained apart. `actor_loss` reads no `values`, `critic_loss` no `logprobs`.
    """

    def actor_loss(self, inputs: LossInputs) -> LossOutput: ...

    def critic_loss(self, inputs: LossInputs) -> LossOutput: ...


@runtime_checkable
class CutsActorCritic(Protocol):
    """What a model offers whose module has an actor and a critic that can be cut into stages:
    `module.cut_parts(num_actor_stages, num_critic_stages)`."""

    def max_stages(self) -> tuple[int, int]:
        """The most stages of actor and of critic."""
        ...


@runtime_checkable
class PreparesBatch(Protocol):
    """What an algorithm offers whose loss of a token depends on the whole batch."""

    @property
    def needs_preparation(self) -> bool:
        """Whether `prepare` is wanted, at the cost of one more forward pass."""
        ...

    def prepare(
        self, batch: TrainBatch, logprobs: npt.NDArray[np.float32]
    ) -> Mapping[str, npt.NDArray[np.float32]]:
        """Columns [S] that the loss finds in `LossInputs.extras`, made before each pass.

        `logprobs` [S] are the current policy's of the batch's tokens.
        """
        ...


class Optimizer(Component, Protocol):
    """Builds the update rule over float32 master parameters."""

    def build(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer: ...


class Trainer(Component, Protocol):
    """Holds the policy being trained.

    Built as `Trainer(config, model=, algorithm=, optimizer=, sampling=, num_threads=)`: logprobs
    are of the distribution that `sampling` draws from, temperature and top-p applied, so that
    they compare with the rollout's.
    """

    def initialize(self, *, seed: int) -> None:
        """Start at v0."""
        ...

    def policy(self) -> PolicyTensors:
        """The bits to publish, as copies that later steps do not touch."""
        ...

    def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        """One optimizer step; returns metrics. A function of state and batch alone."""
        ...

    def state(self) -> TrainerState: ...

    def load(self, state: TrainerState) -> None:
        """Go on from a stored state. Raises `RunError` when a part of it is missing."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DescribesPolicy(Protocol):
    """What a trainer offers whose policies are more than weights and a number."""

    def policy_facts(self) -> Mapping[str, Any]:
        """JSON facts on what `policy` returns now: the attribute `trainer` of that version."""
        ...


@runtime_checkable
class ComparesLogprobs(Protocol):
    """What a trainer offers that remembers how its logprobs differed from the engine's."""

    def logprob_differences(self) -> npt.NDArray[np.float32]:
        """float32 [S], one a token of the batch of the last step, in its order: the trainer's
        logprob before the update minus the rollout's. Empty when nothing was trained."""
        ...


class Scorer(Component, Protocol):
    """Scores a group. Runs in a worker; what it raises becomes `invalid`, never reward 0."""

    def score(
        self,
        group: RolloutGroup,
        *,
        skip: Mapping[int, ScoreResult],
        report: Callable[[int], None],
    ) -> list[ScoreResult]:
        """One result a rollout; positions in `skip` are already decided.

        `report(position)` is called before the rollout at that position is scored: it restarts
        the deadline, and names the culprit if scoring hangs or takes its process down.
        """
        ...


ColumnsByRollout = Mapping[str, Sequence[npt.NDArray[Any]]]
"""Per-token values by column name: one array [T] a rollout."""


class Inference(Component, Protocol):
    """Adds per-token columns to finished rollouts.

    Built in a worker as `Inference(config, model=, sampling=, seed=)`: the rollout node's
    sampling and the run's seed. One that also has `activate(update)`, as engines do, is at the
    version that generated the rollouts whenever `infer` is called.
    """

    def infer(self, group: RolloutGroup) -> ColumnsByRollout:
        """The columns of one group: a function of version and group, whatever is beside it."""
        ...


class Tracker(Component, Protocol):
    """Receives metrics in the driver process. Built as `Tracker(config, run_dir=path)`."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One JSON-like record: `step`, `version`, `time` and metrics."""
        ...

    def last_step(self) -> int:
        """The newest step it has a record of, 0 if none. After a crash the missing ones are
        logged again from the store."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class TracesSamples(Protocol):
    """What a tracker has that follows groups through the processes of a run."""

    def trace(self, spans: Sequence[SampleSpan]) -> None:
        """The spans of the groups of a step, before the step's record."""
        ...


class Verifier(Component, Protocol):
    """Checks a finished group before it is admitted."""

    def verify(self, group: RolloutGroup) -> str | None:
        """None when the group may be used, else the reason why it is invalid."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Another component of the same kind for a node: `options` are fields of its `Config`."""

    node: str
    slot: str
    """As in the node's components: "trainer", "algorithm", ..."""
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A committed version as a guard sees it.

    `metrics` are those of its step and of its evaluations, the latter named `NODE.score` and
    `NODE.pass@K`. `is_own` says whether the version was made on the branch that is judged, and
    not before that began.
    """

    version: int
    snapshot_id: str
    metrics: Mapping[str, float]
    is_own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a guard found at a version, and what is to be done.

    `warn` is written down; `pause` ends the run at the version; `rollback` goes on from
    `last_good` on a new branch, with the options of `overlay` (a tree as of `--set`) in force.
    """

    version: int
    rule: str
    action: Literal["warn", "pause", "rollback"]
    reason: str
    last_good: int = 0
    overlay: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The finding in one line."""
        return f"{self.action} at version {self.version}: {self.reason} (rule: {self.rule})"

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "rule": self.rule,
            "action": self.action,
            "reason": self.reason,
            "last_good": self.last_good,
            "overlay": dict(self.overlay),
        }


class Guard(Component, Protocol):
    """Judges versions by their metrics. Built as `Guard(config)`."""

    @property
    def is_active(self) -> bool:
        """Whether it can find anything at all."""
        ...

    def check(self, config: Mapping[str, Any], metrics: Collection[str]) -> None:
        """Refuse rules that cannot hold, before anything runs. Raises `ConfigError`.

        `config` are the run's resolved options; `metrics` the names that evaluations give.
        """
        ...

    def judge(
        self, history: Sequence[Observed], config: Mapping[str, Any], *, num_rollbacks: int
    ) -> Sequence[Finding]:
        """What begins to hold with the last version of `history`, oldest first.

        A function of its arguments alone. `config` are the run's resolved options and
        `num_rollbacks` how often the run was rolled back before.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionPlan:
    """What to run together or by other components, and why. Semantics must not change: the same
    rollouts, weights and trainer states, bit for bit."""

    reason: str
    chains: tuple[tuple[str, ...], ...] = ()
    """Chains of nodes whose shards run as one task."""
    by_group: tuple[str, ...] = ()
    """Nodes that run once a group, as soon as it is generated, instead of once a rollout task:
    scores, inferences and their joins, which make the same of a group whatever is beside it."""
    replacements: tuple[Replacement, ...] = ()
    """Components that do the work of others. The run's options and their digest stay those of
    the pipeline, and so does what a version is replayed with."""
    tail: TailPolicy | None = None
    """When the last rollouts of a step are moved. With `by_group`, and an engine that
    `LeavesTail`."""


class FusionPlanner(Component, Protocol):
    """Proposes what to fuse; chosen by `pipeline.fusion`. Built as `Planner(config)`."""

    def plan(self, pipeline: ResolvedPipeline) -> FusionPlan:
        """A plan without chains and replacements leaves all as it is; its reason says why."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table for people: numbers are shown to four digits, None as a dash."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What a simulator found: `values` for programs, the rest for people.

    `values` are JSON; `notes` are lines under the tables; `svg` is a picture, empty for none.
    """

    values: Mapping[str, Any]
    tables: tuple[ReportTable, ...] = ()
    notes: tuple[str, ...] = ()
    svg: str = ""


class Simulator(Component, Protocol):
    """Predicts times and sizes without running anything; the class docstring is its help text.

    Built as `Simulator(config)`. The docstrings under the fields of `Config` are the help of its
    options.
    """

    def simulate(self) -> SimulationReport:
        """A function of the config alone. Raises `ConfigError` for one that cannot be."""
        ...
