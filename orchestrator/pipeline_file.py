"""Loading a pipeline file: the one place where a user's module is imported."""

from __future__ import annotations

import traceback
from pathlib import Path

from .dsl import Pipeline
from .errors import PipelineError, RunErrorCode
from .plugin_manager import import_file


def load_pipeline(path: Path) -> Pipeline:
    """The `pipeline` defined in a Python file.

    Raises `PipelineError` when the file is missing, fails to import (with the failing line), or
    defines no `Pipeline` under that name.
    """
    if not path.is_file():
        raise _error(f"pipeline file {str(path)!r} does not exist.")
    try:
        module = import_file(path)
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        raise _error(
            f"pipeline file {str(path)!r} failed to import: {_where(error, path)}",
            remedy=_import_remedy(error, path),
        ) from error
    pipeline = getattr(module, "pipeline", None)
    if not isinstance(pipeline, Pipeline):
        raise _error(
            f"pipeline file {str(path)!r} must define `pipeline = Pipeline(...)`, "
            f"got {type(pipeline).__name__}."
        )
    return pipeline


def _where(error: BaseException, path: Path) -> str:
    """`Type: message (line N: source)` with the last line of the user's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == path.resolve()]
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{what}"
    return f"{what} (line {own[-1].lineno}: {own[-1].line})." if own else f"{what}."


def _import_remedy(error: BaseException, path: Path) -> str | None:
    """What to do about a module that lies beside the pipeline file and was not found."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    top = path.parent / error.name.partition(".")[0]
    if not (top.is_dir() or top.with_suffix(".py").is_file()):
        return None
    return (
        "Modules beside a pipeline file are not found by themselves: install them as a package, or "
        f"set PYTHONPATH={path.parent.absolute()} wherever workers run."
    )


def _error(message: str, *, remedy: str | None = None) -> PipelineError:
    return PipelineError(message, code=RunErrorCode.BAD_PIPELINE_FILE, remedy=remedy)
