"""From a GGUF file of a Llama model to a folder in the layout of Hugging Face checkpoints.

Weights are dequantised to float32, exactly as the format defines them; nothing is rounded. What
GGUF changes is undone: its names, and the order of the rows of query and key projections, whose
rotary pairs it puts side by side where HF has them half a head apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...orchestrator.errors import ConfigError, RunErrorCode
from ...storage.bits import PolicyTensors
from ...storage.export import write_safetensors
from .._extras import need

FloatArray = npt.NDArray[np.float32]

_TOP: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN: Final = 3
"""The type that GGUF gives to special tokens."""


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of `source` into `folder`, which must exist.

    Raises `ConfigError` for a file that is no Llama model with a byte-level BPE, `PluginError`
    without the libraries.
    """
    gguf = need("gguf", by=f"reading {source.name}", extra="smollm2")
    reader = gguf.GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields.get("general.architecture"), fields.get("tokenizer.ggml.model"))
    if kind != ("llama", "gpt2"):
        raise ConfigError(
            f"{source} must be a llama model with a gpt2 tokenizer, got {kind[0]} and {kind[1]}.",
            code=RunErrorCode.BAD_FILE,
        )
    weights = {
        hf_name(tensor.name): _as_hf(
            tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type), fields
        )
        for tensor in reader.tensors
    }
    policy = PolicyTensors.from_bits(
        {name: array.view(np.uint32) for name, array in weights.items()},
        dtypes=dict.fromkeys(weights, "float32"),
    )
    write_safetensors(policy, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", model_config(fields, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))


def hf_name(name: str) -> str:
    """The HF name of a GGUF tensor. Raises `ConfigError` for one a Llama does not have."""
    in_block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if in_block and in_block[2] in _IN_BLOCK:
        return f"model.layers.{in_block[1]}.{_IN_BLOCK[in_block[2]]}.weight"
    if name.removesuffix(".weight") in _TOP:
        return f"{_TOP[name.removesuffix('.weight')]}.weight"
    raise ConfigError(f"a llama model has no tensor {name!r}.", code=RunErrorCode.BAD_FILE)


def halves_apart(weight: FloatArray, *, num_heads: int) -> FloatArray:
    """Rows [H * D, n] with rotary pairs side by side to rows with them D / 2 apart."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def model_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The `config.json` of the file's Llama."""
    own = {key.removeprefix("llama."): fields[key] for key in fields if key.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["rope.dimension_count"],
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(own["rope.freq_base"]),
        "vocab_size": own.get("vocab_size", len(fields["tokenizer.ggml.tokens"])),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **_special_ids(fields),
    }


def build_tokenizer(fields: Mapping[str, Any]) -> Any:
    """A byte-level BPE that splits numbers into digits, as the file's `smollm` rule asks."""
    tokenizers = need("tokenizers", by="reading a GGUF tokenizer", extra="hf")
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    split = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def _as_hf(name: str, weight: FloatArray, fields: Mapping[str, Any]) -> FloatArray:
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    key = heads.get(name.split(".")[-2])
    array = np.asarray(weight, dtype=np.float32)
    return array if key is None else halves_apart(array, num_heads=fields[key])


def _special_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys = {name: f"tokenizer.ggml.{field}_token_id" for name, field in names.items()}
    return {f"{name}_token_id": fields[key] for name, key in keys.items() if key in fields}


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    named = {name.removesuffix("_id"): tokens[i] for name, i in _special_ids(fields).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template", ""),
        **named,
    }


def _shortest(value: float) -> float:
    """The decimal that a float32 was written from."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
