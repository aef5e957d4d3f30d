"""What a person is told to type next can be typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from deltaloom.orchestrator.progress import closing_text
from deltaloom.orchestrator.run_dir import resume_command


@pytest.mark.parametrize("path", ["runs/demo", "/tmp/run of the day", "/tmp/l'été $HOME"])
def test_commands_to_type_next_are_quoted_for_a_shell(path: str) -> None:
    summary = {
        **dict.fromkeys(("dispatched", "trained", "dropped", "invalid", "in_flight"), 0),
        **{"buffered": 0, "versions": 3, "seconds": 1.0, "bytes_published": 1, "bytes_dense": 2},
        **{"reward_first": 0.1, "reward_last": 0.2, "run_dir": path, "store": f"{path}/store"},
    }
    (shown,) = [line for line in closing_text(summary).splitlines() if "deltaloom log" in line]
    assert shlex.split(shown)[1:] == ["deltaloom", "log", path]
    assert shlex.split(resume_command(Path(path))) == ["deltaloom", "resume", path]
