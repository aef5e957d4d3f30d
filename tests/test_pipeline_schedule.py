"""Delays in closed form, schedules, and the validator that finds what would hang."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaloom.orchestrator.errors import ConfigError, PipelineError
from deltaloom.plugins.pipeline import delays
from deltaloom.plugins.pipeline.schedule import (
    Op,
    OpKind,
    Schedule,
    ScheduleName,
    pipeline_ops,
    stage_ops,
    with_transfers,
)
from deltaloom.plugins.pipeline.validation import required_channel_capacity, validate_ops


def kinds(ops: list[Op]) -> str:
    """`F0 F1 B0 U`: the computations in short."""
    letters = {OpKind.FORWARD: "F", OpKind.BACKWARD: "B"}
    return " ".join(
        "U" if op.kind is OpKind.UPDATE else f"{letters[op.kind]}{op.micro_batch}" for op in ops
    )


def test_delay_of_each_stage() -> None:
    assert [delays.gradient_delay(s, num_stages=8) for s in range(8)] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert [
        delays.gradient_delay(s, num_stages=8, micro_batches_per_update=4) for s in range(8)
    ] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert delays.mean_delay(0, num_stages=8, micro_batches_per_update=2) == 3.5


def test_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 4\), got 4"):
        delays.gradient_delay(4, num_stages=4)


def test_momentum_falls_linearly_with_the_stage() -> None:
    values = [delays.stage_momentum(s, num_stages=4) for s in range(4)]
    assert values == pytest.approx([0.99, 0.96, 0.93, 0.9])
    assert delays.stage_momentum(0, num_stages=1) == 0.9


def walk(ops: list[Op], micro_batches_per_update: int) -> tuple[list[int], int]:
    """Delays of all micro-batches and the most live versions, by following the operations."""
    version, seen, most = 0, {}, 1
    found = []
    for op in ops:
        if op.kind is OpKind.FORWARD:
            seen[op.micro_batch] = version
        elif op.kind is OpKind.BACKWARD:
            found.append(op.micro_batch // micro_batches_per_update - seen.pop(op.micro_batch))
        else:
            version += 1
        most = max(most, len({version, *seen.values()}))
    return found, most


@settings(max_examples=80, deadline=None)
@given(num_stages=st.integers(1, 9), per_update=st.integers(1, 5), data=st.data())
def test_closed_forms_agree_with_the_schedule(
    num_stages: int, per_update: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, num_stages - 1))
    schedule = Schedule(
        name="async-1f1b", num_stages=num_stages, micro_batches_per_update=per_update
    )
    count = 3 * num_stages + 4 * per_update
    found, most = walk(stage_ops(schedule, stage, num_micro_batches=count), per_update)

    assert found == [
        delays.micro_batch_delay(
            b, stage=stage, num_stages=num_stages, micro_batches_per_update=per_update
        )
        for b in range(count)
    ]
    assert most <= schedule.max_live_versions(stage)
    settled = found[num_stages : num_stages + per_update]
    tau = delays.gradient_delay(stage, num_stages=num_stages, micro_batches_per_update=per_update)
    assert min(settled) == tau
    assert sum(settled) / per_update == delays.mean_delay(
        stage, num_stages=num_stages, micro_batches_per_update=per_update
    )
    if per_update == 1:
        assert most == schedule.max_live_versions(stage) == tau + 1


def test_orders_of_a_small_pipeline() -> None:
    gpipe = Schedule(name="gpipe", num_stages=2, micro_batches_per_update=2)
    assert kinds(stage_ops(gpipe, 0, num_micro_batches=4)) == "F0 F1 B0 B1 U F2 F3 B2 B3 U"
    one = Schedule(name="1f1b", num_stages=3, micro_batches_per_update=4)
    assert kinds(stage_ops(one, 0, num_micro_batches=4)) == "F0 F1 F2 B0 F3 B1 B2 B3 U"
    assert kinds(stage_ops(one, 2, num_micro_batches=4)) == "F0 B0 F1 B1 F2 B2 F3 B3 U"
    free = Schedule(name="async-1f1b", num_stages=3)
    assert kinds(stage_ops(free, 0, num_micro_batches=4)) == "F0 F1 F2 B0 U F3 B1 U B2 U B3 U"


def test_partial_update_continues_after_a_drain() -> None:
    schedule = Schedule(name="1f1b", num_stages=2, micro_batches_per_update=4)
    assert kinds(stage_ops(schedule, 1, num_micro_batches=3)) == "F0 B0 F1 B1 F2 B2"
    assert kinds(stage_ops(schedule, 0, num_micro_batches=3, num_done=3)) == "F3 B3 U F4 F5 B4 B5"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async-1f1b"])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_every_schedule_runs_with_few_micro_batches(
    name: ScheduleName, num_micro_batches: int, num_stages: int
) -> None:
    schedule = Schedule(
        name=name, num_stages=num_stages, micro_batches_per_update=num_micro_batches
    )
    ops = with_transfers(pipeline_ops(schedule, num_micro_batches=num_micro_batches))

    validate_ops(ops, channel_capacity=None)
    for stage in ops:
        work = [op for op in stage if op.peer is None]
        assert len(work) == 2 * num_micro_batches + 1


def test_one_forward_one_backward_crosses_blocking_sends() -> None:
    schedule = Schedule(name="1f1b", num_stages=4, micro_batches_per_update=8)
    ops = with_transfers(pipeline_ops(schedule, num_micro_batches=8))

    with pytest.raises(PipelineError, match=r"stages 2, 3 wait for each other: .*send activation"):
        validate_ops(ops, channel_capacity=0)
    assert required_channel_capacity(ops) == 1


def test_gpipe_needs_no_buffers() -> None:
    schedule = Schedule(name="gpipe", num_stages=4, micro_batches_per_update=4)
    assert (
        required_channel_capacity(with_transfers(pipeline_ops(schedule, num_micro_batches=8))) == 0
    )


def transfer(kind: OpKind, number: int, peer: int, payload: str = "activation") -> Op:
    return Op(kind=kind, micro_batch=number, peer=peer, payload=payload)


def test_two_crossed_blocking_sends_are_a_cycle() -> None:
    ops = [
        [transfer(OpKind.SEND, 0, 1), transfer(OpKind.RECEIVE, 7, 1)],
        [transfer(OpKind.SEND, 7, 0), transfer(OpKind.RECEIVE, 0, 0)],
    ]
    with pytest.raises(PipelineError, match="stages 0, 1 wait for each other"):
        validate_ops(ops, channel_capacity=0)

    validate_ops(ops, channel_capacity=1)


def test_ring_of_three_is_a_cycle_even_with_buffers_when_all_receive_first() -> None:
    def ring(first: OpKind, second: OpKind) -> list[list[Op]]:
        return [
            [
                transfer(kind, s if kind is OpKind.SEND else (s - 1) % 3,
                         (s + 1) % 3 if kind is OpKind.SEND else (s - 1) % 3)
                for kind in (first, second)
            ]
            for s in range(3)
        ]  # fmt: skip

    with pytest.raises(PipelineError, match="stages 0, 1, 2 wait for each other"):
        validate_ops(ring(OpKind.SEND, OpKind.RECEIVE), channel_capacity=0)
    validate_ops(ring(OpKind.SEND, OpKind.RECEIVE), channel_capacity=1)
    with pytest.raises(PipelineError, match="stages 0, 2, 1 wait for each other"):
        validate_ops(ring(OpKind.RECEIVE, OpKind.SEND), channel_capacity=None)


def test_message_that_is_never_sent_or_received_is_named() -> None:
    with pytest.raises(PipelineError, match="stage 1 waits to receive activation 0 from stage 0"):
        validate_ops([[], [transfer(OpKind.RECEIVE, 0, 0)]], channel_capacity=None)
    with pytest.raises(PipelineError, match="stage 0 sends activation 0 to stage 1, which never"):
        validate_ops([[transfer(OpKind.SEND, 0, 1)], []], channel_capacity=None)


def test_swapped_order_of_messages_is_stuck() -> None:
    sends = [transfer(OpKind.SEND, 0, 1), transfer(OpKind.SEND, 1, 1)]
    receives = [transfer(OpKind.RECEIVE, 1, 0), transfer(OpKind.RECEIVE, 0, 0)]
    with pytest.raises(PipelineError, match="stage 1 waits to receive activation 1"):
        validate_ops([sends, receives], channel_capacity=None)


def test_backward_before_its_forward_is_named() -> None:
    ops = [[Op(kind=OpKind.BACKWARD, micro_batch=3)]]
    with pytest.raises(PipelineError, match="stage 0 runs backward 3 before its forward"):
        validate_ops(ops, channel_capacity=None)


def test_schedule_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.num_stages must be at least 1, got 0"):
        Schedule(name="gpipe", num_stages=0)
    with pytest.raises(ConfigError, match=r"schedule\.micro_batches_per_update must be"):
        Schedule(name="gpipe", num_stages=1, micro_batches_per_update=0)
