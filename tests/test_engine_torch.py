"""The torch engine: what it draws, what it says about it, and when it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltaloom.orchestrator.errors import RunError
from deltaloom.orchestrator.interfaces import WeightUpdate
from deltaloom.orchestrator.types import Rollout
from deltaloom.plugins.engines.torch_engine import TorchEngine, TorchEngineConfig
from deltaloom.plugins.torch_support.sampling import draw, uniforms
from deltaloom.plugins.torch_support.tensor_bits import load_policy
from deltaloom.storage.codec import diff

from .rl_support import engine_with, flat, random_policy, request, small_model, update

MODEL = small_model()
POLICY = random_policy(MODEL, scale=0.5)
END = MODEL.tokenizer().eos_id


def _module(policy: object = POLICY) -> torch.nn.Module:
    module = MODEL.build(seed=0)
    load_policy(module, policy)  # type: ignore[arg-type]
    return module


def _same(a: Rollout, b: Rollout) -> bool:
    return np.array_equal(a.tokens, b.tokens) and bool(np.allclose(a.logprobs, b.logprobs))


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    values = uniforms(np.arange(2_000, dtype=np.uint64), 50)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 5_000) ** 2 / 5_000).sum()
    assert chi_square < 45  # 19 degrees of freedom: exceeded once in 1,000 by a fair source


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    seeds = np.array([3, 2**63 + 5, 3], dtype=np.uint64)
    values = uniforms(seeds, 9)
    assert np.array_equal(values[0], values[2])
    assert np.array_equal(values[:, :4], uniforms(seeds, 4))
    assert np.unique(values[:2]).size == 18


def test_uniforms_of_neighbouring_seeds_are_not_shifted_copies() -> None:
    golden = 0x9E3779B97F4A7C15
    first, second = uniforms(np.array([7, (7 + golden) % 2**64], dtype=np.uint64), 20)
    assert not set(first) & set(second)


def test_draws_follow_the_distribution_their_logprobs_state() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5]])
    uniform = torch.from_numpy(uniforms(np.arange(20_000, dtype=np.uint64), 1)[:, 0])
    tokens, logprobs = draw(logits.expand(20_000, 5), uniform, temperature=0.7, top_p=1.0)
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    counts = torch.bincount(tokens, minlength=5)
    chi_square = ((counts - 20_000 * expected) ** 2 / (20_000 * expected)).sum()
    assert chi_square < 20  # 4 degrees of freedom
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_top_p_keeps_the_nucleus_and_renormalises_over_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    uniform = torch.from_numpy(uniforms(np.arange(5_000, dtype=np.uint64), 1)[:, 0])
    tokens, logprobs = draw(logits.expand(5_000, 4), uniform, temperature=1.0, top_p=0.75)
    assert set(tokens.tolist()) == {0, 1}
    kept = torch.tensor([0.5, 0.3]) / 0.8
    torch.testing.assert_close(logprobs, kept.log()[tokens])


def test_top_p_of_equal_tokens_keeps_the_first_by_id() -> None:
    uniform = torch.linspace(0, 0.999, 100, dtype=torch.float64)
    tokens, logprobs = draw(torch.zeros(100, 4), uniform, temperature=1.0, top_p=0.5)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, torch.full((100,), 0.5).log())


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    edges = torch.tensor([0.0, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    tokens, _ = draw(logits.expand(3, 5), edges, temperature=1.0, top_p=1.0)
    assert tokens.tolist() == [1, 3, 3]


def test_greedy_takes_the_largest_with_logprob_zero() -> None:
    tokens, logprobs = draw(
        torch.tensor([[0.0, 2.0, 2.0]]),
        torch.zeros(1, dtype=torch.float64),
        temperature=0.0,
        top_p=1.0,
    )
    assert (tokens.tolist(), logprobs.tolist()) == ([1], [0.0])


def test_greedy_with_cache_equals_recomputing_everything() -> None:
    engine, module = engine_with(MODEL, POLICY), _module()
    texts = ["1=", "90210=", "555="]
    for text, (rollout,) in zip(
        texts, engine.generate(request(texts, max_new_tokens=12, temperature=0.0)), strict=True
    ):
        tokens = MODEL.tokenizer().encode(text)
        expected: list[int] = []
        while len(expected) < 12 and expected[-1:] != [END]:
            expected.append(int(module(torch.tensor([tokens + expected]))[0, -1].argmax()))
        assert rollout.tokens.tolist() == expected


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward_pass(temperature: float) -> None:
    engine, module = engine_with(MODEL, POLICY), _module()
    groups = engine.generate(
        request(["12=", "34567="], group_size=6, max_new_tokens=10, temperature=temperature)
    )
    for rollout in flat(groups):
        sequence = np.concatenate([rollout.prompt_tokens, rollout.tokens]).astype(np.int64)
        logits = module(torch.from_numpy(sequence)[None])[0] / temperature
        first = rollout.prompt_tokens.size - 1
        distribution = torch.log_softmax(logits[first:-1], dim=-1)
        expected = distribution.gather(1, torch.from_numpy(sequence[first + 1 :, None]))[:, 0]
        np.testing.assert_allclose(rollout.logprobs, expected.detach(), atol=1e-5)


def test_a_rollout_does_not_depend_on_its_batch() -> None:
    engine = engine_with(MODEL, POLICY)
    together = engine.generate(request(["12=", "9=", "4567="], group_size=5, max_new_tokens=10))
    alone = engine.generate(request(["9="], group_size=5, first_seed=5, max_new_tokens=10))
    assert all(_same(a, b) for a, b in zip(together[1], alone[0], strict=True))


def test_the_same_request_gives_the_same_bits() -> None:
    wanted = request(["12=", "9="], group_size=8, max_new_tokens=10)
    first = engine_with(MODEL, POLICY).generate(wanted)
    second = engine_with(MODEL, POLICY).generate(wanted)
    for a, b in zip(flat(first), flat(second), strict=True):
        assert a.tokens.tobytes() == b.tokens.tobytes()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_rollouts_of_a_group_differ_and_carry_their_seeds() -> None:
    engine = engine_with(MODEL, POLICY)
    (group,) = engine.generate(request(["12="], group_size=16, first_seed=40, max_new_tokens=10))
    assert [rollout.seed for rollout in group] == list(range(40, 56))
    assert len({rollout.tokens.tobytes() for rollout in group}) > 8


def test_stop_tokens_end_a_rollout_and_count() -> None:
    engine = engine_with(MODEL, POLICY)
    (group,) = engine.generate(
        request(["12="], group_size=64, max_new_tokens=20, stop_token_ids=(3,))
    )
    ends = {int(r.tokens[-1]) for r in group if r.finish == "stop"}
    assert ends == {END, 3}
    for rollout in group:
        assert not set(rollout.tokens[:-1].tolist()) & {END, 3}
        if rollout.finish == "length":
            assert rollout.num_tokens == 20
        assert rollout.text == MODEL.tokenizer().decode(rollout.tokens.tolist())
        assert rollout.logprobs.size == rollout.versions.size == rollout.num_tokens


class _Countdown:
    """Activates an update at the n-th call between steps."""

    def __init__(self, engine: TorchEngine, at: int, wanted: WeightUpdate) -> None:
        self.engine, self.at, self.wanted, self.calls = engine, at, wanted, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.engine.activate(self.wanted)


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_carry_the_version_that_drew_them(recompute: bool) -> None:
    model = small_model(alphabet="".join(map(chr, range(32, 127))))
    uniform = random_policy(model, scale=0.0)
    engine = engine_with(model, uniform, recompute_cache_on_update=recompute)
    engine.activate(update(uniform, version=7))
    switch = _Countdown(engine, 57, update(uniform, version=8))
    wanted = request(["12="], group_size=12, max_new_tokens=128)
    (group,) = engine.generate(wanted, between_steps=switch)
    assert max(rollout.num_tokens for rollout in group) == 128
    for rollout in group:
        assert rollout.versions.tolist() == ([7] * 57 + [8] * 71)[: rollout.num_tokens]


def test_an_update_in_flight_changes_what_follows_and_nothing_before() -> None:
    other = random_policy(MODEL, seed=5, scale=0.5)
    wanted = request(["12=", "345="], group_size=8, max_new_tokens=12)
    plain = engine_with(MODEL, POLICY).generate(wanted)
    engine = engine_with(MODEL, POLICY)
    switched = engine.generate(
        wanted, between_steps=_Countdown(engine, 4, update(other, version=1))
    )
    pairs = list(zip(flat(plain), flat(switched), strict=True))
    assert all(np.array_equal(a.tokens[:4], b.tokens[:4]) for a, b in pairs)
    assert any(not np.array_equal(a.tokens, b.tokens) for a, b in pairs)


def test_recomputing_the_cache_gives_the_new_version_alone() -> None:
    other = random_policy(MODEL, seed=5, scale=0.5)
    module = _module(other)
    wanted = request(["12=", "34567="], group_size=8, max_new_tokens=12)
    engine = engine_with(MODEL, POLICY, recompute_cache_on_update=True)
    groups = engine.generate(wanted, between_steps=_Countdown(engine, 3, update(other, version=1)))
    long = [rollout for rollout in flat(groups) if rollout.num_tokens > 3]
    assert long
    for rollout in long:
        sequence = np.concatenate([rollout.prompt_tokens, rollout.tokens]).astype(np.int64)
        first = rollout.prompt_tokens.size - 1 + 3
        distribution = torch.log_softmax(module(torch.from_numpy(sequence)[None])[0], dim=-1)
        expected = distribution[first:-1].gather(1, torch.from_numpy(sequence[first + 1 :, None]))
        np.testing.assert_allclose(rollout.logprobs[3:], expected[:, 0].detach(), atol=1e-5)


def test_nothing_of_an_older_version_survives_an_activation() -> None:
    other = random_policy(MODEL, seed=5)
    wanted = request(["12="], group_size=4, max_new_tokens=8)
    engine = engine_with(MODEL, POLICY)
    engine.generate(wanted)
    changes = diff(POLICY, other)
    engine.activate(WeightUpdate(version=2, snapshot_id="b", tensors=other, changes=changes))
    assert engine.version == 2
    fresh = engine_with(MODEL, other)
    for a, b in zip(engine.generate(wanted)[0], fresh.generate(wanted)[0], strict=True):
        assert a.tokens.tobytes() == b.tokens.tobytes()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert set(a.versions.tolist()) == {2}


def test_the_first_activation_loads_everything_even_with_changes() -> None:
    engine = TorchEngine(TorchEngineConfig(), model=MODEL)
    assert engine.version == -1
    engine.activate(WeightUpdate(version=4, snapshot_id="a", tensors=POLICY, changes={}))
    wanted = request(["12="], max_new_tokens=8)
    assert _same(engine.generate(wanted)[0][0], engine_with(MODEL, POLICY).generate(wanted)[0][0])


def test_a_refused_policy_leaves_the_version() -> None:
    engine = engine_with(MODEL, POLICY)
    with pytest.raises(RunError, match="does not fit the model"):
        engine.activate(update(random_policy(small_model(alphabet="01")), version=3))
    assert engine.version == 0


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["1=", ""], r"prompt 1 .*must have at least one token"),
        (["1=", "2=", "4x"], r"prompt 2 .*character 'x'"),
        (["1" * 155], r"prompt 0 .*155 tokens; .*max_length 160"),
    ],
)
def test_a_prompt_that_cannot_be_completed_is_named(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_with(MODEL, POLICY).generate(request(texts))


def test_threads_are_put_back_after_a_call() -> None:
    before = torch.get_num_threads()
    engine_with(MODEL, POLICY, num_threads=before + 1).generate(request(["1="]))
    assert torch.get_num_threads() == before
