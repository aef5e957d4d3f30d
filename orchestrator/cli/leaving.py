"""How a process of the command line ends: without taking the interpreter down.

Threads of the store's native runtime hand results back on their own time. One that asks for the
interpreter while it is being finalized aborts the process, after all work was done and said.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator


class _Leaving:
    """Ends the process with a status, as the last of its exit handlers."""

    def __init__(self) -> None:
        self.status = 0

    def __call__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.status)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Have the process end, with the block's status, once its threads and exit handlers are done.

    Handlers run newest first: those registered in the block, or by what it imports, still run.
    """
    leaving = _Leaving()
    atexit.register(leaving)
    try:
        yield
    except SystemExit as end:
        leaving.status = _status(end.code)
        raise
    except BaseException:
        leaving.status = 1
        raise


def _status(code: str | int | None) -> int:
    """The exit status the interpreter would end with."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
