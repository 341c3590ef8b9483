"""Tests layout `sessions`: the order of its writes, the state after a crash between two writes, and its detection."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, Lock

import pytest
from attrs import evolve
from object_memory import ObjectMemory

from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore, ObjectCells
from leasehold.stores.protocol import Done, Lost, Malformed, PassingStore
from leasehold.stores.requests import ObjectFields, StoredObject
from leasehold.stores.sessions.group import EntryChange, ThreadPrimitives, Ticket
from leasehold.stores.sessions.rows import (
    LEASES,
    SESSIONS,
    LeaseRow,
    parse_lease_row,
    parse_session,
    require_valid_row,
)
from leasehold.stores.sessions.store import IDLE_SECONDS, SessionStore, open_in_layout
from leasehold.stores.urls import open_store
from leasehold.stores.writes import (
    AnnotateLease,
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    DeleteLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    ResetLease,
    StealLease,
    TakeBackLease,
    WithdrawRequest,
    Write,
)
from leasehold_lab.contract.actors import (
    create_owned_lease,
    create_unowned_lease,
    expect_applied,
    expect_rejected,
    read_stored_lease,
)

KEY = "s-0"
AT = Position("41")


def two(objects: ObjectMemory) -> tuple[SessionStore, SessionStore]:
    """Return two stores of one table, as two processes would open them."""
    return tuple(SessionStore(ObjectCells(objects, ""), gather_seconds=0.0) for _ in range(2))  # type: ignore[return-value]


def scene(objects: ObjectMemory, next_owner: bool = False) -> tuple[SessionStore, SessionStore, Lease]:
    """Return the stores of ann and bob, and a lease that ann owns at position 41.

    Bob has a session. If `next_owner` is true, he has requested the lease.
    """
    ann_store, bob_store = two(objects)
    lease = expect_applied(ann_store.write(CheckpointLease(create_owned_lease(ann_store, key=KEY), AT)))
    create_owned_lease(bob_store, "bob", key="s-1")
    if next_owner:
        expect_applied(bob_store.write(RequestLease(read_stored_lease(bob_store, KEY), "bob")))
        lease = expect_applied(ann_store.write(RenewLease(lease)))
    return ann_store, bob_store, lease


Step = Callable[[SessionStore, SessionStore, Lease], object]

STEPS: dict[str, tuple[bool, Step, tuple[str, ...]]] = {
    "renewal": (False, lambda ann, _bob, lease: ann.write(RenewLease(lease)), ("over session",)),
    "checkpoint": (
        False,
        lambda ann, _bob, lease: ann.write(CheckpointLease(lease, Position("42"))),
        ("over session",),
    ),
    "claim of an expired lease": (
        False,
        lambda _ann, bob, _lease: bob.write(ClaimLease(read_stored_lease(bob, KEY), "bob")),
        ("over session", "over lease", "over session"),
    ),
    "theft": (
        False,
        lambda _ann, bob, lease: bob.write(StealLease(lease, "bob")),
        ("over session", "over lease", "over session"),
    ),
    "request": (
        False,
        lambda _ann, bob, lease: bob.write(RequestLease(lease, "bob")),
        ("over lease", "over session"),
    ),
    "gift": (True, lambda ann, _bob, lease: ann.write(GiveLease(lease, AT)), ("over lease",)),
    "gift and acceptance": (
        True,
        lambda ann, bob, lease: bob.write(ClaimLease(expect_applied(ann.write(GiveLease(lease, AT))), "bob")),
        ("over lease", "over session"),
    ),
    "gift taken back": (
        True,
        lambda ann, _bob, lease: ann.write(TakeBackLease(expect_applied(ann.write(GiveLease(lease, AT))), "ann")),
        ("over lease", "over session", "over lease", "over session"),
    ),
    "release": (False, lambda ann, _bob, lease: ann.write(ReleaseLease(lease, "ann")), ("over lease",)),
    "release of another's": (
        False,
        lambda _ann, bob, _lease: bob.write(ReleaseLease(read_stored_lease(bob, KEY), "bob")),
        ("over session", "over lease"),
    ),
    "end": (False, lambda ann, _bob, lease: ann.write(CheckpointLease(lease, SHARD_END)), ("over lease",)),
    "delete": (
        False,
        lambda _ann, bob, _lease: bob.write(DeleteLease(read_stored_lease(bob, KEY))),
        ("over session", "delete lease"),
    ),
}


def sessions(objects: ObjectMemory) -> tuple[str, ...]:
    """Return the names of the session rows."""
    return tuple(name for name in objects.stored if name.startswith("session/"))


def writes_of(objects: ObjectMemory) -> tuple[str, ...]:
    """Return the writes that were sent, each as its verb and the kind of the row."""
    verbs = [line.split() for line in objects.log]
    return tuple(f"{verb} {name.partition('/')[0]}" for verb, name in verbs if verb in {"new", "over", "delete"})


@pytest.mark.parametrize("step", STEPS)
def test_the_session_is_written_before_the_row_of_the_lease(step: str) -> None:
    """The row of a lease names a session. The session must exist before that, so that its checkpoints can be found."""
    next_owner, execute_step, expected_writes = STEPS[step]
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects, next_owner)
    objects.log.clear()
    assert isinstance(execute_step(ann_store, bob_store, lease), Done)
    assert writes_of(objects) == expected_writes


@pytest.mark.parametrize(
    ("step", "place"), [(step, n) for step, (_, _, order) in STEPS.items() for n in range(len(order))]
)
@pytest.mark.parametrize("how", ["before", "after"])
def test_after_any_crash_the_next_owner_starts_at_the_checkpoint(step: str, place: int, how: str) -> None:
    """A crash between two writes skips no records, undoes no checkpoint, and leaves every lease claimable."""
    next_owner, execute_step, _ = STEPS[step]
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects, next_owner)
    objects.log.clear()

    def crash(line: str) -> None:
        verb = line.split(maxsplit=1)[0]
        if verb in {"new", "over", "delete"} and len(writes_of(objects)) == place:
            objects.mute = frozenset({"new", "over"}) if how == "after" else frozenset()
            if how == "before":
                raise OutcomeUnknown("the process died")

    objects.before = crash
    with suppress(OutcomeUnknown):
        execute_step(ann_store, bob_store, lease)
    objects.before, objects.mute = (lambda _line: None), frozenset()
    cat_store = two(objects)[0]
    leases = cat_store.get([KEY])
    if not leases:
        assert step == "delete"
        return
    claimed_lease = expect_applied(cat_store.write(ClaimLease(leases[0], "cat")))
    allowed_positions = (
        {SHARD_END} if step == "end" and leases[0].ended else {AT, Position("42")} if step == "checkpoint" else {AT}
    )
    assert claimed_lease.checkpoint in allowed_positions


@pytest.mark.parametrize("make", [lambda lease: CheckpointLease(lease, Position("42")), RenewLease])
def test_the_next_group_write_settles_an_unanswered_one(make: Callable[[Lease], Write]) -> None:
    """After a lost response, a worker keeps its other leases, and does not assume that the write was stored."""
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    objects.mute = frozenset({"over"})
    objects.log.clear()
    with pytest.raises(OutcomeUnknown):
        ann_store.write(make(lease))
    objects.mute = frozenset()
    assert [line.partition("/")[0] for line in objects.log] == ["over session", "get session", "over session"]
    assert expect_applied(ann_store.write(CheckpointLease(lease, Position("43")))).checkpoint == Position("43")


def test_a_lease_can_be_released_after_an_unanswered_group_write() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    objects.mute = frozenset({"over"})
    with pytest.raises(OutcomeUnknown):
        ann_store.write(CheckpointLease(lease, Position("42")))
    objects.mute = frozenset()
    assert expect_applied(ann_store.write(ReleaseLease(lease, "ann"))) == read_stored_lease(bob_store, KEY)
    assert (read_stored_lease(bob_store, KEY).owner, read_stored_lease(bob_store, KEY).checkpoint) == (
        None,
        Position("42"),
    )


def test_a_lost_response_costs_one_read_for_all_leases() -> None:
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    objects.mute = frozenset({"over"})

    def unmute_on_get(line: str) -> None:
        if line.startswith("get session"):
            objects.mute = frozenset()

    objects.before = unmute_on_get
    objects.log.clear()
    assert expect_applied(ann_store.write(CheckpointLease(lease, Position("42")))).checkpoint == Position("42")
    assert [line.split()[0] for line in objects.log] == ["over", "get", "over"]


def test_a_late_release_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that arrives late is rejected, because it would reset the lease to an earlier position."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    late_writes: list[tuple[str, ObjectFields, str]] = []

    def lose(_objects: ObjectMemory, *write: str) -> None:
        late_writes.append(write)  # type: ignore[arg-type]
        raise OutcomeUnknown("on its way")

    with monkeypatch.context() as patch_context:
        patch_context.setattr(ObjectMemory, "put_if_match", lose)
        with pytest.raises(OutcomeUnknown):
            ann_store.write(ReleaseLease(lease, "ann"))
    lease = expect_applied(ann_store.write(CheckpointLease(lease, Position("42"))))
    assert objects.put_if_match(*late_writes[0]) is None
    assert (read_stored_lease(bob_store, KEY).checkpoint, read_stored_lease(bob_store, KEY).owner) == (
        Position("42"),
        "ann",
    )
    objects.log.clear()
    expect_applied(ann_store.write(RenewLease(lease)))
    assert [line.partition("/")[0] for line in objects.log] == ["over session"], "it is settled, and reads no more"


def test_many_checkpoints_cost_one_write() -> None:
    objects = ObjectMemory()
    store = SessionStore(ObjectCells(objects, ""))
    leases = [create_owned_lease(store, key=f"s-{n}") for n in range(20)]
    objects.log.clear()
    gate = Barrier(len(leases))

    def checkpoint(lease: Lease) -> Lease:
        gate.wait()
        return expect_applied(store.write(CheckpointLease(lease, AT, patient=True)))

    with ThreadPoolExecutor(len(leases)) as pool:
        checkpointed = list(pool.map(checkpoint, leases))
    assert {lease.checkpoint for lease in checkpointed} == {AT}
    assert len(writes_of(objects)) < len(leases) / 4


def test_a_renewal_returns_a_pending_request() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(bob_store.write(RequestLease(read_stored_lease(bob_store, KEY), "bob")))
    lease = expect_applied(ann_store.write(RenewLease(lease)))
    assert lease.next_owner == "bob"
    objects.log.clear()
    assert expect_applied(ann_store.write(RenewLease(lease))).next_owner == "bob"
    assert [line.partition("/")[0] for line in objects.log] == ["over session"], "it has heard, and reads no more"


def test_a_session_drops_lost_leases_and_keeps_returned_ones() -> None:
    """A session drops lost leases to make room for new ones, and never drops a lease that it still has."""
    ann_store, bob_store, lease = scene(ObjectMemory())
    second_lease = create_owned_lease(ann_store, key="s-2")
    lease, second_lease = (
        expect_applied(ann_store.write(RenewLease(owned_lease, annotations=(("lag", "3"),))))
        for owned_lease in (lease, second_lease)
    )
    stolen_lease = expect_applied(bob_store.write(StealLease(lease, "bob")))
    expect_rejected(ann_store.write(RenewLease(lease)))
    second_lease = expect_applied(ann_store.write(RenewLease(second_lease)))
    (page,) = ann_store._pages.values()  # noqa: SLF001  what it holds is what is stored
    assert (set(page.session.entries), set(page.remarks)) == ({"s-2"}, {"s-2"})
    retaken_lease = expect_applied(ann_store.write(StealLease(stolen_lease, "ann")))
    expect_applied(ann_store.write(RenewLease(second_lease)))
    assert set(page.session.entries) == {KEY, "s-2"}
    assert expect_applied(ann_store.write(CheckpointLease(retaken_lease, Position("43")))).checkpoint == Position("43")


def test_the_leases_of_an_ended_session_are_free_at_once() -> None:
    ann_store, bob_store, _ = scene(ObjectMemory())
    create_owned_lease(ann_store, key="s-2")
    expect_applied(bob_store.write(ClaimLease(read_stored_lease(bob_store, KEY), "bob")))
    assert read_stored_lease(bob_store, "s-2").owner is None
    assert expect_applied(bob_store.write(ClaimLease(read_stored_lease(bob_store, "s-2"), "bob"))).owner == "bob"


def test_a_claim_of_a_given_lease_keeps_the_session_of_its_next_owner() -> None:
    """A worker that is slow to accept one lease keeps all the others."""
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects, next_owner=True)
    expect_applied(ann_store.write(GiveLease(lease, AT)))
    cat_store = two(objects)[0]
    assert claim_lease(cat_store, "cat").owner == "cat"
    assert read_stored_lease(cat_store, "s-1").owner == "bob"


def test_a_worker_whose_session_ended_starts_another() -> None:
    ann_store, bob_store, lease = scene(ObjectMemory())
    expect_applied(bob_store.write(ClaimLease(read_stored_lease(bob_store, KEY), "bob")))
    assert expect_rejected(ann_store.write(RenewLease(lease))) == read_stored_lease(bob_store, KEY)
    assert expect_applied(ann_store.write(StealLease(read_stored_lease(ann_store, KEY), "ann"))).owner == "ann"
    assert len(ann_store._pages) == 1, "a long life would keep every session that it had"  # noqa: SLF001  they are counted


def test_a_lease_is_as_old_as_the_last_write_of_its_session() -> None:
    """A living owner renews its session row only, so the row of the lease may be much older."""
    objects = ObjectMemory()
    _, bob_store, _ = scene(objects)
    name = f"lease/{KEY}"
    objects.stored[name] = evolve(objects.stored[name], age=60.0)
    assert (read_stored_lease(bob_store, KEY).idle, bob_store.list().leases[0].idle) == (0.0, 0.0)


def test_a_late_checkpoint_in_the_same_aggregated_record_counts() -> None:
    """The later of the positions in the row and in the session is the checkpoint, by their sub-sequences, too."""
    ann_store, bob_store, lease = scene(ObjectMemory())
    expect_applied(ann_store.write(CheckpointLease(lease, Position("42", 1))))
    late_position = Position("42", 5)
    expect_applied(bob_store.write(CheckpointLate(read_stored_lease(bob_store, KEY), late_position)))
    assert claim_lease(bob_store, "bob").checkpoint == late_position


def test_a_restarted_worker_continues_its_leases_at_the_last_checkpoint() -> None:
    objects = ObjectMemory()
    scene(objects)
    new_store = two(objects)[1]
    assert expect_applied(new_store.write(ClaimLease(read_stored_lease(new_store, KEY), "ann"))).checkpoint == AT


def test_closing_a_store_frees_its_leases_at_once() -> None:
    ann_store, bob_store, _ = scene(ObjectMemory())
    ann_store.close()
    assert (read_stored_lease(bob_store, KEY).owner, read_stored_lease(bob_store, KEY).checkpoint) == (None, AT)


def test_a_lease_of_an_ended_owner_has_no_next_owner() -> None:
    ann_store, bob_store, _ = scene(ObjectMemory(), next_owner=True)
    assert read_stored_lease(bob_store, KEY).next_owner == "bob"
    ann_store.close()
    ended_lease = read_stored_lease(bob_store, KEY)
    assert (ended_lease.owner, ended_lease.next_owner, ended_lease.yields) == (None, None, False)


def test_an_ended_session_is_removed_when_no_lease_names_it() -> None:
    """Ended processes leave no rows behind, but a session that contains the position of a lease is kept."""
    objects = ObjectMemory()
    ann_store, bob_store, _ = scene(objects)
    ann_store.close()
    for _ in range(3):
        bob_store.list()
    assert len(sessions(objects)) == 2  # a lease still names ann's session
    expect_applied(bob_store.write(ClaimLease(read_stored_lease(bob_store, KEY), "bob")))
    for _ in range(3):
        bob_store.list()
    assert len(sessions(objects)) == 1


def test_an_idle_session_without_leases_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle session without leases belongs to a worker that died."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    for _ in range(5):
        bob_store.list()
    assert len(sessions(objects)) == 2, "it may be about to take one"
    monkeypatch.setattr("leasehold.stores.sessions.store.IDLE_SECONDS", -1.0)
    for _ in range(3):
        bob_store.list()
    assert len(sessions(objects)) == 1, "bob's, which a lease names, stays"
    expect_rejected(
        ann_store.write(ClaimLease(read_stored_lease(ann_store, KEY), "ann"))
    )  # ann's first write fails, because her session has ended
    assert expect_applied(ann_store.write(ClaimLease(read_stored_lease(ann_store, KEY), "ann"))).owner == "ann"


def test_a_session_that_will_get_a_lease_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a lease were given to a session that has ended, no worker would read it."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    cat_store = two(objects)[0]
    expect_applied(cat_store.write(RequestLease(read_stored_lease(cat_store, KEY), "cat")))
    monkeypatch.setattr("leasehold.stores.sessions.store.IDLE_SECONDS", -1.0)
    for _ in range(3):
        bob_store.list()
    given_lease = expect_applied(ann_store.write(GiveLease(expect_applied(ann_store.write(RenewLease(lease))), AT)))
    assert expect_applied(cat_store.write(ClaimLease(given_lease, "cat"))).owner == "cat"
    assert len(sessions(objects)) == 3, "it began none anew"


def test_a_reset_lease_is_read_from_its_new_position() -> None:
    """A position that the session stored in an earlier epoch is not used."""
    ann_store, bob_store, lease = scene(ObjectMemory())
    released_lease = expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    expect_applied(bob_store.write(ResetLease(released_lease, TRIM_HORIZON)))
    assert (
        expect_applied(ann_store.write(ClaimLease(read_stored_lease(ann_store, KEY), "ann"))).checkpoint == TRIM_HORIZON
    )


def test_a_slow_thread_keeps_a_lease_that_another_thread_took() -> None:
    """The slow thread does not remove the entry of a lease that was just taken, or its checkpoints."""
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects, next_owner=True)
    given_lease = expect_applied(ann_store.write(GiveLease(lease, AT)))
    taken_leases: list[Lease] = []

    def overtake(line: str) -> None:
        if line.startswith("get session"):
            objects.before = lambda _line: None
            taken_leases.append(expect_applied(ann_store.write(TakeBackLease(given_lease, "ann"))))

    objects.before = overtake
    assert (
        expect_rejected(ann_store.write(TakeBackLease(given_lease, "ann")))
        == taken_leases[0]
        == read_stored_lease(ann_store, KEY)
    )


def test_a_steal_of_an_outdated_row_keeps_a_later_entry() -> None:
    """A worker that reads an old version of a row neither stops its present owner nor undoes the checkpoint."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    outdated_row = objects.stored[f"lease/{KEY}"]
    stolen = expect_applied(bob_store.write(StealLease(lease, "bob")))
    retaken = expect_applied(ann_store.write(StealLease(stolen, "ann")))
    checkpointed = expect_applied(ann_store.write(CheckpointLease(retaken, Position("43"))))
    current_row = objects.stored[f"lease/{KEY}"]
    objects.stored[f"lease/{KEY}"] = outdated_row
    outdated_reads = 4

    def answer_with_current_row(line: str) -> None:
        nonlocal outdated_reads
        outdated_reads -= line == f"get lease/{KEY}"
        if outdated_reads < 0:
            objects.stored[f"lease/{KEY}"] = current_row

    objects.before = answer_with_current_row
    cat_store = two(objects)[0]
    outdated_lease = read_stored_lease(cat_store, KEY)
    assert outdated_lease.epoch < retaken.epoch
    assert expect_applied(cat_store.write(StealLease(outdated_lease, "cat"))).checkpoint == Position("43")
    assert outdated_reads < 0
    assert expect_rejected(ann_store.write(RenewLease(checkpointed)))


