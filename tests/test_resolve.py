"""Options reach the one component they belong to; whatever fits nowhere is refused."""

from __future__ import annotations

from typing import Any

import pytest

from deltaloom.orchestrator import Pipeline, publish, rollout, score, source, train, use
from deltaloom.orchestrator.config import load_overlays
from deltaloom.orchestrator.errors import ConfigError, PluginError
from deltaloom.orchestrator.plugin_manager import create_plugins
from deltaloom.orchestrator.resolve import ResolvedPipeline, resolve


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
    ("override", "parts"),
    [
        ("train.lrr=1", ["train.lrr", "Did you mean 'lr'?"]),
        ("train.optimizer.lrr=1", ["train.optimizer.lrr", "Did you mean 'lr'?"]),
        ("trian.lr=1", ["trian", "Did you mean 'train'?"]),
        ("pipeline.step=1", ["pipeline.step", "Did you mean 'steps'?"]),
        ("rollout.group_size=x", ["rollout.group_size", "must be int"]),
        ("model.alphabet=aa", ["model", "repeated"]),
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
