"""Kits for what computes rollouts: models, engines and inferences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...storage.codec import diff
from ..interfaces import (
    Engine,
    GenerateRequest,
    Inference,
    Model,
    PreparesWeights,
    StreamsGroups,
)
from ..types import Prompt, Rollout, RolloutGroup, SamplingParams
from .component import check_component, missing
from .samples import sample_group, sample_policy, sample_update

if TYPE_CHECKING:
    import torch

GROUP_SIZE = 2
TOLERANCE = 1e-4
"""Absolute, of logits computed with and without a cache."""


class ModelConformance:
    """The contract of `interfaces.Model`; subclasses provide `model`."""

    texts: Sequence[str] = ("12=", "3=")
    """Prompts that the tokenizer knows."""

    def model(self) -> Model:
        """A small model under test."""
        raise missing(self, "model")

    def test_it_is_a_component(self) -> None:
        check_component(self.model())

    def test_its_tokenizer_reads_what_it_wrote(self) -> None:
        tokenizer = self.model().tokenizer()
        for text in self.texts:
            tokens = tokenizer.encode(text)
            assert all(0 <= token < tokenizer.vocab_size for token in tokens)
            assert tokenizer.decode(tokens) == text
            assert tokenizer.decode([*tokens, tokenizer.eos_id]) == text

    def test_v0_is_a_function_of_the_seed(self) -> None:
        first, same = (self.model().build(seed=5).state_dict() for _ in range(2))
        assert [*first] == [*same]
        for name, tensor in first.items():
            assert tensor.equal(same[name]), name
            assert not tensor.is_floating_point() or tensor.element_size() == 4, name

    def test_logits_depend_on_no_later_token(self) -> None:
        import torch

        module, tokens = self._module_and_tokens()
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % self.model().tokenizer().vocab_size
        with torch.no_grad():
            logits = module(tokens)
            assert logits.shape == (*tokens.shape, self.model().tokenizer().vocab_size)
            torch.testing.assert_close(module(changed)[:, :-1], logits[:, :-1])

    def test_places_choose_rows_of_the_logits(self) -> None:
        import torch

        module, tokens = self._module_and_tokens()
        places = torch.tensor([0, tokens.numel() - 1])
        with torch.no_grad():
            chosen = module(tokens)[:, :].flatten(0, 1)[places]
            torch.testing.assert_close(
                module(tokens, at=places), chosen, atol=TOLERANCE, rtol=TOLERANCE
            )

    def test_a_cache_goes_on_as_the_whole_would(self) -> None:
        import torch

        module, tokens = self._module_and_tokens()
        rows, length = tokens.shape
        positions = torch.arange(length).expand(rows, length)
        with torch.no_grad():
            whole = module(tokens)
            cache = module.new_cache(rows, length)  # type: ignore[operator]
            module(tokens[:, :-1], cache=cache, positions=positions[:, :-1])
            last = module(tokens[:, -1:], cache=cache, positions=positions[:, -1:])
            torch.testing.assert_close(last[:, -1], whole[:, -1], atol=TOLERANCE, rtol=TOLERANCE)
            some = cache.select(torch.tensor([rows - 1]))
            again = module(tokens[-1:, -1:], cache=some, positions=positions[-1:, -1:])
            torch.testing.assert_close(again[0], last[-1], atol=TOLERANCE, rtol=TOLERANCE)

    def _module_and_tokens(self) -> tuple[torch.nn.Module, torch.Tensor]:
        import torch

        model = self.model()
        module = _at_sample_policy(model)
        generator = torch.Generator().manual_seed(0)
        return module, torch.randint(0, model.tokenizer().vocab_size, (2, 6), generator=generator)


class EngineConformance:
    """The contract of `interfaces.Engine`; subclasses provide `model` and `engine`."""

    texts: Sequence[str] = ("12=", "3=", "450=")
    """Prompts that the model's tokenizer knows."""
    max_new_tokens = 6

    def model(self) -> Model:
        """A small model that the engine can generate with."""
        raise missing(self, "model")

    def engine(self, model: Model) -> Engine:
        """A fresh engine under test."""
        raise missing(self, "engine")

    def test_it_is_a_component_without_a_version(self) -> None:
        engine = self.engine(self.model())
        check_component(engine)
        assert engine.version == -1

    def test_rollouts_are_whole_and_say_where_they_come_from(self) -> None:
        model = self.model()
        engine, request = self._at(model, version=3), self.request()
        assert engine.version == 3
        groups = engine.generate(request)
        assert [len(group) for group in groups] == [GROUP_SIZE] * len(self.texts)
        for prompt, group, seeds in zip(request.prompts, groups, request.seeds, strict=True):
            for rollout, seed in zip(group, seeds, strict=True):
                self._check(rollout, prompt, int(seed), model, version=3)

    def test_a_rollout_is_a_function_of_version_prompt_and_seed(self) -> None:
        model, request = self.model(), self.request()
        engine = self._at(model)
        drawn = engine.generate(request)
        assert _tokens(engine.generate(request)) == _tokens(drawn)
        assert _tokens(self._at(self.model()).generate(request)) == _tokens(drawn)
        turned = GenerateRequest(
            prompts=request.prompts[::-1],
            group_size=GROUP_SIZE,
            seeds=request.seeds[::-1],
            sampling=request.sampling,
        )
        assert _tokens(engine.generate(turned))[::-1] == _tokens(drawn), "whatever it is drawn with"

    def test_greedy_completions_do_not_depend_on_seeds(self) -> None:
        first, second = self._at(self.model()).generate(self.request(temperature=0.0))[0]
        assert first.tokens.tolist() == second.tokens.tolist()

    def test_changed_elements_lead_where_the_whole_does(self) -> None:
        model, request = self.model(), self.request()
        module = model.build(seed=0)
        old, new = sample_policy(module, seed=0), sample_policy(module, seed=1)
        whole, changed = self.engine(model), self.engine(model)
        whole.activate(sample_update(new, version=1))
        changed.activate(sample_update(old, version=0))
        changed.activate(sample_update(new, version=1, changes=diff(old, new)))
        assert changed.version == 1
        assert _exact(changed.generate(request)) == _exact(whole.generate(request))

    def test_a_version_may_be_activated_between_two_tokens(self) -> None:
        model = self.model()
        engine = self._at(model)
        newer = sample_update(sample_policy(model.build(seed=0), seed=1), version=1)
        calls: list[int] = []

        def between() -> None:
            calls.append(engine.version)
            if len(calls) == 1:
                engine.activate(newer)

        groups = engine.generate(self.request(), between_steps=between)
        assert calls, "it is asked between decode steps"
        for rollout in (rollout for group in groups for rollout in group):
            assert set(rollout.versions.tolist()) <= {0, 1}
            assert (np.diff(rollout.versions) >= 0).all()
        assert any(1 in rollout.versions for group in groups for rollout in group)

    def test_groups_that_are_handed_on_early_are_those_of_the_result(self) -> None:
        engine = self._at(self.model())
        if not isinstance(engine, StreamsGroups):
            return
        early: dict[int, list[Rollout]] = {}
        groups = engine.stream(self.request(), on_group=_once(early))
        assert _exact(groups) == _exact(self._at(self.model()).generate(self.request()))
        for index, rollouts in early.items():
            assert _exact([rollouts]) == _exact([groups[index]])

    def test_a_version_prepared_beside_is_the_version(self) -> None:
        model = self.model()
        engine = self._at(model)
        if not isinstance(engine, PreparesWeights):
            return
        newer = sample_update(sample_policy(model.build(seed=0), seed=1), version=1)
        engine.prepare(newer)
        assert engine.version == 0, "preparing switches nothing"
        engine.activate(newer)
        plain = self.engine(model)
        plain.activate(newer)
        assert _exact(engine.generate(self.request())) == _exact(plain.generate(self.request()))

    def request(self, *, temperature: float = 1.0) -> GenerateRequest:
        """Two completions of each text."""
        count = len(self.texts) * GROUP_SIZE
        return GenerateRequest(
            prompts=tuple(Prompt(text) for text in self.texts),
            group_size=GROUP_SIZE,
            seeds=np.arange(7, 7 + count, dtype=np.uint64).reshape(-1, GROUP_SIZE),
            sampling=SamplingParams(max_new_tokens=self.max_new_tokens, temperature=temperature),
        )

    def _at(self, model: Model, *, version: int = 0) -> Engine:
        engine = self.engine(model)
        policy = sample_policy(model.build(seed=0), seed=0)
        engine.activate(sample_update(policy, version=version))
        return engine

    def _check(
        self, rollout: Rollout, prompt: Prompt, seed: int, model: Model, *, version: int
    ) -> None:
        tokenizer = model.tokenizer()
        assert rollout.prompt == prompt
        assert rollout.prompt_tokens.tolist() == tokenizer.encode(prompt.text)
        assert 1 <= rollout.num_tokens <= self.max_new_tokens
        assert rollout.text == tokenizer.decode(rollout.tokens.tolist())
        assert rollout.logprobs.shape == rollout.versions.shape == rollout.tokens.shape
        assert np.isfinite(rollout.logprobs).all()
        assert (rollout.logprobs <= 0).all()
        assert (rollout.versions == version).all()
        assert rollout.seed == seed
        stopped = int(rollout.tokens[-1]) == tokenizer.eos_id
        assert rollout.finish == ("stop" if stopped else "length")


