"""The weight stash: every backward gets its forward's version, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import PipelineError
from deltaloom.plugins.pipeline.schedule import OpKind, Progress, Schedule, candidates
from deltaloom.plugins.pipeline.stash import WeightStash


@settings(max_examples=150, deadline=None)
@given(
    num_stages=st.integers(1, 7), per_update=st.integers(1, 4), count=st.integers(0, 40),
    data=st.data(),
)  # fmt: skip
def test_pairs_match_and_memory_is_bounded(
    num_stages: int, per_update: int, count: int, data: st.DataObject
) -> None:
    """Also when backwards overtake forwards, as they may with arrival order."""
    stage = data.draw(st.integers(0, num_stages - 1))
    schedule = Schedule(
        name="async-1f1b", num_stages=num_stages, micro_batches_per_update=per_update
    )
    bound = schedule.max_live_versions(stage)
    stash = WeightStash("weights 0", max_versions=bound)
    seen: dict[int, str] = {}
    progress = Progress(total=count)
    while options := candidates(schedule, stage, progress):
        op = data.draw(st.sampled_from(options))
        if op.kind is OpKind.FORWARD:
            seen[op.micro_batch] = stash.forward(op.micro_batch).value
            assert seen[op.micro_batch] == f"weights {progress.num_updates}"
        elif op.kind is OpKind.BACKWARD:
            stashed = stash.backward(op.micro_batch)
            assert stashed.value == seen.pop(op.micro_batch) == f"weights {stashed.version}"
        else:
            assert stash.push(f"weights {progress.num_updates + 1}") == progress.num_updates + 1
        assert stash.num_versions <= bound
        assert set(stash.in_flight) == set(seen)
        progress = progress.after(op)

    assert stash.num_versions == 1
    assert progress.num_backward == count


def test_unknown_and_repeated_micro_batches_are_refused() -> None:
    stash = WeightStash(0, max_versions=2)
    stash.forward(3)
    with pytest.raises(PipelineError, match="micro-batch 3 is in flight already"):
        stash.forward(3)
    stash.backward(3)
    with pytest.raises(PipelineError, match="micro-batch 3 has no forward"):
        stash.backward(3)


def test_outgrowing_the_bound_is_refused() -> None:
    stash = WeightStash(0, max_versions=1)
    stash.forward(0)
    with pytest.raises(PipelineError, match="number 2 in a stash of at most 1"):
        stash.push(1)
