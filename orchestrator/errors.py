"""The orchestrator's error tree, beside the store's, under the same root.

DeltaloomError
+- OrchestratorError
   +- ConfigError          fix the options: unknown key, wrong type, unreadable file
   +- PipelineError        fix the pipeline file: graph, ports, names, import
   +- PluginError          a plugin failed, is missing or ambiguous; names it
   +- RunError             the run directory or the stored run refuses what was asked
   +- TaskError            a task failed for good; names node, worker and policy version
   +- DeadlineError        a wait expired; names what was waited for
   +- RunInterruptedError  a person or a signal stopped the run; it can be resumed
   +- RunPausedError       the guard stopped the run for a person to look at; it can be resumed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from enum import StrEnum

from ..storage.errors import DeltaloomError
from .other_names import name_here


class RunErrorCode(StrEnum):
    """Stable identifiers of causes. Append only."""

    UNKNOWN_KEY = "unknown-key"
    WRONG_TYPE = "wrong-type"
    BAD_FILE = "bad-file"
    UNKNOWN_PLUGIN = "unknown-plugin"
    DUPLICATE_PLUGIN = "duplicate-plugin"
    BROKEN_PLUGIN = "broken-plugin"
    AMBIGUOUS_OPTION = "ambiguous-option"
    BAD_GRAPH = "bad-graph"
    BAD_PIPELINE_FILE = "bad-pipeline-file"
    RUN_EXISTS = "run-exists"
    RUN_NOT_FOUND = "run-not-found"
    RUN_UNWRITABLE = "run-unwritable"
    RUN_MISMATCH = "run-mismatch"
    TASK_FAILED = "task-failed"
    POISON_TASK = "poison-task"
    BAD_PROMPT = "bad-prompt"
    NO_PROGRESS = "no-progress"
    NOTHING_TRAINED = "nothing-trained"
    INTERRUPTED = "interrupted"
    REPLAY_DIVERGED = "replay-diverged"
    NONFINITE_GRADIENT = "nonfinite-gradient"
    SCHEDULER_LOST = "scheduler-lost"
    NO_WORKER = "no-worker"
    BAD_REVIEW = "bad-review"
    FILE_EXISTS = "file-exists"
    RANK_LOST = "rank-lost"
    GUARD_PAUSED = "guard-paused"
    NO_TRANSPORT = "no-transport"
    STAGE_LOST = "stage-lost"
    SYSTEM_ERROR = "system-error"


class OrchestratorError(DeltaloomError):
    """Any failure of the graph, its plugins or its run."""


class ConfigError(OrchestratorError, ValueError):
    """Options that do not fit the components they are given to."""


class PipelineError(OrchestratorError, ValueError):
    """A pipeline that cannot be built: ports, cycles, names, or a file that fails to import."""


class PluginError(OrchestratorError):
    """Plugin code raised, or a plugin is missing, broken or ambiguous."""


class RunError(OrchestratorError):
    """The run directory, or the run stored in it, does not allow what was asked."""


class TaskError(OrchestratorError):
    """A task failed for good."""


class DeadlineError(OrchestratorError):
    """A wait expired; the message names the node, worker and version waited for."""


class RunInterruptedError(OrchestratorError):
    """The run was stopped from outside and can be resumed."""


class RunPausedError(OrchestratorError):
    """A rule of the guard paused the run; it can be resumed."""


@contextmanager
def boundary(error: type[OrchestratorError], what: str) -> Iterator[None]:
    """Turn whatever plugin or user code raises into `error`, naming `what` it was doing.

    Errors of deltaloom's own tree pass through. This is the one place with a broad handler:
    code from outside may raise anything, also what would end the process.
    """
    try:
        yield
    except DeltaloomError:
        raise
    except (Exception, SystemExit) as cause:
        raise error(
            f"{what} failed: {type(cause).__name__}: {cause}", code=RunErrorCode.BROKEN_PLUGIN
        ) from cause


def suggest(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?`, or the list of what is known, for an error about `name`.

    Names of options that other trainers use are understood.
    """
    options = sorted(known)
    if here := name_here(name, options):
        return f"It is called {here!r} here."
    near = get_close_matches(name, options, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known: {', '.join(options)}." if options else "None are known."
