"""Tests with scripted arrival times how long a group write of layout `sessions` waits for more tickets."""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from attrs import Factory, define
from object_memory import ObjectMemory

from leasehold.balancer.model import Position
from leasehold.errors import OutcomeUnknown
from leasehold.stores.objects.store import ObjectCells
from leasehold.stores.requests import StoredObject
from leasehold.stores.sessions import group
from leasehold.stores.sessions.group import EntryChange, Page, Ticket
from leasehold.stores.sessions.rows import Remark, SessionEntry

AT = 0.0, 0.06, 0.12, 0.19
"""The offsets within a second at which the tickets of four leases arrive."""


@define
class Script:
    """A scheduler in virtual time. `due` contains the tickets that will arrive, each with its arrival time."""

    now: float = 0.0
    due: deque[tuple[float, Ticket]] = Factory(deque)
    waiting: deque[Ticket] = Factory(deque)

    def clock(self) -> float:
        return self.now

    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()

    def queue(self) -> "Script":
        return self

    def put(self, item: Any, /) -> None:  # noqa: ANN401  as a scheduler's
        self.waiting.append(item)

    def get(self, until: float = math.inf) -> Any:  # noqa: ANN401  likewise
        """Take the next ticket that arrives by the time `until`."""
        while self.due and self.due[0][0] <= self.now:
            self.waiting.append(self.due.popleft()[1])
        if not self.waiting and self.due and self.due[0][0] <= until:
            self.now, next_ticket = self.due.popleft()
            self.waiting.append(next_ticket)
        if self.waiting:
            return self.waiting.popleft()
        self.now = max(self.now, until)
        return None


def make_ticket(key: str, *, patient: bool = True, epoch: int = 1) -> Ticket:
    """Return a ticket for a checkpoint of this lease."""
    return Ticket(key, lambda: EntryChange(SessionEntry(epoch, Position("1"))), patient=patient)


def commit_tickets(script: Script, page: Page, arrivals: Mapping[float, Ticket]) -> list[tuple[float, set[str]]]:
    """Return the writes that these tickets cause, each with its time and the keys of its leases."""
    script.due.extend(sorted(arrivals.items()))
    writes = []
    while script.due:
        tickets = set(arrivals.values())
        done_before = {done_ticket.key for done_ticket in tickets if done_ticket.done}
        script.now = max(script.now, script.due[0][0])
        page.commit(script.due.popleft()[1])
        writes.append(
            (round(script.now, 3), {done_ticket.key for done_ticket in tickets if done_ticket.done} - done_before)
        )
    return writes


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def page(script: Script) -> Page:
    """Return a session that has begun."""
    page = Page(
        ObjectCells(ObjectMemory(), ""), "one", "ann", sync=script, gather_seconds=0.2, reread=lambda _keys: None
    )
    assert page.begin()
    return page


def second(number: int, *offsets: float) -> dict[float, Ticket]:
    """Return the tickets of one second.

    Lease 0 arrives at the first of these offsets, lease 1 at the next, and so on.
    """
    return {number + offset: make_ticket(str(key)) for key, offset in enumerate(offsets)}


def test_the_first_group_waits_only_for_simultaneous_tickets(script: Script, page: Page) -> None:
    """The first group cannot know which leases to expect, so it does not wait for the full time."""
    assert commit_tickets(script, page, second(1, 0.0, 0.04, 0.1)) == [(1.09, {"0", "1"}), (1.15, {"2"})]


def test_a_group_waits_for_all_leases_of_the_previous_round(script: Script, page: Page) -> None:
    """Even if the tickets of a worker's few leases arrive far apart, they are written together."""
    commit_tickets(script, page, second(1, *AT))
    assert commit_tickets(script, page, second(2, *AT)) == [(2.19, {"0", "1", "2", "3"})]


def test_a_complete_group_is_written_immediately(script: Script, page: Page) -> None:
    commit_tickets(script, page, second(1, 0.0, 0.01))
    assert commit_tickets(script, page, second(2, 0.0, 0.01)) == [(2.01, {"0", "1"})]


def test_a_group_waits_only_once_for_an_absent_lease(script: Script, page: Page) -> None:
    for number in (1, 2):
        commit_tickets(script, page, second(number, *AT))
    assert commit_tickets(script, page, second(3, *AT[:3])) == [(3.2, {"0", "1", "2"})]
    assert commit_tickets(script, page, second(4, *AT[:3])) == [(4.12, {"0", "1", "2"})]


