"""Trainer `titan` on real meshes: ranks agree with one process, die, and are started afresh."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaloom.orchestrator.comparing import compare_runs
from deltaloom.orchestrator.errors import ConfigError, RunErrorCode, TaskError
from deltaloom.orchestrator.inspect import StoredRun
from deltaloom.orchestrator.interfaces import Model
from deltaloom.plugins.models.hf import HfConfig, HfModel
from deltaloom.plugins.models.titan import TitanModel, TitanModelConfig
from deltaloom.plugins.titan_support.architecture import hf_config
from deltaloom.plugins.titan_support.names import Family

from .ppo_support import plain_ppo
from .resume_support import task_lines
from .rl_support import small_model
from .run_support import Done, deltaloom
from .titan_support import (
    ended,
    is_running,
    make_batch,
    monarch_hosts,
    single_process_trainer,
    titan_model,
    titan_trainer,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.titan,
    pytest.mark.timeout(600),
    # Libraries of the extra warn of each other's deprecations when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

NUM_STEPS = 6
PIPELINE = """
from deltaloom.orchestrator import Pipeline, Prompt, publish, rollout, score, source, train, use
from deltaloom.plugins.scorers.exact import position_match


def prompts(step, rng):
    texts = ["".join(rng.choices("0123456789", k=2)) for _ in range(4)]
    return [Prompt(text + "=", answer=text[::-1]) for text in texts]


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout("prompts", to="groups", engine="torch", group_size=4, max_new_tokens=3,
            prompts_per_task=2),
    score("groups", to="scored", by=position_match),
    train("scored", trainer="titan", num_ranks=2, lr=1e-3, {train}),
    publish(codec="raw", anchor_every=4, state_every=2),
    model=use("titan", alphabet="0123456789=", num_layers=1),
    steps={steps},
    workers=1,
)
"""
KILLER = """
import os
import signal
from pathlib import Path

from deltaloom.orchestrator import hookimpl

MARK = Path({mark!r})


def children():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            status = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if int(status[1]) == os.getpid() and b"monarch" in command:
            yield int(process.name)


@hookimpl
def before_policy_publish(version):
    if version == 3 and not MARK.exists():
        MARK.touch()
        ranks = sorted(children())
        MARK.write_text(" ".join(map(str, ranks)))
        os.kill({victim}, signal.SIGKILL)
