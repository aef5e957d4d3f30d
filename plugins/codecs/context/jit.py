"""One way to compile kernels: no GIL, cached on disk when the disk allows, typed for mypy.

Array arguments that a kernel only reads are declared read-only, so that mapped files and frozen
arrays pass as they are. All arithmetic inside kernels is on int64: it is exact and the same on
every machine, which a model that both ends run must be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
import xxhash

_njit: Final[Any] = numba.njit
_types: Final[Any] = numba.types

Function = TypeVar("Function", bound=Callable[..., Any])

int64: Final[Any] = numba.int64
int32: Final[Any] = numba.int32
uint16: Final[Any] = numba.uint16
uint32: Final[Any] = numba.uint32
uint64: Final[Any] = numba.uint64

I8: Final[Any] = _types.int64
PAIR: Final[Any] = _types.UniTuple(_types.int64, 2)
TRIPLE: Final[Any] = _types.UniTuple(_types.int64, 3)
REGISTERS: Final[Any] = _types.UniTuple(_types.int64, 6)
CODED: Final[Any] = _types.Tuple((REGISTERS, _types.int64))
PLACED: Final[Any] = _types.Tuple((REGISTERS, _types.int64, _types.int64))
VOID: Final[Any] = _types.void


def forget_stale_kernels(folder: Path) -> None:
    """Delete the compiled kernels of a package folder when any of its sources has changed.

    numba checks only the file a kernel is written in, but kernels contain those they call and the
    constants they import: an edit elsewhere would leave code of another format in use.
    """
    hasher = xxhash.xxh3_64()
    for source in sorted(folder.glob("*.py")):
        hasher.update(source.read_bytes())
    cache = folder / "__pycache__"
    stamp = cache / "kernels.stamp"
    try:
        if stamp.exists() and stamp.read_text(encoding="ascii") == hasher.hexdigest():
            return
        cache.mkdir(exist_ok=True)
        for kind in ("*.nbi", "*.nbc"):
            for compiled in cache.glob(kind):
                compiled.unlink(missing_ok=True)
        stamp.write_text(hasher.hexdigest(), encoding="ascii")
    except OSError:
        return  # a read-only installation; its files change together


forget_stale_kernels(Path(__file__).parent)


def writable(element: str) -> Any:
    """The numba type of a contiguous vector that the kernel may write."""
    return _types.Array(getattr(_types, element), 1, "C")


def read_only(element: str) -> Any:
    """The numba type of a contiguous vector that the kernel only reads."""
    return _types.Array(getattr(_types, element), 1, "C", readonly=True)


def kernel(
    result: Any, *arguments: Any, inlined: bool = False, allocates: bool = False
) -> Callable[[Function], Function]:
    """Compile for exactly one signature; without a cache where no cache directory is writable.

    `inlined` puts the code into every kernel that calls it, where its results stay in registers.
    Only kernels that make arrays (`allocates`) count references to them: counting is atomic, and
    costs more than coding a bit.
    """
    options = {
        "nogil": True,
        "error_model": "numpy",
        "forceinline": inlined,
        "_nrt": allocates,
    }

    def compile_function(function: Function) -> Function:
        signature = result(*arguments)
        try:
            compiled: Any = _njit(signature, cache=True, **options)(function)
        except RuntimeError:  # numba found no place to keep a cache
            compiled = _njit(signature, **options)(function)
        typed: Function = compiled
        return typed

    return compile_function
