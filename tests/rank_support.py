"""Ranks of a trainer as processes that do what they are told."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


@contextmanager
def rank_processes(
    target: Callable[..., None], *arguments: object, num_ranks: int
) -> Iterator[list[Connection]]:
    """A process a rank that runs `target(*arguments, rank, pipe)`, says "ready" and ends at
    "stop"."""
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe()
        worker = context.Process(target=target, args=(*arguments, rank, there))
        worker.start()
        pipes.append(here)
        workers.append(worker)
    try:
        assert [pipe.recv() for pipe in pipes] == ["ready"] * num_ranks
        yield pipes
    finally:
        for pipe, worker in zip(pipes, workers, strict=True):
            pipe.send("stop")
            worker.join()


def ask(pipes: list[Connection], *message: object) -> list[Any]:
    """Every rank's answer, after all were asked."""
    for pipe in pipes:
        pipe.send(message)
    return [pipe.recv() for pipe in pipes]