"""


def _curve(trainer: Any, num_steps: int) -> list[dict[str, float]]:
    return [dict(trainer.train_step(make_batch(step))) for step in range(num_steps)]


def _assert_close(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    for step, (first, second) in enumerate(zip(one, other, strict=True)):
        for name in ("loss", "grad_norm", "entropy", "kl_rollout", "ratio_mean", "tokens"):
            assert second[name] == pytest.approx(first[name], rel=2e-3, abs=2e-4), (step, name)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_two_ranks_train_as_one_process_does(family: Family) -> None:
    single = single_process_trainer(family)
    single.initialize(seed=1)
    start = single.policy()
    curve = _curve(single, 4)
    meshes = ((1, 0), (2, 2)) if family == "llama3" else ((2, 2),)
    for num_ranks, size in meshes:
        with titan_trainer(num_ranks, family=family, micro_batch_rollouts=size) as trainer:
            trainer.initialize(seed=1)
            policy = trainer.policy()
            assert policy.specs == start.specs
            assert all(np.array_equal(policy.bits[n], start.bits[n]) for n in start.bits)
            _assert_close(curve, _curve(trainer, 4))
            differences = trainer.logprob_differences()
            assert differences.shape == make_batch(3).tokens.shape
            np.testing.assert_allclose(differences, single.logprob_differences(), atol=2e-3)


def test_tensor_parallel_ranks_train_as_one_process_does() -> None:
    single = single_process_trainer()
    single.initialize(seed=1)
    start = single.policy()
    with titan_trainer(2, tensor_parallel=2, gradient_checkpointing=True) as trainer:
        trainer.initialize(seed=1)
        policy = trainer.policy()
        assert all(np.array_equal(policy.bits[n], start.bits[n]) for n in start.bits)
        _assert_close(_curve(single, 3), _curve(trainer, 3))
    with (
        titan_trainer(2, family="qwen3", tensor_parallel=2) as tied,
        pytest.raises(ConfigError, match="tied"),
    ):
        tied.initialize(seed=1)


def test_a_state_of_two_ranks_goes_on_with_one() -> None:
    options: dict[str, Any] = {
        "schedule_steps": 6,
        "schedule_warmup_steps": 2,
        "schedule_decay_ratio": 0.5,
    }
    with titan_trainer(2, **options) as two, titan_trainer(1, **options) as one:
        two.initialize(seed=1)
        rates = [two.train_step(make_batch(step))["learning_rate"] for step in range(3)]
        assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])
        state, policy = two.state(), two.policy()
        one.load(state)
        loaded, again = one.policy(), one.state()
        assert all(np.array_equal(policy.bits[n], loaded.bits[n]) for n in policy.bits)
        assert again.arrays.keys() == state.arrays.keys()
        assert all(np.array_equal(again.arrays[n], state.arrays[n]) for n in state.arrays)
        assert again.values == state.values
        steps = [[dict(t.train_step(make_batch(s))) for s in (3, 4)] for t in (two, one)]
        _assert_close(*steps)
        rates = [metrics["learning_rate"] for metrics in steps[1]]
        assert rates == [metrics["learning_rate"] for metrics in steps[0]]
        assert rates[-1] < 1e-3
        before = one.policy()
        assert one.train_step(make_batch(5, num_rollouts=0))["empty"] == 1.0
        assert all(np.array_equal(before.bits[n], b) for n, b in one.policy().bits.items())


def test_a_dead_rank_is_named_and_the_others_end() -> None:
    with titan_trainer(2) as trainer:
        trainer.initialize(seed=1)
        ranks = trainer.identities
        os.kill(ranks[1].pid, signal.SIGKILL)
        with pytest.raises(TaskError, match=r"rank 1 \(process \d+ on host ") as caught:
            trainer.train_step(make_batch(0))
        assert caught.value.code == RunErrorCode.RANK_LOST
        assert str(ranks[1].pid) in str(caught.value)
        assert ranks[1].host in str(caught.value)
        trainer.close()
        assert not any(is_running(rank.pid) for rank in ranks)


def _checkpoint_of_qwen2(folder: Path) -> HfModel:
    """A minute one, of an architecture that torchtitan lacks, with biases and a tied head."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    _save_tokenizer(folder)
    return HfModel(HfConfig(path=str(folder)))


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["transformer", "hf"])
def test_models_that_torchtitan_lacks_are_cut_as_they_are(
    kind: str, compute_dtype: str, tmp_path: Path
) -> None:
    model: Model = _checkpoint_of_qwen2(tmp_path) if kind == "hf" else small_model()
    single = single_process_trainer(model=model)
    single.initialize(seed=1)
    start = single.policy()
    with titan_trainer(2, model=model, compute_dtype=compute_dtype) as trainer:
        trainer.initialize(seed=1)
        policy = trainer.policy()
        assert policy.specs == start.specs
        assert all(np.array_equal(policy.bits[n], start.bits[n]) for n in start.bits)
        curves = _curve(single, 3), _curve(trainer, 3)
        if compute_dtype == "float32":
            _assert_close(*curves)
        for first, second in zip(*curves, strict=True):
            assert second["loss"] == pytest.approx(first["loss"], abs=0.01)
            assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=0.05)
        state, policy = trainer.state(), trainer.policy()
        trainer.load(state)
        assert all(np.array_equal(policy.bits[n], b) for n, b in trainer.policy().bits.items())


def test_what_cannot_be_trained_is_refused() -> None:
    with (
        titan_trainer(2, model=small_model(), tensor_parallel=2) as trainer,
        pytest.raises(ConfigError, match="tensor_parallel must be 1 for model 'transformer'"),
    ):
        trainer.initialize(seed=0)
    with (
        titan_trainer(1, algorithm=plain_ppo()) as trainer,
        pytest.raises(ConfigError, match="trains a critic; model 'titan' has none"),
    ):
        trainer.initialize(seed=0)
    for options, part in (
        ({"size": "debugmodle"}, "Did you mean 'debugmodel'"),
        ({"family": "qwen3", "size": "debugmodel_moe"}, "experts"),
    ):
        model = TitanModel(TitanModelConfig(alphabet="01", **options))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=part):
            model.build(seed=0)


def test_sizes_are_those_of_published_checkpoints() -> None:
    sizes = {
        ("llama3", "8B"): (4096, 14336, 32, 32, 8, 128, 128256, False),
        ("llama3", "1B"): (2048, 8192, 16, 32, 8, 64, 128256, True),
        ("qwen3", "0.6B"): (1024, 3072, 28, 16, 8, 128, 151936, True),
    }
    for (family, size), wanted in sizes.items():
        config: Any = {"family": family, "size": size, "path": "x"}
        found = hf_config(TitanModel(TitanModelConfig(**config)).architecture)
        assert wanted == (
            found.hidden_size,
            found.intermediate_size,
            found.num_hidden_layers,
            found.num_attention_heads,
            found.num_key_value_heads,
            found.head_dim,
            found.vocab_size,
            found.tie_word_embeddings,
        )


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    model = titan_model()
    module: Any = model.build(seed=0)
    module.hf.save_pretrained(tmp_path)
    _save_tokenizer(tmp_path)
    given: Any = {"path": str(tmp_path), "num_layers": 2}
    with pytest.raises(ConfigError, match="vocab_size 12 instead of 2048"):
        TitanModel(TitanModelConfig(**given)).build(seed=0)


