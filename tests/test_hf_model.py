"""Models of transformers behind the bundled interface: logits, caches, names, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.interfaces import ExportsFiles
from deltaloom.plugins._extras import need
from deltaloom.plugins.models.hf import HfConfig, HfModel
from deltaloom.plugins.torch_support.causal_lm import CausalLm, dither
from deltaloom.plugins.torch_support.tensor_bits import load_policy, policy_tensors

from .hf_support import save_tiny_llama, transformers

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def module(folder: Path) -> CausalLm:
    built = HfModel(HfConfig(path=str(folder))).build(seed=0)
    assert isinstance(built, CausalLm)
    return built.eval()


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens_of(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 200, shape, generator=generator)


@torch.inference_mode()
def test_logits_are_those_of_transformers(folder: Path, module: CausalLm) -> None:
    tokens = tokens_of(3, 9)
    expected = reference(folder)(tokens).logits
    torch.testing.assert_close(module(tokens), expected)
    places = torch.tensor([0, 8, 17, 26])
    torch.testing.assert_close(module(tokens, at=places), expected.flatten(0, 1)[places])


@torch.inference_mode()
def test_scaled_logits_are_scaled_here_too(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    config = transformers.GraniteConfig(
        **{**json.loads((tmp_path / "config.json").read_text()), "model_type": "granite"},
        logits_scaling=3.0,
    )
    torch.manual_seed(0)
    inner = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = tokens_of(2, 5)
    expected = inner(tokens).logits
    torch.testing.assert_close(CausalLm(inner).eval()(tokens), expected)
    at = torch.tensor([4, 9])
    torch.testing.assert_close(CausalLm(inner).eval()(tokens, at=at), expected.flatten(0, 1)[at])


@torch.inference_mode()
def test_rows_of_a_cache_go_on_from_their_own_length(module: CausalLm) -> None:
    lengths = torch.tensor([3, 7, 5])
    tokens = tokens_of(3, 12)
    padded = tokens[:, :7].clone()
    for row, length in enumerate(lengths.tolist()):
        padded[row, length:] = 1
    cache = module.new_cache(3, 20)
    module(padded, cache=cache, at=torch.zeros(1, dtype=torch.int64))
    rows = torch.tensor([2, 0, 0, 1])
    cache = cache.select(rows)
    for step in range(4):
        positions = (lengths[rows] + step).unsqueeze(1)
        drawn = tokens[rows].gather(1, positions)
        logits = module(drawn, cache=cache, positions=positions)[:, 0]
        for place, row in enumerate(rows.tolist()):
            whole = module(tokens[row : row + 1, : int(lengths[row]) + step + 1])[0, -1]
            torch.testing.assert_close(logits[place], whole, rtol=1e-4, atol=1e-4)
        if step == 1:
            rows, cache = rows[1:], cache.select(torch.tensor([1, 2, 3]))


@torch.inference_mode()
def test_tokens_replace_what_was_at_their_positions(module: CausalLm) -> None:
    tokens = tokens_of(2, 6)
    cache = module.new_cache(2, 20)
    module(tokens_of(2, 6, seed=9), cache=cache)
    positions = torch.arange(6).expand(2, 6)
    again = module(tokens, cache=cache, positions=positions)
    torch.testing.assert_close(again, module(tokens), rtol=1e-4, atol=1e-4)


def test_tied_embeddings_are_stored_once_and_come_back_tied(module: CausalLm) -> None:
    policy = policy_tensors(module, dtype=torch.bfloat16)
    names = {spec.name for spec in policy.specs}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert not any("rotary" in name for name in names)
    assert names <= set(module.hf.state_dict())
    doubled = {name: bits.copy() for name, bits in policy.bits.items()}
    doubled["model.embed_tokens.weight"][:] = 0x3F80
    changed = type(policy)(specs=policy.specs, bits=doubled)
    other = CausalLm(type(module.hf)(module.hf.config))
    load_policy(other, changed)
    assert bool((other.hf.lm_head.weight == 1.0).all())
    assert np.array_equal(
        policy_tensors(other, dtype=torch.bfloat16).bits["model.norm.weight"],
        policy.bits["model.norm.weight"],
    )


def test_untied_heads_are_stored_beside_the_embeddings(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, tie_word_embeddings=False)
    built = HfModel(HfConfig(path=str(tmp_path))).build(seed=0)
    names = {spec.name for spec in policy_tensors(built, dtype=torch.bfloat16).specs}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names


def test_random_weights_are_a_function_of_the_seed(folder: Path) -> None:
    model = HfModel(HfConfig(path=str(folder), random_init=True))
    first, again, other = (model.build(seed=seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_dither_stays_within_half_a_bf16_step(module: CausalLm) -> None:
    grid = CausalLm(type(module.hf)(module.hf.config))
    embedding = grid.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        for parameter in grid.parameters():
            parameter.copy_(parameter.bfloat16())
        embedding[5] = 0.0
        embedding[6, ::2] = 0.0
    before = {name: p.detach().clone() for name, p in grid.named_parameters()}
    dither(grid, seed=3)
    for name, parameter in grid.named_parameters():
        old = before[name]
        moved = (parameter.detach() - old).abs()
        assert bool((moved[old != 0] <= old[old != 0].abs() / 256).all())
        assert bool(moved.any()) == (parameter.dim() > 1)
    assert bool((embedding[5] == 0).all())
    smallest = before["model.embed_tokens.weight"][6, 1::2].abs().min()
    assert bool((embedding[6, ::2].abs() <= smallest / 2).all())
    assert bool((embedding[6, ::2] != 0).any())


def test_the_length_of_prompt_and_completion_is_bounded(tmp_path: Path, module: CausalLm) -> None:
    assert module.max_length == 96
    with pytest.raises(ValueError, match="96"):
        module.new_cache(1, 97)


def test_models_with_other_layers_are_refused(tmp_path: Path) -> None:
    transformers.Lfm2Config(
        hidden_size=32, num_hidden_layers=2, full_attn_idxs=[1]
    ).save_pretrained(tmp_path)
    with pytest.raises(PluginError, match="lfm2"):
        HfModel(HfConfig(path=str(tmp_path), random_init=True)).build(seed=0)


def test_the_tokenizer_takes_text_as_it_stands(folder: Path) -> None:
    tokenizer = HfModel(HfConfig(path=str(folder))).tokenizer()
    ids = tokenizer.encode("<|user|>a b\u00e9")
    assert ids[0] == 1
    assert len(ids) == 6
    assert tokenizer.decode([*ids, 0]) == "a b\u00e9"
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (0, 0, (0, 2))
    assert tokenizer.vocab_size == 259


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        HfConfig(path="")
    with pytest.raises(ConfigError, match="local cache"):
        HfModel(HfConfig(path="no-such/model", offline=True)).tokenizer()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        HfModel(HfConfig(path=str(tmp_path))).tokenizer()
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="end token"):
        HfModel(HfConfig(path=str(tmp_path))).tokenizer()
    with pytest.raises(PluginError, match=r"pip install 'deltaloom\[hf\]'"):
        need("no_such_library", by="model 'hf'", extra="hf")


def test_listing_the_plugins_loads_no_library() -> None:
    code = (
        "import sys; from deltaloom.orchestrator.plugin_manager import create_plugins;"
        "names = create_plugins().components;"
        "assert 'hf' in names['model'] and 'hf' in names['engine'] and 'hf' in names['trainer'];"
        "assert 'smollm2' in names['model'];"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exported_files_say_nothing_of_the_dtype(folder: Path, tmp_path: Path) -> None:
    model = HfModel(HfConfig(path=str(folder)))
    assert isinstance(model, ExportsFiles)
    names = model.export_files(tmp_path)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    config = json.loads((tmp_path / "config.json").read_text())
    assert "dtype" not in config
    assert config["hidden_size"] == 32
