"""Tokens per second of the torch engine against `transformers` generate on the same weights.

    python -m benchmarks.engine --json [--quick] [--invariant]

Both sample at temperature 1 from one policy, from equal prompts and for an equal number of
tokens; runs alternate, and the ratio is the median over pairs. `quick-start` has the sizes of
pipelines/quickstart.py. It and `grouped` ask for the batch as groups of one prompt each, which the
engine prefills once and generate once a rollout. With two busy threads on two cores any other
load stalls both sides: measure on a quiet machine. `--invariant` measures what rollouts cost whose
bits do not depend on their batch: the engine against itself with `batch_invariant`, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks._report import write_result
from deltaloom.orchestrator.interfaces import GenerateRequest, WeightUpdate
from deltaloom.orchestrator.types import Prompt, SamplingParams
from deltaloom.plugins.engines.torch_engine import TorchEngine, TorchEngineConfig
from deltaloom.plugins.models.transformer import (
    CharacterTokenizer,
    Transformer,
    TransformerConfig,
)
from deltaloom.plugins.torch_support.tensor_bits import policy_tensors

CASE_SECONDS = 30.0
BLOCK_ROWS = (8, 32)
LEAST_PAIRS = 3
ALPHABET = "".join(map(chr, range(32, 127)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model's size, and what is asked of it."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    prompt_tokens: int
    new_tokens: int
    group_size: int = 1
    batch_size: int = 64


CASES = (
    Case(
        name="quick-start", num_layers=2, hidden_size=128, num_heads=4, prompt_tokens=5,
        new_tokens=6, group_size=16,
    ),
    Case(
        name="tiny", num_layers=2, hidden_size=64, num_heads=4, prompt_tokens=8,
        new_tokens=32,
    ),
    Case(
        name="small", num_layers=4, hidden_size=256, num_heads=8, prompt_tokens=32,
        new_tokens=64,
    ),
    Case(
        name="small-grouped", num_layers=4, hidden_size=256, num_heads=8, prompt_tokens=192,
        new_tokens=64, group_size=16,
    ),
    Case(
        name="medium", num_layers=8, hidden_size=512, num_heads=8, prompt_tokens=32,
        new_tokens=32,
    ),
)  # fmt: skip


class _EndlessTokenizer(CharacterTokenizer):
    """No token ends a completion, so that both sides do the same work."""

    @property
    def eos_id(self) -> int:
        return -1


class _EndlessTransformer(Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self._tokenizer = _EndlessTokenizer(config.alphabet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quick", action="store_true", help="one small case, few repeats")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--invariant", action="store_true", help="the cost of batch_invariant")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = CASES[:1] if arguments.quick else CASES
    repeats = 3 if arguments.quick else 9
    if arguments.invariant:
        costs = [
            invariant_row(case, block_rows=size, repeats=repeats)
            for case in cases
            for size in BLOCK_ROWS
        ]
        name = "engine_invariant_quick" if arguments.quick else "engine_invariant"
        write_result(name, {"cases": costs})
        print(json.dumps(costs, indent=1))
        return
    rows = [measure(case, repeats=repeats) for case in cases]
    payload = {"threads": arguments.threads, "repeats": repeats, "cases": rows}
    write_result("engine_quick" if arguments.quick else "engine", payload)
    if arguments.json:
        print(json.dumps(payload, indent=1))
        return
    for row in rows:
        print(
            f"{row['name']:14} engine {row['engine_tokens_per_second']:9.0f} tok/s   generate "
            f"{row['generate_tokens_per_second']:9.0f} tok/s   ratio {row['ratio']:.2f}"
        )


def measure(case: Case, *, repeats: int) -> dict[str, Any]:
    """Alternate both sides after a warm-up: `repeats` times, fewer where time runs out."""
    model = make_model(case)
    module = _with_preferences(model.build(seed=0))
    ours = _engine_run(case, model, module, TorchEngineConfig())
    pairs = _pairs(ours, _generate_run(case, module), repeats=repeats)
    num_tokens = case.batch_size * case.new_tokens
    return {
        **asdict(case),
        "pairs": len(pairs),
        "parameters": sum(p.numel() for p in module.parameters()),
        "engine_tokens_per_second": num_tokens / statistics.median(a for a, _ in pairs),
        "generate_tokens_per_second": num_tokens / statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "ratio_range": [min(b / a for a, b in pairs), max(b / a for a, b in pairs)],
        "largest_logit_difference": logit_difference(case, module),
    }


def invariant_row(case: Case, *, block_rows: int, repeats: int) -> dict[str, Any]:
    """How many times as long the engine takes for rollouts that do not depend on their batch."""
    model = make_model(case)
    module = _with_preferences(model.build(seed=0))
    configs = (
        TorchEngineConfig(num_threads=1),
        TorchEngineConfig(batch_invariant=True, block_rows=block_rows),
    )
    plain, invariant = (_engine_run(case, model, module, config) for config in configs)
    pairs = _pairs(plain, invariant, repeats=repeats)
    ratios = [b / a for a, b in pairs]
    return {
        "name": case.name,
        "block_rows": block_rows,
        "pairs": len(pairs),
        "seconds_plain": round(statistics.median(a for a, _ in pairs), 4),
        "seconds_invariant": round(statistics.median(b for _, b in pairs), 4),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def _pairs(
    ours: Callable[[], None], theirs: Callable[[], None], *, repeats: int
) -> list[tuple[float, float]]:
    """Seconds of both in turns, after a warm-up."""
    ours()
    theirs()
    started = time.perf_counter()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < LEAST_PAIRS or (
        len(pairs) < repeats and time.perf_counter() - started < CASE_SECONDS
    ):
        pairs.append((_seconds(ours), _seconds(theirs)))
    return pairs


def make_model(case: Case) -> Transformer:
    return _EndlessTransformer(
        TransformerConfig(
            alphabet=ALPHABET,
            num_layers=case.num_layers,
            hidden_size=case.hidden_size,
            num_heads=case.num_heads,
            max_length=case.prompt_tokens + case.new_tokens,
            positions="rotary",
        )
    )


def as_llama(case: Case, module: torch.nn.Module) -> LlamaForCausalLM:
    """The same weights in the architecture of `transformers`."""
    config = LlamaConfig(
        vocab_size=len(ALPHABET) + 1,
        hidden_size=case.hidden_size,
        intermediate_size=2 * case.hidden_size,
        num_hidden_layers=case.num_layers,
        num_attention_heads=case.num_heads,
        num_key_value_heads=case.num_heads,
        max_position_embeddings=case.prompt_tokens + case.new_tokens,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
    )
    llama: LlamaForCausalLM = LlamaForCausalLM(config)
    llama.load_state_dict(module.state_dict())
    llama.train(mode=False)
    return llama


def logit_difference(case: Case, module: torch.nn.Module) -> float:
    """How far the two architectures are apart on the benchmark's prompts."""
    tokens = _prompt_tokens(case)
    with torch.inference_mode():
        return float((module(tokens) - as_llama(case, module)(tokens).logits).abs().max())