def test_a_group_does_not_wait_for_leases_blocked_by_its_own_write(script: Script, page: Page) -> None:
    """There are fewer threads than leases, so some tickets can arrive only after the write."""
    late_arrivals = 0.3, 0.31, 0.5, 0.51
    for number in (1, 2):
        commit_tickets(script, page, second(number, *AT, *late_arrivals))
    assert commit_tickets(script, page, second(3, *AT, *late_arrivals)) == [
        (3.2, {"0", "1", "2", "3"}),
        (3.36, {"4", "5"}),
        (3.51, {"6", "7"}),
    ]


def test_an_urgent_ticket_writes_the_waiting_ones_along(script: Script, page: Page) -> None:
    """The bulletin does not wait for the checkpoints of the worker that publishes it."""
    for number in (1, 2):
        commit_tickets(script, page, second(number, *AT))
    arrivals = {3.0: make_ticket("0"), 3.05: make_ticket("1", patient=False), 3.06: make_ticket("2")}
    assert commit_tickets(script, page, arrivals)[0] == (3.05, {"0", "1"})


def test_a_new_lease_is_written_with_the_others(script: Script, page: Page) -> None:
    for number in (1, 2):
        commit_tickets(script, page, second(number, 0.05, 0.1))
    arrivals = {
        4.0: make_ticket("new"),
        **{3.0 + offset: offset_ticket for offset, offset_ticket in second(1, 0.05, 0.1).items()},
    }
    assert commit_tickets(script, page, arrivals) == [(4.1, {"new", "0", "1"})]


def test_a_lost_lease_is_expected_again_only_after_its_return(script: Script, page: Page) -> None:
    """Groups do not wait for a lease that has another owner. They wait for it again after it has come back."""
    for number in (1, 2):
        commit_tickets(script, page, second(number, 0.0, 0.1))
    page.superseded["1"] = 1  # the lease's row was seen with a later epoch
    assert commit_tickets(script, page, second(3, 0.0)) == [(3.0, {"0"})]
    assert set(page.session.entries) == {"0"}
    commit_tickets(script, page, {4.0: make_ticket("1", epoch=3), 4.1: make_ticket("0")})
    assert commit_tickets(script, page, {5.0: make_ticket("0"), 5.1: make_ticket("1", epoch=3)}) == [(5.1, {"0", "1"})]


def test_a_group_does_not_wait_for_impatient_tickets(script: Script, page: Page) -> None:
    """A handler that requests its own checkpoints does not delay the checkpoints of other leases."""
    for number in (1, 2, 3):
        arrivals = {number + 0.0: make_ticket("0"), number + 0.1: make_ticket("1", patient=False)}
        writes = commit_tickets(script, page, arrivals)
    assert writes == [(3.0, {"0"}), (3.1, {"1"})]


def test_a_ticket_just_before_a_round_belongs_to_it(script: Script, page: Page) -> None:
    commit_tickets(script, page, {1.0: make_ticket("0")})
    commit_tickets(script, page, {2.0: make_ticket("1"), 2.04: make_ticket("0")})
    assert commit_tickets(script, page, {3.0: make_ticket("0"), 3.1: make_ticket("1")}) == [(3.1, {"0", "1"})]


