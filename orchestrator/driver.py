"""The driver: executes the instructions of `task_state`, and turns what happens into its events.

    thread          consumes                   produces            waits for, at most
    main            executor events,           tasks, training,    `stall_seconds` without any
                    completions                commits             progress
    trainer         groups of one step         next version,       `train.timeout_seconds`
                                               ledger rows
    committer       one trained version        one commit          `publish.timeout_seconds`
                    one version's evaluations  its verdict

A task's deadline is the executor's. Whoever is late is named in a `DeadlineError` or `TaskFault`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .accounting import Accounting, Ledger, LedgerRow, since
from .background import BackgroundThread, Completion
from .dispatching import QueueTimes, priority_of, rollout_rows
from .empty_steps import EmptySteps
from .errors import RunErrorCode, TaskError
from .evaluation_state import EvaluationState
from .examples import learns_from_prompts, open_examples
from .executor import (
    Executor,
    ExecutorEvent,
    TaskFault,
    TaskPart,
    TaskResult,
    TaskSpec,
    WorkerJoined,
    WorkerLeft,
    WorkerRefused,
)
from .held_out import HeldOut
from .plan import Plan
from .resolve import ResolvedPipeline
from .results import TaskResults
from .roles import (
    Committed,
    CommittingRole,
    Halt,
    JudgingRole,
    Observer,
    StepRecord,
    TrainingRole,
    Verdict,
)
from .score_faults import Decided, exclude_culprit, ledger_words
from .spool import SPOOL_WORKER, ResultSpool, SpoolKey
from .tails import Tails
from .task_events import (
    Complete,
    Event,
    GiveUp,
    Instruction,
    Judge,
    PartFinished,
    Publish,
    StepTrained,
    Stop,
    Submit,
    TaskFailed,
    TaskFinished,
    Train,
    VersionJudged,
    VersionPublished,
)
from .task_state import TaskId, TaskState
from .training import StepOutcome, StepResult, publish_times
from .waits import Outstanding
from .watchdog import Watchdog
from .wire import PORT_CODECS, score_to_json, unpack_prompts
from .worker_board import WorkerBoard

POLL_SECONDS = 1.0


@dataclass(slots=True)
class _Step:
    """What the driver holds of a step between training and its commit."""

    outcome: StepResult
    accounting: Accounting
    late: Sequence[TaskId]


class Driver:
    """Runs a plan to its end. Built for one run; `run` is called once.

    `heads` maps policy versions that rollouts may still need to snapshot ids. Results in `spool`
    count as finished without being computed again.
    """

    def __init__(
        self,
        *,
        pipeline: ResolvedPipeline,
        plan: Plan,
        state: TaskState,
        evaluations: EvaluationState,
        held_out: Mapping[str, HeldOut],
        executor: Executor,
        ledger: Ledger,
        training: TrainingRole,
        committing: CommittingRole,
        judging: JudgingRole,
        observers: Sequence[Observer],
        heads: Mapping[int, str],
        board: WorkerBoard,
        spool: ResultSpool | None = None,
    ) -> None:
        self._spool = spool
        self._found: list[TaskResult] = []
        self._pipeline = pipeline
        self._plan = plan
        self._state = state
        self._evaluations = evaluations
        self._held_out = held_out
        self._judging = judging
        self._halt: Halt | None = None
        self._executor = executor
        self._ledger = ledger
        self._training = training
        self._committing = committing
        self._observers = observers
        self._heads = dict(heads)
        self._results = TaskResults(state.template)
        self._tails = Tails(
            node=self._rollout_name(),
            template=state.template,
            policy=plan.tail,
            executor=executor,
            inferring=frozenset(n.name for n in state.template.nodes if n.by_group),
        )
        self._delivers_parts = bool(getattr(executor, "delivers_parts", False))
        self._evaluated: dict[TaskId, bytes] = {}
        self._decided: dict[TaskId, Decided] = {}
        self._suspects: dict[TaskId, set[int]] = {}
        self._fault_words: dict[TaskId, str] = {}
        self._lost: dict[str, str] = {}
        self._queue_times = QueueTimes()
        self._late_tasks: dict[int, Sequence[TaskId]] = {}
        self._trained: dict[int, _Step] = {}
        self._empty_steps = EmptySteps(limit=pipeline.options.max_empty_steps)
        self._trainer = BackgroundThread("trainer", notify=executor.wake)
        self._committer = BackgroundThread("committer", notify=executor.wake)
        self._started = time.monotonic()
        self._watchdog = Watchdog(
            pipeline=pipeline,
            state=state,
            evaluations=evaluations,
            executor=executor,
            trainer=self._trainer,
            committer=self._committer,
            board=board,
            describe=self._outstanding,
        )
        self._from_prompts = learns_from_prompts(pipeline)

    def run(self) -> Halt | None:
        """Execute instructions until the last step is committed, or a verdict halts the run.

        Raises `TaskError`, `DeadlineError` or `RunError`, or what training or committing raised.
        """
        pending: deque[Instruction] = deque(self._state.start() + self._evaluations.start())
        while True:
            while pending:
                if isinstance(instruction := pending.popleft(), Complete):
                    return None
                self._execute(instruction)
            for event in self._events():
                pending.extend(self._handle(event))
            if self._halt is not None:
                return self._halt

    def _handle(self, event: Event) -> list[Instruction]:
        """Tell both state machines what concerns them."""
        if isinstance(event, TaskFinished | TaskFailed) and event.task.node in self._held_out:
            return self._evaluations.handle(event)
        made = self._state.handle(event)
        if isinstance(event, VersionPublished | VersionJudged):
            made += self._evaluations.handle(event)
        return made

    def finish_commit(self, *, timeout_seconds: float) -> bool:
        """Let a commit in progress finish; False if it did not in time."""
        return self._committer.close(timeout_seconds=timeout_seconds)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Submit(task=task, attempt=attempt):
                # Events handled since may have trained the step: then nobody waits for the task.
                if task.node in self._held_out or self._state.awaits(task, attempt=attempt):
                    self._submit(instruction)
            case Train():
                self._train(instruction)
            case Publish(version=version):
                self._commit(version)
            case Judge():
                self._judge(instruction)
            case GiveUp(task=task, reason=reason):
                self._give_up(task, self._fault_words.get(task, reason))
            case Stop(task=task, reason=reason):
                version = self._version_of(task)
                raise TaskError(
                    f"task {task} (policy version {version}) failed: {reason}.",
                    code=RunErrorCode.TASK_FAILED,
                )
            case Complete():
                return

    def _give_up(self, task: TaskId, words: str) -> None:
        """The groups of a task are lost, whatever became of them before."""
        lost = [row.group_id for row in self._open_rows(task)]
        self._lost |= dict.fromkeys(lost, words)
        self._results.drop_groups(task.step, [int(g.rpartition("/")[2]) for g in lost])

    def _open_rows(self, task: TaskId) -> list[LedgerRow]:
        """The open groups that a task works on."""
        rows = self._ledger.open_rows(task=str(self._rollout_of(task)))
        if self._state.template.node(task.node).by_group:
            return [row for row in rows if row.group_id == f"{task.step}/{task.shard}"]
        return rows

    def _events(self) -> list[Event]:
        """Wait for something to happen and say it in the state machine's terms."""
        events: list[Event] = []
        found, self._found = self._found, []
        timeout = 0.0 if found else POLL_SECONDS
        for seen in [*found, *self._executor.poll(timeout_seconds=timeout)]:
            self._watchdog.progressed()
            for event in self._tails.seen(seen):
                events += self._on_executor_event(event)
        events += [self._on_trained(done) for done in self._trainer.completed()]
        events += [e for done in self._committer.completed() for e in self._on_committer(done)]
        if not events:
            self._watchdog.check()
        self._watchdog.show()
        return events

    def _on_executor_event(self, event: ExecutorEvent) -> list[Event]:
        match event:
            case TaskResult():
                return self._on_result(event)
            case TaskPart(task=task, attempt=attempt, item=item):
                if self._state.awaits(task, attempt=attempt):
                    self._results.add_part(event)
                return [PartFinished(task=task, attempt=attempt, item=item)]
            case TaskFault():
                return [self._on_fault(event)]
            case WorkerJoined() | WorkerLeft() | WorkerRefused():
                for observer in self._observers:
                    observer.on_worker(event)
        return []

    def _on_result(self, result: TaskResult) -> list[Event]:
        started = time.monotonic() - self._started - result.seconds
        seen = self._queue_times.added_to(result, started_seconds=started)
        for observer in self._observers:
            observer.on_task(seen, started_seconds=started)
        if result.task.node in self._held_out:
            if self._evaluations.awaits(result.task, attempt=result.attempt):
                self._keep(result)
                self._evaluated[result.task] = result.output
        elif self._state.awaits(result.task, attempt=result.attempt):
            self._keep(result)
            self._results.add(result, codec=PORT_CODECS[self._output_kind(result.task.node)])
            if self._from_prompts and result.task.node in self._state.template.outputs:
                prompts, seed = unpack_prompts(result.output), self._pipeline.options.seed
                open_examples(self._ledger, prompts, task=result.task, seed=seed)
            elif result.task.node in self._state.template.outputs:
                self._ledger.buffer(row.group_id for row in self._open_rows(result.task))
        return [TaskFinished(task=result.task, attempt=result.attempt, num_items=result.num_items)]

    def _keep(self, result: TaskResult) -> None:
        if self._spool is not None and result.worker != SPOOL_WORKER:
            self._spool.keep(self._key(self._spool, result.task), result)

    def _find(self, task: TaskId, *, attempt: int) -> TaskResult | None:
        if self._spool is None:
            return None
        return self._spool.find(self._key(self._spool, task), attempt=attempt)

    def _key(self, spool: ResultSpool, task: TaskId) -> SpoolKey:
        version, snapshot_id = self._policy_of(task)
        inputs = self._inputs(task)
        return spool.key(task, version=version, snapshot_id=snapshot_id, inputs=inputs)

    def _policy_of(self, task: TaskId) -> tuple[int, str]:
        """The version and snapshot a task needs; -1 and empty if it needs none."""
        evaluates = task.node in self._held_out
        if not evaluates and not self._state.template.node(task.node).needs_policy:
            return -1, ""
        version = self._version_of(task)
        return version, self._heads.get(version, "")

    def _version_of(self, task: TaskId) -> int:
        """The version that an evaluation is of, or that rollouts of the task's step use."""
        return task.step if task.node in self._held_out else self._state.required_version(task.step)

    def _inputs(self, task: TaskId) -> list[bytes]:
        """The packed values that a task reads."""
        if task.node in self._held_out:
            return [self._held_out[task.node].packed(task.shard)]
        return self._results.inputs(task)

    def _on_fault(self, fault: TaskFault) -> TaskFailed:
        for observer in self._observers:
            observer.on_fault(fault)
        excluded = self._exclude(fault)
        if excluded is not None:
            self._decided[fault.task] = excluded
        self._fault_words[fault.task] = ledger_words(fault)
        where = f"{fault.reason} (worker {fault.worker})"
        return TaskFailed(
            task=fault.task,
            attempt=fault.attempt,
            reason=where,
            retryable=fault.retryable,
            excused=excluded is not None,
        )

    def _exclude(self, fault: TaskFault) -> Decided | None:
        node = self._pipeline.nodes[fault.task.node]
        if node.spec.role != "score":
            return None
        (rollout,) = self._pipeline.by_role("rollout")
        groups = self._results.num_groups(fault.task, self._rollout_of(fault.task))
        suspects = self._suspects.setdefault(fault.task, set())
        decided = exclude_culprit(
            fault,
            self._decided.get(fault.task, {}),
            suspects=suspects,
            num_rollouts=groups * rollout.options.group_size,
            max_timeouts=node.options.max_timeouts_per_task,
        )
        suspects.add(fault.item)
        return decided

    def _submit(self, instruction: Submit) -> None:
        task = instruction.task
        node = self._pipeline.nodes[task.node]
        inputs = tuple(self._inputs(task))
        parts = self._delivers_parts and self._results.is_streamed(task.node)
        tail = 0
        if node.spec.role == "rollout":
            seed = self._pipeline.options.seed
            self._ledger.dispatch(rollout_rows(task, node, inputs[0], run_seed=seed))
            if parts:
                num_items = self._state.num_items[task.step]
                tail = self._tails.submit(task, attempt=instruction.attempt, num_items=num_items)
        found = self._find(task, attempt=instruction.attempt)
        if found is not None:
            self._found.append(found)
            return
        self._queue_times.submitted(task, seconds=time.monotonic() - self._started)
        self._executor.submit(self._task_spec(instruction, inputs, parts=parts, tail=tail))

    def _task_spec(
        self, instruction: Submit, inputs: tuple[bytes, ...], *, parts: bool, tail: int
    ) -> TaskSpec:
        """What a worker is told of a task. It tells from `tail` unfinished rollouts on."""
        task = instruction.task
        node = self._pipeline.nodes[task.node]
        version, snapshot_id = self._policy_of(task)
        decided = self._decided.get(task, {})
        return TaskSpec(
            task=task,
            attempt=instruction.attempt,
            priority=priority_of(
                task,
                instruction.order,
                self._state.template,
                evaluates=task.node in self._held_out,
            ),
            inputs=inputs,
            values={
                "chain": list(self._plan.chain_of(task.node)),
                "skip": {str(i): score_to_json(score) for i, score in decided.items()},
                "parts": parts,
                "tail": tail,
            },
            deadline_seconds=node.options.timeout_seconds,
            version=version,
            snapshot_id=snapshot_id,
            role=node.spec.role.value,
        )

    def _train(self, instruction: Train) -> None:
        step = instruction.step
        data = [
            (self._output_kind(task.node), self._results[task])
            for task in instruction.tasks
            if task in self._results
        ]
        rows: dict[str, LedgerRow] = {}
        for task in dict.fromkeys(self._rollout_of(task) for task in instruction.tasks):
            rows |= {row.group_id: row for row in self._ledger.open_rows(task=str(task))}
        lost = {group_id: self._lost[group_id] for group_id in rows if group_id in self._lost}
        self._late_tasks[step] = instruction.late
        self._trainer.submit(step, self._training_of(step, data, rows, lost))

    def _training_of(
        self,
        step: int,
        data: Sequence[tuple[str, bytes]],
        rows: Mapping[str, LedgerRow],
        lost: Mapping[str, str],
    ) -> Callable[[], StepResult]:
        def work() -> StepResult:
            items = [item for kind, packed in data for item in PORT_CODECS[kind].decode(packed)]
            return self._training(step=step, groups=items, open_rows=rows, lost=lost)

        return work

    def _commit(self, version: int) -> None:
        step = self._trained[version]
        outcome = step.outcome
        assert isinstance(outcome, StepOutcome)
        self._committer.submit(
            version,
            lambda: self._committing(outcome, accounting=step.accounting, late=step.late),
        )

    def _judge(self, instruction: Judge) -> None:
        version = instruction.version
        outputs = {
            task: self._evaluated.pop(task) for task in instruction.tasks if task in self._evaluated
        }
        self._committer.submit(
            version,
            lambda: self._judging(version=version, outputs=outputs, lost=instruction.lost),
        )

    def _on_committer(self, done: Completion) -> list[Event]:
        """A commit, or a verdict, which either lets the run go on or ends it."""
        self._watchdog.progressed()
        result = _result(done)
        if isinstance(result, Committed):
            return [self._on_committed(result, seconds=done.seconds)]
        verdict: Verdict = result
        if verdict.halt is not None:
            self._halt = verdict.halt
            return []
        return [VersionJudged(version=verdict.version)]

    def _on_trained(self, done: Completion) -> StepTrained:
        self._watchdog.progressed()
        outcome: StepResult = _result(done)
        self._ledger.close(outcome.rows)
        self._empty_steps.check(outcome, self._ledger.closed)
        late = self._late_tasks.pop(done.label)
        if self._state.template.trains:
            self._trained[done.label] = _Step(outcome, self._ledger.closed, late)
        else:
            self._record(outcome, None, accounting=self._ledger.accounting(), extra={})
        self._forget(before=self._state.oldest_open_step())
        return StepTrained(step=done.label)

    def _forget(self, *, before: int) -> None:
        """Let go of what belongs to steps that are consumed whole."""
        self._results.forget(before=before)
        self._tails.forget(before=before)
        self._decided = {t: d for t, d in self._decided.items() if t.step >= before}
        self._suspects = {t: s for t, s in self._suspects.items() if t.step >= before}
        self._fault_words = {t: w for t, w in self._fault_words.items() if t.step >= before}
        self._lost = {g: r for g, r in self._lost.items() if int(g.partition("/")[0]) >= before}

    def _on_committed(self, committed: Committed, *, seconds: float) -> VersionPublished:
        self._heads[committed.version] = committed.snapshot_id
        step = self._trained.pop(committed.version)
        oldest_step = min((t.step for t in step.late), default=committed.version + 1)
        oldest = self._state.required_version(min(oldest_step, committed.version))
        consumed = oldest_step - 1
        if self._evaluations.judges:
            oldest = min(oldest, self._evaluations.judged + 1)
            consumed = min(consumed, self._evaluations.judged)
        self._heads = {v: s for v, s in self._heads.items() if v >= oldest}
        if self._spool is not None:
            self._spool.consumed(step=consumed)
        self._record(
            step.outcome,
            committed,
            accounting=since(step.accounting, self._ledger.accounting()),
            extra={
                **publish_times(step.outcome.timing),
                "commit_seconds": seconds,
            },
        )
        return VersionPublished(version=committed.version)

    def _record(
        self,
        outcome: StepResult,
        committed: Committed | None,
        *,
        accounting: Accounting,
        extra: Mapping[str, float],
    ) -> None:
        elapsed = time.monotonic() - self._started
        record = StepRecord(
            step=outcome.step,
            steps=self._state.last_step,
            committed=committed,
            metrics={**outcome.metrics, **extra},
            accounting=accounting,
            elapsed_seconds=elapsed,
            step_rate=(outcome.step - self._state.first_step + 1) / elapsed,
        )
        for observer in self._observers:
            observer.on_step(record)

    def _outstanding(self, task: TaskId, attempt: int) -> Outstanding:
        return Outstanding(
            task=task,
            attempt=attempt,
            held_as=self._tails.holder(task),
            version=self._policy_of(task)[0],
            deadline_seconds=self._pipeline.nodes[task.node].options.timeout_seconds,
        )

    def _rollout_of(self, task: TaskId) -> TaskId:
        """The task that opened the groups a task works on: of a rollout, or of given examples."""
        if self._from_prompts:
            return task
        return TaskId(self._rollout_name(), task.step, self._state.template.slice_of(task))

    def _rollout_name(self) -> str:
        nodes = self._pipeline.by_role("rollout")
        return nodes[0].name if nodes else ""

    def _output_kind(self, node: str) -> str:
        last = self._plan.chain_of(node)[-1]
        return self._pipeline.nodes[last].spec.output_kind.value


def _result(done: Completion) -> Any:
    if done.error is not None:
        raise done.error
    return done.result
