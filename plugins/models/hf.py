"""`hf`: a causal language model of transformers, from a folder or the Hugging Face hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from .._extras import need

if TYPE_CHECKING:
    import torch

    from ._hf_tokenizer import HfTokenizer

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.*"]
_PASSED_ON = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "vocab.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """Which model. Raises `ConfigError` when none is named."""

    path: str
    """A folder with config.json, safetensors and tokenizer.json, or a repository on the hub."""
    revision: str = "main"
    """Branch, tag or commit of a hub repository; a commit makes the run repeatable."""
    offline: bool = False
    """Take a hub repository from the local cache alone."""
    random_init: bool = False
    """Start from random weights of the architecture instead of the checkpoint's."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "model.path: must be a folder or a repository on the hub, got nothing.",
                code=RunErrorCode.WRONG_TYPE,
            )


class HfModel:
    """Any decoder of transformers with attention over all tokens; masters in float32.

    Tensor names are the checkpoint's, tied embeddings are stored once.
    """

    name: ClassVar[str] = "hf"
    Config: ClassVar[type[Any]] = HfConfig

    def __init__(self, config: HfConfig) -> None:
        self._config = config

    @cached_property
    def folder(self) -> Path:
        """Where the files are, downloaded first if need be. Raises `ConfigError`."""
        folder = Path(self._config.path).expanduser()
        return folder if folder.is_dir() else _from_hub(self._config)

    def tokenizer(self) -> HfTokenizer:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        from ._hf_tokenizer import HfTokenizer

        return HfTokenizer(self.folder)

    def build(self, *, seed: int) -> torch.nn.Module:
        """A float32 module with the weights of v0: the checkpoint's, whatever the seed.

        Raises `PluginError` without transformers or for an architecture that does not fit.
        """
        from ..torch_support.causal_lm import load_causal_lm, random_causal_lm

        if self._config.random_init:
            return random_causal_lm(self.folder, seed=seed)
        return load_causal_lm(self.folder)

    def export_files(self, folder: Path) -> Sequence[str]:
        """Write config and tokenizer beside exported weights; the names of the files.

        The dtype is left out of config.json: it is that of the weights.
        """
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        plain = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        (folder / "config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        present = [name for name in _PASSED_ON if (self.folder / name).is_file()]
        for name in present:
            shutil.copyfile(self.folder / name, folder / name)
        return ["config.json", *present]


def _from_hub(config: HfConfig) -> Path:
    hub = need("huggingface_hub", by="model 'hf'", extra="hf")
    try:
        return Path(
            hub.snapshot_download(
                config.path,
                revision=config.revision,
                local_files_only=config.offline,
                allow_patterns=_HUB_PATTERNS,
            )
        )
    except (OSError, ValueError) as error:
        where = "the local cache of the hub" if config.offline else "the hub"
        raise ConfigError(
            f"model.path: {config.path!r} is no folder, and {where} has no such model "
            f"({type(error).__name__}).",
            code=RunErrorCode.BAD_FILE,
        ) from error


@hookimpl
def register_models() -> list[type[Any]]:
    return [HfModel]