def _engine_run(
    case: Case, model: Transformer, module: torch.nn.Module, options: TorchEngineConfig
) -> Callable[[], None]:
    engine = TorchEngine(options, model=model)
    policy = policy_tensors(module, dtype=torch.float32)
    engine.activate(WeightUpdate(version=0, snapshot_id="0", tensors=policy, changes=None))
    num_prompts = case.batch_size // case.group_size
    texts = _prompt_texts(case)[:: case.group_size]
    request = GenerateRequest(
        prompts=tuple(map(Prompt, texts)),
        group_size=case.group_size,
        seeds=np.arange(case.batch_size, dtype=np.uint64).reshape(num_prompts, -1),
        sampling=SamplingParams(max_new_tokens=case.new_tokens),
    )

    def run() -> None:
        rollouts = engine.generate(request)
        drawn = sum(r.num_tokens for group in rollouts for r in group)
        assert drawn == case.batch_size * case.new_tokens

    return run


def _generate_run(case: Case, module: torch.nn.Module) -> Callable[[], None]:
    llama, tokens = as_llama(case, module), _prompt_tokens(case)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, top_k=0, max_new_tokens=case.new_tokens, pad_token_id=0, eos_token_id=None
    )

    def run() -> None:
        with torch.inference_mode():
            drawn = llama.generate(
                tokens, generation_config=config, attention_mask=torch.ones_like(tokens)
            )
        assert drawn.shape[1] == case.prompt_tokens + case.new_tokens

    return run


def _with_preferences(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head = module.get_parameter("lm_head.weight")
        head.normal_(0.0, head.shape[1] ** -0.5, generator=generator)
    return module.eval()


def _prompt_texts(case: Case) -> list[str]:
    rng = np.random.default_rng(0)
    num_prompts = case.batch_size // case.group_size
    rows = rng.integers(0, len(ALPHABET), (num_prompts, case.prompt_tokens))
    texts = ["".join(ALPHABET[index] for index in row) for row in rows]
    return [text for text in texts for _ in range(case.group_size)]


def _prompt_tokens(case: Case) -> torch.Tensor:
    tokenizer = CharacterTokenizer(ALPHABET)
    return torch.tensor([tokenizer.encode(text) for text in _prompt_texts(case)])


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
