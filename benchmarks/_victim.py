"""A run or its resumption in a process that ends itself by SIGKILL at a chosen boundary.

`python -m benchmarks._victim RUN_DIR PIPELINE STEPS POINT COUNT`: starts the run, or resumes it
when there is one, and dies when POINT is passed for the COUNT-th time. Points are those of
`orchestrator.session.Session`: encoded, staged, written, committed, replayed, evaluated, found,
forked, branched; "none" never.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def killer(point: str, count: int) -> Callable[[str], None]:
    """A `faults` callback that ends the process when `point` is passed for the `count`-th time.

    Versions trained again are printed, for whoever counts them.
    """
    left = [count]

    def faults(boundary: str) -> None:
        if boundary == "replayed":
            sys.stdout.write("replayed\n")
            sys.stdout.flush()
        left[0] -= boundary == point
        if boundary == point and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return faults


def main(run_dir: Path, pipeline: Path, steps: int, point: str, count: int) -> None:
    """Start or resume, with the fault in place; each finished step is printed."""
    from deltaloom.orchestrator.progress import PlainProgress
    from deltaloom.orchestrator.run import (
        ResumeRequest,
        RunRequest,
        prepare,
        resume_run,
        start_run,
    )
    from deltaloom.orchestrator.run_dir import is_run

    faults, observers = killer(point, count), [PlainProgress()]
    if is_run(run_dir):
        resume_run(ResumeRequest(path=run_dir), observers=observers, faults=faults)
    else:
        overlay = {"pipeline": {"steps": steps}}
        request = RunRequest(pipeline_path=pipeline, run_dir=run_dir, overlay=overlay)
        start_run(prepare(request), observers=observers, faults=faults)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
