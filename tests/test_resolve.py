"""Options reach the one component they belong to; whatever fits nowhere is refused."""

from __future__ import annotations

from typing import Any

import pytest

from deltaloom.orchestrator import Pipeline, options, publish, rollout, score, source, train, use
from deltaloom.orchestrator.config import field_names, load_overlays
from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.other_names import OTHER_NAMES
from deltaloom.orchestrator.plan import make_plan
from deltaloom.orchestrator.plugin_manager import create_plugins
from deltaloom.orchestrator.resolve import ResolvedPipeline, resolve

from .run_support import REPOSITORY


def anything(*arguments: Any) -> list[Any]:
    return list(arguments)


def make(*overrides: str) -> ResolvedPipeline:
    pipeline = Pipeline(
        source(anything, to="prompts"),
        rollout("prompts", to="groups", max_new_tokens=4),
        score("groups", to="scored", by=anything),
        train("scored", lr=1e-3),
        publish(codec="raw"),
        model=use("transformer", alphabet="ab"),
        steps=5,
    )
    return resolve(pipeline, create_plugins(), overlay=load_overlays([], overrides))


def test_a_flat_option_goes_to_its_owner() -> None:
    node = make().nodes["train"]
    assert node.components["optimizer"].config.lr == 1e-3


@pytest.mark.parametrize("key", ["train.lr", "train.optimizer.lr"])
def test_an_override_reaches_the_component_by_either_name(key: str) -> None:
    assert make(f"{key}=2e-5").nodes["train"].components["optimizer"].config.lr == 2e-5


def test_an_override_can_choose_another_plugin() -> None:
    resolved = make("train.algorithm=reinforce")
    assert resolved.nodes["train"].components["algorithm"].name == "reinforce"


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.optimizer=nadam", "train.optimizer.weight_decay=0.1"),
        ("train.optimizer.weight_decay=0.1", "train.optimizer=nadam"),
        ("train.optimizer=adamw", "train.optimizer.weight_decay=0.1", "train.optimizer=nadam"),
    ],
)
def test_a_plugin_and_its_options_may_be_chosen_one_after_the_other(
    overrides: tuple[str, ...],
) -> None:
    optimizer = make(*overrides).nodes["train"].components["optimizer"]
    assert (optimizer.name, optimizer.config.weight_decay) == ("nadam", 0.1)


def test_options_of_the_plugin_displaced_are_refused_and_not_dropped() -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer\.warmup_steps: unknown key"):
        make("train.optimizer.warmup_steps=3", "train.optimizer=delayed-sgd")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.lrr=1", ["train.lrr", "Did you mean 'lr'?"]),
        ("train.optimizer.lrr=1", ["train.optimizer.lrr", "Did you mean 'lr'?"]),
        ("trian.lr=1", ["trian", "Did you mean 'train'?"]),
        ("pipeline.step=1", ["pipeline.step", "Did you mean 'steps'?"]),
        ("train.learning_rate=1", ["train.learning_rate", "It is called 'lr' here."]),
        ("train.beta=0.1", ["train.beta", "It is called 'kl_coefficient' here."]),
        ("train.batch_size=4", ["train.batch_size", "'micro_batch_rollouts' here."]),
        ("rollout.batch_size=4", ["rollout.batch_size", "'prompts_per_task' here."]),
        ("rollout.num_generations=8", ["rollout.num_generations", "'group_size' here."]),
        ("rollout.group_size=x", ["rollout.group_size", "must be int"]),
        ("model.alphabet=aa", ["model", "repeated"]),
        ("train.max_grad_norm=inf", ["train.trainer.max_grad_norm", "must be finite, got inf"]),
        ("train.lr=nan", ["train.optimizer.lr", "must be finite, got nan"]),
        ("train.policy_dtype=int8", ["train.trainer.policy_dtype", "must be one of 'bfloat16'"]),
        ("rollout.compute_dtype=fp32", ["rollout.engine.compute_dtype", "must be one of"]),
        ("rollout.timeout_seconds=0", ["rollout", "timeout_seconds must be at least 0.001"]),
        ("train.timeout_seconds=-1", ["train", "timeout_seconds must be at least 0.001"]),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_near_one(
    override: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(override)
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_plugin_is_refused_with_the_near_one() -> None:
    with pytest.raises(PluginError, match="Did you mean 'adamw'"):
        make("train.optimizer=adam_w")


def test_every_name_of_elsewhere_leads_to_an_option_and_is_in_the_table() -> None:
    kinds = create_plugins().components.values()
    configs = [component.Config for kind in kinds for component in kind.values()]
    of_nodes = [value for name, value in vars(options).items() if name.endswith("Options")]
    known = {name for config in (*configs, *of_nodes) for name in field_names(config)}
    assert set(OTHER_NAMES) <= known
    table = (REPOSITORY / "docs" / "from-other-trainers.md").read_text(encoding="utf-8")
    for here, others in OTHER_NAMES.items():
        row = next(line for line in table.splitlines() if line.endswith(f"| `{here}` |"))
        for other in others:
            assert f"`{other}`" in row, other


def test_a_missing_option_is_named() -> None:
    pipeline = Pipeline(source(anything, to="prompts"), rollout("prompts", to="groups"))
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens: required"):
        resolve(pipeline, create_plugins())


def test_the_digest_ignores_what_does_not_change_the_result() -> None:
    same = make("pipeline.workers=7", "pipeline.steps=9")
    assert same.config_digest == make().config_digest
    assert make("train.lr=2e-3").config_digest != make().config_digest
    assert make("pipeline.seed=1").config_digest != make().config_digest


def test_the_resolved_configuration_is_complete() -> None:
    config = make().config
    assert config["pipeline"]["max_staleness"] == 1
    assert config["train"]["optimizer"]["name"] == "adamw"
    assert config["publish"]["codec"]["name"] == "raw"
    assert set(config) >= {"pipeline", "model", "source", "rollout", "score", "train", "publish"}


def test_groups_too_small_for_the_algorithm_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_size must be at least 2, got 1"):
        make_plan(make("rollout.group_size=1"), create_plugins())
    for sound in ("train.min_group_size=1", "train.algorithm=reinforce"):
        make_plan(make("rollout.group_size=1", sound), create_plugins())
