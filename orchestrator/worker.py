"""What a worker does with a task, whatever executor brought it: run the node, pack the result.

A worker rebuilds plugins and pipeline from the bootstrap alone, keeps one engine, and gets its
weights from the store, or directly from the process that publishes them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..storage.errors import InputError
from .direct_transport import source_of
from .errors import PluginError, RunErrorCode, TaskError, boundary
from .executor import TaskSpec, WorkerBootstrap
from .interfaces import Engine, GenerateRequest, Inference, LeavesTail, Model, Tokenizer
from .output_checks import check_columns, check_items, check_scores
from .pipeline_file import load_pipeline
from .plugin_manager import Plugins, create_plugins
from .resolve import ResolvedNode, ResolvedPipeline, resolve
from .seeds import derive_seed, rollout_seeds
from .streaming import Emit, GroupStream
from .tail_task import TailLink, TailTask
from .types import Prompt, Rollout, SamplingParams, ScoredGroup
from .wire import PORT_CODECS, pack_prompts, score_from_json

if TYPE_CHECKING:
    from .worker_weights import HoldsWeights, WorkerWeights

Report = Callable[[int], None]
Holder = TypeVar("Holder", bound="HoldsWeights")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutput:
    """What a node made: items of its port's kind, and numbers worth keeping.

    A rollout task that gave up its tail has no items; `left` is the tail, packed.
    """

    items: Sequence[Any]
    metrics: Mapping[str, float]
    left: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutput:
    """What a task made, packed; with `left`, what it gave up instead."""

    data: bytes
    num_items: int
    metrics: Mapping[str, float]
    left: bytes = b""


class TaskRunner:
    """Runs tasks in this process. Built once; heavy parts are made when first needed."""

    def __init__(self, bootstrap: WorkerBootstrap, *, worker: str) -> None:
        self._bootstrap = bootstrap
        self._worker = worker
        self._emit: Emit = _discard
        self._link: TailLink | None = None
        directory = bootstrap.plugins_dir
        self._plugins: Plugins = create_plugins(plugins_dir=Path(directory) if directory else None)
        self._pipeline: ResolvedPipeline = resolve(
            load_pipeline(Path(bootstrap.pipeline_path)), self._plugins, overlay=bootstrap.overlay
        )

    def run(
        self, spec: TaskSpec, *, report: Report, emit: Emit, link: TailLink | None = None
    ) -> TaskOutput:
        """What a task makes.

        A task that asks for `parts` gives `emit` each group that is finished before the others;
        one with a `link` gives up its last rollouts, or takes in others', when it is told to.
        Raises whatever the node raises; observers' hooks run around it.
        """
        self._emit, self._link = emit, link
        chain = [self._pipeline.nodes[name] for name in spec.values["chain"]]
        taken = time.monotonic()
        inputs = [
            PORT_CODECS[kind].decode(data)
            for kind, data in zip(_input_kinds(chain[0]), spec.inputs, strict=True)
        ]
        metrics: dict[str, float] = {}
        started = time.monotonic()
        for node in chain:
            output = self._observed(node, spec, inputs, report)
            inputs = [list(output.items)]
            metrics |= output.metrics
            if output.left:
                return TaskOutput(data=b"", num_items=0, metrics=metrics, left=output.left)
        ended = time.monotonic()
        data = PORT_CODECS[chain[-1].spec.output_kind].encode(output.items)
        metrics["run_seconds"] = ended - started
        metrics["pack_seconds"] = started - taken + time.monotonic() - ended
        return TaskOutput(data=data, num_items=len(output.items), metrics=metrics)

    @property
    def version(self) -> int:
        """The policy version its engine holds; -1 while it has no engine."""
        weights: WorkerWeights[Engine] | None = self.__dict__.get("_weights")
        return -1 if weights is None else weights.holder.version

    def _observed(
        self, node: ResolvedNode, spec: TaskSpec, inputs: list[Any], report: Report
    ) -> NodeOutput:
        context = {"node": node.name, "task": str(spec.task), "worker": self._worker}
        self._plugins.hook.before_node_run(**context)
        started = time.monotonic()
        try:
            output = self._run_node(node, spec, inputs, report)
        except BaseException as error:
            self._plugins.hook.on_node_error(**context, error=error)
            raise
        self._plugins.hook.after_node_run(**context, seconds=time.monotonic() - started)
        return output

    def _run_node(
        self, node: ResolvedNode, spec: TaskSpec, inputs: list[Any], report: Report
    ) -> NodeOutput:
        handlers: Mapping[str, Callable[[ResolvedNode, TaskSpec, list[Any], Report], NodeOutput]]
        handlers = {
            "source": self._source,
            "rollout": self._rollout,
            "score": self._score,
            "infer": self._infer,
            "evaluate": self._evaluate,
            "function": self._function,
        }
        return handlers[node.spec.role](node, spec, inputs, report)

    def _source(
        self, node: ResolvedNode, spec: TaskSpec, _inputs: list[Any], _report: Report
    ) -> NodeOutput:
        step = spec.task.step
        rng = random.Random(derive_seed(self._pipeline.options.seed, node.name, step))
        with boundary(TaskError, f"source {node.name!r} at step {step}"):
            prompts = node.spec.functions[0](step, rng)
        return NodeOutput(
            items=check_prompts(prompts, node=node.name, step=step, tokenizer=self._tokenizer),
            metrics={},
        )

    def _rollout(
        self, node: ResolvedNode, spec: TaskSpec, inputs: list[Any], report: Report
    ) -> NodeOutput:
        report(0)
        options = node.options
        first = spec.task.shard * options.prompts_per_task
        prompts = tuple(inputs[0][first : first + options.prompts_per_task])
        request = GenerateRequest(
            prompts=prompts,
            group_size=options.group_size,
            seeds=rollout_seeds(
                self._pipeline.options.seed,
                node=node.name,
                step=spec.task.step,
                first_prompt=first,
                num_prompts=len(prompts),
                group_size=options.group_size,
            ),
            sampling=sampling_params(node),
        )
        positions = range(first, first + len(prompts))
        stream = GroupStream(request, step=spec.task.step, positions=positions, emit=self._emit)
        if self._link is not None:
            rollouts, metrics, left = self._generate_with_tail(
                request, spec, report, positions=positions, link=self._link
            )
            if left:
                return NodeOutput(items=(), metrics=metrics, left=left)
        else:
            rollouts, metrics = self._generate(
                request, spec, report, in_flight=options.in_flight, stream=stream
            )
        groups = stream.groups(rollouts, engine=node.components["engine"].name)
        num_tokens = sum(r.num_tokens for group in groups for r in group.rollouts)
        return NodeOutput(
            items=groups,
            metrics={**metrics, "num_tokens": float(num_tokens)},
        )

    def _generate(
        self,
        request: GenerateRequest,
        spec: TaskSpec,
        report: Report,
        *,
        in_flight: bool,
        stream: GroupStream,
    ) -> tuple[list[list[Rollout]], Mapping[str, float]]:
        """Rollouts of the version asked for, or from it on with every newer one as it comes."""
        weights = self._weights
        engine = weights.holder
        generate = stream.generator(engine) if spec.values.get("parts") else engine.generate
        if not in_flight:
            arrival = weights.ensure(spec.version, snapshot_id=spec.snapshot_id)
            started = time.monotonic()
            rollouts = generate(request, between_steps=lambda: report(0))
            return rollouts, {
                "generate_seconds": time.monotonic() - started,
                **arrival.metrics(),
                **weights.transport_counts(),
            }
        arrival = weights.ensure_newest(spec.version, snapshot_id=spec.snapshot_id)
        started = time.monotonic()
        with weights.in_flight() as follower:

            def between_steps() -> None:
                report(0)
                follower.advance()

            rollouts = generate(request, between_steps=between_steps)
        return rollouts, {
            "generate_seconds": time.monotonic() - started,
            **arrival.metrics(),
            **follower.metrics(),
            **weights.transport_counts(),
        }

    def _generate_with_tail(
        self,
        request: GenerateRequest,
        spec: TaskSpec,
        report: Report,
        *,
        positions: range,
        link: TailLink,
    ) -> tuple[list[list[Rollout]], Mapping[str, float], bytes]:
        """As `_generate`, or what was left of the task instead."""
        weights = self._weights
        arrival = weights.ensure(spec.version, snapshot_id=spec.snapshot_id)
        started = time.monotonic()
        task = TailTask(
            cast("LeavesTail", weights.holder),
            request,
            step=spec.task.step,
            positions=positions,
            emit=self._emit,
            link=link,
        )
        left = task.run(lambda: report(0))
        metrics = {**task.metrics(started=started), **arrival.metrics()}
        return [] if left else task.groups, metrics, left

    def _score(
        self, node: ResolvedNode, spec: TaskSpec, inputs: list[Any], report: Report
    ) -> NodeOutput:
        scorer = self._scorers[node.name]
        decided = {int(k): score_from_json(v) for k, v in spec.values.get("skip", {}).items()}
        scored = []
        first = 0
        for group in inputs[0]:
            size = len(group.rollouts)
            skip = {k - first: v for k, v in decided.items() if first <= k < first + size}
            scores = scorer.score(
                group, skip=skip, report=lambda position, base=first: report(base + position)
            )
            if len(scores) != size:
                raise PluginError(
                    f"scorer of {node.name!r} gave {len(scores)} results for group {group.id}; "
                    f"expected {size}.",
                    code=RunErrorCode.BROKEN_PLUGIN,
                )
            check_scores(scores, where=f"scorer of {node.name!r}, group {group.id}")
            scored.append(ScoredGroup(group=group, scores=tuple(scores)))
            first += size
        return NodeOutput(items=scored, metrics={})

    def _infer(
        self, node: ResolvedNode, spec: TaskSpec, inputs: list[Any], report: Report
    ) -> NodeOutput:
        report(0)
        inference, weights = self._inferences[node.name]
        arrival = weights.ensure(spec.version, snapshot_id=spec.snapshot_id) if weights else None
        groups = []
        for position, group in enumerate(inputs[0]):
            report(position)
            where = f"inference {inference.name!r}, group {group.id}"
            with boundary(PluginError, where):
                columns = inference.infer(group)
            check_columns(columns, group=group, where=where)
            groups.append(replace(group, extras={**group.extras, **columns}))
        metrics = arrival.metrics() | weights.transport_counts() if arrival and weights else {}
        return NodeOutput(items=groups, metrics=metrics)

    def _evaluate(
        self, node: ResolvedNode, spec: TaskSpec, inputs: list[Any], report: Report
    ) -> NodeOutput:
        """Complete and score held-out prompts; their seeds are those of every evaluation."""
        report(0)
        (rollout,) = self._pipeline.by_role("rollout")
        first = spec.task.shard * node.options.prompts_per_task
        request = GenerateRequest(
            prompts=tuple(inputs[0]),
            group_size=node.options.num_samples,
            seeds=rollout_seeds(
                self._pipeline.options.seed,
                node=node.name,
                step=0,
                first_prompt=first,
                num_prompts=len(inputs[0]),
                group_size=node.options.num_samples,
            ),
            sampling=evaluation_sampling(node, rollout),
        )
        positions = range(first, first + len(request.prompts))
        stream = GroupStream(request, step=spec.task.step, positions=positions, emit=self._emit)
        rollouts, metrics = self._generate(request, spec, report, in_flight=False, stream=stream)
        groups = stream.groups(rollouts, engine=rollout.components["engine"].name)
        scored = self._score(node, spec, [groups], report)
        return NodeOutput(items=scored.items, metrics=metrics)

    def _function(
        self, node: ResolvedNode, spec: TaskSpec, inputs: list[Any], _report: Report
    ) -> NodeOutput:
        where, step = f"function node {node.name!r}", spec.task.step
        with boundary(TaskError, where):
            items = list(node.spec.functions[0](*inputs))
        if node.spec.output_kind == "prompts":
            made = check_prompts(items, node=node.name, step=step, tokenizer=self._tokenizer)
            return NodeOutput(items=made, metrics={})
        return NodeOutput(items=check_items(items, inputs, where=where), metrics={})

    @cached_property
    def _model(self) -> Model:
        model: Model = self._pipeline.model.create()
        return model

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._model.tokenizer()

    @cached_property
    def _scorers(self) -> Mapping[str, Any]:
        return {
            node.name: node.components["scorer"].create()
            for role in ("score", "evaluate")
            for node in self._pipeline.by_role(role)
        }

    @cached_property
    def _inferences(self) -> Mapping[str, tuple[Inference, WorkerWeights[Any] | None]]:
        """Every inference node's component, with the weights of those that follow the policy."""
        (rollout,) = self._pipeline.by_role("rollout")
        made: dict[str, tuple[Inference, WorkerWeights[Any] | None]] = {}
        for node in self._pipeline.by_role("infer"):
            inference = node.components["inference"].create(
                model=self._model,
                sampling=sampling_params(rollout),
                seed=self._pipeline.options.seed,
            )
            follows = hasattr(inference, "activate")
            made[node.name] = (inference, self._follow(inference) if follows else None)
        return made

    @cached_property
    def _weights(self) -> WorkerWeights[Engine]:
        (node,) = self._pipeline.by_role("rollout")
        engine: Engine = node.components["engine"].create(model=self._model)
        return self._follow(engine, double_buffered=node.options.double_buffered)

    def _follow(self, holder: Holder, *, double_buffered: bool = False) -> WorkerWeights[Holder]:
        from .worker_weights import WorkerWeights, transfer_options

        options = self._pipeline.options
        return WorkerWeights(
            holder,
            store_url=self._bootstrap.store_url,
            branch=self._bootstrap.branch,
            codecs=self._plugins.components["codec"],
            transfer=transfer_options(options, cache=options.weights_cache),
            double_buffered=double_buffered,
            source=source_of(self._bootstrap.offering),
        )


