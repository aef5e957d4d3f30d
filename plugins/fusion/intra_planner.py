"""`fusion-intra`: trains actor and critic as two pipelines that fill each other's bubbles."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.interfaces import CutsActorCritic, FusionPlan, Replacement, SeparatesCritic
from ...orchestrator.resolve import ResolvedNode, ResolvedPipeline
from .._options import require

if TYPE_CHECKING:
    from .intra_costs import IntraCosts
    from .problem import FusionProblem
    from .schedule import Evaluation, FusedSchedule

PLAIN_TRAINER = "torch"
FUSED_TRAINER = "fused-pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionIntraConfig:
    """How the models are cut, what their stages cost, and how long to look for a schedule.

    Raises `ConfigError` for values out of range.
    """

    pipeline_workers: int = 2
    """Threads that actor and critic share."""
    actor_stages: int = 0
    """Stages of the actor, a divisor of `pipeline_workers`; 0: as many as its layers allow."""
    critic_stages: int = 0
    """The same for the critic."""
    micro_batches: int = 8
    """Micro-batches of a step that the schedule is made for. A step of more goes through it
    again, one of fewer leaves some out."""
    actor_forward: float = 0.0
    """Time of a forward of one stage of the actor on one micro-batch, in any unit; with the next
    three all 0 they are measured on this machine, when the run is planned."""
    actor_backward: float = 0.0
    """Of its backward."""
    critic_forward: float = 0.0
    """Of a forward of one stage of the critic."""
    critic_backward: float = 0.0
    """Of its backward."""
    critic_memory: float = 1.0
    """Activations of a critic's micro-batch on a stage, in those of an actor's; measured when the
    times are."""
    measured_tokens: int = 0
    """Tokens of a row that is measured; 0: the longest completion, and as many of a prompt."""
    memory_cap: float = 0.0
    """The most activations a worker may hold, in micro-batches of the actor; 0: no limit."""
    search: Literal["annealing", "greedy"] = "annealing"
    """How the schedule is found."""
    max_evaluations: int = 20_000
    """Schedules that annealing tries."""
    budget_seconds: float = 0.0
    """Time it may take, for another schedule on another machine; 0: no clock, the same schedule
    for the same costs and seed."""
    seed: int = 0
    """The search's only randomness."""

    def __post_init__(self) -> None:
        for name in ("pipeline_workers", "micro_batches", "max_evaluations"):
            got = getattr(self, name)
            require(got >= 1, option=name, expected="at least 1", got=got)
        for name in ("actor_stages", "critic_stages", "measured_tokens"):
            got = getattr(self, name)
            require(got >= 0, option=name, expected=">= 0", got=got)
        for name in ("memory_cap", "budget_seconds"):
            value = getattr(self, name)
            require(value >= 0, option=name, expected=">= 0", got=value)
        require(
            self.critic_memory > 0,
            option="critic_memory",
            expected="above 0",
            got=self.critic_memory,
        )
        times = self.times
        if any(times) and not all(time > 0 for time in times):
            raise ConfigError(
                "actor_forward, actor_backward, critic_forward and critic_backward must all be "
                f"above 0, or all 0 to be measured, got {times}.",
                code=RunErrorCode.WRONG_TYPE,
            )

    @property
    def times(self) -> tuple[float, float, float, float]:
        """The four times of a stage as they are given."""
        return (self.actor_forward, self.actor_backward, self.critic_forward, self.critic_backward)


