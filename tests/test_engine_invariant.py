"""Batch-invariant decoding: a rollout has the same bits alone, in any batch, and gone on with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError
from deltaloom.orchestrator.interfaces import GenerateRequest
from deltaloom.orchestrator.types import Prompt, Rollout, SamplingParams
from deltaloom.plugins.engines.hf_engine import HfEngine
from deltaloom.plugins.engines.torch_engine import TorchEngine, TorchEngineConfig
from deltaloom.plugins.models.hf import HfConfig, HfModel
from deltaloom.plugins.models.transformer import Transformer, TransformerConfig
from deltaloom.plugins.torch_support.invariant_decoding import align_parameters
from deltaloom.plugins.torch_support.tensor_bits import policy_tensors
from deltaloom.storage.packing import pack, unpack

from .hf_support import save_tiny_llama
from .rl_support import engine_with, flat, random_policy, request, small_model, update

MODEL = small_model(hidden_size=48, num_layers=3, positions="rotary")
POLICY = random_policy(MODEL, scale=0.3)
ENGINE = engine_with(MODEL, POLICY, batch_invariant=True)
OTHERS = [engine_with(MODEL, POLICY, batch_invariant=True) for _ in range(2)]
MAX_NEW = 80
Row = tuple[str, int]

ROWS = st.lists(
    st.tuples(st.text("0123456789", min_size=1, max_size=60), st.integers(0, 2**63)),
    min_size=1,
    max_size=21,
    unique=True,
)


def asked(rows: Sequence[Row], *, top_p: float = 1.0) -> GenerateRequest:
    """One rollout a prompt, so that any rows can be put together."""
    return GenerateRequest(
        prompts=tuple(Prompt(text) for text, _ in rows),
        group_size=1,
        seeds=np.array([[seed] for _, seed in rows], dtype=np.uint64),
        sampling=SamplingParams(max_new_tokens=MAX_NEW, temperature=1.1, top_p=top_p),
    )


def bits(rollout: Rollout) -> tuple[bytes, bytes, str]:
    return rollout.tokens.tobytes(), rollout.logprobs.tobytes(), rollout.finish


def drawn(rows: Sequence[Row], **options: float) -> dict[Row, tuple[bytes, bytes, str]]:
    rollouts = flat(ENGINE.generate(asked(rows, **options)))
    return dict(zip(rows, map(bits, rollouts), strict=True))


@settings(max_examples=12, deadline=None)
@given(rows=ROWS, data=st.data(), top_p=st.sampled_from([1.0, 0.9]))
def test_a_rollout_has_the_same_bits_in_any_batch(
    rows: list[Row], data: st.DataObject, top_p: float
) -> None:
    together = drawn(rows, top_p=top_p)
    assert drawn(data.draw(st.permutations(rows)), top_p=top_p) == together
    chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
    some = drawn(chosen, top_p=top_p)
    assert some == {row: together[row] for row in chosen}
    assert drawn(rows[:1], top_p=top_p) == {rows[0]: together[rows[0]]}


class Countdown:
    """Says so after as many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def __call__(self, _num_unfinished: int) -> bool:
        self.num_tokens -= 1
        return self.num_tokens == 0


def keep(
    groups: dict[Row, tuple[bytes, bytes, str]],
    rows: Sequence[Row],
    index: int,
    group: list[Rollout],
) -> None:
    groups[rows[index]] = bits(group[0])


def in_two_parts(
    rows: Sequence[Row], *, cuts: Sequence[int], parts: Sequence[TorchEngine]
) -> dict[Row, tuple[bytes, bytes, str]]:
    """Draw the rows as two batches, each left after so many tokens, then together elsewhere."""
    groups: dict[Row, tuple[bytes, bytes, str]] = {}
    tails, left = [], []
    middle = len(rows) // 2
    for engine, cut, own in zip(parts, cuts, (rows[:middle], rows[middle:]), strict=True):
        if not own:
            continue
        tail = engine.draw_until(
            asked(own), leave=Countdown(cut), on_group=partial(keep, groups, own)
        )
        if tail is not None:
            tails.append(replace(tail, arrays=unpack(pack({}, tail.arrays))[1]))
            left += [own[index] for index in tail.indices]
    if left:
        end = parts[-1].draw_until(
            asked(left),
            tails=tails,
            leave=lambda _: False,
            on_group=partial(keep, groups, left),
        )
        assert end is None
    return groups


@settings(max_examples=12, deadline=None)
@given(rows=ROWS, cuts=st.tuples(st.integers(1, 40), st.integers(1, 80)))
def test_a_rollout_has_the_same_bits_when_other_engines_go_on_with_it(
    rows: list[Row], cuts: tuple[int, int]
) -> None:
    assert in_two_parts(rows, cuts=cuts, parts=OTHERS) == drawn(rows)


