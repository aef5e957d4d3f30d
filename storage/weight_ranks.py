"""What the trainer's ranks give of their own shares, all of them asked at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from .bits import PolicyTensors
from .errors import StorageError
from .weight_answers import tensors_of
from .weight_link import ServerLink
from .weight_wire import failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a rank gave: its share of an anchor, if that was asked for, and its deltas."""

    anchor: PolicyTensors | None
    payloads: list[bytes]


def ask_ranks(
    links: Sequence[ServerLink], *, anchor: str, deltas: Sequence[str], seconds: float
) -> list[Given | StorageError]:
    """The share of an anchor (empty: none) and of deltas that each rank gives, or its error.

    All are asked at the same time, and none may take longer than `seconds`.
    """
    ask = partial(_outcome, anchor=anchor, deltas=deltas, deadline=time.monotonic() + seconds)
    if len(links) < 2:
        return [ask(link) for link in links]
    with ThreadPoolExecutor(len(links), thread_name_prefix="weight source") as pool:
        return list(pool.map(ask, links))


def _outcome(
    link: ServerLink, *, anchor: str, deltas: Sequence[str], deadline: float
) -> Given | StorageError:
    try:
        tensors = _anchor(link, anchor, deadline) if anchor else None
        payloads = _deltas(link, deltas, deadline) if deltas else []
    except StorageError as error:
        return error
    return Given(anchor=tensors, payloads=payloads)


def _anchor(link: ServerLink, snapshot_id: str, deadline: float) -> PolicyTensors:
    answer = link.ask({"ask": "anchor", "snapshot": snapshot_id}, deadline=deadline)
    try:
        return tensors_of(answer.header["specs"], answer.parts)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise failed(f"an anchor makes no sense ({error})") from error


def _deltas(link: ServerLink, snapshot_ids: Sequence[str], deadline: float) -> list[bytes]:
    request = {"ask": "deltas", "snapshots": list(snapshot_ids)}
    parts = link.ask(request, deadline=deadline).parts
    if len(parts) != len(snapshot_ids):
        raise failed("a rank answered with other deltas than asked for")
    return [part.tobytes() for part in parts]
