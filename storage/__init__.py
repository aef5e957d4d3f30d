"""The versioned policy store: commits, deltas, digests, publish, subscribe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bits import PolicyTensors, TensorSpec
    from .chain import CodecLookup
    from .packing import pack, unpack
    from .publisher import Publisher, needs_anchor
    from .records import CommitInfo, VersionRef
    from .repository import PolicyRepository
    from .subscriber import Activation, StagedVersion, Subscriber

_MODULES = {
    "Activation": "subscriber",
    "CodecLookup": "chain",
    "CommitInfo": "records",
    "PolicyRepository": "repository",
    "PolicyTensors": "bits",
    "Publisher": "publisher",
    "StagedVersion": "subscriber",
    "Subscriber": "subscriber",
    "TensorSpec": "bits",
    "VersionRef": "records",
    "needs_anchor": "publisher",
    "pack": "packing",
    "unpack": "packing",
}

__all__ = [
    "Activation",
    "CodecLookup",
    "CommitInfo",
    "PolicyRepository",
    "PolicyTensors",
    "Publisher",
    "StagedVersion",
    "Subscriber",
    "TensorSpec",
    "VersionRef",
    "needs_anchor",
    "pack",
    "unpack",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: errors and bits stay light (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