class FusionIntraPlanner:
    """Puts trainer `fused-pipeline` with a schedule in place of trainer `torch`.

    The bits of weights, states and metrics stay those of trainer `torch`, also in replays.
    """

    name: ClassVar[str] = "fusion-intra"
    Config: ClassVar[type[Any]] = FusionIntraConfig

    def __init__(self, config: FusionIntraConfig) -> None:
        self._config = config

    def plan(self, pipeline: ResolvedPipeline) -> FusionPlan:
        """The fused trainer, or why not. Raises `ConfigError` for stages that cannot be cut."""
        if reason := obstacle(pipeline):
            return FusionPlan(reason=reason)
        (train,) = pipeline.by_role("train")
        num_stages = self._num_stages(pipeline.model.create())
        costs = self._costs(pipeline, train, num_stages)
        problem = self._problem(costs, num_stages)
        schedule, evaluation, effort = self._search(problem)
        reason = self._reason(problem, evaluation, f"{effort}; {costs.origin}")
        if evaluation.makespan >= _serial(problem):
            return FusionPlan(reason=f"nothing to gain: {reason}")
        return FusionPlan(
            reason=reason,
            replacements=(_replacement(train, schedule, num_stages=num_stages),),
        )

    def _num_stages(self, model: CutsActorCritic) -> tuple[int, int]:
        workers = self._config.pipeline_workers
        given = (self._config.actor_stages, self._config.critic_stages)
        first, second = (
            stages or max(d for d in range(1, limit + 1) if workers % d == 0)
            for stages, limit in zip(given, model.max_stages(), strict=True)
        )
        for name, stages, limit in zip(
            ("actor_stages", "critic_stages"), (first, second), model.max_stages(), strict=True
        ):
            if stages > limit or workers % stages:
                raise ConfigError(
                    f"fusion.fusion-intra.{name} must be at most {limit} for this model and "
                    f"divide pipeline_workers {workers}, got {stages}.",
                    code=RunErrorCode.WRONG_TYPE,
                )
        return first, second

    def _costs(
        self, pipeline: ResolvedPipeline, train: ResolvedNode, num_stages: tuple[int, int]
    ) -> IntraCosts:
        from .intra_costs import IntraCosts, measure

        config = self._config
        if any(config.times):
            return IntraCosts(
                actor=config.times[:2],
                critic=config.times[2:],
                critic_memory=config.critic_memory,
                origin="costs as given",
            )
        longest = max((n.options.max_new_tokens for n in pipeline.by_role("rollout")), default=64)
        return measure(
            pipeline,
            num_stages=num_stages,
            num_rows=train.components["trainer"].config.micro_batch_rollouts,
            num_tokens=config.measured_tokens or 2 * longest,
        )

    def _problem(self, costs: IntraCosts, num_stages: tuple[int, int]) -> FusionProblem:
        from .problem import FusionProblem, ModelPipeline

        workers = self._config.pipeline_workers
        together = math.lcm(*(workers // stages for stages in num_stages))
        total = -(-self._config.micro_batches // together) * together
        actor, critic = (
            ModelPipeline(
                num_stages=stages,
                num_copies=workers // stages,
                num_micro_batches=total * stages // workers,
                forward_cost=forward,
                backward_cost=backward,
                memory_per_micro_batch=memory,
            )
            for stages, (forward, backward), memory in zip(
                num_stages, costs.units(), (1.0, costs.critic_memory), strict=True
            )
        )
        return FusionProblem(model_a=actor, model_b=critic)

    def _search(self, problem: FusionProblem) -> tuple[FusedSchedule, Evaluation, str]:
        """A schedule, what it costs, and in words how it was found."""
        from .annealing import search_schedule
        from .baselines import greedy_schedule
        from .schedule import evaluate

        config = self._config
        cap = config.memory_cap or None
        if config.search == "greedy":
            schedule = greedy_schedule(problem)
            evaluation = evaluate(problem, schedule)
            if cap is None or evaluation.peak_memory <= cap:
                return schedule, evaluation, "greedy"
        found = search_schedule(
            problem,
            memory_cap=cap,
            seed=config.seed,
            max_evaluations=config.max_evaluations,
            budget_seconds=config.budget_seconds or None,
        )
        return found.schedule, found.evaluation, f"annealing, {found.num_evaluations} schedules"

    def _reason(self, problem: FusionProblem, evaluation: Evaluation, how: str) -> str:
        from .baselines import serial_peak_memory
        from .schedule import lower_bound

        actor, critic = problem.models
        serial = _serial(problem)
        cap = f", cap {self._config.memory_cap:g}" if self._config.memory_cap else ""
        cores = len(os.sched_getaffinity(0))
        few = (
            f"; {cores} cores for {problem.num_nodes} workers" if cores < problem.num_nodes else ""
        )
        return (
            f"actor in {actor.num_stages} stages and critic in {critic.num_stages} on "
            f"{problem.num_nodes} workers, {actor.num_micro_batches * actor.num_copies} "
            f"micro-batches: predicted {serial / evaluation.makespan:.2f} times as fast as one "
            f"after the other (bound {serial / lower_bound(problem).value:.2f}), holding "
            f"{evaluation.peak_memory:.3g} micro-batches' memory at most (serial "
            f"{serial_peak_memory(problem):.3g}{cap}); {how}{few}"
        )


def obstacle(pipeline: ResolvedPipeline) -> str:
    """Why a pipeline's training cannot be fused, in words; empty if it can."""
    trains = pipeline.by_role("train")
    if not trains:
        return "there is no train node"
    trainer = trains[0].components["trainer"]
    algorithm = trains[0].components["algorithm"]
    if trainer.name != PLAIN_TRAINER:
        return f"trainer {trainer.name!r} is not {PLAIN_TRAINER!r}, whose bits are kept"
    if not issubclass(algorithm.component, SeparatesCritic):
        return f"algorithm {algorithm.name!r} has no actor and critic with losses of their own"
    if not issubclass(pipeline.model.component, CutsActorCritic):
        return f"model {pipeline.model.name!r} is not an actor and a critic that can be cut"
    if not trainer.config.micro_batch_rollouts:
        return (
            f"{trains[0].name}.micro_batch_rollouts is 0, so a step is one micro-batch, and a "
            "pipeline needs several"
        )
    return ""


def _serial(problem: FusionProblem) -> int:
    from .baselines import serial_makespan

    return serial_makespan(problem)


def _replacement(
    train: ResolvedNode, schedule: FusedSchedule, *, num_stages: tuple[int, int]
) -> Replacement:
    """The fused trainer with the options of the one it stands for."""
    config = train.components["trainer"].config
    kept = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return Replacement(
        node=train.name,
        slot="trainer",
        name=FUSED_TRAINER,
        options={
            **kept,
            "actor_stages": num_stages[0],
            "critic_stages": num_stages[1],
            "pipeline_workers": len(schedule.orders),
            "order": schedule.lines(),
        },
    )


@hookimpl
def register_fusion_planners() -> list[type[Any]]:
    """The planner of this module."""
    return [FusionIntraPlanner]
