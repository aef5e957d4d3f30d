"""Names that options speak of; light, so that listing plugins stays cheap."""

from __future__ import annotations

from typing import Literal

Family = Literal["llama3", "qwen3"]
DecayType = Literal["linear", "sqrt", "cosine"]
