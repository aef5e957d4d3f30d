"""The ledger's sum is closed after every event, whatever happens to groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaloom.orchestrator.accounting import (
    Accounting,
    Ledger,
    LedgerRow,
    accounting_from_json,
    since,
)


def row(index: int, size: int = 4) -> LedgerRow:
    return LedgerRow(
        group_id=f"1/{index}",
        step=1,
        prompt_id=f"p{index}",
        num_rollouts=size,
        task="rollout/1/0",
        first_seed=index,
    )


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_the_sum_is_closed_at_every_moment(groups: list[tuple[int, int, int]]) -> None:
    ledger = Ledger()
    rows = [row(index, size) for index, (size, _, _) in enumerate(groups)]
    ledger.dispatch(rows)
    for item, (size, trained, dropped) in zip(rows, groups, strict=True):
        assert ledger.accounting().is_closed
        ledger.buffer([item.group_id])
        assert ledger.accounting().is_closed
        trained = min(trained, size)
        dropped = min(dropped, size - trained)
        invalid = size - trained - dropped
        ledger.close([replace(item, trained=trained, dropped=dropped, invalid=invalid)])
        assert ledger.accounting().is_closed
    total = ledger.accounting()
    assert total.dispatched == sum(size for size, _, _ in groups)
    assert total.in_flight == total.buffered == 0


def test_a_reissued_group_is_counted_once() -> None:
    ledger = Ledger()
    ledger.dispatch([row(0)])
    ledger.dispatch([row(0)])
    assert ledger.accounting().dispatched == 4


def test_outcomes_that_do_not_add_up_are_refused() -> None:
    ledger = Ledger()
    ledger.dispatch([row(0)])
    with pytest.raises(ValueError, match="do not add up"):
        ledger.close([replace(row(0), trained=3)])


def test_a_group_cannot_be_closed_twice() -> None:
    ledger = Ledger()
    ledger.dispatch([row(0)])
    ledger.close([replace(row(0), trained=4)])
    with pytest.raises(ValueError, match="not open"):
        ledger.close([replace(row(0), trained=4)])


def test_what_was_closed_after_a_version_counts_as_buffered_then() -> None:
    committed = Accounting(dispatched=8, trained=6, invalid=2)
    now = Accounting(dispatched=20, trained=12, invalid=2, in_flight=4, buffered=2)
    then = since(committed, now)
    assert then.is_closed
    assert (then.trained, then.invalid, then.in_flight, then.buffered) == (6, 2, 4, 8)


def test_totals_survive_storage() -> None:
    total = Accounting(dispatched=3, trained=1, invalid=2, reasons={"invalid: nan": 2})
    assert accounting_from_json(total.to_json()) == total


@pytest.mark.parametrize(
    ("trained", "dropped", "invalid", "outcome"),
    [(4, 0, 0, "trained"), (1, 1, 2, "trained"), (0, 3, 1, "dropped"), (0, 0, 4, "invalid")],
)
def test_the_outcome_of_a_group(trained: int, dropped: int, invalid: int, outcome: str) -> None:
    closed = replace(row(0), stage="closed", trained=trained, dropped=dropped, invalid=invalid)
    assert closed.outcome == outcome
