"""Results of finished tasks, kept on disk until a committed version has consumed them.

A run that is killed has groups that are finished but not trained on. Its resumption finds them
here instead of generating them again. A file is keyed by everything the result depends on, so
one that does not belong to the task asked for is never used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..storage.errors import IntegrityError
from ..storage.packing import pack, unpack
from .executor import TaskResult
from .task_state import TaskId

SPOOL_WORKER = "spool"
"""The worker named by results that were found and not computed."""
_SUFFIX = ".result"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolKey:
    """What a task's result is a function of.

    `version` and `snapshot_id` name the policy of a rollout (-1 and empty for others);
    `identity` stands for the configuration and the pipeline file.
    """

    task: TaskId
    version: int
    snapshot_id: str
    identity: str
    inputs_digest: str

    def to_json(self) -> list[Any]:
        task = self.task
        policy = [self.version, self.snapshot_id]
        return [task.node, task.step, task.shard, *policy, self.identity, self.inputs_digest]


class ResultSpool:
    """The spool of one branch of a run. `say` gets a line for every file that is of no use."""

    def __init__(self, directory: Path, *, identity: str, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._identity = identity
        self._say = say
        directory.mkdir(parents=True, exist_ok=True)

    def key(
        self, task: TaskId, *, version: int, snapshot_id: str, inputs: Sequence[bytes]
    ) -> SpoolKey:
        """The key of a task with these inputs."""
        digest = hashlib.blake2b(digest_size=16)
        for data in inputs:
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return SpoolKey(
            task=task,
            version=version,
            snapshot_id=snapshot_id,
            identity=self._identity,
            inputs_digest=digest.hexdigest(),
        )

    def keep(self, key: SpoolKey, result: TaskResult) -> None:
        """Write a result whole, or not at all.

        It is not forced to the disk: a file that a power cut tore fails its digest and costs
        one task, not the run. Neither does a full disk stop the run here.
        """
        values = {"key": key.to_json(), "num_items": result.num_items}
        data = pack(values, {"output": np.frombuffer(result.output, dtype=np.uint8)})
        path = self._path(key.task)
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._say(f"the result of {key.task} could not be kept: {error.strerror}")

    def find(self, key: SpoolKey, *, attempt: int) -> TaskResult | None:
        """The result kept under this key, as if the task had just finished; None if there is
        none, or if what is there is damaged or belongs to another run of the task."""
        path = self._path(key.task)
        try:
            values, arrays = unpack(path.read_bytes())
            kept, num_items = values["key"], int(values["num_items"])
            output = arrays["output"].tobytes()
        except FileNotFoundError:
            return None
        except (IntegrityError, KeyError, TypeError, ValueError) as error:
            self._say(f"kept result of {key.task} is damaged and not used: {error}")
            return None
        if kept != key.to_json():
            self._say(f"kept result of {key.task} is of another policy or input and not used")
            return None
        return TaskResult(
            task=key.task,
            attempt=attempt,
            worker=SPOOL_WORKER,
            output=output,
            num_items=num_items,
            seconds=0.0,
        )

    def consumed(self, *, step: int) -> None:
        """Remove the results of every step up to this one: a committed version holds them."""
        for path in self._directory.iterdir():
            number = path.name.partition("-")[0]
            if number.isdigit() and int(number) <= step:
                path.unlink(missing_ok=True)

    def _path(self, task: TaskId) -> Path:
        name = hashlib.blake2b(str(task).encode(), digest_size=12).hexdigest()
        return self._directory / f"{task.step:08d}-{name}{_SUFFIX}"


def spool_identity(config_digest: str, pipeline_source: str) -> str:
    """One digest for the options that decide what is computed and the code that computes it."""
    text = f"{config_digest}\0{pipeline_source}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
