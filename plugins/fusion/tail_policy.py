"""How many rollouts are the tail of a step: simulated, and again as lengths drift."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ...orchestrator.tail_state import StepMeasures, TailRule
from .inter_stage import InterStageCosts, decode_seconds
from .run_profile import profile_run
from .threshold import choose_threshold, retune

NUM_CANDIDATES = 64
"""Thresholds that are simulated, at most, spread evenly."""


class SimulatedTail:
    """A threshold from the last steps' lengths and mean times; the first is a choice, further ones
    only leave it for a gain. 0, which moves nothing, until a step is known.

    A rollout task counts as a generation instance.
    """

    def __init__(self, *, max_batch: int, last_steps: int, fixed: int = 0) -> None:
        self._max_batch = max_batch
        self._steps: deque[StepMeasures] = deque(maxlen=last_steps)
        self._fixed = fixed
        self._threshold: int | None = None

    @property
    def words(self) -> str:
        """A line for the plan."""
        if self._fixed:
            return f"the last {self._fixed} rollouts of a step move to fewer workers"
        if self._threshold is None:
            return "the last rollouts of a step move to fewer workers, how many is simulated"
        return (
            f"the last {self._threshold} rollouts of a step move to fewer workers, simulated again "
            "after each step"
        )

    def rule(self) -> TailRule:
        """See `TailPolicy.rule`."""
        return TailRule(threshold=self._fixed or self._threshold or 0, max_rollouts=self._max_batch)

    def observe(self, measures: StepMeasures) -> None:
        """See `TailPolicy.observe`."""
        self._steps.append(measures)
        if not self._fixed:
            self._choose()

    def learn_from(self, run_dir: Path) -> None:
        """Start with the last steps of a run. Raises `ConfigError` for one without any."""
        profile = profile_run(run_dir, last_steps=self._steps.maxlen or 1)
        for tasks in reversed(profile.tasks):
            self._steps.append(
                StepMeasures(
                    lengths=tuple(tuple(n for group in task for n in group) for task in tasks),
                    decode_step_seconds=profile.decode_step_seconds,
                    inference_seconds=profile.inference_seconds,
                )
            )
        if not self._fixed:
            self._choose()

    def _choose(self) -> None:
        steps = [step.lengths for step in self._steps]
        costs, candidates = self.costs(), self._candidates()
        if self._threshold is None:
            self._threshold = choose_threshold(steps, costs, candidates=candidates).threshold
            return
        tuned = retune(self._threshold, observed=steps, costs=costs, candidates=candidates)
        self._threshold = tuned.threshold

    def _candidates(self) -> range:
        most = max(sum(map(len, step.lengths)) for step in self._steps)
        return range(0, most + 1, -(-(most + 1) // NUM_CANDIDATES))

    def costs(self) -> InterStageCosts:
        """What the simulator is fed: means over the last steps."""
        count = len(self._steps)
        return InterStageCosts(
            max_batch=self._max_batch,
            decode_step_seconds=sum(map(self._block_seconds, self._steps)) / count,
            inference_seconds=sum(s.inference_seconds for s in self._steps) / count,
        )

    def _block_seconds(self, step: StepMeasures) -> float:
        """Seconds of a token for up to `max_batch` rollouts, such that what the simulator says of
        the whole step's generation is what was measured."""
        unit = InterStageCosts(max_batch=self._max_batch, inference_seconds=0.0)
        simulated = sum(max(decode_seconds(own, unit)) for own in step.lengths)
        return step.decode_step_seconds * sum(map(max, step.lengths)) / simulated
