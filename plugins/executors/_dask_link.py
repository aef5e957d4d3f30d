"""The driver's side of a Dask cluster: what happens on Dask's own thread.

Everything it learns is put into the inbox of the executor; it keeps no state of the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import queue
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ...orchestrator.code_identity import code_identity
from ...orchestrator.executor import TaskSpec, WorkerBootstrap
from ...orchestrator.worker_process import bootstrap_json, pack_spec
from ...storage.packing import canonical_json, pack
from ._dask_cluster import DaskConfig, open_cluster
from ._dask_members import Answer, Holding, Seen, Settled, Sighting
from ._dask_packed import Packed
from ._dask_worker import PLUGIN, admit, dismiss, dump_stacks, run_task

WATCH_SECONDS = 0.5
CLOSE_SECONDS = 10.0


class DaskLink:
    """A connection to a cluster on behalf of one run. `key` names the run there."""

    def __init__(
        self,
        config: DaskConfig,
        *,
        num_workers: int,
        bootstrap: WorkerBootstrap,
        inbox: queue.SimpleQueue[Any],
    ) -> None:
        identity = code_identity(bootstrap).to_json()
        plain = dict(bootstrap_json(bootstrap))
        text = canonical_json({"run": plain, "code": identity})
        self.key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.answered = time.monotonic()
        self._resource = f"deltaloom-{self.key}"
        self._bootstrap, self._identity = pack(plain, {}), pack(identity, {})
        self._config = config
        self._inbox = inbox
        self._session = uuid.uuid4().hex[:8]
        self._count = itertools.count()
        self._cluster, self._client = open_cluster(config, num_workers=num_workers)
        self._client.loop.add_callback(self._watch)

    @property
    def connected(self) -> bool:
        return bool(self._client.status == "running")

    @property
    def closed(self) -> bool:
        return self._client.status in ("closed", "closing")

    def submit(
        self,
        spec: TaskSpec,
        *,
        positions: Sequence[int],
        sources: Sequence[Any],
        needs: Mapping[str, float],
    ) -> Any:
        """Give Dask a try; returns its future. `sources` stand for the inputs at `positions`."""
        step, order, _ = spec.priority
        future = self._client.submit(
            run_task,
            self.key,
            Packed(pack_spec(spec)),
            tuple(positions),
            *sources,
            key=f"{spec.task.node}-{spec.task.step}-{spec.task.shard}-{spec.attempt}-"
            f"{self._session}{next(self._count)}",
            resources={self._resource: 1.0, **needs},
            priority=-(step + order / 1000),
            pure=False,
        )
        self._client.loop.add_callback(self._settle, future)
        return future

    def cancel(self, future: Any) -> None:
        """Give up a try."""
        self._client.loop.add_callback(self._cancel, future)

    def ask(self, address: str) -> None:
        """Ask a worker to join; an `Answer` follows."""
        self._client.loop.add_callback(self._ask, address)

    def ask_holding(self, address: str) -> None:
        """Ask the scheduler what a worker holds; a `Holding` follows."""
        self._client.loop.add_callback(self._ask_holding, address)

    def dump(self, addresses: Sequence[str]) -> None:
        """Have engines on those workers write their stacks to their logs."""
        self._client.loop.add_callback(self._run_quietly, list(addresses), dump_stacks, self.key)

    def close(self, addresses: Sequence[str]) -> None:
        """End what was started for the run: its cluster, or its engines on those workers."""
        if self._cluster is None and self.connected and addresses:
            with suppress(OSError):
                self._client.sync(
                    self._run_quietly,
                    list(addresses),
                    dismiss,
                    self.key,
                    self._resource,
                    callback_timeout=CLOSE_SECONDS,
                )
        with suppress(OSError):
            self._client.close(timeout=CLOSE_SECONDS)
        if self._cluster is not None:
            with suppress(OSError):
                self._cluster.close(timeout=CLOSE_SECONDS)

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Ask the cluster something; that it cannot be reached is noticed by `_watch`.

        A closing client takes its scheduler away under the questions that are open: whatever
        these raise then is nobody's error.
        """
        try:
            yield
        except OSError:
            return
        except Exception:
            if not self.closed:
                raise

    async def _watch(self) -> None:
        """Tell what the scheduler sees, over and over."""
        while not self.closed:
            if self.connected:
                with self._while_open():
                    view = await asyncio.wait_for(
                        self._client.scheduler.identity(n_workers=-1), self._config.silent_seconds
                    )
                    self.answered = time.monotonic()
                    self._inbox.put(Seen(self._sightings(view["workers"])))
            else:
                self.answered = time.monotonic()
                self._inbox.put(None)
            await asyncio.sleep(WATCH_SECONDS)
        self._inbox.put(None)

    def _sightings(self, workers: Mapping[str, Mapping[str, Any]]) -> dict[str, Sighting]:
        return {
            address: Sighting(
                name=str(worker["name"]),
                heartbeat=worker["last_seen"],
                doing=worker["metrics"].get(PLUGIN, {}).get(self.key, {}),
            )
            for address, worker in workers.items()
        }

    async def _ask(self, address: str) -> None:
        reply: Mapping[str, Any] | None = None
        with self._while_open():
            answers = await self._client.run(
                admit,
                self.key,
                self._resource,
                self._bootstrap,
                self._identity,
                workers=[address],
                on_error="return",
                asynchronous=True,
            )
            reply = _reply(answers.get(address))
        self._inbox.put(Answer(address, reply))

    async def _settle(self, future: Any) -> None:
        """Tell what a try came to, or that it cannot be known."""
        outcome = Settled(key=future.key)
        with self._while_open():
            outcome = await self._outcome(future)
        self._inbox.put(outcome)

    async def _outcome(self, future: Any) -> Settled:
        found = await self._client.gather([future], errors="skip", asynchronous=True)
        if found:
            return Settled(key=future.key, packed=found[0])
        if future.status == "error":
            error = await future.exception(asynchronous=True)
            return Settled(key=future.key, error=f"{type(error).__name__}: {error}")
        return Settled(key=future.key)

    async def _cancel(self, future: Any) -> None:
        with self._while_open():
            await future.cancel(asynchronous=True)

    async def _ask_holding(self, address: str) -> None:
        with self._while_open():
            held = await self._client.scheduler.processing(workers=[address])
            self._inbox.put(Holding(address, list(held.get(address, ()))))

    async def _run_quietly(self, addresses: list[str], function: Any, *arguments: str) -> None:
        """Run a function on those workers that can be reached."""
        with self._while_open():
            await self._client.run(
                function, *arguments, workers=addresses, on_error="ignore", asynchronous=True
            )


def _reply(answer: Any) -> Mapping[str, Any] | None:
    """What a worker answered; None if it was not reached, a refusal if it could not check."""
    if isinstance(answer, OSError) or answer is None:
        return None
    if isinstance(answer, BaseException):
        return {"refused": f"it cannot run deltaloom's check: {type(answer).__name__}: {answer}"}
    reply: Mapping[str, Any] = answer
    return reply