class InferenceConformance:
    """The contract of `interfaces.Inference`; subclasses provide `model` and `inference`."""

    def model(self) -> Model:
        """A small model that it can compute with."""
        raise missing(self, "model")

    def inference(self, model: Model, *, sampling: SamplingParams, seed: int) -> Inference:
        """A fresh inference under test."""
        raise missing(self, "inference")

    def group(self) -> RolloutGroup:
        """A finished group of the model's tokens."""
        return sample_group(vocab_size=self.model().tokenizer().vocab_size)

    def test_it_is_a_component(self) -> None:
        check_component(self._at_v0())

    def test_columns_have_a_value_a_token(self) -> None:
        group = self.group()
        columns = self._at_v0().infer(group)
        assert columns, "it adds at least one column"
        for name, arrays in columns.items():
            shapes = [np.asarray(array).shape for array in arrays]
            assert shapes == [rollout.tokens.shape for rollout in group.rollouts], name
            assert all(np.isfinite(array).all() for array in arrays), name

    def test_columns_are_a_function_of_version_and_group(self) -> None:
        group, inference = self.group(), self._at_v0()
        first = inference.infer(group)
        inference.infer(sample_group((2, 2), vocab_size=self.model().tokenizer().vocab_size))
        for other in (inference.infer(group), self._at_v0().infer(group)):
            for name, arrays in first.items():
                for array, again in zip(arrays, other[name], strict=True):
                    assert np.array_equal(array, again), name

    def _at_v0(self) -> Inference:
        model = self.model()
        sampling = SamplingParams(max_new_tokens=6)
        inference = self.inference(model, sampling=sampling, seed=0)
        activate = getattr(inference, "activate", None)
        if activate is not None:
            activate(sample_update(sample_policy(model.build(seed=0), seed=0), version=0))
        return inference


def _at_sample_policy(model: Model) -> torch.nn.Module:
    """A module that prefers some tokens, whatever v0 does."""
    import torch

    module = model.build(seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module


def _once(early: dict[int, list[Rollout]]) -> Callable[[int, list[Rollout]], None]:
    def keep(index: int, rollouts: list[Rollout]) -> None:
        assert index not in early, f"group {index} was handed on twice"
        early[index] = rollouts

    return keep


def _tokens(groups: Sequence[Sequence[Rollout]]) -> list[list[list[int]]]:
    return [[rollout.tokens.tolist() for rollout in group] for group in groups]


def _exact(groups: Sequence[Sequence[Rollout]]) -> list[list[tuple[bytes, bytes]]]:
    return [[(r.tokens.tobytes(), r.logprobs.tobytes()) for r in group] for group in groups]