def test_what_is_left_counts_unfinished_rollouts_of_groups_that_are_not_whole() -> None:
    wanted = request(["12=", "9=", "4567="], group_size=6, max_new_tokens=30)
    plain = ENGINE.generate(wanted)
    whole: list[int] = []
    tail = ENGINE.draw_until(
        wanted, leave=lambda num: num <= 9, on_group=lambda index, _: whole.append(index)
    )
    assert tail is not None
    assert sorted([*whole, *tail.indices]) == [0, 1, 2]
    assert tail.num_unfinished == tail.arrays["live"].sum() <= 9
    assert tail.arrays["live"].size == 6 * len(tail.indices)
    rest: dict[int, list[Rollout]] = {}
    chosen = list(tail.indices)
    again = replace(
        wanted, prompts=tuple(wanted.prompts[i] for i in chosen), seeds=wanted.seeds[chosen]
    )
    ENGINE.draw_until(
        again, tails=[tail], leave=lambda _: False, on_group=lambda i, g: rest.update({i: g})
    )
    for place, index in enumerate(chosen):
        assert list(map(bits, rest[place])) == list(map(bits, plain[index]))
        for a, b in zip(rest[place], plain[index], strict=True):
            assert a.versions.tobytes() == b.versions.tobytes()


def test_recomputing_the_cache_leaves_rows_independent() -> None:
    """Both in one batch and alone, a newer version takes over after some tokens."""
    other = random_policy(MODEL, seed=5, scale=0.3)
    results = []
    rows: list[Row] = [("12", 3), ("345678", 4), ("9", 5)]
    for chosen in (rows, rows[1:2]):
        engine = engine_with(MODEL, POLICY, batch_invariant=True, recompute_cache_on_update=True)
        calls = iter(range(MAX_NEW))

        def between(engine: TorchEngine = engine, calls: Iterator[int] = calls) -> None:
            if next(calls) == 3:
                engine.activate(update(other, version=1))

        rollouts = flat(engine.generate(asked(chosen), between_steps=between))
        results.append(dict(zip(chosen, map(bits, rollouts), strict=True)))
    assert results[0][rows[1]] == results[1][rows[1]]


def test_it_draws_what_the_plain_engine_draws_but_for_rounding() -> None:
    wanted = request(["12=", "9=", "4567="], group_size=4, max_new_tokens=40)
    for a, b in zip(
        flat(ENGINE.generate(wanted)),
        flat(engine_with(MODEL, POLICY).generate(wanted)),
        strict=True,
    ):
        assert np.array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_model_without_such_a_cache_is_refused() -> None:
    class Plain(Transformer):
        def build(self, *, seed: int) -> torch.nn.Module:
            return torch.nn.Linear(2, 2)

    with pytest.raises(ConfigError, match="'transformer' has none"):
        TorchEngine(TorchEngineConfig(batch_invariant=True), model=Plain(TransformerConfig()))


def test_parameters_from_the_middle_of_something_get_memory_of_their_own() -> None:
    module = torch.nn.Linear(4, 4)
    flat_weights = torch.arange(17.0)
    module.weight.data = flat_weights[1:].view(4, 4)
    align_parameters(module)
    assert module.weight.data_ptr() % 64 == 0
    assert module.weight.flatten().tolist() == list(range(1, 17))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"compute_dtype": "bfloat16"}, "compute_dtype must be float32 with batch_invariant"),
        ({"num_threads": 2}, "num_threads must be 1 with batch_invariant"),
        ({"block_rows": 0}, "block_rows must be at least 1"),
    ],
)
def test_options_it_cannot_hold_with_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        engine_with(MODEL, POLICY, batch_invariant=True, **options)


def test_it_holds_for_models_of_transformers_with_grouped_heads(tmp_path: Path) -> None:
    model = HfModel(HfConfig(path=str(save_tiny_llama(tmp_path / "llama"))))
    engines = [
        HfEngine(TorchEngineConfig(batch_invariant=on), model=model) for on in (True, True, False)
    ]
    policy = policy_tensors(model.build(seed=0), dtype=torch.bfloat16)
    for engine in engines:
        engine.activate(update(policy))
    wanted = request(["12=", "9=", "4567=890"], group_size=5, max_new_tokens=40)
    plain, *rest = (list(map(bits, flat(e.generate(wanted)))) for e in engines)
    assert plain == rest[0]
    assert [tokens for tokens, *_ in plain] == [tokens for tokens, *_ in rest[1]]
    alone = request(["9="], group_size=5, first_seed=5, max_new_tokens=40)
    assert list(map(bits, flat(engines[1].generate(alone)))) == plain[5:10]
    groups: dict[int, list[Rollout]] = {}
    tail = engines[0].draw_until(
        wanted, leave=Countdown(7), on_group=lambda i, g: groups.update({i: g})
    )
    assert tail is not None
    left = list(tail.indices)
    rest_of_it = replace(
        wanted, prompts=tuple(wanted.prompts[i] for i in left), seeds=wanted.seeds[left]
    )
    engines[1].draw_until(
        rest_of_it,
        tails=[tail],
        leave=lambda _: False,
        on_group=lambda i, g: groups.update({left[i]: g}),
    )
    assert [bits(r) for _, group in sorted(groups.items()) for r in group] == plain
