"""Faults of other systems with advantages, losses and scores: where the test of each is.

G group and PPO mathematics, S scoring, O pipelines; the letters and numbers are those of the
collection the faults come from.
"""

from __future__ import annotations

import ast

import pytest

from .run_support import REPOSITORY

CASES = {
    "G1 identical rewards in a group give a huge advantage": (
        "test_algorithms.py::test_equal_rewards_have_advantages_of_exactly_zero",
        "test_algorithms.py::test_leave_one_out_of_the_odd_one",
        "test_algorithms.py::test_large_rewards_stay_finite",
        "test_ppo.py::test_equal_advantages_are_normalised_to_exactly_zero",
    ),
    "G3 partial groups shift every later group": (
        "test_algorithms.py::test_a_partial_group_does_not_shift_the_others",
        "test_task_state_groups.py::test_a_group_that_is_given_up_takes_no_other_with_it",
    ),
    "G4 a token mean depends on how the batch is cut": (
        "test_algorithms.py::test_aggregation_is_the_same_for_every_split",
        "test_trainer_torch.py::test_gradients_do_not_depend_on_the_micro_batch",
        "test_fused_pipeline.py::test_o2_rounds_of_micro_batches_do_not_change_the_gradients_scale",
    ),
    "G5 a truncation mask in the numerator only, a fully masked batch": (
        "test_algorithms.py::test_a_masked_rollout_does_not_dilute_the_loss",
        "test_algorithms.py::test_nothing_to_train_is_a_loss_of_zero",
        "test_algorithms.py::test_truncated_rollouts_count_in_the_baseline_but_are_not_trained",
        "test_batching.py::test_no_groups_make_an_empty_batch_of_the_same_dtypes",
        "test_trainer_torch.py::test_a_fully_masked_batch_changes_nothing",
        "test_trainer_torch.py::test_a_completion_of_no_tokens_beside_one_of_three",
        "test_trainer_torch.py::test_a_completion_that_is_one_end_token_is_trained_on",
        "test_trainer_torch.py::test_a_prompt_of_no_tokens_is_refused_with_its_row",
    ),
    "G8 GAE runs through tool tokens, a cut treated as an end": (
        "test_ppo.py::test_gae_skips_tool_tokens",
        "test_ppo.py::test_values_of_tool_tokens_change_nothing",
        "test_ppo.py::test_a_rollout_that_was_cut_goes_on_at_the_critics_value",
    ),
    "S2 mathematical answers falsely accepted and rejected": (
        "test_scorer_math.py::test_other_values_are_wrong",
        "test_scorer_math.py::test_equal_values_in_another_form_are_right",
    ),
    "S3 an answer key that cannot be read gives reward 1": (
        "test_scorer_math.py::test_a_prompt_without_an_answer_is_never_right",
        "test_scorer_math.py::test_an_answer_that_is_no_mathematics_is_never_right",
    ),
    "S4 lists of the wrong length, None or NaN from a reward function": (
        "test_scorers.py::test_a_list_of_the_wrong_length_names_function_and_counts",
        "test_scorers.py::test_none_abstains_for_that_rollout_alone",
        "test_scorers.py::test_nan_is_invalid_and_drops_a_group_of_nothing_else",
        "test_scorers.py::test_infinity_is_invalid",
        "test_scorers.py::test_scalars_of_every_kind_are_numbers",
        "test_scorers.py::test_async_functions_run_concurrently",
        "test_scorers.py::test_an_exception_is_of_its_rollout_alone",
    ),
    "O1 a pipeline schedule hangs": (
        "test_cases_pipeline.py::test_o1a_few_micro_batches_complete_with_the_gradient_of_one_process",
        "test_fused_pipeline.py::test_o1_fewer_micro_batches_than_stages_do_not_hang",
    ),
    "O2 the gradient's scale with a pipeline and accumulation": (
        "test_cases_pipeline.py::test_o2_twelve_micro_batches_are_averaged_once",
        "test_fused_pipeline.py::test_o2_rounds_of_micro_batches_do_not_change_the_gradients_scale",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: str) -> None:
    for name in CASES[case]:
        file, _, function = name.partition("::")
        tree = ast.parse((REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions, name