def _discard(item: int, output: bytes) -> None:
    """Nobody wants parts."""


def sampling_params(node: ResolvedNode) -> SamplingParams:
    """The sampling options of a rollout node."""
    options = node.options
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        stop_token_ids=tuple(options.stop_token_ids),
    )


def evaluation_sampling(node: ResolvedNode, rollout: ResolvedNode) -> SamplingParams:
    """The sampling options of an evaluate node: the rollout node's, where it has none."""
    names = ("max_new_tokens", "temperature", "top_p")
    own = {name: getattr(node.options, name) for name in names}
    given = {name: value for name, value in own.items() if value is not None}
    return replace(sampling_params(rollout), **given)


def _input_kinds(node: ResolvedNode) -> Sequence[str]:
    """What a task's inputs are: of an evaluation, the held-out prompts."""
    return ("prompts",) if node.spec.role == "evaluate" else node.spec.input_kinds


def check_prompts(prompts: Any, *, node: str, step: int, tokenizer: Tokenizer) -> list[Prompt]:
    """The step's prompts, numbered where they have no id.

    Raises `TaskError` naming the row for anything but a non-empty list of `Prompt` whose text
    has at least one token and whose answer and data are JSON values.
    """
    where = f"source {node!r} at step {step}"
    if not isinstance(prompts, list | tuple) or not prompts:
        got = "an empty list" if prompts == [] else type(prompts).__name__
        raise _bad_prompt(f"{where}: must return a non-empty list of Prompt, got {got}.")
    return [
        _check_prompt(prompt, where=f"{where}, row {row}", default_id=f"{step}/{row}", by=tokenizer)
        for row, prompt in enumerate(prompts)
    ]


def _check_prompt(prompt: Any, *, where: str, default_id: str, by: Tokenizer) -> Prompt:
    if not isinstance(prompt, Prompt):
        raise _bad_prompt(f"{where}: must be a Prompt, got {prompt!r}.")
    with boundary(TaskError, where):
        num_tokens = len(by.encode(prompt.text))
    try:
        pack_prompts([prompt])
    except InputError as error:
        raise _bad_prompt(f"{where}: {error}") from error
    if num_tokens == 0:
        raise _bad_prompt(f"{where}: prompt {prompt.text!r} has no tokens.")
    if prompt.id:
        return prompt
    return Prompt(prompt.text, answer=prompt.answer, data=prompt.data, id=default_id)


def _bad_prompt(message: str) -> TaskError:
    return TaskError(message, code=RunErrorCode.BAD_PROMPT)
