"""The words a pipeline is written in. Each returns data; nothing runs until a run is started.

Example:
    pipeline = Pipeline(
        source(prompts, to="prompts"),
        rollout("prompts", to="groups", engine="torch", group_size=8, max_new_tokens=8),
        score("groups", to="scored", by=exact_match),
        train("scored", trainer="torch", algorithm="grpo", optimizer="adamw", lr=1e-3),
        publish(codec="context", anchor_every=50),
        model=use("transformer", alphabet="0123456789"),
        max_staleness=1,
    )
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .errors import PipelineError, RunErrorCode
from .graph import Graph, build_graph
from .joining import join_columns
from .options import (
    EvaluateOptions,
    FunctionOptions,
    InferOptions,
    PublishOptions,
    RolloutOptions,
    ScoreOptions,
    SourceOptions,
    TrainOptions,
)


class Role(StrEnum):
    """What a node does, and so where and how often it runs."""

    SOURCE = "source"
    ROLLOUT = "rollout"
    SCORE = "score"
    INFER = "infer"
    EVALUATE = "evaluate"
    FUNCTION = "function"
    TRAIN = "train"
    PUBLISH = "publish"


class Port(StrEnum):
    """The kinds of value an edge carries."""

    PROMPTS = "prompts"
    GROUPS = "groups"
    SCORED = "scored"
    WEIGHTS = "weights"
    POLICY = "policy"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class ComponentChoice:
    """A plugin selected by name, with options for it alone."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node as written: what it reads and makes, and the options given to it.

    `components` maps a slot (`engine`, `optimizer`, ...) to the plugin chosen for it. `options`
    belong to the node or to whichever of its components has a field of that name.
    """

    name: str
    role: Role
    inputs: tuple[str, ...]
    input_kinds: tuple[Port, ...]
    output: str
    output_kind: Port
    options_type: type[Any]
    functions: tuple[Callable[..., Any], ...] = ()
    other_kinds: tuple[Port, ...] = ()
    """Kinds of input accepted in place of `input_kinds`."""
    prompts: Callable[..., Any] | None = None
    """What makes the held-out prompts of an evaluation."""
    components: Mapping[str, ComponentChoice] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


def use(name: str, /, **options: Any) -> ComponentChoice:
    """Select a plugin by name and give it options: `optimizer=use("adamw", lr=1e-3)`."""
    return ComponentChoice(name, options)


def source(
    prompts: Callable[..., Any], /, *, to: str, name: str = "source", **options: Any
) -> NodeSpec:
    """Make the prompts of each step.

    `prompts(step, rng)` returns a list of `Prompt`; `rng` is a `random.Random` seeded by the run
    and the step, so that any step can be made again.
    """
    return NodeSpec(
        name=name,
        role=Role.SOURCE,
        inputs=(),
        input_kinds=(),
        output=to,
        output_kind=Port.PROMPTS,
        options_type=SourceOptions,
        functions=(prompts,),
        options=options,
        where=_caller(),
    )


def rollout(
    prompts: str,
    /,
    *,
    to: str,
    engine: str | ComponentChoice = "torch",
    name: str = "rollout",
    **options: Any,
) -> NodeSpec:
    """Complete every prompt `group_size` times with the current policy."""
    return NodeSpec(
        name=name,
        role=Role.ROLLOUT,
        inputs=(prompts,),
        input_kinds=(Port.PROMPTS,),
        output=to,
        output_kind=Port.GROUPS,
        options_type=RolloutOptions,
        components={"engine": _choice(engine)},
        options=options,
        where=_caller(),
    )


def score(
    groups: str,
    /,
    *,
    to: str,
    by: Callable[..., Any] | Sequence[Callable[..., Any]] | str | ComponentChoice,
    name: str = "score",
    **options: Any,
) -> NodeSpec:
    """Score every rollout by plain functions, or by a scorer plugin.

    A function takes a `Rollout` and returns a number, `Invalid(reason)`, or None to abstain;
    several are summed. What it raises makes that rollout invalid, never reward 0.
    """
    scorer, functions = _scored_by(by)
    return NodeSpec(
        name=name,
        role=Role.SCORE,
        inputs=(groups,),
        input_kinds=(Port.GROUPS,),
        output=to,
        output_kind=Port.SCORED,
        options_type=ScoreOptions,
        functions=functions,
        components={"scorer": scorer},
        options=options,
        where=_caller(),
    )


def infer(
    groups: str,
    /,
    *,
    to: str,
    by: str | ComponentChoice,
    name: str = "",
    **options: Any,
) -> NodeSpec:
    """Add per-token columns that a model computes from finished rollouts.

    `by` is an inference plugin: `"values"` of the critic, `"reference"` logprobs. It runs in
    workers, with the policy version that generated the rollouts; named by the plugin if unnamed.
    """
    choice = _choice(by)
    return NodeSpec(
        name=name or choice.name,
        role=Role.INFER,
        inputs=(groups,),
        input_kinds=(Port.GROUPS,),
        output=to,
        output_kind=Port.GROUPS,
        options_type=InferOptions,
        components={"inference": choice},
        options=options,
        where=_caller(),
    )


def join(scored: str, /, *groups: str, to: str, name: str = "join", **options: Any) -> NodeSpec:
    """Scored groups with the columns that `infer` nodes made of the same groups.

    A group that one of the inputs left out is left out.
    """
    return NodeSpec(
        name=name,
        role=Role.FUNCTION,
        inputs=(scored, *groups),
        input_kinds=(Port.SCORED, *(Port.GROUPS,) * len(groups)),
        output=to,
        output_kind=Port.SCORED,
        options_type=FunctionOptions,
        functions=(join_columns,),
        options=options,
        where=_caller(),
    )


def node(
    function: Callable[..., Any],
    /,
    *inputs: str,
    to: str,
    kind: str,
    name: str = "",
    **options: Any,
) -> NodeSpec:
    """A plain function between two ports of one kind: `prompts`, `groups` or `scored`.

    It gets one list per input and returns the list that goes on: a filter, a transformation, a
    measurement. It runs in a worker and must be a function of its inputs.
    """
    port = _port(kind, where=_caller())
    return NodeSpec(
        name=name or getattr(function, "__name__", ""),
        role=Role.FUNCTION,
        inputs=inputs,
        input_kinds=(port,) * len(inputs),
        output=to,
        output_kind=port,
        options_type=FunctionOptions,
        functions=(function,),
        options=options,
        where=_caller(),
    )


def evaluate(
    prompts: Callable[..., Any],
    /,
    *,
    by: Callable[..., Any] | Sequence[Callable[..., Any]] | str | ComponentChoice,
    name: str = "evaluate",
    **options: Any,
) -> NodeSpec:
    """Score every so many versions on held-out prompts, with the engine of the rollout node.

    `prompts(rng)` returns a list of `Prompt`, made once; `rng` is seeded by the run alone. `by`
    is as of `score`. Prompts and seeds are the same for every version, so that two evaluations
    differ by their policies alone. Results are kept beside the version: its score, and pass@k
    where a score of at least `pass_score` counts as a success.
    """
    scorer, functions = _scored_by(by)
    return NodeSpec(
        name=name,
        role=Role.EVALUATE,
        inputs=(),
        input_kinds=(),
        output=name,
        output_kind=Port.EVALUATION,
        options_type=EvaluateOptions,
        functions=functions,
        prompts=prompts,
        components={"scorer": scorer},
        options=options,
        where=_caller(),
    )


def train(
    scored: str,
    /,
    *,
    to: str = "weights",
    trainer: str | ComponentChoice = "torch",
    algorithm: str | ComponentChoice = "grpo",
    optimizer: str | ComponentChoice = "adamw",
    name: str = "train",
    **options: Any,
) -> NodeSpec:
    """One training step on the groups of a step; makes the next policy version's weights.

    `scored` may also name prompts: then there are no rollouts, and each prompt's `answer` is a
    completion to learn (`algorithm="sft"`).
    """
    return NodeSpec(
        name=name,
        role=Role.TRAIN,
        inputs=(scored,),
        input_kinds=(Port.SCORED,),
        other_kinds=(Port.PROMPTS,),
        output=to,
        output_kind=Port.WEIGHTS,
        options_type=TrainOptions,
        components={
            "trainer": _choice(trainer),
            "algorithm": _choice(algorithm),
            "optimizer": _choice(optimizer),
        },
        options=options,
        where=_caller(),
    )


def publish(
    weights: str = "weights",
    /,
    *,
    to: str = "policy",
    codec: str | ComponentChoice = "context",
    name: str = "publish",
    **options: Any,
) -> NodeSpec:
    """Commit weights, ledger, batch and metrics of a step as one policy version."""
    return NodeSpec(
        name=name,
        role=Role.PUBLISH,
        inputs=(weights,),
        input_kinds=(Port.WEIGHTS,),
        output=to,
        output_kind=Port.POLICY,
        options_type=PublishOptions,
        components={"codec": _choice(codec)},
        options=options,
        where=_caller(),
    )


def guard(*rules: str | Mapping[str, Any], **options: Any) -> ComponentChoice:
    """The guard that judges every version by declared rules: `Pipeline(guard=guard(...))`.

    A rule is a text, `"reward drop=0.2 over=3 action=rollback scale.train.lr=0.1"`, or a
    `rule(...)`; plugin `rules` says what it may hold.
    """
    return ComponentChoice("rules", {"rules": list(rules), **options})


def rule(metric: str, /, **options: Any) -> Mapping[str, Any]:
    """A rule of the guard over one metric, with its condition, window and action."""
    return {"metric": metric, **options}


class Pipeline:
    """A validated task graph with its model and run-wide options.

    Raises `PipelineError`, naming the node, for a cycle without lag, an input nobody makes, two
    producers of one output, clashing names, or an edge between different kinds of port.
    `options` are the fields of `PipelineOptions`; they and all plugin names and options are
    checked when the pipeline is planned or run.
    """

    def __init__(
        self,
        *nodes: NodeSpec,
        model: str | ComponentChoice = "transformer",
        trackers: Sequence[str | ComponentChoice] = ("jsonl",),
        guard: str | ComponentChoice = "rules",
        **options: Any,
    ) -> None:
        self.nodes = nodes
        self.model = _choice(model)
        self.trackers = tuple(_choice(tracker) for tracker in trackers)
        self.guard = _choice(guard)
        self.options: Mapping[str, Any] = options
        self.graph: Graph = build_graph(nodes)


def _scored_by(
    by: Callable[..., Any] | Sequence[Callable[..., Any]] | str | ComponentChoice,
) -> tuple[ComponentChoice, tuple[Callable[..., Any], ...]]:
    """The scorer plugin meant, and the functions it is to call."""
    if isinstance(by, str | ComponentChoice):
        return _choice(by), ()
    return ComponentChoice("function"), (by,) if callable(by) else tuple(by)


def _choice(value: str | ComponentChoice | object) -> ComponentChoice:
    if isinstance(value, ComponentChoice):
        return value
    if isinstance(value, str):
        return ComponentChoice(value)
    raise PipelineError(
        f"a plugin is selected by its name or by use(name, ...), got {value!r}.",
        code=RunErrorCode.BAD_GRAPH,
    )


def _port(kind: str, *, where: str) -> Port:
    allowed = (Port.PROMPTS, Port.GROUPS, Port.SCORED)
    if kind not in allowed:
        raise PipelineError(
            f"{where}: kind must be one of {', '.join(allowed)}, got {kind!r}.",
            code=RunErrorCode.BAD_GRAPH,
        )
    return Port(kind)


def _caller() -> str:
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame is not None else None
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