def test_an_outdated_lease_is_rejected_after_writes_for_other_leases() -> None:
    """A thread that was overtaken by another one stops reading, whichever leases the session has written since."""
    ann_store, _, lease = scene(ObjectMemory())
    second_lease = create_owned_lease(ann_store, key="s-2")
    renewed_lease = expect_applied(ann_store.write(RenewLease(lease)))
    expect_applied(ann_store.write(RenewLease(second_lease)))
    assert expect_rejected(ann_store.write(RenewLease(lease))) == read_stored_lease(ann_store, KEY)
    assert expect_applied(ann_store.write(RenewLease(renewed_lease))).owner == "ann"


def claim_lease(store: SessionStore, worker: str) -> Lease:
    """Return the lease after this worker has claimed it."""
    return expect_applied(store.write(ClaimLease(read_stored_lease(store, KEY), worker)))


def give_lease_to_ann(ann_store: SessionStore, bob_store: SessionStore) -> Lease:
    """Return the lease after bob has claimed it and given it to ann."""
    expect_applied(ann_store.write(RequestLease(claim_lease(bob_store, "bob"), "ann")))
    return expect_applied(bob_store.write(GiveLease(read_stored_lease(bob_store, KEY), AT)))


OWN_WRITES: dict[str, Callable[[SessionStore, SessionStore], Write]] = {
    "claim": lambda ann, _bob: ClaimLease(read_stored_lease(ann, KEY), "ann"),
    "acceptance": lambda ann, bob: ClaimLease(give_lease_to_ann(ann, bob), "ann"),
    "checkpoint": lambda ann, _bob: CheckpointLease(claim_lease(ann, "ann"), AT),
}


