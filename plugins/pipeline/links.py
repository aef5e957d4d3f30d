"""Neighbouring stages in different processes: one connection each, read by a thread of its own."""

from __future__ import annotations

import socket
import struct
import threading
from multiprocessing.connection import Connection

from ...orchestrator.errors import DeadlineError, RunErrorCode
from ...storage.packing import pack, unpack
from ..torch_support.stage_threads import Halt
from .channels import Inbox, Message, NormExchange
from .schedule import OpKind
from .stage_wire import pack_message, unpack_message


class NeighbourLink:
    """Sends to a neighbour, and delivers what it sends.

    A neighbour that is gone is for the trainer to notice, which ends all stages: nothing is
    raised here, and a wait for it expires.
    """

    def __init__(
        self, peer: socket.socket, *, stage: int, neighbour: int, deadline_seconds: float
    ) -> None:
        self.neighbour = neighbour
        self._stage = stage
        self._deadline_seconds = deadline_seconds
        self._sending = threading.Lock()
        self._ended = threading.Semaphore(0)
        bound_sends(peer, deadline_seconds)
        self._connection = Connection(peer.detach())

    def listen(self, *, inbox: Inbox, norms: LinkedNorms) -> None:
        """Deliver what the neighbour sends, from now on."""
        threading.Thread(target=self._read, args=(inbox, norms), daemon=True).start()

    def put(self, kind: OpKind, micro_batch: int, message: Message) -> None:
        """See `Outlet`. Raises `DeadlineError` when the neighbour takes nothing in."""
        what = "activation" if kind is OpKind.FORWARD else "gradient"
        self._send(
            pack_message(kind, micro_batch, message), f"the {what} of micro-batch {micro_batch}"
        )

    def close(self, total: int) -> None:
        """See `Outlet`: every stage knows the number of micro-batches."""

    def send_norm(self, stage: int, update: int, value: float) -> None:
        """Tell the neighbour, and those behind it, a stage's gradient norm."""
        told = {"norm": [stage, update, value]}
        self._send(pack(told, {}), f"the gradient norm of update {update}")

    def end(self) -> None:
        """Say that nothing more comes in this step."""
        self._send(pack({"end": True}, {}), "the end of the step")

    def wait_end(self) -> None:
        """Wait until the neighbour has said so; all it sent has then been delivered."""
        if not self._ended.acquire(timeout=self._deadline_seconds):
            raise self._expired(f"for stage {self.neighbour} to end the step")

    def _send(self, data: bytes, what: str) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except BlockingIOError as error:
            raise self._expired(f"to send {what} to stage {self.neighbour}") from error
        except (BrokenPipeError, ConnectionResetError):
            return

    def _read(self, inbox: Inbox, norms: LinkedNorms) -> None:
        while True:
            try:
                values, arrays = unpack(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            if "end" in values:
                self._ended.release()
            elif "norm" in values:
                norms.receive(*values["norm"], source=self.neighbour)
            else:
                inbox.put(*unpack_message(values, arrays))

    def _expired(self, what: str) -> DeadlineError:
        return DeadlineError(
            f"stage {self._stage} waited {self._deadline_seconds:g} s {what}.",
            code=RunErrorCode.NO_PROGRESS,
            remedy="Look at that stage, or raise deadline_seconds if it is only slow.",
        )


class LinkedNorms(NormExchange):
    """A `NormExchange` between processes: values travel from neighbour to neighbour."""

    def __init__(self, *, num_stages: int, halt: Halt) -> None:
        super().__init__(num_stages=num_stages, halt=halt)
        self._links: tuple[NeighbourLink, ...] = ()

    def connect(self, *links: NeighbourLink) -> None:
        """Exchange with these neighbours."""
        self._links = links

    def total(self, value: float, *, stage: int, update: int, deadline_seconds: float) -> float:
        """See `NormExchange.total`."""
        self._pass_on(stage, update, value, source=stage)
        return super().total(value, stage=stage, update=update, deadline_seconds=deadline_seconds)

    def receive(self, stage: int, update: int, value: float, *, source: int) -> None:
        """Take a stage's value from a neighbour and tell the other one."""
        self.put(value, stage=stage, update=update)
        self._pass_on(stage, update, value, source=source)

    def _pass_on(self, stage: int, update: int, value: float, *, source: int) -> None:
        for link in self._links:
            if link.neighbour != source:
                link.send_norm(stage, update, value)


def bound_sends(peer: socket.socket, seconds: float) -> None:
    """Have blocking sends that make no progress for so long raise `BlockingIOError`."""
    whole, part = divmod(max(seconds, 1e-3), 1)
    limit = struct.pack("@ll", int(whole), int(part * 1e6))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
