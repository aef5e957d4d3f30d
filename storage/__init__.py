"""The versioned policy store: commits, deltas, digests, publish, subscribe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bits import PolicyTensors, TensorSpec
    from .chain import CodecLookup
    from .drafting import needs_anchor
    from .export import export_safetensors, import_safetensors
    from .graph import log_graph
    from .leases import Lease
    from .notes import NoteInfo, find_note, list_notes, read_note, write_note
    from .offers import Address, Offers
    from .packing import pack, unpack
    from .publisher import Publisher
    from .records import CommitInfo, VersionRef
    from .repository import PolicyRepository
    from .retention import GcReport, gc
    from .sharded_publisher import ShardCoordinator, ShardPublisher
    from .sharding import describe_plan, plan_transfer
    from .share_subscriber import ShareSubscriber
    from .shares import row_shares, shares_of
    from .subscriber import Activation, StagedVersion, Subscriber
    from .transfer import TransferCounts, TransferOptions
    from .verify import VerifyReport
    from .weight_server import WeightServer
    from .weight_source import DirectSource

_MODULES = {
    "Activation": "subscriber",
    "Address": "offers",
    "CodecLookup": "chain",
    "CommitInfo": "records",
    "DirectSource": "weight_source",
    "GcReport": "retention",
    "Lease": "leases",
    "NoteInfo": "notes",
    "Offers": "offers",
    "PolicyRepository": "repository",
    "PolicyTensors": "bits",
    "Publisher": "publisher",
    "ShardCoordinator": "sharded_publisher",
    "ShardPublisher": "sharded_publisher",
    "ShareSubscriber": "share_subscriber",
    "StagedVersion": "subscriber",
    "Subscriber": "subscriber",
    "TensorSpec": "bits",
    "TransferCounts": "transfer",
    "TransferOptions": "transfer",
    "VerifyReport": "verify",
    "VersionRef": "records",
    "WeightServer": "weight_server",
    "describe_plan": "sharding",
    "export_safetensors": "export",
    "find_note": "notes",
    "gc": "retention",
    "import_safetensors": "export",
    "list_notes": "notes",
    "log_graph": "graph",
    "needs_anchor": "drafting",
    "pack": "packing",
    "plan_transfer": "sharding",
    "read_note": "notes",
    "row_shares": "shares",
    "shares_of": "shares",
    "unpack": "packing",
    "write_note": "notes",
}

__all__ = [
    "Activation",
    "Address",
    "CodecLookup",
    "CommitInfo",
    "DirectSource",
    "GcReport",
    "Lease",
    "NoteInfo",
    "Offers",
    "PolicyRepository",
    "PolicyTensors",
    "Publisher",
    "ShardCoordinator",
    "ShardPublisher",
    "ShareSubscriber",
    "StagedVersion",
    "Subscriber",
    "TensorSpec",
    "TransferCounts",
    "TransferOptions",
    "VerifyReport",
    "VersionRef",
    "WeightServer",
    "describe_plan",
    "export_safetensors",
    "find_note",
    "gc",
    "import_safetensors",
    "list_notes",
    "log_graph",
    "needs_anchor",
    "pack",
    "plan_transfer",
    "read_note",
    "row_shares",
    "shares_of",
    "unpack",
    "write_note",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: errors and bits stay light (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
