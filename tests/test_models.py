"""The character transformer: tokenizer, initial weights, cache, names, bits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import RunError
from deltaloom.plugins.models.transformer import CharacterTokenizer, TransformerConfig
from deltaloom.plugins.torch_support.tensor_bits import (
    apply_policy_changes,
    bits_to_tensor,
    load_policy,
    policy_tensors,
    tensor_to_bits,
    tied_names,
)
from deltaloom.storage.bits import PolicyTensors
from deltaloom.storage.codec import Change, diff

from .rl_support import policy_bytes, random_module, random_policy, small_model


@given(st.text(alphabet="0123456789=", max_size=30))
def test_tokenizer_round_trips_its_alphabet(text: str) -> None:
    tokenizer = CharacterTokenizer("0123456789=")
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([*tokens, tokenizer.eos_id]) == text
    assert all(0 < token < tokenizer.vocab_size for token in tokens)


def test_tokenizer_names_the_character_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"character 'x' of '12x'"):
        CharacterTokenizer("0123").encode("12x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alphabet": "aba"}, "distinct characters"),
        ({"alphabet": ""}, "non-empty"),
        ({"hidden_size": 36, "num_heads": 4}, "multiple of 2"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_config_refuses_what_cannot_be_built(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**options)  # type: ignore[arg-type]


def test_plugin_modules_import_without_torch() -> None:
    names = (
        *("models.transformer", "engines.torch_engine", "trainers.torch_trainer"),
        *("optimizers.adamw", "algorithms.grpo", "algorithms.reinforce"),
        *("scorers.function", "scorers.exact", "trackers.jsonl"),
    )
    code = "".join(f"import deltaloom.plugins.{name}\n" for name in names)
    code += "import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_initial_weights_depend_on_seed_alone() -> None:
    model = small_model()
    torch.manual_seed(1)
    first = model.build(seed=3).state_dict()
    before = torch.get_rng_state()
    second, other = model.build(seed=3).state_dict(), model.build(seed=4).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_first_policy_is_uniform() -> None:
    logits = small_model().build(seed=0)(torch.tensor([[1, 2, 3]]))
    assert torch.equal(logits, torch.zeros(1, 3, 12))


def test_tensor_names_are_those_of_hf_llama() -> None:
    names = small_model(num_layers=1, positions="rotary").build(seed=0).state_dict().keys()
    layer = "model.layers.0."
    assert set(names) == {
        "model.embed_tokens.weight",
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_cached_steps_equal_one_full_pass_for_rows_of_different_lengths(positions: str) -> None:
    module = random_module(small_model(positions=positions))
    rng = np.random.default_rng(0)
    lengths = torch.tensor([2, 5, 4])
    tokens = torch.from_numpy(rng.integers(1, 12, (3, 9)))
    with torch.inference_mode():
        cache = module.new_cache(3, 12)  # type: ignore[operator]
        module(tokens[:, :5], cache=cache)
        for step in range(4):
            positions_now = (lengths + step).unsqueeze(1)
            following = tokens.gather(1, positions_now)
            logits = module(following, cache=cache, positions=positions_now)[:, 0]
            for row in range(3):
                full = module(tokens[row : row + 1, : lengths[row] + step + 1])[0, -1]
                torch.testing.assert_close(logits[row], full, rtol=0, atol=1e-5)


def test_padding_on_the_right_never_reaches_a_logit() -> None:
    module = random_module(small_model())
    short = torch.tensor([[1, 2, 3]])
    padded = torch.tensor([[1, 2, 3, 9, 9], [1, 2, 3, 0, 4]])
    expected = module(short)[0]
    for row in module(padded)[:, :3]:
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)


def test_logits_at_chosen_places() -> None:
    module = random_module(small_model())
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    chosen = module(tokens, at=torch.tensor([4, 0]))
    torch.testing.assert_close(chosen, module(tokens).flatten(0, 1)[[4, 0]])


@pytest.mark.parametrize("num_layers", [1, 2])
def test_gradients_and_cache_of_chosen_places_are_those_of_the_whole(num_layers: int) -> None:
    module = random_module(small_model(num_layers=num_layers)).double()
    tokens, at = torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7]]), torch.tensor([7, 2, 3])
    weights = torch.randn(3, module(tokens).shape[-1], generator=torch.Generator().manual_seed(0))
    caches, gradients = [], []
    for places in (at, None):
        module.zero_grad()
        logits = module(tokens, at=places)
        chosen = logits if places is not None else logits.flatten(0, 1)[at]
        (chosen * weights).sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        caches.append(module.new_cache(2, 8))  # type: ignore[operator]
        with torch.no_grad():
            module(tokens, cache=caches[-1], at=places)
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(caches[0].keys, caches[1].keys)
    torch.testing.assert_close(caches[0].values, caches[1].values)


def test_cache_beyond_the_model_is_refused() -> None:
    module = small_model(max_length=8).build(seed=0)
    with pytest.raises(ValueError, match="at most the model's max_length 8, got 9"):
        module.new_cache(1, 9)  # type: ignore[operator]


def test_policy_bits_load_exactly_and_leave_buffers_out() -> None:
    model = small_model(positions="rotary")
    policy = random_policy(model)
    assert not any("rope" in spec.name for spec in policy.specs)
    assert {spec.dtype for spec in policy.specs} == {"bfloat16"}
    module = model.build(seed=9)
    load_policy(module, policy)
    assert policy_bytes(policy_tensors(module, dtype=torch.bfloat16)) == policy_bytes(policy)


def test_policy_is_a_copy() -> None:
    module = small_model().build(seed=0)
    policy = policy_tensors(module, dtype=torch.float32)
    before = policy_bytes(policy)
    with torch.no_grad():
        module.get_parameter("model.norm.weight").add_(1.0)
    assert policy_bytes(policy) == before


def test_changes_alone_take_a_module_to_the_next_state() -> None:
    model = small_model()
    old, new = random_policy(model, seed=1), random_policy(model, seed=2)
    module = model.build(seed=0)
    load_policy(module, old)
    few = next(spec.name for spec in old.specs if spec.num_elements > 8)
    kept = old.bits[few].reshape(-1).copy()
    kept[::5] = new.bits[few].reshape(-1)[::5]
    new = PolicyTensors(specs=new.specs, bits={**new.bits, few: kept.reshape(new.bits[few].shape)})
    changes = diff(old, new)
    dense = {"lm_head.weight": Change(indices=None, values=new.bits["lm_head.weight"].reshape(-1))}
    apply_policy_changes(module, new, {**changes, **dense})
    assert policy_bytes(policy_tensors(module, dtype=torch.bfloat16)) == policy_bytes(new)


def test_read_only_bits_load_without_a_warning() -> None:
    model = small_model()
    policy = random_policy(model)
    for bits in policy.bits.values():
        bits.flags.writeable = False
    module = model.build(seed=3)
    load_policy(module, policy)
    assert policy_bytes(policy_tensors(module, dtype=torch.bfloat16)) == policy_bytes(policy)


def test_tied_tensors_are_stored_once_and_move_together() -> None:
    model = small_model(tie_embeddings=True)
    module = model.build(seed=0)
    assert tied_names(module) == {"lm_head.weight": "model.embed_tokens.weight"}
    policy = policy_tensors(module, dtype=torch.bfloat16)
    assert "lm_head.weight" not in policy.bits
    target = model.build(seed=5)
    load_policy(target, policy)
    assert torch.equal(
        target.get_parameter("lm_head.weight"), target.get_parameter("model.embed_tokens.weight")
    )


def test_equal_but_separate_tensors_are_not_aliases() -> None:
    module = small_model().build(seed=0)
    with torch.no_grad():
        module.get_parameter("lm_head.weight").copy_(
            module.get_parameter("model.embed_tokens.weight")
        )
    assert tied_names(module) == {}


def test_a_policy_of_another_model_is_refused_before_any_write() -> None:
    model = small_model()
    policy = random_policy(model)
    partial = PolicyTensors.from_bits(
        {name: bits for name, bits in policy.bits.items() if name != "model.norm.weight"},
        dtypes={spec.name: spec.dtype for spec in policy.specs},
    )
    module = model.build(seed=7)
    before = policy_bytes(policy_tensors(module, dtype=torch.float32))
    with pytest.raises(RunError, match=r"missing \['model.norm.weight'\]"):
        load_policy(module, partial)
    with pytest.raises(RunError, match=r"other shape \['lm_head.weight'"):
        load_policy(small_model(alphabet="01").build(seed=0), policy)
    assert policy_bytes(policy_tensors(module, dtype=torch.float32)) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_bits_round_trip_every_pattern(dtype: torch.dtype) -> None:
    width = torch.empty((), dtype=dtype).element_size()
    raw = np.random.default_rng(0).integers(0, 256, 64 * width, dtype=np.uint8)
    bits = (raw % 2 if dtype == torch.bool else raw).view(f"u{width}")
    assert np.array_equal(tensor_to_bits(bits_to_tensor(bits, dtype)), bits)
