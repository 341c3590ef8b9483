"""The checker of a swap finds no fault in the protocol, and finds each planted fault."""
# ruff: noqa: SLF001  each planted fault changes one step of the code under test

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from attrs import evolve

from leasehold.balancer.model import TRIM_HORIZON, Annotations, Lease
from leasehold.stores import swap
from leasehold.stores.protocol import Done, Outcome
from leasehold.stores.swap import FROM, MOVED_OWNER_PREFIX, RowPair, SwapStore, join_version
from leasehold.stores.writes import ClaimLease, CreateLease, ReleaseLease, ResetLease, Write
from leasehold_lab.checker.swap import CheckedTable, SwapModel, build_swap_model, build_swap_models

pytestmark = pytest.mark.slow


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", sorted(build_swap_models()))
def test_no_order_of_requests_breaks_a_law(name: str) -> None:
    """In any order of requests of a swap, no record is skipped, no write is undone, and no shard has two readers."""
    result = build_swap_models()[name].explore(3_000)
    assert [(broken_law.law, broken_law.trace) for broken_law in result.findings] == []
    assert result.states >= 3_000 or result.complete


Plant = Callable[[pytest.MonkeyPatch], None]


def copy_with_a_later_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the copy a later epoch than the marked row before a worker has claimed it (W3)."""
    original_copy = swap._copy_without_owner
    monkeypatch.setattr(swap, "_copy_without_owner", lambda row: evolve(original_copy(row), epoch=row.epoch + 1))


def claiming_by_the_copys_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim with the checkpoint of the copy, which is the position at which the lease began (W3)."""
    original_copy = swap._copy_without_owner
    monkeypatch.setattr(swap, "_copy_without_owner", lambda row: evolve(original_copy(row), checkpoint=TRIM_HORIZON))


def claiming_by_the_checkpoint_of_an_earlier_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the checkpoint of an earlier period in which the lease was in this table (W3)."""
    original_write = CheckedTable.write

    def write(self: CheckedTable, request: Write) -> Outcome:
        return original_write(
            self, evolve(request, position=request.lease.checkpoint) if isinstance(request, ResetLease) else request
        )

    monkeypatch.setattr(CheckedTable, "write", write)


def claiming_before_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim the lease in TO while writes of its owner and of other workers to FROM's row still succeed (W2)."""

    def move_renewed(self: SwapStore, side: int, held_lease: Lease, me: str) -> Outcome:
        claimed_lease = self._copy_and_claim(RowPair((None, None)).put(side, held_lease), me)
        mark_outcome = self._tables[side].write(ReleaseLease(held_lease, "", MOVED_OWNER_PREFIX + me))
        return (
            Done(claimed_lease)
            if claimed_lease and isinstance(mark_outcome, Done)
            else self._read_lost_outcome(held_lease.key)
        )

    monkeypatch.setattr(SwapStore, "_move_renewed", move_renewed)


def marking_whatever_stands_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the mark on the row as it is at that time, not as it was when the lease was held (W2)."""
    original_write = CheckedTable.write

    def write(self: CheckedTable, request: Write) -> Outcome:
        if isinstance(request, ReleaseLease) and (request.to or "").startswith(MOVED_OWNER_PREFIX):
            (row,) = self.get([request.lease.key])
            request = evolve(request, lease=row)
        return original_write(self, request)

    monkeypatch.setattr(CheckedTable, "write", write)


def a_late_mover_that_does_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker that marked the row claim the lease in TO, even if another has claimed it there meanwhile (W4)."""

    def copy_and_claim(self: SwapStore, pair: RowPair, taker: str | None, notes: Annotations = ()) -> Lease | None:
        target_side = 1 - pair.side
        assert pair.row is not None
        copied_lease = self._tables[target_side].write(CreateLease(swap._copy_without_owner(pair.row))).lease
        assert copied_lease is not None
        claim = self._tables[target_side].write(ClaimLease(copied_lease, taker or "", notes))
        return join_version(target_side, claim.lease) if isinstance(claim, Done) else None

    monkeypatch.setattr(SwapStore, "_copy_and_claim", copy_and_claim)


def reading_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a row in FROM without reading TO (W1)."""
    monkeypatch.setattr(RowPair, "side", property(lambda self: FROM if self.rows[FROM] is not None else 1))


def combining_rows_of_different_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Combine a row of FROM from the time when it was a copy with a row of TO from the time when that is one (W5)."""

    def keep_pairs(_self: SwapStore, pairs: Mapping[str, RowPair]) -> dict[str, RowPair]:
        return dict(pairs)

    monkeypatch.setattr(SwapStore, "_reread_torn", keep_pairs)


def freeing_what_is_left_before_it_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free the row of an earlier period before the row is a copy. A worker that read the other row before trusts it."""
    monkeypatch.setattr(swap, "is_unclaimed_copy", lambda _row: False)

    def side(self: RowPair) -> int:
        first_row, second_row = self.rows
        if first_row is None or second_row is None:
            return FROM if second_row is None else 1
        return (
            FROM
            if first_row.epoch > second_row.epoch or (first_row.epoch == second_row.epoch and swap.is_marked(first_row))
            else 1
        )

    monkeypatch.setattr(RowPair, "side", property(side))


FOUND_WITHIN = 8_000

HELD = ((0, "look", ""), (0, "claim", "s0"), (1, "look", ""))
MOVED = (*HELD, (0, "handle", "s0"), (0, "commit", "s0"))
BACK = (*MOVED, (1, "send", "from"), (0, "commit", "s0"), (0, "handle", "s0"), (0, "commit", "s0"), (1, "send", "to"))
RETURNING = (*BACK[:6], (0, "commit", "s0", 6))
FREE = (*MOVED, (0, "release", "s0"), (1, "look", ""))
CARRIED = (*FREE, (0, "look", "", 1), (1, "carry", "s0"), (1, "look", ""), (1, "carry", "s0", 4))


def setting(moves: tuple[int, ...], initial_actions: Any, verbs: str, **faults: int) -> SwapModel:  # noqa: ANN401
    """Return a setting that is as small as the order of events allows."""
    return build_swap_model(moves, initial_actions, *verbs.split(), faults=faults)


PLANTS: dict[Plant, Callable[[], SwapModel]] = {
    copy_with_a_later_epoch: lambda: setting((1, 2), HELD, "look claim commit"),
    claiming_by_the_copys_checkpoint: lambda: setting((3, 0), HELD, "handle commit release"),
    claiming_by_the_checkpoint_of_an_earlier_turn: lambda: setting((1, 2), BACK, "commit look claim", tick=1),
    claiming_before_the_mark: lambda: setting((3, 2), HELD, "commit steal look claim"),
    marking_whatever_stands_there: lambda: setting((1, 1), HELD, "commit steal"),
    a_late_mover_that_does_not_compare: lambda: setting((1, 2), HELD, "look commit steal claim", tick=1),
    reading_one_row: lambda: setting((0, 2), MOVED, "look claim", tick=1),
    combining_rows_of_different_times: lambda: setting((3, 2), RETURNING, "look claim commit send"),
    freeing_what_is_left_before_it_is_a_copy: lambda: setting((2, 3), CARRIED, "look claim"),
}


@pytest.mark.more
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_checker_finds_nothing_without_a_planted_fault(plant: Plant) -> None:
    """The settings of the planted faults break no law by themselves."""
    assert PLANTS[plant]().explore(FOUND_WITHIN).findings == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker finds an order of requests in which the planted fault breaks a law."""
    plant(monkeypatch)
    findings = PLANTS[plant]().explore(FOUND_WITHIN).findings
    assert findings, plant.__doc__