@pytest.mark.parametrize("write", OWN_WRITES)
def test_an_outdated_listing_does_not_make_a_write_lost(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a successful write were reported as lost, its lease would be owned but not read by any worker."""
    objects = ObjectMemory()
    cells = ObjectCells(objects, "")
    ann_store, bob_store = SessionStore(cells, gather_seconds=0.0), two(objects)[0]
    create_owned_lease(ann_store, key="s-1")
    expect_applied(bob_store.write(CreateLease(Lease(KEY))))
    outdated_rows = cells.list("lease/", "session/")
    pending_write = OWN_WRITES[write](ann_store, bob_store)

    def list_during_write(line: str) -> None:
        if line.startswith("over session"):
            objects.before = lambda _line: None
            monkeypatch.setattr(cells, "list", lambda *_names, **_how: outdated_rows)
            ann_store.list()

    objects.before = list_during_write
    assert expect_applied(ann_store.write(pending_write)) == read_stored_lease(ann_store, KEY)


def test_the_session_entry_of_a_deleted_lease_is_not_reused() -> None:
    """A shard of a recreated stream is not read from the old stream's position."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    objects.stored.pop(f"lease/{KEY}")
    row = expect_applied(bob_store.write(CreateLease(Lease(KEY))))
    while row.epoch < lease.epoch - 1:
        row = expect_applied(bob_store.write(ResetLease(row, TRIM_HORIZON)))
    assert expect_applied(ann_store.write(ClaimLease(row, "ann"))).checkpoint == TRIM_HORIZON


def test_a_recreated_lease_can_be_claimed_although_its_next_owner_has_an_entry_of_the_deleted_one() -> None:
    """Otherwise, if the next owner died before it accepted the lease, no worker could ever claim it."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    for _ in range(3):
        lease = expect_applied(bob_store.write(StealLease(lease, "bob")))
        lease = expect_applied(ann_store.write(StealLease(lease, "ann")))
    objects.stored.pop(f"lease/{KEY}")
    expect_applied(bob_store.write(CreateLease(Lease(KEY))))
    new_lease = expect_applied(bob_store.write(ClaimLease(read_stored_lease(bob_store, KEY), "bob")))
    expect_applied(ann_store.write(RequestLease(read_stored_lease(ann_store, KEY), "ann")))
    new_lease = expect_applied(bob_store.write(RenewLease(new_lease)))
    given_lease = expect_applied(bob_store.write(GiveLease(new_lease, AT)))
    assert (given_lease.owner, given_lease.epoch < lease.epoch) == ("ann", True)
    cat_store = two(objects)[0]
    claimed_lease = expect_applied(cat_store.write(ClaimLease(read_stored_lease(cat_store, KEY), "cat")))
    assert (claimed_lease.owner, claimed_lease.checkpoint) == ("cat", AT)


def test_a_rejected_claim_returns_the_stored_lease() -> None:
    ann_store, bob_store, lease = scene(ObjectMemory())

    def release_lease(lease: Lease) -> Lease:
        expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
        return next(row for row in bob_store.list().leases if row.key == KEY)

    former_release = release_lease(lease)
    release_lease(expect_applied(ann_store.write(ClaimLease(read_stored_lease(ann_store, KEY), "ann"))))
    claimed_again = expect_applied(ann_store.write(ClaimLease(read_stored_lease(ann_store, KEY), "ann")))
    assert expect_rejected(bob_store.write(ClaimLease(former_release, "bob"))) == claimed_again


# Rows that were changed by hand


def rewritten(objects: ObjectMemory, name: str, **fields: str) -> None:
    """Change fields of a row, as a user could do in a console."""
    row = objects.stored[name]
    assert objects.put_if_match(name, {**row.fields, **fields}, row.etag)


def test_a_lease_with_a_deleted_row_is_lost_after_the_next_listing() -> None:
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    del objects.stored[f"lease/{KEY}"]
    assert ann_store.list().leases[0].key == "s-1"
    assert expect_rejected(ann_store.write(RenewLease(lease))) is None


def test_a_lease_whose_row_was_restored_can_be_renewed() -> None:
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    row = objects.stored.pop(f"lease/{KEY}")
    ann_store.list()
    objects.stored[row.name] = row
    assert expect_applied(ann_store.write(CheckpointLease(lease, Position("42")))).checkpoint == Position("42")


DELETED: dict[str, tuple[bool, Callable[[Lease], Write], Position, str | None]] = {
    "renewal": (False, RenewLease, AT, "ann"),
    "checkpoint": (False, lambda lease: CheckpointLease(lease, Position("42")), Position("42"), "ann"),
    "end": (False, lambda lease: CheckpointLease(lease, SHARD_END), SHARD_END, None),
    "gift": (True, lambda lease: GiveLease(lease, Position("42")), Position("42"), "bob"),
    "release": (False, lambda lease: ReleaseLease(lease, "ann"), AT, None),
}
"""For each write of the owner: whether bob has requested the lease, the write, and the position and owner afterwards.
"""


@pytest.mark.parametrize("case", DELETED)
def test_a_deleted_session_loses_no_position_of_its_living_owner(case: str) -> None:
    """The owner's next write, of any kind, restores the session and its position from memory (G14)."""
    next_owner, write, position, owner = DELETED[case]
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects, next_owner)
    (page,) = ann_store._pages  # noqa: SLF001  whose row is deleted
    del objects.stored[f"session/{page}"]
    lease_before_write = {listed_lease.key: listed_lease for listed_lease in bob_store.list().leases}[KEY]
    assert (lease_before_write.owner, read_stored_lease(bob_store, KEY).owner) == ("ann", "ann"), (
        "it has to expire first"
    )
    written_lease = expect_applied(ann_store.write(write(lease)))
    assert (written_lease.checkpoint, written_lease.owner) == (position, owner)
    assert (read_stored_lease(bob_store, KEY).checkpoint, read_stored_lease(bob_store, KEY).owner) == (position, owner)
    if owner == "ann":  # the owner continues in a new session
        checkpointed_lease = expect_applied(ann_store.write(CheckpointLease(written_lease, Position("50"))))
        assert read_stored_lease(bob_store, KEY).checkpoint == checkpointed_lease.checkpoint == Position("50")


