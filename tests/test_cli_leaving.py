"""How the command line ends: its exit handlers run, the interpreter is not taken down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .run_support import command, deltaloom

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


def status_of(redirection: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and standard error of a command with its output somewhere else."""
    finished = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command(*arguments)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | environment,
    )
    return finished.returncode, finished.stderr


@pytest.mark.parametrize("arguments", [("plugins", "--json"), ("plugins",), ("--help",)])
def test_output_that_cannot_be_written_is_one_line_and_no_success(
    arguments: tuple[str, ...],
) -> None:
    status, errors = status_of("> /dev/full", *arguments)
    assert status == 1
    assert errors.startswith("error [system-error]: [Errno 28] No space left on device.")
    assert "Traceback" not in errors


def test_a_command_without_standard_output_ends_in_silence() -> None:
    assert status_of(">&-", "plugins", "--json") == (0, "")


def test_an_interpreter_without_assertions_is_refused_at_once() -> None:
    """What zarr asserts of its metadata is also what takes it apart."""
    status, errors = status_of("", "plugins", PYTHONOPTIMIZE="1")
    assert status == 2
    assert "error [system-error]: Python runs with -O" in errors


def test_what_plugins_print_is_no_part_of_the_json(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text("print('chatty is loaded')\n")
    done = deltaloom("plugins", "--plugins-dir", tmp_path, "--json")
    assert "chatty" in [plugin["name"] for plugin in done.json]
    assert done.err == "chatty is loaded\n"
    assert "chatty is loaded\n" in deltaloom("plugins", "--plugins-dir", tmp_path).out


def test_a_plugin_that_would_end_the_process_is_shown_as_broken(tmp_path: Path) -> None:
    """As a script does that reads its arguments when it is imported."""
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    done = deltaloom("plugins", "--plugins-dir", tmp_path, "--json")
    assert done.status == 0
    found = {plugin["name"]: str(plugin) for plugin in done.json}
    assert "SystemExit: 3" in found["leaves"]
    assert "SystemExit: 2" in found["script"]