def _save_tokenizer(folder: Path) -> None:
    """The least that counts as one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"<end>": 0, "a": 1}, unk_token="<end>")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')


def _write(
    folder: Path, *, victim: str = "", train: str = "", steps: int = NUM_STEPS
) -> list[str | Path]:
    """A pipeline and the options of a run of it; `victim` is killed at version 3."""
    folder.mkdir(exist_ok=True)
    (folder / "pipeline.py").write_text(PIPELINE.format(steps=steps, train=train))
    options: list[str | Path] = [folder / "pipeline.py", "--run-dir", folder / "run"]
    if victim:
        (folder / "plugins").mkdir()
        text = KILLER.format(mark=str(folder / "mark"), victim=victim)
        (folder / "plugins" / "killer.py").write_text(text)
        options += ["--plugins-dir", folder / "plugins"]
    return options


def _run(*arguments: str | Path) -> Done:
    return deltaloom(*arguments, timeout_seconds=400)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    done = _run("run", *_write(folder / "whole"))
    assert done.status == 0, done.err
    return folder / "whole" / "run"


def test_each_rank_publishes_its_own_rows(whole: Path) -> None:
    stored = StoredRun(whole)
    for info in stored.repository.log():
        if info.version:
            assert info.record.delta is not None
            assert info.record.delta.num_shards == 2
            assert info.record.delta.shares_digest
            assert info.attributes["changed"]
    assert _run("verify", whole).status == 0


def test_workers_take_each_share_from_its_rank(tmp_path: Path) -> None:
    direct = ("--set", "publish.transport=direct", "--set", "pipeline.max_staleness=0")
    through_store = ("--set", "pipeline.max_staleness=0")
    for name, options in {"direct": direct, "store": through_store}.items():
        done = _run("run", *_write(tmp_path / name), *options)
        assert done.status == 0, done.err
    lines = task_lines(tmp_path / "direct" / "run")
    assert sum(line.get("direct_versions", 0) for line in lines) == NUM_STEPS
    assert sum(line.get("direct_fallbacks", 0) for line in lines) == 0
    runs = [StoredRun(tmp_path / name / "run") for name in ("direct", "store")]
    result = compare_runs(*runs)
    assert result["identical"], result["difference"]


def test_a_run_that_lost_a_rank_resumes_on_fresh_ones_and_on_one(
    whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "lost" / "run"
    done = _run("run", *_write(tmp_path / "lost", victim="ranks[-1]"))
    assert done.status != 0
    assert "rank-lost" in done.err
    assert "rank 1 (process" in done.err or "rank 0 (process" in done.err
    assert f"deltaloom resume {run_dir}" in done.err
    ranks = [int(pid) for pid in (tmp_path / "lost" / "mark").read_text().split()]
    assert len(ranks) == 2
    assert not any(is_running(pid) for pid in ranks)
    assert _run("resume", run_dir).status == 0
    result = compare_runs(StoredRun(whole), StoredRun(run_dir))
    assert result["identical"], result["difference"]
    done = _run("resume", run_dir, "--set", "train.num_ranks=1", "--steps", str(NUM_STEPS + 2))
    assert done.status == 0, done.err
    stored = StoredRun(run_dir)
    assert stored.branch == f"main-{NUM_STEPS}"
    head = stored.repository.head(stored.branch)
    assert head.version == NUM_STEPS + 2
    assert head.attributes["trainer"]["num_ranks"] == 1
    assert head.record.delta is not None
    assert head.record.delta.num_shards == 1
    assert _run("verify", run_dir).status == 0


def test_ranks_end_with_a_killed_driver(tmp_path: Path) -> None:
    done = _run("run", *_write(tmp_path / "killed", victim="os.getpid()"))
    assert done.status == -signal.SIGKILL
    ranks = [int(pid) for pid in (tmp_path / "killed" / "mark").read_text().split()]
    assert len(ranks) == 2
    assert all(ended(pid, timeout_seconds=60) for pid in ranks)


def test_ranks_run_on_other_hosts(whole: Path, tmp_path: Path) -> None:
    with monarch_hosts(2) as (driver, hosts):
        train = f'hosts={tuple(hosts)!r}, driver_address="{driver}"'
        done = _run("run", *_write(tmp_path / "hosts", train=train))
    assert done.status == 0, done.err
    pairs = zip(
        StoredRun(whole).repository.log(),
        StoredRun(tmp_path / "hosts" / "run").repository.log(),
        strict=True,
    )
    assert all(one.state_digest == other.state_digest for one, other in pairs)
    run_dir = tmp_path / "hosts" / "run"
    here = ("--set", "train.hosts=[]", "--set", 'train.driver_address=""')
    done = _run("resume", run_dir, *here, "--steps", str(NUM_STEPS + 1))
    assert done.status == 0, done.err
    stored = StoredRun(run_dir)
    assert (stored.branch, stored.repository.head("main").version) == ("main", NUM_STEPS + 1)
