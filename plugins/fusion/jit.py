"""How kernels are compiled: without the GIL, cached on disk when the disk allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(signature: str) -> Callable[[Function], Function]:
    """Compile an entry point for one signature; uncached where no cache directory is writable."""

    def compile_function(function: Function) -> Function:
        try:
            compiled: Any = numba.njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:  # numba found no place to keep a cache
            compiled = numba.njit(signature, nogil=True)(function)
        typed: Function = compiled
        return typed

    return compile_function


def helper(function: Function) -> Function:
    """Mark a function that kernels of the same module call; compiled with its caller.

    It must live in its caller's module: the cache of a kernel is renewed by that file's age.
    """
    compiled: Any = numba.njit(nogil=True)(function)
    typed: Function = compiled
    return typed
