"""A `tokenizer.json` behind the interface of bundled tokenizers; without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...orchestrator.errors import ConfigError, RunErrorCode
from .._extras import need


class HfTokenizer:
    """Encodes text as it stands: special tokens written in it count, none are added."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` for a folder without a tokenizer or an end token."""
        library = need("tokenizers", by="model 'hf'", extra="hf")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"there is no tokenizer.json in {str(folder)!r}.",
                code=RunErrorCode.BAD_FILE,
                remedy="Save one with transformers: AutoTokenizer.from_pretrained(...)"
                ".save_pretrained(...)",
            )
        self._tokenizer = library.Tokenizer.from_file(str(file))
        self._stops = _stop_ids(folder, self._tokenizer)

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def pad_id(self) -> int:
        """The end token: padding is never attended to."""
        return self._stops[0]

    @property
    def eos_id(self) -> int:
        return self._stops[0]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion, the end token first."""
        return self._stops

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def _stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of tokenizer_config.json, generation_config.json and config.json, in order."""
    found: list[int] = []
    named = _read(folder / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if text is not None and (token := tokenizer.token_to_id(text)) is not None:
        found.append(token)
    for name in ("generation_config.json", "config.json"):
        ids = _read(folder / name).get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not found:
        raise ConfigError(
            f"the model in {str(folder)!r} names no end token; expected eos_token in "
            "tokenizer_config.json or eos_token_id in config.json.",
            code=RunErrorCode.BAD_FILE,
        )
    return tuple(dict.fromkeys(found))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
