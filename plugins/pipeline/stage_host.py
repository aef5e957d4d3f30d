"""A stage that lives in a process of its own: it answers what the trainer asks of it.

How questions and answers travel is none of its business, `stage_process` and `stage_actor` know.
Stages send activations and gradients to each other by their links.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import torch

from ...orchestrator.errors import PluginError, boundary
from ...storage.errors import DeltaloomError
from ...storage.packing import pack, unpack
from ..torch_support.determinism import compute_threads, deterministic
from ..torch_support.stage_threads import DeviceClock, Halt
from .channels import Inbox
from .clock import StageSeconds, jitter_factors
from .links import LinkedNorms, NeighbourLink
from .parts import PipelineParts, StageLoss
from .schedule import Progress
from .stage import Stage
from .stage_wire import Answer, Arrays, ReadOnlyArrays, pack_error, unpack_message
from .state import load_stage, load_waiting, stage_arrays, waiting_arrays
from .weights import trainable
from .worker import Links, MicroBatch, Source, Worker

Values = Mapping[str, Any]


class StageHost:
    """One stage with its worker's surroundings. Used by one thread, which calls `report` after
    every operation of training."""

    def __init__(
        self,
        *,
        stage: int,
        previous: NeighbourLink | None,
        following: NeighbourLink | None,
        report: Callable[[], None],
    ) -> None:
        self._index = stage
        self._report = report
        self._previous = previous
        self._following = following
        self._hosted: _HostedStage | None = None

    def answer(self, question: bytes) -> bytes:
        """The packed answer to a packed question, also if it is an error."""
        values, arrays = unpack(question)
        what = values["do"]
        try:
            with boundary(PluginError, f"stage {self._index}, {what}"):
                if what == "build":
                    self._build(values)
                    return pack({}, {})
                assert self._hosted is not None
                told, found = self._hosted.questions[what](values, arrays)
                return pack(told, found)
        except DeltaloomError as error:
            return pack_error(error, stage=self._index, trace=traceback.format_exc())

    def _build(self, values: Values) -> None:
        parts = PipelineParts.from_json(values["parts"])
        self._hosted = _HostedStage(
            parts,
            index=self._index,
            seed=values["seed"],
            previous=self._previous,
            following=self._following,
            report=self._report,
        )


class _HostedStage:
    """A built stage, with what it has been sent and how far it is."""

    def __init__(
        self,
        parts: PipelineParts,
        *,
        index: int,
        seed: int,
        previous: NeighbourLink | None,
        following: NeighbourLink | None,
        report: Callable[[], None],
    ) -> None:
        self.questions: dict[str, Callable[[Values, ReadOnlyArrays], Answer]] = {
            "train": self._train,
            "state": self._state,
            "load": self._load,
        }
        self._parts = parts
        self._seed = seed
        self._report_operation = report
        self._previous = previous
        self._following = following
        self._loss = StageLoss(parts.policy_loss())
        self._stage = self._build_stage(index)
        self._progress = Progress()
        self._halt = Halt()
        self._inbox = Inbox(stage=index, halt=self._halt)
        self._norms = LinkedNorms(num_stages=parts.config.num_stages, halt=self._halt)
        self._norms.connect(*self._links)
        for link in self._links:
            link.listen(inbox=self._inbox, norms=self._norms)

    @property
    def _links(self) -> list[NeighbourLink]:
        return [link for link in (self._previous, self._following) if link is not None]

    def _build_stage(self, index: int) -> Stage:
        module = self._parts.cut(self._parts.model.build(seed=self._seed).train())[index]
        named: list[tuple[str, torch.Tensor]] = list(trainable(module).items())
        return Stage(
            module,
            index=index,
            schedule=self._parts.schedule,
            optimizer=self._parts.build_optimizer(index, named),
            loss=self._loss,
            use_stash=self._parts.config.stash,
        )

    def _train(self, values: Values, arrays: ReadOnlyArrays) -> Answer:
        """Work on the micro-batches of a step; the first stage is given them."""
        worker = self._worker(_source(arrays), drain=values["drain"])
        if self._stage.index:
            self._inbox.close(values["total"])
        with self._repeatable(step=values["step"]):
            worker.run()
        self._meet_neighbours()
        self._progress = replace(worker.progress, total=None)
        return self._report(worker), self._weights()

    def _worker(self, source: list[MicroBatch], *, drain: bool) -> Worker:
        index, config = self._stage.index, self._parts.pipeline_config
        is_global = config.clip == "global" and config.clip_norm is not None
        return Worker(
            self._stage,
            schedule=config.schedule,
            progress=self._progress,
            links=Links(
                inbox=self._inbox,
                previous=self._previous,
                following=self._following,
                source=Source(source, drain=Event()) if index == 0 else None,
                exchange=self._norms if is_global else None,
                halt=self._halt,
                clock=DeviceClock(self._halt.event),
            ),
            clip_norm=config.clip_norm,
            fixed_order=True,
            deadline_seconds=config.deadline_seconds,
            seconds=StageSeconds(),
            link_seconds=0.0,
            factors=jitter_factors(index, jitter=0.0, seed=0),
            drain=drain,
            report=self._report_operation,
        )

    def _meet_neighbours(self) -> None:
        """Have all that they sent in this step, so that a state lacks nothing."""
        for link in self._links:
            link.end()
        for link in self._links:
            link.wait_end()

    def _report(self, worker: Worker) -> dict[str, Any]:
        progress = self._progress
        return {
            "progress": [progress.num_forward, progress.num_backward, progress.num_updates],
            "losses": [[m.micro_batch, m.loss_sum, m.weight] for m in worker.losses],
            "updates": [[u.version, u.delay, u.gradient_norm] for u in worker.updates],
            "spans": [[str(s.op.kind), s.op.micro_batch, s.start, s.end] for s in worker.spans],
            "means": self._loss.take_means(),
            "learning_rate": float(self._stage.optimizer.param_groups[0]["lr"]),
        }

    def _weights(self) -> Arrays:
        named = trainable(self._stage.module).items()
        return {name: parameter.detach().cpu().numpy() for name, parameter in named}

    def _state(self, values: Values, arrays: ReadOnlyArrays) -> Answer:
        return {}, {**stage_arrays(self._stage), **waiting_arrays(self._inbox.waiting)}

    def _load(self, values: Values, arrays: ReadOnlyArrays) -> Answer:
        forward, backward, updates = values["progress"]
        with self._repeatable(step=0):
            load_stage(self._stage, arrays)
        for (kind, number), message in load_waiting(arrays).items():
            self._inbox.put(kind, number, message)
        self._progress = Progress(num_forward=forward, num_backward=backward, num_updates=updates)
        return {}, self._weights()

    @contextmanager
    def _repeatable(self, *, step: int) -> Iterator[None]:
        """Whatever bits may depend on, as it is in the threads of a trainer."""
        threads = compute_threads(self._parts.num_threads)
        with threads, deterministic(seed=self._seed, step=step):
            yield


def _source(arrays: ReadOnlyArrays) -> list[MicroBatch]:
    """The packed micro-batches of a question, in order."""
    found = []
    for packed in arrays.values():
        _, _, message = unpack_message(*unpack(np.ascontiguousarray(packed).data))
        found.append(
            MicroBatch(
                inputs=message.tensor,
                targets=message.targets,
                weight=message.weight,
                at=message.at,
            )
        )
    return found
