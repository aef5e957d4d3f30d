"""How the command line ends: its exit handlers run, the interpreter is not taken down."""

from __future__ import annotations

from pathlib import Path

import pytest

from .run_support import deltaloom

LATE = """
import atexit
import pathlib
import threading

FOLDER = pathlib.Path(__file__).parent


class Lasting:
    def __del__(self):
        (FOLDER / "finalized").touch()


LASTING = Lasting()
atexit.register((FOLDER / "handled").touch)
threading.Thread(target=(FOLDER / "joined").touch).start()
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(("plugins", "--json"), 0), (("plugins", "--nothing"), 2), (("status", "nowhere"), 2)],
)
def test_output_status_and_exit_handlers_outlive_the_interpreters_end(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    where = ("--plugins-dir", tmp_path) if arguments[0] == "plugins" else ()
    done = deltaloom(*arguments, *where)
    assert done.status == status, done.err
    assert done.out if status == 0 else done.err
    left = {path.name for path in tmp_path.iterdir() if not path.suffix} - {"__pycache__"}
    assert left == ({"handled", "joined"} if status == 0 else set())