def test_each_lease_of_a_deleted_session_keeps_its_position() -> None:
    """The position of a lease that is written after the new session has begun is not lost either."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    second_lease = expect_applied(
        ann_store.write(CheckpointLease(create_owned_lease(ann_store, key="s-2"), Position("7")))
    )
    (page,) = ann_store._pages  # noqa: SLF001  whose row is deleted
    del objects.stored[f"session/{page}"]
    assert expect_applied(ann_store.write(RenewLease(second_lease))).checkpoint == Position("7")
    assert expect_applied(ann_store.write(RenewLease(lease))).checkpoint == AT
    assert [read_stored_lease(bob_store, key).checkpoint for key in (KEY, "s-2")] == [AT, Position("7")]


def test_a_claimed_lease_of_a_deleted_session_leaves_its_owner() -> None:
    """What the former owner knows about the lease is used only as long as the row names its session."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    (page,) = ann_store._pages  # noqa: SLF001  whose row is deleted
    del objects.stored[f"session/{page}"]
    expect_applied(bob_store.write(ClaimLease(read_stored_lease(bob_store, KEY), "bob")))
    for write in (RenewLease(lease), CheckpointLease(lease, Position("42")), GiveLease(lease, AT)):
        assert expect_rejected(ann_store.write(write)) == read_stored_lease(bob_store, KEY)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("state", "asleep", "is neither living nor ended"),
        ("leases", "[]", "is not an object of entries"),
        ("leases", '{"s-0": [1]}', "has an entry that is not [epoch, position, …]"),
        ("leases", '{"s-0": [1, "41", 0, "", "held", 1]}', "has an entry that is not [epoch, position, …]"),
    ],
)
def test_an_unreadable_session_is_reported_for_each_of_its_leases(field: str, value: str, why: str) -> None:
    """The leases of an unreadable session are reported, and are not taken from an owner that continues to read."""
    objects = ObjectMemory()
    ann_store, bob_store, _ = scene(objects)
    cat_store = two(objects)[0]
    create_unowned_lease(cat_store, "s-2")
    expect_applied(
        cat_store.write(
            ReleaseLease(expect_applied(cat_store.write(ClaimLease(read_stored_lease(cat_store, "s-2"), "cat"))), "cat")
        )
    )
    cat_store.close()
    (page,) = ann_store._pages  # noqa: SLF001  whose row is changed
    rewritten(objects, f"session/{page}", **{field: value})
    for _ in range(3):
        listing = bob_store.list()
    assert listing.malformed == (Malformed(KEY, field, f"{why}, in its session session/{page}"),)
    assert [listed_lease.key for listed_lease in listing.leases] == ["s-1", "s-2"]
    assert len(sessions(objects)) == 3, "what cannot be read may name the one that has ended"
    with pytest.raises(StoreError, match=rf"row session/{page}: {field}: .*; correct the row, or delete it"):
        bob_store.write(ClaimLease(Lease(KEY), "bob"))


def test_an_unreadable_row_of_annotations_is_ignored() -> None:
    """No decision depends on a row of annotations, so a mistake in it does not block reads or renewals of leases."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    annotated = expect_applied(ann_store.write(RenewLease(lease, annotations=(("lag", "3"),))))
    assert read_stored_lease(bob_store, KEY).annotation("lag") == "3"
    (page,) = ann_store._pages  # noqa: SLF001  whose row is changed
    rewritten(objects, f"told/{page}", told="{")
    assert read_stored_lease(bob_store, KEY).annotation("lag") is None
    assert expect_applied(ann_store.write(RenewLease(annotated, annotations=(("lag", "4"),)))).annotation("lag") == "4"
    assert read_stored_lease(bob_store, KEY).annotation("lag") == "4"


def test_a_write_during_a_request_still_returns_the_request() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    renewals = [lease]

    def overtake(line: str) -> None:
        if line.startswith("over session"):
            objects.before = lambda _line: None
            renewals.append(expect_applied(ann_store.write(RenewLease(lease))))

    objects.before = overtake
    expect_applied(bob_store.write(RequestLease(read_stored_lease(bob_store, KEY), "bob")))
    assert expect_applied(ann_store.write(RenewLease(renewals[-1]))).next_owner == "bob"


# Requests


def test_a_lease_and_its_session_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = ObjectMemory()
    _, bob_store, lease = scene(objects)
    bob_store.list()
    reads: list[list[str]] = []
    read = bob_store._versioned_rows.read  # noqa: SLF001  the test counts these requests

    def record_read(names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        reads.append([name.partition("/")[0] for name in names])
        return read(names, stale_ok=stale_ok)

    monkeypatch.setattr(bob_store._versioned_rows, "read", record_read)  # noqa: SLF001
    assert bob_store.get([KEY]) == (lease,)
    assert reads == [["lease", "session", "told"]]


def test_a_lease_in_a_new_session_is_read_with_that_session() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    assert read_stored_lease(ann_store, KEY).owner == "ann"
    stolen = expect_applied(bob_store.write(StealLease(lease, "bob")))
    checkpointed = expect_applied(bob_store.write(CheckpointLease(stolen, Position("43"))))
    assert read_stored_lease(ann_store, KEY) == checkpointed


def test_a_free_lease_is_claimed_without_another_read() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    (unowned,) = (row for row in bob_store.list().leases if row.key == KEY)
    objects.log.clear()
    assert expect_applied(bob_store.write(ClaimLease(unowned, "bob"))).checkpoint == AT
    assert [" ".join(line.split("/")[0].split()) for line in objects.log] == ["over lease", "over session"]


def test_a_process_starts_with_three_writes_and_no_read() -> None:
    objects = ObjectMemory()
    ann_store, bob_store = two(objects)
    create_unowned_lease(ann_store, KEY)
    (unowned,) = bob_store.list().leases
    objects.log.clear()
    expect_applied(bob_store.write(ClaimLease(unowned, "bob")))
    assert [line.partition("/")[0] for line in objects.log] == ["new session", "over lease", "over session"]


def test_a_claim_of_a_lease_taken_since_the_listing_is_rejected() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    (unowned,) = (row for row in bob_store.list().leases if row.key == KEY)
    claimed_again = expect_applied(ann_store.write(ClaimLease(read_stored_lease(ann_store, KEY), "ann")))
    assert expect_rejected(bob_store.write(ClaimLease(unowned, "bob"))) == claimed_again


# Which layout a table has


def test_the_layout_is_recognized_and_a_mixed_table_rejected(tmp_path: Path) -> None:
    """A worker without the option uses the layout of the table. A table that contains both layouts is rejected."""
    url = f"sqlite://{tmp_path}/leases.db"
    first = open_store(f"{url}?layout=sessions")
    lease = expect_applied(first.write(CreateLease(Lease(KEY))))
    first.close()
    second = open_store(url)
    assert second.get([KEY]) == (lease,)
    second.close()
    other_url = f"sqlite://{tmp_path}/other.db"
    default_store = open_store(other_url)
    create_unowned_lease(default_store, KEY)
    with pytest.raises(StoreError, match="not in layout sessions; name a new table"):
        open_store(f"{other_url}?layout=sessions")
    default_store.close()


def test_objects_of_both_layouts_are_rejected() -> None:
    objects = ObjectMemory()
    expect_applied(EtagStore(objects, ObjectLayout("fleet")).write(CreateLease(Lease(KEY))))
    expect_applied(SessionStore(ObjectCells(objects, "fleet")).write(CreateLease(Lease(KEY))))
    with pytest.raises(StoreError, match="in layout sessions and in the usual one"):
        open_in_layout(EtagStore(objects, ObjectLayout("fleet")), None)


def test_an_unknown_layout_is_rejected() -> None:
    with pytest.raises(ValueError, match="option 'layout' must be sessions"):
        open_store("memory://slip?layout=session")


def test_a_session_holds_at_most_one_page_of_leases() -> None:
    """A row has a size limit, so a worker's leases are spread over several sessions if necessary."""
    cells = ObjectCells(ObjectMemory(), "", page_leases=3)
    store = SessionStore(cells, gather_seconds=0.0)
    for turn in range(2):
        leases = [create_owned_lease(store, key=f"s-{turn}-{number}") for number in range(4)]
        for lease in leases[:2]:
            expect_applied(store.write(ReleaseLease(lease, "ann")))
    entry_counts = [len(require_valid_row(parse_session(session_row)).entries) for session_row in cells.list(SESSIONS)]
    assert max(entry_counts) <= 3
    assert sum(entry_counts) >= 4


# Laws


CHANGES: tuple[Callable[[Lease], Write], ...] = (
    lambda lease: RenewLease(lease, annotations=(("lag", "3"),)),
    lambda lease: CheckpointLease(lease, Position("42")),
    lambda lease: AnnotateLease(lease, "seal", "7"),
    lambda lease: RequestLease(lease, "bob"),
    lambda lease: GiveLease(lease, Position("43")),
    lambda lease: ClaimLease(lease, "bob"),
    lambda lease: StealLease(lease, "ann"),
    lambda lease: ReleaseLease(lease, "ann"),
    lambda lease: ResetLease(lease, TRIM_HORIZON),
)
"""Writes that follow each other in the life of a lease that ann owns at first."""