FOREIGN = (KeyError("x"), MemoryError(), RecursionError(), UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"))


class BreakingRows(ObjectCells):
    """Rows whose next conditional write raises `error`."""

    error: BaseException | None = None

    def put_if_match(self, name: str, fields: Mapping[str, str], version: str) -> str | None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().put_if_match(name, fields, version)


@pytest.mark.parametrize("error", [*FOREIGN, KeyboardInterrupt(), SystemExit()], ids=lambda error: type(error).__name__)
def test_a_failed_group_write_reports_no_ticket_as_done(script: Script, error: BaseException) -> None:
    """The first commit tries to write both tickets. A later attempt succeeds."""
    rows = BreakingRows(ObjectMemory(), "")
    page = Page(rows, "one", "ann", sync=script, gather_seconds=0.2, reread=lambda _keys: None)
    assert page.begin()
    first_ticket, second_ticket = make_ticket("0"), make_ticket("1")
    script.waiting.append(second_ticket)
    rows.error = error
    with pytest.raises(OutcomeUnknown if isinstance(error, Exception) else type(error)):
        page.commit(first_ticket)
    assert (second_ticket.done, second_ticket.change, type(second_ticket.fault)) == (True, None, OutcomeUnknown)
    assert not page.settled
    assert page.commit(make_ticket("0", patient=False)) is not None


@pytest.mark.parametrize("error", FOREIGN, ids=lambda error: type(error).__name__)
def test_a_dequeued_ticket_always_gets_a_result(
    script: Script, page: Page, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_ticket = make_ticket("1")
    script.waiting.append(second_ticket)
    monkeypatch.setattr(page, "_write_group", lambda _tickets: pytest.fail("nothing was gathered"))

    first_result = iter([None])

    def raise_on_second_call() -> None:
        """Raise on the second call, when the first ticket has already been taken."""
        try:
            next(first_result)
        except StopIteration:
            raise error from None

    monkeypatch.setattr(page, "_missing_keys", raise_on_second_call)
    page._round_keys.add("1")  # noqa: SLF001  a second ticket begins a round, which looks for the missing ones
    with pytest.raises(OutcomeUnknown):
        page.commit(make_ticket("0"))
    assert (second_ticket.done, type(second_ticket.fault)) == (True, OutcomeUnknown)


def test_an_interrupt_during_error_handling_reports_no_ticket_as_done(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = BreakingRows(ObjectMemory(), "")
    page = Page(rows, "one", "ann", sync=script, gather_seconds=0.2, reread=lambda _keys: None)
    assert page.begin()
    second_ticket = make_ticket("1")
    script.waiting.append(second_ticket)
    rows.error = KeyError("x")

    def raise_interrupt(_error: BaseException) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "error_summary", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        page.commit(make_ticket("0"))
    assert (second_ticket.done, second_ticket.change, type(second_ticket.fault)) == (True, None, OutcomeUnknown)


def test_an_urgent_ticket_does_not_wait_for_later_patient_ones(script: Script, page: Page) -> None:
    script.waiting.extend([make_ticket("0", patient=False), make_ticket("1")])
    page.commit(make_ticket("2"))
    assert script.now == 0.0


def test_a_steady_stream_of_tickets_is_written_after_the_gather_time(script: Script, page: Page) -> None:
    offsets = tuple(number * 0.04 for number in range(10))
    assert commit_tickets(script, page, second(1, *offsets))[0] == (1.2, {"0", "1", "2", "3", "4", "5"})


def test_a_group_does_not_wait_for_a_lease_that_left_the_session(script: Script, page: Page) -> None:
    for number in (1, 2):
        commit_tickets(script, page, second(number, 0.0, 0.1))
    page.commit(Ticket("1", lambda: EntryChange(None)))
    assert commit_tickets(script, page, second(3, 0.0)) == [(3.0, {"0"})]


@define
class Lock:
    """A lock that calls `meet` just before it is taken."""

    held: bool = False
    meet: Callable[[], object] = lambda: None

    def __enter__(self) -> None:
        self.meet()
        assert not self.held
        self.held = True

    def __exit__(self, *_error: object) -> None:
        self.held = False


class GuardedRows(ObjectCells):
    """Rows that may only be accessed under this lock."""

    lock = Lock(held=True)

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        assert self.lock.held
        return super().read(names, stale_ok=stale_ok)

    def put_if_match(self, name: str, fields: Mapping[str, str], version: str) -> str | None:
        assert self.lock.held
        return super().put_if_match(name, fields, version)


def open_guarded_page(script: Script, monkeypatch: pytest.MonkeyPatch) -> tuple[Page, Lock, ObjectMemory]:
    """Return a session that has begun, its lock, and its rows."""
    lock, objects = Lock(), ObjectMemory()
    monkeypatch.setattr(script.__class__, "lock", lambda _script: lock)
    rows = GuardedRows(objects, "")
    rows.lock = lock
    page = Page(rows, "one", "ann", sync=script, gather_seconds=0.2, reread=lambda _keys: None)
    assert page.begin()
    return page, lock, objects


@pytest.mark.parametrize(
    "call", [lambda page: page.commit(make_ticket("0")), Page.settle, Page.end], ids=["commit", "settle", "end"]
)
def test_the_row_of_a_session_is_accessed_under_its_lock(
    call: Callable[[Page], object], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, two threads would write the session at the same time, and one of them would be rejected."""
    page, lock, objects = open_guarded_page(script, monkeypatch)
    objects.log.clear()
    call(page)
    assert objects.log
    assert not lock.held


def test_a_ticket_that_another_thread_wrote_does_not_wait(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    page, lock, objects = open_guarded_page(script, monkeypatch)

    def commit_first() -> None:
        lock.meet = lambda: None
        page.commit(make_ticket("0", patient=False))

    lock.meet = commit_first
    second_ticket = make_ticket("1")
    assert page.commit(second_ticket) is not None
    assert (script.now, [line for line in objects.log if line.startswith("over")]) == (0.0, ["over session/one"])


def test_an_ended_session_is_not_read_again(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row may be gone by then. It must not look like a row that was deleted while its session lived."""
    page, lock, objects = open_guarded_page(script, monkeypatch)

    def remove_ended_session() -> None:
        page.ended = True
        objects.stored.clear()

    lock.meet = remove_ended_session
    page.settle()
    assert (page.ended, page.vanished) == (True, False)


@pytest.mark.parametrize("vanished", [True, False])
def test_a_deleted_session_is_distinguished_from_an_ended_one(script: Script, vanished: bool) -> None:
    objects = ObjectMemory()
    page = Page(ObjectCells(objects, ""), "one", "ann", sync=script, gather_seconds=0.2, reread=lambda _keys: None)
    assert page.begin()
    if vanished:
        objects.stored.clear()
    else:
        page.end()
    page.settle()
    assert (page.ended, page.vanished) == (True, vanished)


def test_a_lease_lost_during_a_group_write_leaves_the_session_with_the_next_one(script: Script) -> None:
    objects = ObjectMemory()
    page = Page(ObjectCells(objects, ""), "one", "ann", sync=script, gather_seconds=0.2, reread=lambda _keys: None)
    assert page.begin()
    commit_tickets(script, page, second(1, 0.0, 0.0001, 0.0002))
    page.superseded["0"] = 1

    def lose_lease(line: str) -> None:
        if line.startswith("over"):
            page.superseded["1"] = 1

    objects.before = lose_lease
    page.commit(make_ticket("2", patient=False))
    assert set(page.session.entries) == {"1", "2"}
    page.commit(make_ticket("2", patient=False))
    assert set(page.session.entries) == {"2"}


def test_annotations_are_stored_before_the_session_and_only_if_they_have_changed(script: Script) -> None:
    """A worker that reads the new version of a lease also reads its annotations."""
    objects = ObjectMemory()
    page = Page(ObjectCells(objects, ""), "one", "ann", sync=script, gather_seconds=0.2, reread=lambda _keys: None)
    assert page.begin()
    objects.log.clear()
    for value in ("3", "3", "4"):
        remark = Remark(1, {"lag": (value, 1)})
        change = EntryChange(SessionEntry(1, Position("1")), remark)
        page.commit(Ticket("0", lambda change=change: change))  # type: ignore[misc]
    assert objects.log == [
        *("new told/one", "over session/one"),
        "over session/one",
        *("over told/one", "over session/one"),
    ]


def test_all_changed_leases_of_a_session_are_read_again(script: Script) -> None:
    reread_keys: list[set[str]] = []
    cells = ObjectCells(ObjectMemory(), "")
    page = Page(cells, "one", "ann", sync=script, gather_seconds=0.2, reread=lambda keys: reread_keys.append(set(keys)))
    assert page.begin()
    stored_row = page.session.stored
    touched_fields = {**stored_row.fields, "touched": '["0", "1"]'}
    assert cells.put_if_match(stored_row.name, touched_fields, stored_row.etag)
    for _ in range(2):
        page.commit(make_ticket("0", patient=False))
    assert reread_keys == [{"0", "1"}]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rejected_ticket_does_not_affect_the_others(script: Script, page: Page, order: tuple[int, int]) -> None:
    tickets = [Ticket("0", lambda: None), make_ticket("1", patient=False)]
    first_ticket, second_ticket = (tickets[number] for number in order)
    script.waiting.append(second_ticket)
    page.commit(first_ticket)
    assert [(ticket.change is None, ticket.fault, ticket.done) for ticket in tickets] == [
        (True, None, True),
        (False, None, True),
    ]
    assert (set(page.session.entries), page.settled) == ({"1"}, True)
