"""Fused pipeline schedules: published instances, proven optima, memory caps, invariants."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fusion import intra_stage_row
from deltaloom.plugins.fusion.annealing import SearchResult, search_schedule
from deltaloom.plugins.fusion.baselines import (
    concatenated_schedule,
    greedy_schedule,
    serial_makespan,
    serial_peak_memory,
    starting_schedules,
)
from deltaloom.plugins.fusion.exact import enumerate_makespans, node_orders, solve_exact
from deltaloom.plugins.fusion.jit import kernel
from deltaloom.plugins.fusion.problem import (
    FusionProblem,
    ModelPipeline,
    TaskKind,
    symmetric_problem,
)
from deltaloom.plugins.fusion.published import PublishedInstance, published_instances
from deltaloom.plugins.fusion.schedule import (
    Evaluation,
    FusedSchedule,
    evaluate,
    is_valid,
    lower_bound,
)
from deltaloom.plugins.fusion.tables import (
    mirror_ids,
    mirrored_tables,
    order_array,
    problem_tables,
    schedule_of,
)
from deltaloom.plugins.fusion.timeline import panel, svg_timeline, text_timeline
from deltaloom.storage.errors import InputError

TINY: dict[str, FusionProblem] = {
    "T1": symmetric_problem(num_nodes=2, a=(2, 1), b=(2, 1)),
    "T2": symmetric_problem(num_nodes=2, a=(2, 2), b=(2, 1), memory=(2, 1)),
    "T2b": symmetric_problem(num_nodes=2, a=(1, 2), b=(2, 1), memory=(2, 1)),
    "T3": symmetric_problem(num_nodes=3, a=(2, 1), b=(2, 1)),
    "T4": symmetric_problem(num_nodes=2, a=(3, 2), b=(2, 1)),
    "D4": symmetric_problem(num_nodes=4, a=(4, 2), b=(2, 1), memory=(2, 1)),
    "D4sym": symmetric_problem(num_nodes=4, a=(4, 1), b=(4, 1)),
}

SERIAL_TWELVE = (813, 477, 309, 819, 483, 315, 708, 420, 276, 711, 423, 279)
A_THEN_B_TWELVE = (801, 465, 297, 805, 469, 301, 694, 406, 262, 696, 408, 264)
B_THEN_A_TWELVE = (798, 462, 294, 791, 455, 287, 694, 406, 262, 681, 393, 249)
GREEDY_PEAK_TWELVE = (
    42.90, 33.30, 23.60, 42.90, 31.25, 23.60, 75.44, 58.48, 42.24, 75.44, 52.48, 41.24,
)  # fmt: skip
SERIAL_PEAK_TWELVE = (15.60,) * 6 + (26.24,) * 6


@cache
def greedy_evaluation(number: int) -> Evaluation:
    problem = published_instances()[number].problem
    return evaluate(problem, greedy_schedule(problem))


@pytest.mark.parametrize("instance", published_instances(), ids=lambda one: f"exp{one.number}")
class TestPublishedInstances:
    def test_serial_1f1b(self, instance: PublishedInstance) -> None:
        assert serial_makespan(instance.problem) == SERIAL_TWELVE[instance.number]
        assert serial_peak_memory(instance.problem) == pytest.approx(
            SERIAL_PEAK_TWELVE[instance.number]
        )

    def test_concatenated_orders(self, instance: PublishedInstance) -> None:
        makespans = [
            evaluate(
                instance.problem, concatenated_schedule(instance.problem, first=first)
            ).makespan
            for first in (0, 1)
        ]
        assert makespans == [A_THEN_B_TWELVE[instance.number], B_THEN_A_TWELVE[instance.number]]

    def test_greedy(self, instance: PublishedInstance) -> None:
        evaluation = greedy_evaluation(instance.number)
        assert evaluation.makespan == instance.greedy_makespan
        assert evaluation.peak_memory == pytest.approx(GREEDY_PEAK_TWELVE[instance.number])

    def test_lower_bound(self, instance: PublishedInstance) -> None:
        assert lower_bound(instance.problem).value == instance.lower_bound

    def test_search_meets_the_published_makespan(self, instance: PublishedInstance) -> None:
        found = search_schedule(instance.problem, max_evaluations=2_000, minimise_memory=False)
        assert found.evaluation.makespan <= instance.annealed_makespan


@pytest.mark.parametrize("number", [2, 5, 11])
def test_search_meets_published_makespan_within_published_memory(number: int) -> None:
    instance = published_instances()[number]
    found = search_schedule(
        instance.problem,
        memory_cap=instance.annealed_peak_memory,
        max_evaluations=20_000,
        minimise_memory=False,
    )
    assert found.evaluation.makespan == instance.annealed_makespan == found.lower_bound
    assert found.evaluation.peak_memory <= instance.annealed_peak_memory + 1e-9


def test_the_instance_that_annealing_left_open_is_solved_to_its_bound() -> None:
    instance = published_instances()[9]
    found = search_schedule(
        instance.problem,
        memory_cap=instance.annealed_peak_memory,
        max_evaluations=3_000,
        minimise_memory=False,
    )
    assert found.evaluation.makespan == 606 == found.lower_bound < instance.annealed_makespan


@pytest.mark.parametrize(
    ("name", "serial", "a_then_b", "greedy", "bound"),
    [
        ("T1", 18, 17, 16, 12),
        ("T2", 27, 26, 18, 18),
        ("T2b", 21, None, 12, 12),
        ("T3", 24, None, 18, 15),
        ("T4", 33, None, 24, 24),
        ("D4", 57, None, 42, 42),
        ("D4sym", 42, 39, 34, 27),
    ],
)
def test_tiny_baselines(
    name: str, serial: int, a_then_b: int | None, greedy: int, bound: int
) -> None:
    problem = TINY[name]
    assert serial_makespan(problem) == serial
    assert evaluate(problem, greedy_schedule(problem)).makespan == greedy
    assert lower_bound(problem).value == bound
    if a_then_b is not None:
        assert evaluate(problem, concatenated_schedule(problem, first=0)).makespan == a_then_b


@pytest.mark.parametrize(
    ("name", "memory_cap", "optimum"),
    [
        ("T1", None, 12),
        ("T1", 2, 12),
        ("T2", None, 18),
        ("T2", 5, 18),
        ("T2", 4, 19),
        ("T2b", None, 12),
        ("T2b", 4, 12),
        ("T3", None, 15),
        ("T4", None, 24),
        ("D4", None, 42),
    ],
)
def test_exact_and_search_agree_on_the_optimum(
    name: str, memory_cap: float | None, optimum: int
) -> None:
    exact = solve_exact(TINY[name], memory_cap=memory_cap)
    checked = evaluate(TINY[name], exact.schedule)
    found = search_schedule(TINY[name], memory_cap=memory_cap, max_evaluations=3_000)
    assert exact.makespan == checked.makespan == found.evaluation.makespan == optimum
    if memory_cap is not None:
        assert checked.peak_memory <= memory_cap
        assert found.evaluation.peak_memory <= memory_cap


@pytest.mark.parametrize("seed", range(6))
def test_every_seed_solves_the_symmetric_instance(seed: int) -> None:
    found = search_schedule(TINY["D4sym"], seed=seed, max_evaluations=5_000)
    assert found.evaluation.makespan == 27
    assert found.evaluation.peak_memory <= 6


def test_memory_phase_keeps_the_makespan_and_lowers_the_greedy_peak() -> None:
    found = search_schedule(TINY["D4"], max_evaluations=20_000)
    assert found.evaluation.makespan == 42
    assert found.evaluation.peak_memory == 8
    assert greedy_peak("D4") == (10, 33)


def greedy_peak(name: str) -> tuple[float, float]:
    evaluation = evaluate(TINY[name], greedy_schedule(TINY[name]))
    return evaluation.peak_memory, evaluation.total_peak_memory


def test_enumeration_counts_valid_and_deadlocked_orders() -> None:
    assert len(list(node_orders(TINY["T1"]))) == 280
    found = enumerate_makespans(TINY["T1"])
    num_invalid = sum(count for (makespan, _, _), count in found.items() if makespan < 0)
    assert sum(found.values()) == 78_400
    assert num_invalid == 64_046
    assert sum(found.values()) - num_invalid == 14_354
    assert min(rank for rank in found if rank[0] >= 0) == (12, 2, 4)


def test_enumeration_of_the_small_asymmetric_instance() -> None:
    found = enumerate_makespans(TINY["T2b"])
    num_invalid = sum(count for (makespan, _, _), count in found.items() if makespan < 0)
    assert (sum(found.values()), num_invalid) == (900, 608)
    best = min(rank for rank in found if rank[0] >= 0)
    assert best[:2] == (12, 4)


def test_latency_memory_trade_off_of_all_schedules() -> None:
    found = enumerate_makespans(TINY["T2"])
    best = {
        makespan: min(rank[1:] for rank in found if 0 <= rank[0] <= makespan)
        for makespan in (18, 19, 20, 21)
    }
    assert best == {18: (5, 9), 19: (4, 8), 20: (4, 8), 21: (4, 7)}


def test_a_known_optimum_keeps_both_nodes_busy() -> None:
    schedule = FusedSchedule.parse(
        [
            "Af Bf Bb Ab Af Bf Bb Ab",
            "Bf Af Ab Bb Bf Af Ab Bb",
        ]
    )
    evaluation = evaluate(TINY["T1"], schedule)
    assert evaluation.makespan == 12
    assert evaluation.bubble_fraction == 0
    assert list(evaluation.node_peaks) == [2, 2]
    assert text_timeline(evaluation) == "0 |abBBAAabBBAA|\n1 |baAABBbaAABB|\n"


def test_same_arguments_give_the_same_schedule() -> None:
    def search() -> SearchResult:
        return search_schedule(TINY["D4sym"], seed=3, num_seeds=2, max_evaluations=2_000)

    assert search().schedule == search().schedule


def test_a_wall_clock_budget_ends_the_search() -> None:
    found = search_schedule(TINY["T3"], budget_seconds=0.05)
    assert 15 <= found.evaluation.makespan <= 18
    assert found.num_evaluations >= 0
    assert 0 <= found.seconds_to_makespan <= found.seconds


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Ab Af", "Af Ab"], "node 0 position 0: Ab must come after its forward"),
        (["Af Ab"], "must have 2 nodes, got 1"),
        (["Af Ab", "Af Af"], "node 1 must run Af 1 times, got 2"),
    ],
)
def test_a_wrong_order_is_refused_with_its_place(lines: list[str], message: str) -> None:
    pipeline = ModelPipeline(num_stages=2, num_micro_batches=1, forward_cost=1, backward_cost=1)
    problem = FusionProblem(model_a=pipeline, model_b=pipeline)
    rest = "Bf Bb"
    with pytest.raises(InputError, match=message):
        evaluate(problem, FusedSchedule.parse(f"{line} {rest}" for line in lines))


def test_a_deadlock_is_refused_and_names_the_nodes() -> None:
    problem = TINY["T1"]
    schedule = FusedSchedule.parse(["Bf Bb Bf Bb Af Ab Af Ab", "Af Ab Af Ab Bf Bb Bf Bb"])
    assert not is_valid(problem, schedule)
    with pytest.raises(InputError, match=r"deadlocks: node 0 at position 0 \(Bf\), node 1"):
        evaluate(problem, schedule)


@pytest.mark.parametrize(
    "change",
    [
        {"num_stages": 0},
        {"forward_cost": 1.5},
        {"memory_per_micro_batch": 0.0},
    ],
)
def test_a_pipeline_checks_its_numbers(change: dict[str, int]) -> None:
    fields = {"num_stages": 2, "num_micro_batches": 2, "forward_cost": 1, "backward_cost": 2}
    with pytest.raises(InputError, match="must be"):
        ModelPipeline(**{**fields, **change})


def test_models_must_cover_the_same_nodes() -> None:
    two, three = (
        ModelPipeline(num_stages=n, num_micro_batches=1, forward_cost=1, backward_cost=2)
        for n in (2, 3)
    )
    with pytest.raises(InputError, match="same nodes, got 2 for A and 3 for B"):
        FusionProblem(model_a=two, model_b=three)


def test_a_search_needs_a_budget_and_a_cap_that_fits() -> None:
    with pytest.raises(InputError, match="must have a budget"):
        search_schedule(TINY["T1"])
    with pytest.raises(InputError, match=r"memory_cap must be at least 2"):
        search_schedule(TINY["T2"], memory_cap=1, max_evaluations=10)


def test_the_tightest_cap_still_gives_a_schedule() -> None:
    exact = solve_exact(TINY["T2"], memory_cap=2)
    found = search_schedule(TINY["T2"], memory_cap=2, max_evaluations=500)
    assert found.evaluation.peak_memory == evaluate(TINY["T2"], exact.schedule).peak_memory == 2
    assert 30 == exact.makespan <= found.evaluation.makespan <= 31


def test_soft_walks_pass_through_orders_that_a_cap_cuts_off() -> None:
    found = [
        search_schedule(TINY["T2"], memory_cap=2, seed=seed, max_evaluations=50_000)
        for seed in range(4)
    ]
    assert min(result.evaluation.makespan for result in found) == 30
    assert {result.evaluation.peak_memory for result in found} == {2}


def test_svg_is_well_formed_self_contained_and_follows_dark_mode() -> None:
    problem = TINY["D4sym"]
    before = panel(problem, concatenated_schedule(problem, first=0), title="before <1F1B>")
    after = panel(problem, greedy_schedule(problem), title="after")
    picture = svg_timeline([before, after], width=800)
    root = ElementTree.fromstring(picture)
    namespace = "{http://www.w3.org/2000/svg}"
    hints = [element.text or "" for element in root.iter(f"{namespace}title")]
    assert len(hints) == 2 * problem.num_tasks
    assert hints[0] == "A0 forward, 0 to 1"
    assert "prefers-color-scheme:dark" in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    rights = [
        float(box.get("x", "0")) + float(box.get("width", "0"))
        for box in root.iter(f"{namespace}rect")
    ]
    assert max(rights) <= 800


def test_text_timeline_is_scaled_to_the_width() -> None:
    problem = published_instances()[2].problem
    lines = text_timeline(greedy_evaluation(2), width=60).splitlines()
    assert len(lines) == problem.num_nodes
    assert {len(line) for line in lines} == {60 + len("0 ||")}


def test_a_kernel_without_a_place_for_its_cache_still_compiles() -> None:
    namespace: dict[str, Callable[[int], int]] = {}
    exec("def successor(number):\n    return number + 1", namespace)
    assert kernel("int64(int64)")(namespace["successor"])(41) == 42


def test_benchmark_row_of_a_published_instance() -> None:
    row = intra_stage_row(published_instances()[2], budget_seconds=0.2, num_seeds=1)
    assert (row["serial"], row["greedy"], row["published"], row["bound"]) == (309, 239, 225, 225)
    assert row["bound"] <= row["ours"] <= row["greedy"]
    assert row["peak_greedy"] == 23.6
    assert row["evaluations_per_second"] > 0


def costs() -> st.SearchStrategy[int]:
    return st.integers(1, 3)


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 3, max_micro_batches: int = 3) -> FusionProblem:
    num_nodes = draw(st.integers(1, max_nodes))
    divisors = [n for n in range(1, num_nodes + 1) if num_nodes % n == 0]

    def pipeline() -> ModelPipeline:
        num_stages = draw(st.sampled_from(divisors))
        return ModelPipeline(
            num_stages=num_stages,
            num_copies=num_nodes // num_stages,
            num_micro_batches=draw(st.integers(1, max_micro_batches)),
            forward_cost=draw(costs()),
            backward_cost=draw(costs()),
            memory_per_micro_batch=draw(st.sampled_from([0.5, 1.0, 1.64])),
        )

    return FusionProblem(model_a=pipeline(), model_b=pipeline())


@given(problem=problems(max_nodes=4, max_micro_batches=4), cap_factor=st.floats(1.0, 3.0))
@settings(max_examples=60, deadline=None)
def test_search_lies_between_bound_and_serial_and_keeps_the_cap(
    problem: FusionProblem, cap_factor: float
) -> None:
    cap = cap_factor * serial_peak_memory(problem)
    found = search_schedule(problem, memory_cap=cap, max_evaluations=60)
    assert lower_bound(problem).value <= found.evaluation.makespan <= serial_makespan(problem)
    assert found.evaluation.peak_memory <= cap + 1e-9
    assert evaluate(problem, found.schedule) == found.evaluation


@given(problem=problems(max_nodes=2, max_micro_batches=2), extra=st.sampled_from([0.0, 1.0, 3.0]))
@settings(max_examples=25, deadline=None)
def test_exact_is_never_above_the_search_under_the_same_cap(
    problem: FusionProblem, extra: float
) -> None:
    cap = extra + max(model.memory_per_micro_batch for model in problem.models)
    found = search_schedule(problem, memory_cap=cap, max_evaluations=200)
    exact = solve_exact(problem, memory_cap=cap)
    assert exact.makespan <= found.evaluation.makespan
    for evaluation in (found.evaluation, evaluate(problem, exact.schedule)):
        assert evaluation.peak_memory <= cap + 1e-9


@given(problem=problems(max_nodes=2, max_micro_batches=2))
@settings(max_examples=25, deadline=None)
def test_exact_equals_full_enumeration(problem: FusionProblem) -> None:
    if len(list(node_orders(problem))) ** problem.num_nodes > 1_000:
        problem = FusionProblem(
            model_a=problem.model_a,
            model_b=ModelPipeline(
                num_stages=problem.model_b.num_stages,
                num_copies=problem.model_b.num_copies,
                num_micro_batches=1,
                forward_cost=problem.model_b.forward_cost,
                backward_cost=problem.model_b.backward_cost,
            ),
        )
    found = [rank for rank in enumerate_makespans(problem) if rank[0] >= 0]
    assert solve_exact(problem).makespan == min(found)[0]
    for cap in {peak for _, peak, _ in found}:
        capped = min(makespan for makespan, peak, _ in found if peak <= cap)
        assert solve_exact(problem, memory_cap=cap).makespan == capped


@given(problem=problems())
@settings(max_examples=40, deadline=None)
def test_evaluation_invariants(problem: FusionProblem) -> None:
    for schedule in starting_schedules(problem):
        evaluation = evaluate(problem, schedule)
        assert len(evaluation.tasks) == problem.num_tasks
        assert evaluation.makespan >= lower_bound(problem).value
        ends = {(t.node, t.kind, t.micro_batch): t.end for t in evaluation.tasks}
        for earlier, later in zip(evaluation.tasks, evaluation.tasks[1:], strict=False):
            assert earlier.node != later.node or earlier.end <= later.start
        for task in evaluation.tasks:
            assert task.end - task.start == problem.cost(task.kind)
            if task.kind.is_backward:
                forward = (task.node, TaskKind(task.kind - 1), task.micro_batch)
                assert ends[forward] <= task.start


@given(problem=problems())
@settings(max_examples=40, deadline=None)
def test_orders_survive_the_flat_form_and_text(problem: FusionProblem) -> None:
    tables = problem_tables(problem)
    schedule = greedy_schedule(problem)
    assert schedule_of(tables, order_array(tables, schedule)) == schedule
    assert FusedSchedule.parse(schedule.lines()) == schedule


@given(problem=problems())
@settings(max_examples=40, deadline=None)
def test_mirroring_time_twice_is_the_identity(problem: FusionProblem) -> None:
    tables = problem_tables(problem)
    twice = mirrored_tables(mirrored_tables(tables))
    mirror = mirror_ids(tables)
    assert np.array_equal(twice.tasks, tables.tasks)
    assert np.array_equal(mirror[mirror], np.arange(problem.num_tasks))
