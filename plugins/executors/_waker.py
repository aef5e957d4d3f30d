"""What wakes a thread that waits for connections, from other threads."""

from __future__ import annotations

import os
import threading


class Waker:
    """A pipe that becomes readable when somebody calls `wake`; `fileno` is to be waited for.

    Whoever still works when it is closed may call `wake` for as long as it likes: the numbers of
    closed descriptors are given to other files.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closing = threading.Lock()
        self._is_open = True

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        """Make it readable; does nothing once it is closed."""
        with self._closing:
            if not self._is_open:
                return
            try:
                os.write(self._write, b"w")
            except BlockingIOError:
                return

    def clear(self) -> None:
        """Forget the calls so far; there was one."""
        os.read(self._read, 4096)

    def close(self) -> None:
        with self._closing:
            if self._is_open:
                self._is_open = False
                os.close(self._read)
                os.close(self._write)