def test_unknown_fields_survive_every_write() -> None:
    """A newer version of the library may write more fields, and old and new workers share a table."""
    objects = ObjectMemory()
    scene(objects)
    objects.stored = {
        name: evolve(row, fields={**row.fields, "newer": "1"})
        for name, row in objects.stored.items()
        if not name.startswith("told/")
    }
    names = set(objects.stored)
    store = two(objects)[0]
    lease = claim_lease(store, "ann")
    for make_write in CHANGES:
        write = make_write(lease)
        lease = expect_applied(store.write(write))
        assert {objects.stored[name].fields.get("newer") for name in names} == {"1"}, write


def test_a_withdrawn_request_stops_the_owner_at_most_once() -> None:
    """The first gift is rejected. After that, the owner's renewals do not return the request again."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects, next_owner=True)
    expect_applied(bob_store.write(WithdrawRequest(read_stored_lease(bob_store, KEY), "bob")))
    stored_lease = expect_rejected(ann_store.write(GiveLease(lease, AT)))
    assert stored_lease is not None
    assert (stored_lease.owner, stored_lease.next_owner) == ("ann", None)
    assert expect_applied(ann_store.write(RenewLease(stored_lease))).next_owner is None


@pytest.mark.parametrize("lag", ["3", "4"])
@pytest.mark.parametrize("weight", [256, 512])
def test_an_annotation_or_a_throughput_can_return_to_its_first_value(lag: str, weight: int) -> None:
    ann_store, bob_store = two(ObjectMemory())
    first_lease = expect_applied(ann_store.write(CreateLease(Lease(KEY, weight=256, annotations=(("lag", "3"),)))))
    lease = expect_applied(ann_store.write(ClaimLease(first_lease, "ann")))
    for next_lag, next_weight in (("4", 512), (lag, weight)):
        renewal = RenewLease(evolve(lease, weight=next_weight), annotations=(("lag", next_lag),))
        lease = expect_applied(ann_store.write(renewal))
        for read_lease in (lease, read_stored_lease(bob_store, KEY)):
            assert (read_lease.annotation("lag"), read_lease.weight) == (next_lag, next_weight)


def test_an_annotation_of_another_worker_replaces_the_owners() -> None:
    ann_store, bob_store, lease = scene(ObjectMemory())
    for number in (1, 2, 3):
        lease = expect_applied(ann_store.write(RenewLease(lease, annotations=(("lag", str(number)),))))
    expect_applied(bob_store.write(AnnotateLease(read_stored_lease(bob_store, KEY), "lag", "4")))
    assert read_stored_lease(bob_store, KEY).annotation("lag") == "4"


def test_a_checkpoint_at_the_same_position_stores_its_token() -> None:
    ann_store, bob_store = two(ObjectMemory())
    first_lease = expect_applied(ann_store.write(CreateLease(Lease(KEY, checkpoint=Position("41", 0, "a")))))
    lease = expect_applied(ann_store.write(ClaimLease(first_lease, "ann")))
    expect_applied(ann_store.write(CheckpointLease(lease, Position("41", 0, "b"))))
    assert [row.checkpoint.token for row in bob_store.get([KEY])] == ["b"]


def aged(objects: ObjectMemory, *prefixes: str) -> None:
    """Let a minute pass since these rows were written."""
    for name, row in objects.stored.items():
        if name.startswith(prefixes):
            objects.stored[name] = evolve(row, age=60.0)


def test_a_lease_is_idle_only_while_its_owner_writes_nothing() -> None:
    """A lease looks old if its owner is dead, or if its next owner has not accepted it."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects, next_owner=True)
    aged(objects, "lease/", "session/", "told/")
    assert read_stored_lease(bob_store, KEY).idle == 60.0
    expect_applied(ann_store.write(RenewLease(lease)))
    assert read_stored_lease(bob_store, KEY).idle == 0.0
    expect_applied(ann_store.write(GiveLease(read_stored_lease(ann_store, KEY), AT)))
    aged(objects, "lease/")
    expect_applied(bob_store.write(RenewLease(read_stored_lease(bob_store, "s-1"))))
    assert read_stored_lease(bob_store, KEY).idle == 60.0


@pytest.mark.parametrize("name", ["lease/", "lease/a/b", "lease/a b"])
def test_a_foreign_row_is_no_lease(name: str) -> None:
    objects = ObjectMemory()
    _, bob_store, _ = scene(objects)
    objects.put_if_absent(name, objects.stored[f"lease/{KEY}"].fields)
    assert [lease.key for lease in bob_store.list().leases] == [KEY, "s-1"]


class IgnoringConditions(ObjectMemory):
    """A bucket that ignores If-Match."""

    def put_if_match(self, name: str, fields: ObjectFields, etag: str) -> str | None:  # noqa: ARG002
        self._ask("over", name)
        return self._put("over", name, fields)


def test_a_service_that_ignores_conditions_is_rejected() -> None:
    """The probe is in the folder of the leases, to which a policy may limit access."""
    objects = IgnoringConditions()
    names: set[str] = set()
    objects.before = lambda _line: names.update(objects.stored)
    with pytest.raises(StoreError, match="ignores If-Match on a write"):
        SessionStore(ObjectCells(objects, "fleet/one")).prove()
    assert names
    assert all(name.startswith("fleet/one/probe/") for name in names)


ENDED_OWNER: dict[str, tuple[Callable[[Lease], Write], bool]] = {
    "reset": (lambda lease: ResetLease(evolve(lease, owner=None), TRIM_HORIZON), True),
    "annotation": (lambda lease: AnnotateLease(evolve(lease, owner=None), "a", "1"), True),
    "annotation for the owner": (lambda lease: AnnotateLease(lease, "a", "1"), False),
    "request": (lambda lease: RequestLease(lease, "bob"), False),
    "renewal": (RenewLease, False),
    "checkpoint": (lambda lease: CheckpointLease(lease, Position("42")), False),
}


@pytest.mark.parametrize("case", ENDED_OWNER)
def test_a_lease_of_an_ended_session_has_no_owner_for_any_write(case: str) -> None:
    make_write, is_applied = ENDED_OWNER[case]
    ann_store, bob_store, lease = scene(ObjectMemory())
    ann_store.close()
    version = read_stored_lease(bob_store, KEY).version
    assert isinstance(bob_store.write(make_write(evolve(lease, version=version))), Done) is is_applied


def row_of_lease(objects: ObjectMemory) -> LeaseRow:
    """Return the row of the lease."""
    return require_valid_row(parse_lease_row(KEY, objects.stored[f"{LEASES}{KEY}"]))


REQUEST_ENDS: dict[str, Callable[[SessionStore, SessionStore, Lease], object]] = {
    "withdrawal": lambda _ann, bob, _lease: bob.write(WithdrawRequest(read_stored_lease(bob, KEY), "bob")),
    "gift": lambda ann, _bob, lease: ann.write(GiveLease(lease, AT)),
    "release": lambda ann, _bob, lease: ann.write(ReleaseLease(lease, "ann")),
    "theft": lambda _ann, bob, _lease: bob.write(StealLease(read_stored_lease(bob, KEY), "bob")),
    "end": lambda ann, _bob, lease: ann.write(CheckpointLease(lease, SHARD_END)),
}


@pytest.mark.parametrize("case", REQUEST_ENDS)
def test_a_request_that_is_over_leaves_no_session_in_the_row(case: str) -> None:
    """A session that a row names is never removed."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects, next_owner=True)
    assert row_of_lease(objects).next_owners
    assert isinstance(REQUEST_ENDS[case](ann_store, bob_store, lease), Done)
    row = row_of_lease(objects)
    assert (row.next_owners, row.session == "") == ("", row.lease.owner is None)


def test_an_owner_notices_every_request() -> None:
    """Several leases may be requested before the owner's next write."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    leases = [lease, *(create_owned_lease(ann_store, key=key) for key in ("s-2", "s-3"))]
    for requested_lease in leases:
        expect_applied(bob_store.write(RequestLease(read_stored_lease(bob_store, requested_lease.key), "bob")))
    assert [expect_applied(ann_store.write(RenewLease(lease))).next_owner for lease in leases] == ["bob"] * 3
    rows = [require_valid_row(parse_session(objects.stored[name])) for name in sessions(objects)]
    assert [row.touched for row in rows] == [frozenset()] * 2


