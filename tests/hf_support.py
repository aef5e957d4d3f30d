"""A tiny Llama checkpoint with a byte-level tokenizer, as transformers writes one."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import tokenizers
import torch

transformers: Any = import_module("transformers")
"""Most of its functions have no types."""

SPECIAL = ("<|end|>", "<|user|>", "<|stop|>")


def save_tokenizer(folder: Path) -> int:
    """Single bytes and a few special tokens; the size of the vocabulary."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return len(vocab)


def save_tiny_llama(folder: Path, *, seed: int = 0, std: float = 0.3, **options: Any) -> Path:
    """A two-layer Llama with grouped heads and tied embeddings; `options` override its config.

    Weights are large for its size, so that it has preferences.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {
        "vocab_size": save_tokenizer(folder),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "tie_word_embeddings": True,
        "initializer_range": std,
        "eos_token_id": [0, 2],
        "bos_token_id": None,
    }
    config = transformers.LlamaConfig(**{**sizes, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder
