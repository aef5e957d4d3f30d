"""Codec plugin `context`: the smallest exact deltas of the bundled codecs."""

from __future__ import annotations

from typing import Any

from ....orchestrator.hookspecs import hookimpl
from .codec import ContextCodec, ContextConfig

__all__ = ["ContextCodec", "ContextConfig", "register_codecs"]


@hookimpl
def register_codecs() -> list[type[Any]]:
    return [ContextCodec]
