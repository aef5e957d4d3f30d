"""The DSL and the graph: what is refused before anything runs, and what the drawing says."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from deltaloom.orchestrator import (
    Pipeline,
    evaluate,
    node,
    publish,
    rollout,
    score,
    source,
    train,
)
from deltaloom.orchestrator.draw import draw_mermaid, draw_svg, draw_text
from deltaloom.orchestrator.dsl import NodeSpec
from deltaloom.orchestrator.errors import PipelineError
from deltaloom.orchestrator.plan import Selection, select


def same(*items: Any) -> Any:
    return items[0]


def loop(**names: str) -> tuple[NodeSpec, ...]:
    return (
        source(same, to="prompts"),
        rollout("prompts", to="groups", max_new_tokens=3),
        score("groups", to="scored", by=same, name=names.get("score", "score")),
        train("scored"),
        publish(),
    )


def test_nodes_come_in_topological_order_whatever_order_they_are_written_in() -> None:
    graph = Pipeline(*reversed(loop())).graph
    assert [n.name for n in graph.nodes] == ["source", "rollout", "score", "train", "publish"]


def test_the_loop_is_an_edge_from_publish_to_rollout() -> None:
    carried = [e for e in Pipeline(*loop()).graph.edges if e.carried]
    assert [(e.producer, e.consumer, e.port) for e in carried] == [("publish", "rollout", "policy")]


@pytest.mark.parametrize(
    ("nodes", "parts"),
    [
        (
            (source(same, to="prompts"), rollout("promts", to="g", max_new_tokens=1)),
            ["'rollout'", "'promts'", "Did you mean 'prompts'?"],
        ),
        (
            (source(same, to="w", name="one"), source(same, to="w", name="two")),
            ["'one'", "'two'", "'w'"],
        ),
        ((node(same, "w", to="w", kind="groups", name="own"),), ["'own'", "'w'"]),
        (
            (source(same, to="a", name="x"), source(same, to="b", name="x")),
            ["two nodes are named 'x'", "test_graph.py"],
        ),
        ((source(same, to="a", name=" "),), ["empty name"]),
        (
            (source(same, to="p"), score("p", to="s", by=same)),
            ["'score'", "'p'", "groups", "'source'", "prompts"],
        ),
        ((source(same, to="a", name="pipeline"),), ["'pipeline'"]),
        ((source(same, to="a", name="a/b"),), ["'a/b'"]),
        ((*loop()[:3], train("scored")), ["train", "publish"]),
    ],
)
def test_a_graph_that_cannot_work_is_refused_by_name(
    nodes: tuple[NodeSpec, ...], parts: list[str]
) -> None:
    with pytest.raises(PipelineError) as caught:
        Pipeline(*nodes)
    for part in parts:
        assert part in str(caught.value)


def of_step_alone(step: int) -> list[Any]:
    return []


def of_texts(completions: list[str], answer: list[str]) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (
            source(of_step_alone, to="prompts"),
            ["'source' calls of_step_alone(step, rng)", "of_step_alone takes (step)", "too many"],
        ),
        (
            score("groups", to="scored", by=[same, of_texts]),
            ["'score' calls of_texts(rollout)", "of_texts takes (completions, answer)", "'answer'"],
        ),
        (evaluate(of_texts, by=same), ["'evaluate' calls of_texts(rng)", "'answer'"]),
        (
            node(of_step_alone, "a", "b", to="c", kind="groups"),
            ["'of_step_alone' calls of_step_alone(a, b)"],
        ),
        (source([1, 2], to="prompts"), ["'source' calls", "[1, 2] is no function"]),  # type: ignore[arg-type]
    ],
    ids=["source", "score", "evaluate", "node", "no function"],
)
def test_a_function_that_cannot_be_called_as_its_node_does_is_refused(
    spec: NodeSpec, parts: list[str]
) -> None:
    with pytest.raises(PipelineError) as caught:
        Pipeline(spec)
    for part in [*parts, "test_graph.py:"]:
        assert part in caught.value.message


def test_a_function_of_any_arguments_can_be_called() -> None:
    made = Pipeline(source(dict, to="prompts"), node(same, "prompts", to="more", kind="prompts"))
    assert [spec.functions for spec in made.graph.nodes] == [(dict,), (same,)]


def test_a_cycle_is_told_node_by_node() -> None:
    nodes = [
        node(same, "c", to="a", kind="groups", name="first"),
        node(same, "a", to="b", kind="groups", name="second"),
        node(same, "b", to="c", kind="groups", name="third"),
    ]
    with pytest.raises(PipelineError, match=r"cycle") as caught:
        Pipeline(*nodes)
    for name in ("first", "second", "third"):
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["train([x,y]) -> [m]", "étape 1", "a.b"])
def test_odd_names_are_kept_and_can_be_selected(name: str) -> None:
    graph = Pipeline(*loop(score=name)).graph
    assert graph.node(name).name == name
    assert select(graph, Selection(to_nodes=(name,))) == {"source", "rollout", name}
    assert name in draw_text(graph, lag=1)


def test_a_slice_up_to_a_node_holds_what_it_depends_on() -> None:
    graph = Pipeline(*loop()).graph
    assert select(graph, Selection(to_nodes=("score",))) == {"source", "rollout", "score"}


def test_a_slice_that_lacks_an_input_names_the_missing_node() -> None:
    graph = Pipeline(*loop()).graph
    with pytest.raises(PipelineError, match=r"'score' needs the output of 'rollout'"):
        select(graph, Selection(from_nodes=("score",)))
    with pytest.raises(PipelineError, match=r"Did you mean 'score'"):
        select(graph, Selection(to_nodes=("scor",)))


def test_drawings_say_that_evaluations_have_no_lag() -> None:
    graph = Pipeline(*loop(), evaluate(same, by=same, name="held_out")).graph
    assert "policy: publish => held_out (when due)" in draw_text(graph, lag=3)
    assert "policy: publish => rollout (lag 3)" in draw_text(graph, lag=3)
    assert "-. policy, when due .->" in draw_mermaid(graph, lag=3)
    assert "policy, when due" in draw_svg(graph, lag=3)


def test_drawings_name_every_node_and_the_lag() -> None:
    graph = Pipeline(*loop(score="é<&>")).graph
    svg = draw_svg(graph, lag=3)
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
    for drawing in (draw_text(graph, lag=3), draw_mermaid(graph, lag=3), " ".join(texts)):
        assert "lag 3" in drawing
        assert all(n.name in drawing for n in graph.nodes)
