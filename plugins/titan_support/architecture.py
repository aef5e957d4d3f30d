"""torchtitan's model of a name, and the same architecture as transformers describes it.

The trainer's ranks compute with the first, rollout workers with the second; torchtitan's HF
state-dict adapter leads from one's tensors to the other's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ...orchestrator.errors import ConfigError, RunErrorCode, suggest
from .._extras import need
from .names import Family

_COMPARED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Which of torchtitan's models, and what is not as its size has it."""

    family: Family
    size: str
    num_layers: int = 0
    """Layers kept, counted from the first; 0 keeps all."""
    vocab_size: int = 0
    """Rows of embedding and head; 0 keeps the size's own."""
    max_length: int
    """Longest sequence, which rotary positions are tabulated for."""


def model_spec(architecture: Architecture) -> Any:
    """torchtitan's `ModelSpec`. Raises `ConfigError` for a size it does not have, `PluginError`
    without torchtitan.

    Attention is torch's own, causal: rollouts are padded on the right, so that no mask is needed,
    and a backward pass exists everywhere. torchtitan's default is for packed documents.
    """
    models = torchtitan_module(f"models.{architecture.family}")
    flavors = getattr(models, f"{architecture.family}_configs")
    if architecture.size not in flavors:
        raise ConfigError(
            f"model.size: torchtitan has no {architecture.family} {architecture.size!r}. "
            f"{suggest(architecture.size, flavors)}",
            code=RunErrorCode.WRONG_TYPE,
        )
    spec = models.model_registry(architecture.size)
    _check_dense(spec.model, architecture)
    _adapt(spec.model, architecture)
    return spec


def hf_config(architecture: Architecture) -> Any:
    """The configuration of the same model in transformers."""
    library = need("transformers", by="model 'titan'", extra="titan")
    config = model_spec(architecture).model
    first = config.layers[0]
    attention = first.attention
    kind = library.LlamaConfig if architecture.family == "llama3" else library.Qwen3Config
    return kind(
        hidden_size=config.dim,
        intermediate_size=first.feed_forward.w1.out_features,
        num_hidden_layers=len(config.layers),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        head_dim=attention.head_dim or config.dim // attention.n_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=architecture.max_length,
        rms_norm_eps=first.attention_norm.eps,
        tie_word_embeddings=config.enable_weight_tying,
        rope_parameters=_rope_parameters(attention.rope),
        bos_token_id=None,
        eos_token_id=None,
    )


def check_checkpoint(found: Any, architecture: Architecture) -> None:
    """Raise `ConfigError` naming what a checkpoint's configuration has otherwise than the size.

    Rotary positions count: with other ones the same weights are another model.
    """
    wanted = hf_config(architecture)
    other = [
        f"{name} {getattr(found, name, None)!r} instead of {getattr(wanted, name)!r}"
        for name in _COMPARED
        if getattr(found, name, None) != getattr(wanted, name)
    ]
    if other:
        raise ConfigError(
            f"model.path: the checkpoint is no {architecture.family} {architecture.size!r} of "
            f"torchtitan: {'; '.join(other)}.",
            code=RunErrorCode.WRONG_TYPE,
        )


def check_tensor_parallel(architecture: Architecture) -> None:
    """Raise `ConfigError` for a model that tensor parallelism would change: torchtitan spreads
    embedding and head as two tensors, so that tied ones would part."""
    if model_spec(architecture).model.enable_weight_tying:
        raise ConfigError(
            f"tensor_parallel must be 1 for {architecture.family} {architecture.size!r}, whose "
            "embeddings are tied.",
            code=RunErrorCode.WRONG_TYPE,
        )


def torchtitan_module(name: str) -> Any:
    """A module of torchtitan. Raises `PluginError` with the way to install it."""
    need("torch", by="trainer 'titan'", extra="titan")
    from . import cpu

    need("torchtitan", by="trainer 'titan'", extra="titan")
    cpu.prepare()
    return import_module(f"torchtitan.{name}")


def _check_dense(config: Any, architecture: Architecture) -> None:
    if any(layer.feed_forward is None for layer in config.layers):
        raise ConfigError(
            f"model.size: {architecture.family} {architecture.size!r} has experts; only dense "
            "models can be trained.",
            code=RunErrorCode.WRONG_TYPE,
        )


def _adapt(config: Any, architecture: Architecture) -> None:
    attention = torchtitan_module("models.common.attention")
    if architecture.num_layers:
        config.layers = config.layers[: architecture.num_layers]
    for layer in config.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
        layer.attention.rope = replace(layer.attention.rope, max_seq_len=architecture.max_length)
    if architecture.vocab_size:
        config.vocab_size = architecture.vocab_size
        config.tok_embeddings.num_embeddings = architecture.vocab_size
        config.lm_head.out_features = architecture.vocab_size


def _rope_parameters(rope: Any) -> dict[str, Any]:
    if rope.scaling == "none":
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.scaling_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