def test_a_request_is_noticed_although_an_older_row_is_read_late() -> None:
    """A thread that read the row before the request does not replace the row that another thread has read since."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    outdated_row = objects.stored[f"lease/{KEY}"]
    expect_applied(bob_store.write(RequestLease(read_stored_lease(bob_store, KEY), "bob")))
    renewed_lease = expect_applied(ann_store.write(RenewLease(lease)))
    current_row = objects.stored[f"lease/{KEY}"]
    objects.stored[f"lease/{KEY}"] = outdated_row
    expect_rejected(ann_store.write(CheckpointLease(lease, Position("40"))))
    objects.stored[f"lease/{KEY}"] = current_row
    assert expect_applied(ann_store.write(RenewLease(renewed_lease))).next_owner == "bob"


def test_a_request_does_not_change_an_ended_session() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, _ = scene(objects)
    (ann_session,) = ann_store._pages  # noqa: SLF001  whose row is ended
    lease_before = read_stored_lease(bob_store, KEY)

    def end_session(line: str) -> None:
        if line.startswith("over lease"):
            objects.before = lambda _line: None
            ann_store.close()

    objects.before = end_session
    bob_store.write(RequestLease(lease_before, "bob"))
    session = require_valid_row(parse_session(objects.stored[f"session/{ann_session}"]))
    assert (session.ended, session.touched) == (True, frozenset())


@pytest.mark.parametrize("change", ["deleted", "released"])
def test_a_lease_that_changes_while_it_is_read_is_returned_as_it_is_now(change: str) -> None:
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    cat_store = two(objects)[0]

    def change_lease(line: str) -> None:
        if line.startswith("get session"):
            objects.before = lambda _line: None
            expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
            expect_applied(ann_store.write(RenewLease(create_owned_lease(ann_store, key="s-2"))))
            if change == "deleted":
                expect_applied(ann_store.write(DeleteLease(read_stored_lease(ann_store, KEY))))

    objects.before = change_lease
    assert [found_lease.owner for found_lease in cat_store.get([KEY])] == ([] if change == "deleted" else [None])


def test_a_touched_lease_whose_row_was_deleted_is_lost() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(bob_store.write(RequestLease(read_stored_lease(bob_store, KEY), "bob")))
    del objects.stored[f"lease/{KEY}"]
    assert expect_rejected(ann_store.write(RenewLease(lease))) is None


def test_a_session_id_is_used_only_once() -> None:
    objects = ObjectMemory()
    stores = [
        SessionStore(ObjectCells(objects, ""), gather_seconds=0.0, make_session_id=lambda: "same") for _ in range(2)
    ]
    create_owned_lease(stores[0], key="s-0")
    with pytest.raises(StoreError, match="session same: a session with this id already exists"):
        create_owned_lease(stores[1], "bob", key="s-1")


def test_threads_of_a_worker_share_one_session() -> None:
    """A worker that claims its first leases with twenty threads begins a single session."""
    objects = ObjectMemory()
    store = SessionStore(ObjectCells(objects, ""), gather_seconds=0.0)
    guards: list[bool] = []
    store._begin_lock = Lock()  # noqa: SLF001  its state is observed
    objects.before = lambda line: guards.append(store._begin_lock.locked()) if "new session" in line else None  # type: ignore[attr-defined]  # noqa: SLF001
    create_owned_lease(store)
    assert guards == [True]


class Timed(ThreadPrimitives):
    """The primitives of threads, with a clock that the test moves."""

    now = 0.0

    def clock(self) -> float:
        return self.now


def open_timed(objects: ObjectMemory) -> tuple[SessionStore, Timed]:
    """Return the store of a worker that lists the table, and its clock."""
    clock = Timed()
    return SessionStore(ObjectCells(objects, ""), sync=clock, gather_seconds=0.0), clock


def living_sessions(objects: ObjectMemory) -> int:
    """Return the number of sessions that have not ended."""
    rows = (require_valid_row(parse_session(objects.stored[name])) for name in sessions(objects))
    return sum(not row.ended for row in rows)


def test_a_session_without_leases_ends_after_an_hour() -> None:
    """A session that a lease named or that was written in between gets a new hour."""
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    store, clock = open_timed(objects)
    page = next(iter(ann_store._pages.values()))  # noqa: SLF001  it writes although it has no lease

    def list_after(seconds: float) -> int:
        clock.now += seconds
        store.list()
        return living_sessions(objects)

    assert list_after(0.0) == list_after(2 * IDLE_SECONDS) == 2, "a lease names each session"
    expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    assert list_after(0.0) == list_after(IDLE_SECONDS) == 2
    requested_lease = expect_applied(ann_store.write(RequestLease(read_stored_lease(ann_store, "s-1"), "ann")))
    assert list_after(IDLE_SECONDS) == 2
    expect_applied(ann_store.write(WithdrawRequest(requested_lease, "ann")))
    assert list_after(0.0) == list_after(IDLE_SECONDS - 1.0) == 2
    row = page.session.stored
    assert objects.put_if_match(row.name, {**row.fields, "newer": "1"}, row.etag)
    assert list_after(2.0) == list_after(IDLE_SECONDS) == 2
    assert list_after(1.0) == 1


def test_an_ended_session_is_removed_only_after_a_consistent_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale listing may lack the row that names the session, and the position of that lease would be lost."""
    cells = ObjectCells(ObjectMemory(), "")
    store = SessionStore(cells, gather_seconds=0.0)
    ann_store = SessionStore(cells, gather_seconds=0.0)
    expect_applied(ann_store.write(ReleaseLease(create_owned_lease(ann_store, key=KEY), "ann")))
    for page in ann_store._pages.values():  # noqa: SLF001  its connections stay open
        page.end()
    listings: list[tuple[tuple[str, ...], bool]] = []
    list_rows = cells.list

    def record_listing(*prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:
        listings.append((prefixes, consistent))
        return list_rows(*prefixes, consistent=consistent)

    monkeypatch.setattr(cells, "list", record_listing)
    every_row = ((LEASES, SESSIONS, "told/"), False)
    store.list()
    assert listings == [every_row]
    store.list()
    assert listings == [every_row, every_row, ((LEASES,), True)]
    assert list_rows(SESSIONS) == ()


def test_an_unreadable_row_that_appears_during_a_removal_keeps_every_session(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    ann_store.close()
    bob_store.list()
    cells, list_rows = bob_store._versioned_rows, bob_store._versioned_rows.list  # noqa: SLF001

    def spoil_row(*prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:
        if consistent:
            rewritten(objects, f"lease/{KEY}", checkpoint="soon", sequence="soon")
        return list_rows(*prefixes, consistent=consistent)

    monkeypatch.setattr(cells, "list", spoil_row)
    bob_store.list()
    assert len(sessions(objects)) == 2


@pytest.mark.parametrize("place", range(2))
def test_an_interrupted_removal_of_a_session_is_completed_by_a_later_listing(place: int) -> None:
    """No row of an ended session stays forever."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    lease = expect_applied(ann_store.write(RenewLease(lease, annotations=(("lag", "3"),))))
    (ann_session,) = ann_store._pages  # noqa: SLF001  whose rows are removed
    expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    ann_store.close()
    bob_store.list()
    deletions: list[str] = []

    def crash(line: str) -> None:
        if line.startswith("delete"):
            deletions.append(line)
            if len(deletions) == place + 1:
                raise OutcomeUnknown("the process died")

    objects.before = crash
    with pytest.raises(OutcomeUnknown):
        bob_store.list()
    objects.before = lambda _line: None
    for _ in range(3):
        two(objects)[0].list()
        bob_store.list()
    assert [name for name in objects.stored if ann_session in name] == []


def test_an_ended_session_is_removed_by_the_second_listing() -> None:
    """The first listing may have read the rows before the session ended."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    ann_store.close()
    session_counts = []
    for _ in range(3):
        bob_store.list()
        session_counts.append(len(sessions(objects)))
    assert session_counts == [2, 1, 1]


@pytest.mark.parametrize(
    ("make_write", "waits"),
    [
        (RenewLease, True),
        (lambda lease: RenewLease(lease, patient=False), False),
        (lambda lease: CheckpointLease(lease, Position("42")), False),
        (lambda lease: CheckpointLease(lease, Position("42"), patient=True), True),
    ],
)
def test_only_a_patient_write_waits_for_others(make_write: Callable[[Lease], Write], waits: bool) -> None:
    store = SessionStore(ObjectCells(ObjectMemory(), ""), gather_seconds=0.0)
    lease = create_owned_lease(store, key=KEY)
    (page,) = store._pages.values()  # noqa: SLF001  whose tickets are observed
    patience: list[bool] = []
    commit = page.commit

    def record_ticket(ticket: Ticket) -> EntryChange | None:
        patience.append(ticket.patient)
        return commit(ticket)

    page.commit = record_ticket  # type: ignore[method-assign]
    expect_applied(store.write(make_write(lease)))
    assert patience == [waits]


def test_a_claim_settles_an_earlier_write_without_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that arrives after the claim is rejected."""
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    released_lease = expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    late_writes: list[tuple[str, ObjectFields, str]] = []

    def lose(_objects: ObjectMemory, *write: str) -> None:
        late_writes.append(write)  # type: ignore[arg-type]
        raise OutcomeUnknown("on its way")

    with monkeypatch.context() as patch_context:
        patch_context.setattr(ObjectMemory, "put_if_match", lose)
        with pytest.raises(OutcomeUnknown):
            ann_store.write(ResetLease(released_lease, TRIM_HORIZON))
    ann_store.list()
    assert expect_applied(ann_store.write(ClaimLease(released_lease, "ann"))).checkpoint == AT
    assert objects.put_if_match(*late_writes[0]) is None


@pytest.mark.parametrize(("requested", "usual"), [("sessions", True), (None, True), ("sessions", False)])
def test_a_bucket_keeps_its_layout(requested: str | None, usual: bool) -> None:
    objects = ObjectMemory()
    store = EtagStore(objects, ObjectLayout("fleet"), page_leases=7)
    if usual:
        create_unowned_lease(store, KEY)
    if requested and usual:
        with pytest.raises(StoreError, match="not in layout sessions; name a new table"):
            open_in_layout(store, requested)
        return
    opened_store = open_in_layout(store, requested)
    assert (opened_store is store, isinstance(opened_store, SessionStore)) == (not requested, bool(requested))
    assert store.cells().page_leases == 7


def test_accepting_a_lease_keeps_a_later_checkpoint_of_the_same_record() -> None:
    """Another thread of the worker may have accepted the lease and checkpointed a part of an aggregated record."""
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    lease = expect_applied(ann_store.write(CheckpointLease(lease, Position("42", 1))))
    (page,) = ann_store._pages.values()  # noqa: SLF001  in which the lease is accepted again
    row = require_valid_row(parse_lease_row(KEY, objects.stored[f"lease/{KEY}"]))
    ann_store._write_entry(row, evolve(lease, checkpoint=Position("42", 0)), page)  # noqa: SLF001
    assert read_stored_lease(ann_store, KEY).checkpoint == Position("42", 1)


@pytest.mark.parametrize("crash", [False, True])
def test_a_theft_keeps_the_position_of_the_robbed_owner(crash: bool) -> None:
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(ann_store.write(CheckpointLease(lease, Position("42", 7))))
    stolen_from = read_stored_lease(bob_store, KEY)

    def die(line: str) -> None:
        if crash and line.startswith("over lease"):
            raise OutcomeUnknown("the process died")

    objects.before = die
    with suppress(OutcomeUnknown):
        expect_applied(bob_store.write(StealLease(stolen_from, "bob")))
    objects.before = lambda _line: None
    left_lease = read_stored_lease(two(objects)[0], KEY)
    assert (left_lease.owner, left_lease.checkpoint) == (None if crash else "bob", Position("42", 7))


def test_an_overtaken_thread_does_not_restore_a_deleted_session() -> None:
    objects = ObjectMemory()
    ann_store, _, lease = scene(objects)
    renewed_lease = expect_applied(ann_store.write(RenewLease(lease)))
    (page,) = ann_store._pages  # noqa: SLF001  whose row is deleted
    del objects.stored[f"session/{page}"]
    assert expect_rejected(ann_store.write(GiveLease(evolve(lease, next_owner="bob"), AT))) is not None
    assert isinstance(ann_store.write(RenewLease(lease)), Lost)
    assert expect_applied(ann_store.write(RenewLease(renewed_lease))).owner == "ann"


def test_throughput_of_an_earlier_ownership_is_not_used() -> None:
    """A worker may get a lease back before it has written its session again."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    expect_applied(ann_store.write(RenewLease(evolve(lease, weight=256))))
    stolen_lease = expect_applied(bob_store.write(StealLease(read_stored_lease(bob_store, KEY), "bob")))
    expect_applied(bob_store.write(RenewLease(evolve(stolen_lease, weight=512))))

    def die(line: str) -> None:
        if line.startswith(("over session", "over told")) and f"over lease/{KEY}" in objects.log:
            raise OutcomeUnknown("the process died")

    objects.log.clear()
    objects.before = die
    with pytest.raises(OutcomeUnknown):
        ann_store.write(StealLease(read_stored_lease(ann_store, KEY), "ann"))
    objects.before = lambda _line: None
    left_lease = read_stored_lease(bob_store, KEY)
    assert (left_lease.owner, left_lease.weight) == ("ann", 512)


OVERTAKEN: dict[str, tuple[bool, Step]] = {
    "release": (False, lambda ann, _bob, lease: ann.write(ReleaseLease(lease, "ann"))),
    "end": (False, lambda ann, _bob, lease: ann.write(CheckpointLease(lease, SHARD_END))),
    "gift": (True, lambda ann, _bob, lease: ann.write(GiveLease(lease, AT))),
    "theft": (False, lambda _ann, bob, lease: bob.write(StealLease(lease, "bob"))),
    "claim": (False, lambda _ann, bob, lease: bob.write(ClaimLease(lease, "bob"))),
    "request": (False, lambda _ann, bob, lease: bob.write(RequestLease(lease, "bob"))),
    "withdrawal": (True, lambda _ann, bob, lease: bob.write(WithdrawRequest(lease, "bob"))),
    "annotation": (False, lambda _ann, bob, lease: bob.write(AnnotateLease(lease, "seal", "8"))),
    "late checkpoint": (False, lambda _ann, bob, lease: bob.write(CheckpointLate(lease, Position("42")))),
    "deletion": (False, lambda _ann, bob, lease: bob.write(DeleteLease(lease))),
}


@pytest.mark.parametrize("case", OVERTAKEN)
def test_a_write_overtaken_by_an_annotation_is_retried(case: str) -> None:
    """Another worker may write the row of a lease at any time. The condition of the overtaken write still holds."""
    next_owner, execute_step = OVERTAKEN[case]
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects, next_owner)
    cat_store = two(objects)[0]

    def annotate(line: str) -> None:
        if line in {f"over lease/{KEY}", f"delete lease/{KEY}"}:
            objects.before = lambda _line: None
            current_lease = read_stored_lease(cat_store, KEY)
            expect_applied(cat_store.write(AnnotateLease(current_lease, "cat", "1")))

    objects.before = annotate
    assert isinstance(execute_step(ann_store, bob_store, lease), Done)
    assert [row.annotation("cat") for row in cat_store.get([KEY])] == ([] if case == "deletion" else ["1"])


@pytest.mark.parametrize("role", ["owner", "next owner"])
def test_a_session_that_only_a_consistent_listing_shows_as_named_is_kept(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position of its lease is in the session, and a lease that is given to it is free at once."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    lease = expect_applied(ann_store.write(CheckpointLease(lease, Position("42"))))
    if role == "owner":
        ann_store.close()
    else:
        cat_store = two(objects)[0]
        expect_applied(cat_store.write(RequestLease(read_stored_lease(cat_store, KEY), "cat")))
        cat_store.close()
    list_rows = bob_store._versioned_rows.list  # noqa: SLF001

    def list_without_row(*prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:
        rows = list_rows(*prefixes, consistent=consistent)
        return rows if consistent else tuple(row for row in rows if row.name != f"lease/{KEY}")

    monkeypatch.setattr(bob_store._versioned_rows, "list", list_without_row)  # noqa: SLF001
    for _ in range(3):
        bob_store.list()
    if role == "next owner":
        expect_applied(ann_store.write(GiveLease(expect_applied(ann_store.write(RenewLease(lease))), Position("42"))))
    assert read_stored_lease(two(objects)[0], KEY).owner is None
    assert claim_lease(two(objects)[0], "dan").checkpoint == Position("42")


def test_a_store_without_rows_of_sessions_has_only_its_own_layout() -> None:
    store = MemoryStore()
    create_unowned_lease(store, KEY)
    assert open_in_layout(store, None) is store
    wrapped_store = PassingStore(store)
    assert open_in_layout(wrapped_store, None) is wrapped_store


def test_an_owner_notices_that_another_worker_ended_its_lease() -> None:
    """For example, a former process of the worker reached the end of the shard."""
    ann_store, bob_store, lease = scene(ObjectMemory())
    ended_lease = expect_applied(bob_store.write(CheckpointLate(read_stored_lease(bob_store, KEY), SHARD_END)))
    assert ended_lease.ended
    stored_lease = expect_rejected(ann_store.write(RenewLease(lease)))
    assert stored_lease is not None
    assert stored_lease.ended


def test_a_lease_of_a_deleted_session_keeps_its_owner_in_every_process() -> None:
    """A worker that has noticed the deletion does not show its own leases as free either."""
    objects = ObjectMemory()
    ann_store, bob_store, _ = scene(objects)
    second_lease = create_owned_lease(ann_store, key="s-2")
    (page,) = ann_store._pages  # noqa: SLF001  whose row is deleted
    del objects.stored[f"session/{page}"]
    expect_applied(ann_store.write(RenewLease(second_lease)))
    for store in (ann_store, bob_store):
        assert read_stored_lease(store, KEY).owner == "ann"
        assert [lease.owner for lease in store.list().leases] == ["ann", "bob", "ann"]


@pytest.mark.parametrize("stale_ok", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_a_read_is_consistent_unless_it_may_be_stale(
    stale_ok: bool, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A next owner polls its lease, and consistent reads cost twice as much."""
    _, bob_store, lease = scene(ObjectMemory())
    if listed:
        bob_store.list()
    reads: set[bool] = set()
    read = bob_store._versioned_rows.read  # noqa: SLF001

    def record_read(names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        reads.add(stale_ok)
        return read(names, stale_ok=stale_ok)

    monkeypatch.setattr(bob_store._versioned_rows, "read", record_read)  # noqa: SLF001
    assert bob_store.get([KEY], stale_ok=stale_ok) == (lease,)
    assert reads == {stale_ok}


@pytest.mark.parametrize("case", ["renewal", "checkpoint", "gift", "end", "release", "acceptance"])
def test_a_lease_stays_valid_after_writes_for_other_leases(case: str) -> None:
    """Each group write increments the count of the session, which is part of the versions of all its leases."""
    next_owner, write, _, _ = DELETED.get(case, (False, lambda lease: ClaimLease(lease, "ann"), AT, "ann"))
    ann_store, _, lease = scene(ObjectMemory(), next_owner)
    second_lease = create_owned_lease(ann_store, key="s-2")
    for _ in range(2):
        second_lease = expect_applied(ann_store.write(RenewLease(second_lease)))
    assert isinstance(ann_store.write(write(lease)), Done)


def test_a_theft_succeeds_although_the_owner_has_claimed_its_lease_again() -> None:
    ann_store, bob_store, lease = scene(ObjectMemory())
    restarted_lease = expect_applied(ann_store.write(ClaimLease(lease, "ann")))
    assert expect_applied(bob_store.write(StealLease(lease, "bob"))).owner == "bob"
    assert restarted_lease.owner == "ann"


@pytest.mark.parametrize("claimant", ["ann", "cat"])
@pytest.mark.parametrize("case", ["renewal", "checkpoint", "gift"])
def test_an_owner_that_another_worker_has_stopped_writes_nothing_more(case: str, claimant: str) -> None:
    """The other worker died before it took the lease, which any worker may claim now."""
    next_owner, write, _, _ = DELETED[case]
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects, next_owner)

    def die(line: str) -> None:
        if line.startswith("over lease"):
            raise OutcomeUnknown("the process died")

    objects.before = die
    with pytest.raises(OutcomeUnknown):
        bob_store.write(StealLease(read_stored_lease(bob_store, KEY), "bob"))
    objects.before = lambda _line: None
    for _ in range(2):
        stored_lease = expect_rejected(ann_store.write(write(lease)))
        assert stored_lease is not None
        assert (stored_lease.owner, stored_lease.checkpoint) == (None, AT)
    claimed_lease = claim_lease(ann_store if claimant == "ann" else two(objects)[0], claimant)
    assert (claimed_lease.owner, claimed_lease.checkpoint) == (claimant, AT)


def test_a_lease_of_an_ended_session_is_not_valid_in_the_next_one() -> None:
    """The counts of a new session start again, so they say nothing about a lease of an earlier epoch."""
    ann_store, bob_store, lease = scene(ObjectMemory())
    for _ in range(5):
        lease = expect_applied(ann_store.write(RenewLease(lease)))
    claim_lease(bob_store, "bob")
    expect_rejected(ann_store.write(RenewLease(lease)))
    retaken_lease = expect_applied(ann_store.write(StealLease(read_stored_lease(ann_store, KEY), "ann")))
    for write in (RenewLease(lease), CheckpointLease(lease, Position("42"))):
        assert expect_rejected(ann_store.write(write)) == retaken_lease


@pytest.mark.parametrize("rival", ["another thread", "the giver"])
def test_a_given_lease_is_accepted_only_once(rival: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rival writes after the lease was read, and before it is accepted."""
    ann_store, bob_store, lease = scene(ObjectMemory(), next_owner=True)
    given_lease = expect_applied(ann_store.write(GiveLease(lease, AT)))
    rival_leases: list[Lease] = []
    read = bob_store._versioned_rows.read  # noqa: SLF001

    def read_before_rival(names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        rows = read(names, stale_ok=stale_ok)
        if f"{LEASES}{KEY}" not in names and not rival_leases:
            monkeypatch.setattr(bob_store._versioned_rows, "read", read)  # noqa: SLF001
            store, write = (
                (bob_store, ClaimLease(given_lease, "bob"))
                if rival == "another thread"
                else (ann_store, TakeBackLease(given_lease, "ann"))
            )
            rival_leases.append(expect_applied(store.write(write)))
        return rows

    monkeypatch.setattr(bob_store._versioned_rows, "read", read_before_rival)  # noqa: SLF001
    assert [expect_rejected(bob_store.write(ClaimLease(given_lease, "bob")))] == rival_leases


def test_a_lease_that_is_stolen_before_it_is_accepted_is_lost() -> None:
    ann_store, bob_store, lease = scene(objects := ObjectMemory())
    (bob_session,) = bob_store._pages  # noqa: SLF001  in which bob accepts the lease
    cat_leases: list[Lease] = []

    def steal(line: str) -> None:
        if line == f"over session/{bob_session}":
            objects.before = lambda _line: None
            cat_store = two(objects)[0]
            cat_leases.append(expect_applied(cat_store.write(StealLease(read_stored_lease(cat_store, KEY), "cat"))))

    objects.before = steal
    assert [expect_rejected(bob_store.write(StealLease(lease, "bob")))] == cat_leases
    assert read_stored_lease(ann_store, KEY) == cat_leases[0]


def test_a_lease_of_a_deleted_session_can_be_requested() -> None:
    objects = ObjectMemory()
    ann_store, bob_store, _ = scene(objects)
    (page,) = ann_store._pages  # noqa: SLF001  whose row is deleted
    del objects.stored[f"session/{page}"]
    assert expect_applied(bob_store.write(RequestLease(read_stored_lease(bob_store, KEY), "bob"))).next_owner == "bob"


def test_a_theft_that_another_thread_overtakes_keeps_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower thread of the worker read the row before the faster one took the lease."""
    ann_store, bob_store, lease = scene(ObjectMemory())
    checkpointed_leases: list[Lease] = []
    read = bob_store._versioned_rows.read  # noqa: SLF001

    def read_before_theft(names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        rows = read(names, stale_ok=stale_ok)
        if f"{LEASES}{KEY}" not in names and not checkpointed_leases:
            monkeypatch.setattr(bob_store._versioned_rows, "read", read)  # noqa: SLF001
            stolen_lease = expect_applied(bob_store.write(StealLease(lease, "bob")))
            checkpointed_leases.append(expect_applied(bob_store.write(CheckpointLease(stolen_lease, Position("42")))))
        return rows

    monkeypatch.setattr(bob_store._versioned_rows, "read", read_before_theft)  # noqa: SLF001
    assert [expect_rejected(bob_store.write(StealLease(lease, "bob")))] == checkpointed_leases
    assert read_stored_lease(ann_store, KEY).checkpoint == Position("42")


def test_a_second_session_of_a_worker_leaves_the_first_one_alone() -> None:
    """The leases of a full session are renewed in it, and keep their fencing numbers."""
    objects = ObjectMemory()
    store = SessionStore(ObjectCells(objects, "", page_leases=1), gather_seconds=0.0)
    leases = [create_owned_lease(store, key=f"s-{number}") for number in range(3)]
    objects.log.clear()
    renewed_leases = [expect_applied(store.write(RenewLease(lease))) for lease in leases]
    assert [lease.epoch for lease in renewed_leases] == [lease.epoch for lease in leases]
    assert (len(sessions(objects)), writes_of(objects)) == (3, ("over session",) * 3)


def test_a_session_that_was_read_before_its_lease_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner may have released the lease and claimed it again between the two reads (G13)."""
    objects = ObjectMemory()
    ann_store, bob_store, lease = scene(objects)
    bob_store.list()
    (ann_session,) = ann_store._pages  # noqa: SLF001  that is read too early
    outdated_row = objects.stored[f"session/{ann_session}"]
    expect_applied(ann_store.write(ReleaseLease(lease, "ann")))
    current_lease = expect_applied(ann_store.write(CheckpointLease(claim_lease(ann_store, "ann"), Position("42"))))
    read = bob_store._versioned_rows.read  # noqa: SLF001

    def read_session_early(names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        rows = read(names, stale_ok=stale_ok)
        return {**rows, outdated_row.name: outdated_row} if f"{LEASES}{KEY}" in names else rows

    monkeypatch.setattr(bob_store._versioned_rows, "read", read_session_early)  # noqa: SLF001
    assert bob_store.get([KEY]) == (current_lease,)


@pytest.mark.parametrize("session_exists", [True, False])
def test_a_request_is_stored_although_its_mark_is_not(session_exists: bool) -> None:
    """The owner finds the request when it next reads the row."""
    objects = ObjectMemory()
    _, bob_store, lease = scene(objects)

    def lose_mark(line: str) -> None:
        if line.startswith("over session"):
            if session_exists:
                raise OutcomeUnknown("on its way")
            objects.stored.pop(line.removeprefix("over "), None)

    objects.before = lose_mark
    assert expect_applied(bob_store.write(RequestLease(lease, "bob"))).next_owner == "bob"
    objects.before = lambda _line: None
    assert read_stored_lease(bob_store, KEY).next_owner == "bob"


def test_a_given_lease_is_accepted_with_the_annotations_of_its_claim() -> None:
    """The annotations identify the process, so that it recognizes the lease after a restart."""
    ann_store, bob_store, lease = scene(ObjectMemory(), next_owner=True)
    given_lease = expect_applied(ann_store.write(GiveLease(lease, AT)))
    accepted_lease = expect_applied(bob_store.write(ClaimLease(given_lease, "bob", (("process", "2"),))))
    assert accepted_lease.annotation("process") == "2"
    assert read_stored_lease(ann_store, KEY) == accepted_lease


def test_a_hub_keeps_its_layout_next_to_a_table_in_sessions() -> None:
    """The blobs of a hub and a table in layout `sessions` may share a container."""
    objects = ObjectMemory()
    scene(objects)
    hub_store = EtagStore(objects, EventHubLayout("ns", "hub", "group"))
    assert open_in_layout(hub_store, None) is hub_store
