"""What wakes the driver from its other threads, also after the end."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import wait

import pytest

from deltaloom.plugins.executors._waker import Waker


def test_a_wait_ends_with_a_call_from_another_thread() -> None:
    waker = Waker()
    assert wait([waker.fileno()], timeout=0) == []
    thread = threading.Thread(target=waker.wake)
    thread.start()
    assert wait([waker.fileno()], timeout=60) == [waker.fileno()]
    thread.join()
    waker.clear()
    assert wait([waker.fileno()], timeout=0) == []
    waker.close()


def test_calls_that_nobody_waits_for_do_not_block() -> None:
    waker = Waker()
    for _ in range(100_000):
        waker.wake()
    assert wait([waker.fileno()], timeout=0) == [waker.fileno()]
    waker.close()


def test_a_call_after_the_end_writes_to_nobodys_file() -> None:
    """A trainer thread outlives the workers of a run that ends early."""
    waker = Waker()
    waker.close()
    waker.close()
    read, write = os.pipe()
    os.set_blocking(read, False)
    waker.wake()
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    os.close(read)
    os.close(write)
