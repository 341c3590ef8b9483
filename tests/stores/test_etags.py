"""Tests the order in which a lease's objects are written, and the state after a failure between two writes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import permutations
from threading import Barrier, Event, current_thread, main_thread
from threading import enumerate as enumerate_threads

import pytest
from attrs import define, evolve, field
from object_memory import ObjectMemory
from waiters import WAIT

from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects.event_hubs_layout import DEDUPLICATION_LENGTH_MAX, EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore, Layout, ObjectCells
from leasehold.stores.protocol import Lost, Outcome, Store
from leasehold.stores.requests import Parts, StoredObject
from leasehold.stores.sessions.store import SessionStore
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
    Write,
)
from leasehold_lab.contract.actors import clear_layout_fields, create_lease_with_owner, expect_applied, expect_rejected

OURS = ObjectLayout()
HUB = EventHubLayout("ns", "hub", "group")
LAYOUTS = pytest.mark.parametrize("layout", [OURS, HUB], ids=["ours", "event-hubs"])
AT_9, AT_10 = Position("9", 0, "4520"), Position("10", 0, "4530")


def opened(layout: Layout) -> tuple[ObjectMemory, EtagStore]:
    """Return an empty bucket and a store in it."""
    objects = ObjectMemory()
    return objects, EtagStore(objects, layout)


def create_lease_of_ann(objects: ObjectMemory, store: EtagStore) -> Lease:
    """Return a lease that ann owns. The log does not contain the claim."""
    lease = create_lease_with_owner(store, Lease("0", owner="ann"))
    objects.log.clear()
    return lease


def call_before_request(line: str, action: Callable[[], object]) -> Callable[[str], None]:
    """Return a hook that calls `action` just before the first request that equals `line`."""
    pending = [action]

    def hook(request: str) -> None:
        if request == line and pending:
            pending.pop()()

    return hook


@LAYOUTS
def test_the_start_is_stored_before_the_ownership(layout: Layout) -> None:
    """If the creator dies between the two writes, the worker that takes the lease starts at the same position."""
    objects, store = opened(layout)
    create_lease_with_owner(store, Lease("0", owner="ann"))
    assert [line for line in objects.log if line.startswith("new")] == ["new checkpoint/0", "new ownership/0"]


@LAYOUTS
def test_a_creator_that_dies_in_between_leaves_a_free_lease(layout: Layout) -> None:
    objects, store = opened(layout)
    objects.mute = frozenset({"new"})
    with pytest.raises(OutcomeUnknown):
        create_lease_with_owner(store, Lease("0", owner="ann", checkpoint=AT_9))
    objects.mute = frozenset()
    (lease,) = EtagStore(objects, layout).list().leases
    assert lease == Lease("0", lease.stream, checkpoint=AT_9)
    assert expect_applied(store.write(ClaimLease(lease, "bob"))).owner == "bob"


@LAYOUTS
def test_a_renewal_is_one_write_and_no_read(layout: Layout) -> None:
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    lease = expect_applied(store.write(RenewLease(expect_applied(store.write(RenewLease(lease))))))
    expect_applied(store.write(CheckpointLease(lease, AT_9)))
    assert objects.log == ["over ownership/0"] * 3 + ["over checkpoint/0"]


ROBBED: tuple[Callable[[EtagStore, Lease], Outcome], ...] = (
    lambda store, lease: store.write(CheckpointLease(lease, AT_9)),
    lambda store, lease: store.write(CheckpointLease(lease, SHARD_END)),
    lambda store, lease: store.write(GiveLease(lease, AT_9)),
)


@LAYOUTS
@pytest.mark.parametrize("write", ROBBED, ids=["checkpoint", "end", "give"])
def test_a_former_owner_cannot_move_the_checkpoint(
    layout: Layout, write: Callable[[EtagStore, Lease], Outcome]
) -> None:
    """Rule 1: only one worker may write a lease's checkpoints."""
    objects, store = opened(layout)
    lease = expect_applied(store.write(RequestLease(create_lease_of_ann(objects, store), "bob")))
    stolen = expect_applied(EtagStore(objects, layout).write(StealLease(lease, "cat")))
    assert expect_rejected(write(store, lease)) == stolen
    assert stolen.checkpoint == TRIM_HORIZON
    assert "over checkpoint/0" not in objects.log


@LAYOUTS
def test_the_last_checkpoint_is_written_before_the_ownership(layout: Layout) -> None:
    """Rule 2: a next owner, or a worker that claims the released lease, starts where the former owner stopped."""
    objects, store = opened(layout)
    lease = expect_applied(store.write(RequestLease(create_lease_of_ann(objects, store), "bob")))
    lease = expect_applied(store.write(ClaimLease(expect_applied(store.write(GiveLease(lease, AT_9))), "bob")))
    expect_applied(store.write(CheckpointLease(lease, SHARD_END)))
    writes = [line for line in objects.log if line.startswith("over")]
    request, accept, closing = "over ownership/0", "over ownership/0", ["over checkpoint/0", "over ownership/0"]
    assert writes == [request, *closing, accept, *closing]


@LAYOUTS
def test_a_gift_reads_only_the_ownership(layout: Layout) -> None:
    """Between the giver's last record and the next owner's first one, no worker reads the shard. So a gift is quick."""
    objects, store = opened(layout)
    lease = expect_applied(store.write(RequestLease(create_lease_of_ann(objects, store), "bob")))
    objects.log.clear()
    expect_applied(store.write(GiveLease(lease, AT_9)))
    assert objects.log == ["get ownership/0", "over checkpoint/0", "over ownership/0"]


@LAYOUTS
def test_a_next_owner_polls_with_one_request_until_the_gift(layout: Layout) -> None:
    """A poll costs only one request instead of three. The next owner still starts where the giver stopped."""
    objects, store = opened(layout)
    next_owner = EtagStore(objects, layout)
    lease = expect_applied(next_owner.write(RequestLease(create_lease_of_ann(objects, store), "bob")))
    objects.log.clear()
    assert next_owner.get(["0"], stale_ok=True) == (lease,)
    assert objects.log == ["get ownership/0"]
    given_lease = expect_applied(store.write(GiveLease(store.get(["0"])[0], AT_9)))
    assert next_owner.get(["0"], stale_ok=True) == (given_lease,)
    assert given_lease.checkpoint == AT_9


@LAYOUTS
def test_a_next_owner_reads_nothing_more_after_a_renewal(layout: Layout) -> None:
    objects, store = opened(layout)
    next_owner = EtagStore(objects, layout)
    lease = expect_applied(
        store.write(
            RenewLease(expect_applied(next_owner.write(RequestLease(create_lease_of_ann(objects, store), "bob"))))
        )
    )
    objects.log.clear()
    assert next_owner.get(["0"], stale_ok=True) == (lease,)
    assert objects.log == ["get ownership/0"]


@LAYOUTS
def test_a_next_owner_of_many_leases_lists_them(layout: Layout) -> None:
    objects, store = opened(layout)
    leases = tuple(create_lease_with_owner(store, Lease(str(number), owner="ann")) for number in range(5))
    objects.log.clear()
    assert store.get([lease.key for lease in leases], stale_ok=True) == leases
    assert objects.log == ["list group/ownership" if layout is HUB else "list ownership"]


@LAYOUTS
def test_a_checkpoint_overtaken_by_a_request_is_stored(layout: Layout) -> None:
    """A gift follows a request and renews the lease, so the checkpoint does not have to renew it."""
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    expect_applied(EtagStore(objects, layout).write(RequestLease(lease, "bob")))
    objects.log.clear()
    checkpointed = expect_applied(store.write(CheckpointLease(lease, AT_9)))
    assert checkpointed == evolve(lease, next_owner="bob", checkpoint=AT_9, epoch=checkpointed.epoch)
    assert objects.log == ["over ownership/0", "get ownership/0", "over checkpoint/0"]


@LAYOUTS
def test_a_lease_never_seen_or_never_owned_is_read_whole(layout: Layout) -> None:
    """If no objects of a lease are cached, the lease is read and not treated as missing."""
    objects, store = opened(layout)
    unowned_lease = expect_applied(store.write(CreateLease(Lease("0", checkpoint=AT_9))))
    assert EtagStore(objects, layout).get(["0"], stale_ok=True) == (unowned_lease,)


@LAYOUTS
def test_a_claim_returns_the_current_checkpoint(layout: Layout) -> None:
    """Rule 3: the new owner starts at the position that the old owner checkpointed after the listing."""
    objects, store = opened(layout)
    owned_lease = create_lease_of_ann(objects, store)
    new_owner = EtagStore(objects, layout)
    (listed_lease,) = new_owner.list().leases
    expect_applied(store.write(CheckpointLease(owned_lease, AT_9)))
    assert expect_applied(new_owner.write(StealLease(listed_lease, "bob"))).checkpoint == AT_9


@LAYOUTS
def test_a_checkpoint_overtaken_by_a_later_one_is_lost(layout: Layout) -> None:
    """A drain may store a later checkpoint between the two writes of this checkpoint, the renewal and the position."""
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    draining_store = EtagStore(objects, layout)
    objects.before = call_before_request(
        "over checkpoint/0", lambda: draining_store.write(CheckpointLate(lease, AT_10))
    )
    outcome = store.write(CheckpointLease(lease, AT_9))
    assert isinstance(outcome, Lost)
    assert store.get(["0"]) == (outcome.lease,)
    assert clear_layout_fields(outcome.lease) == clear_layout_fields(evolve(lease, checkpoint=AT_10))


def test_a_checkpoint_overtaken_in_the_same_aggregated_record_is_lost() -> None:
    """A checkpoint never moves back within an aggregated record."""
    objects, store = opened(OURS)
    lease = create_lease_of_ann(objects, store)
    draining_store = EtagStore(objects, OURS)
    late_write = CheckpointLate(lease, Position("9", 5))
    objects.before = call_before_request("over checkpoint/0", lambda: draining_store.write(late_write))
    assert isinstance(store.write(CheckpointLease(lease, Position("9", 1))), Lost)
    assert store.get(["0"])[0].checkpoint == Position("9", 5)


@LAYOUTS
def test_a_checkpoint_overtaken_by_an_earlier_one_is_retried(layout: Layout) -> None:
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    draining_store = EtagStore(objects, layout)
    objects.before = call_before_request("over checkpoint/0", lambda: draining_store.write(CheckpointLate(lease, AT_9)))
    assert expect_applied(store.write(CheckpointLease(lease, AT_10))).checkpoint == AT_10


@pytest.mark.parametrize("token", ["4530", f"4530 {'a' * (DEDUPLICATION_LENGTH_MAX + 1)}"])
def test_a_checkpoint_replaces_the_deduplication_data(token: str) -> None:
    """The data of a Spark sink are stored only with the position to which they belong."""
    objects, store = opened(HUB)
    lease, tokens = create_lease_of_ann(objects, store), list[str]()
    for position in (Position("9", 0, "4520 a:7"), Position("10", 0, token)):
        lease = expect_applied(store.write(CheckpointLease(lease, position)))
        tokens.append(store.get(["0"])[0].checkpoint.token)
    assert tokens == ["4520 a:7", "4530"]


@LAYOUTS
@pytest.mark.parametrize("verb", ["claim", "steal", "renew", "release"])
def test_an_unanswered_write_is_never_done(layout: Layout, verb: str) -> None:
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    objects.mute = frozenset({"over"})
    writes: dict[str, Callable[[], object]] = {
        "claim": lambda: store.write(ClaimLease(lease, "bob")),
        "steal": lambda: store.write(StealLease(lease, "bob")),
        "renew": lambda: store.write(RenewLease(lease)),
        "release": lambda: store.write(ReleaseLease(lease, "ann")),
    }
    with pytest.raises(OutcomeUnknown):
        writes[verb]()
    assert objects.log == ["over ownership/0"]


def test_a_lease_deleted_while_it_is_claimed_leaves_nothing() -> None:
    """A claim during a deletion leaves no ownership object for the next lease with that key."""
    objects, store = opened(OURS)
    unowned_lease = expect_applied(store.write(CreateLease(Lease("0"))))
    other_store = EtagStore(objects, OURS)
    objects.before = call_before_request("new ownership/0", lambda: other_store.write(DeleteLease(unowned_lease)))
    assert store.write(ClaimLease(unowned_lease, "ann")) == Lost("0", None)
    assert objects.stored == {}


def test_late_checkpoints_and_annotations_keep_the_ownerships_etag() -> None:
    """A late checkpoint of the old owner must not cause the rejection of the new owner's next renewal."""
    objects, store = opened(OURS)
    lease = create_lease_of_ann(objects, store)
    other_store = EtagStore(objects, OURS)
    expect_applied(other_store.write(CheckpointLate(lease, AT_9)))
    expect_applied(other_store.write(AnnotateLease(lease, "seal", "7")))
    objects.log.clear()
    assert expect_applied(store.write(RenewLease(lease))).owner == "ann"
    assert objects.log == ["over ownership/0"]


@LAYOUTS
def test_no_object_is_rewritten_or_deleted_unnecessarily(layout: Layout) -> None:
    """With soft delete or versioning, every unnecessary write is stored and billed for years."""
    objects, store = opened(layout)
    lease = expect_applied(store.write(AnnotateLease(create_lease_of_ann(objects, store), "seal", "7")))
    lease = expect_applied(store.write(RequestLease(lease, "bob")))
    objects.log.clear()
    assert expect_applied(store.write(AnnotateLease(lease, "seal", "7"))) == lease
    assert expect_applied(store.write(RequestLease(lease, "bob"))) == lease
    assert expect_rejected(store.write(CreateLease(Lease("0")))) == lease
    assert not [line for line in objects.log if line.startswith(("over", "delete"))]


@LAYOUTS
def test_an_unreadable_row_is_malformed_and_not_missing(layout: Layout) -> None:
    objects, store = opened(layout)
    expect_applied(store.write(CreateLease(Lease("1"))))
    objects.put_if_absent(layout.name("0", "checkpoint"), {"sequence": "soon", "sequencenumber": "soon"})
    listing = store.list()
    assert [lease.key for lease in listing.leases] == ["1"]
    assert [(malformed.key, malformed.field) for malformed in listing.malformed] in (
        [("0", "sequence")],
        [("0", "sequencenumber")],
    )
    with pytest.raises(StoreError, match="lease 0: sequence"):
        store.get(["0"])


def test_a_position_the_layout_cannot_store_is_rejected_before_any_write() -> None:
    """The position is checked before the renewal, so the owner still knows its version after the rejection."""
    objects, store = opened(HUB)
    lease = create_lease_of_ann(objects, store)
    with pytest.raises(StoreError, match="needs an offset"):
        store.write(CheckpointLease(lease, Position("9")))
    assert objects.log == []
    assert expect_applied(store.write(RenewLease(lease))).owner == "ann"


def test_an_ownership_without_a_checkpoint_is_no_lease_for_us() -> None:
    """The SDKs write a checkpoint long after they have claimed the partition.

    If we created the missing checkpoint, we would set a start position that the SDK's user did not choose.
    """
    objects, store = opened(HUB)
    objects.put_if_absent(HUB.name("0", "ownership"), {"ownerid": "sdk"})
    (lease,) = store.list().leases
    assert (lease.owner, lease.checkpoint) == ("sdk", TRIM_HORIZON)
    assert expect_rejected(store.write(CreateLease(Lease("0")))) == lease
    assert set(objects.stored) == {"ns/hub/group/ownership/0"}


def test_a_service_that_rejects_everything_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    objects, store = opened(OURS)
    lease = create_lease_of_ann(objects, store)
    monkeypatch.setattr(ObjectMemory, "put_if_match", lambda *_asked: None)
    with pytest.raises(StoreError, match="64 conditional writes in a row were rejected"):
        store.write(StealLease(lease, "bob"))


@LAYOUTS
def test_an_interrupted_reset_leaves_a_free_lease_at_its_old_position(layout: Layout) -> None:
    objects, store = opened(layout)
    created_lease = expect_applied(store.write(CreateLease(Lease("0", checkpoint=AT_9))))
    objects.mute = frozenset({"new"})
    with pytest.raises(OutcomeUnknown):
        store.write(ResetLease(created_lease, TRIM_HORIZON))
    objects.mute = frozenset()
    (remaining_lease,) = EtagStore(objects, layout).list().leases
    assert clear_layout_fields(remaining_lease) == clear_layout_fields(created_lease)
    assert remaining_lease.version != created_lease.version
    assert expect_applied(store.write(ResetLease(remaining_lease, TRIM_HORIZON))).checkpoint == TRIM_HORIZON


@LAYOUTS
def test_a_reset_overtaken_by_a_claim_is_lost(layout: Layout) -> None:
    """The worker that takes the lease between the two writes of the reset has already read the old checkpoint."""
    objects, store = opened(layout)
    created_lease = expect_applied(store.write(CreateLease(Lease("0", checkpoint=AT_9))))
    other_store = EtagStore(objects, layout)
    objects.before = call_before_request(
        "over checkpoint/0", lambda: expect_applied(other_store.write(ClaimLease(other_store.get(["0"])[0], "ann")))
    )
    current_lease = expect_rejected(store.write(ResetLease(created_lease, TRIM_HORIZON)))
    assert current_lease is not None
    assert current_lease.owner == "ann"


def write_invalid_checkpoint(objects: ObjectMemory, layout: Layout) -> None:
    """Overwrite the checkpoint with an invalid value."""
    name = layout.name("0", "checkpoint")
    stored_object = objects.stored[name]
    fields = {"sequence": "soon", "sequencenumber": "soon"}
    objects.stored[name] = evolve(stored_object, etag="spoilt", fields=fields)


@LAYOUTS
@pytest.mark.parametrize("verb", ["renew", "checkpoint", "steal"])
def test_an_invalid_object_met_by_a_write_is_reported_with_its_lease(layout: Layout, verb: str) -> None:
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    spoil_hook = call_before_request("over ownership/0", lambda: write_invalid_checkpoint(objects, layout))
    writes: dict[str, Callable[[], object]] = {
        "renew": lambda: store.write(RenewLease(lease)),
        "checkpoint": lambda: store.write(CheckpointLease(lease, AT_9)),
        "steal": lambda: store.write(StealLease(lease, "bob")),
    }
    if verb == "renew":
        expect_applied(EtagStore(objects, layout).write(RenewLease(lease)))
        write_invalid_checkpoint(objects, layout)
    else:
        objects.before = spoil_hook
    with pytest.raises(StoreError, match="lease 0: sequence"):
        writes[verb]()


@LAYOUTS
def test_a_gift_overtaken_by_a_later_checkpoint_returns_the_stored_lease(layout: Layout) -> None:
    """The owner neither treats the lease as gone nor gives it away at a position before the stored one."""
    objects, store = opened(layout)
    lease = expect_applied(store.write(RequestLease(create_lease_of_ann(objects, store), "bob")))
    draining_store = EtagStore(objects, layout)
    objects.before = call_before_request(
        "over checkpoint/0", lambda: draining_store.write(CheckpointLate(lease, AT_10))
    )
    outcome = store.write(GiveLease(lease, AT_9))
    assert isinstance(outcome, Lost)
    assert (outcome.key, outcome.lease) == ("0", store.get(["0"])[0])
    assert outcome.lease is not None
    assert (outcome.lease.owner, outcome.lease.checkpoint) == ("ann", AT_10)


@LAYOUTS
def test_a_checkpoint_that_is_already_stored_is_done(layout: Layout) -> None:
    """The owner's own drain may have reached the same position."""
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    draining_store = EtagStore(objects, layout)
    objects.before = call_before_request("over checkpoint/0", lambda: draining_store.write(CheckpointLate(lease, AT_9)))
    assert expect_applied(store.write(CheckpointLease(lease, AT_9))).checkpoint == AT_9


def test_conditions_are_probed_in_the_folder_of_the_leases() -> None:
    """A policy that allows access to the folder therefore allows the probe, too."""
    objects = ObjectMemory()
    names: set[str] = set()
    objects.before = lambda _line: names.update(objects.stored)
    EtagStore(objects, ObjectLayout("fleet/one")).prove()
    assert names
    assert all(name.startswith("fleet/one/probe/") for name in names)
    assert objects.stored == {}


def test_a_copied_lease_keeps_its_fencing_number() -> None:
    """The next owner must not get a fencing number that was used before, because it would be rejected."""
    _, store = opened(OURS)
    for number in (0, 1, 2):
        created_lease = expect_applied(store.write(CreateLease(Lease(str(number), epoch=number))))
        assert store.get([str(number)])[0].epoch == created_lease.epoch == number


def test_objects_are_read_eight_at_a_time() -> None:
    objects, store = opened(OURS)
    keys = [str(number) for number in range(8)]
    for key in keys:
        expect_applied(store.write(CreateLease(Lease(key))))
    all_readers = Barrier(8)

    def before(line: str) -> None:
        if "ownership" in line:
            all_readers.wait(WAIT)

    objects.before = before
    assert [lease.key for lease in EtagStore(objects, OURS).get(keys)] == keys


@LAYOUTS
def test_the_annotations_of_a_new_lease_cost_the_fewest_writes(layout: Layout) -> None:
    """The SDKs' layout stores annotations with the ownership, whereas ours would write one more object per lease."""
    objects, store = opened(layout)
    created_lease = expect_applied(store.write(CreateLease(Lease("0", annotations=(("seal", "7"),)))))
    assert EtagStore(objects, layout).list().leases == (created_lease,)
    assert created_lease.annotations == (("seal", "7"),)
    creations = [line for line in objects.log if line.startswith("new")]
    assert creations == (["new checkpoint/0", "new ownership/0"] if layout is HUB else ["new checkpoint/0"])


@pytest.mark.parametrize(("lease_count", "listed"), [(7, True), (8, False)])
def test_reads_of_few_leases_use_the_cheaper_of_gets_and_a_listing(lease_count: int, listed: bool) -> None:
    """An object in a listing costs an eighth of a single request, but a listing contains all objects."""
    objects, store = opened(OURS)
    leases = tuple(create_lease_with_owner(store, Lease(str(number), owner="ann")) for number in range(lease_count))
    objects.log.clear()
    assert store.get(["0", "1"], stale_ok=True) == leases[:2]
    assert objects.log == (["list ownership"] if listed else ["get ownership/0", "get ownership/1"])


def test_one_object_is_read_by_the_caller_and_two_by_named_threads() -> None:
    """A next owner polls eight times a second, so its reads must not wait for a thread. Threads have names."""
    objects, store = opened(OURS)
    for key in "ab":
        create_lease_with_owner(store, Lease(key, owner="ann"))
    names: list[str] = []
    objects.before = lambda _line: names.append(current_thread().name)
    store.get(["a"], stale_ok=True)
    assert names == [current_thread().name]
    names.clear()
    EtagStore(objects, OURS).get(["a", "b"])
    assert len(names) == 6
    assert all(name.startswith("leasehold-objects") for name in names)


@LAYOUTS
def test_a_checkpoint_overtaken_by_a_request_and_a_drain_is_lost(layout: Layout) -> None:
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    requested_lease = expect_applied(EtagStore(objects, layout).write(RequestLease(lease, "bob")))
    draining_store = EtagStore(objects, layout)
    objects.before = call_before_request(
        "over checkpoint/0", lambda: draining_store.write(CheckpointLate(lease, AT_10))
    )
    outcome = store.write(CheckpointLease(lease, AT_9))
    assert outcome == Lost("0", evolve(requested_lease, checkpoint=AT_10))


def test_a_lease_that_is_deleted_between_two_writes_is_lost() -> None:
    objects, store = opened(OURS)
    lease = create_lease_of_ann(objects, store)
    objects.before = call_before_request("over checkpoint/0", objects.stored.clear)
    assert store.write(CheckpointLease(lease, AT_9)) == Lost("0", None)


def test_concurrent_annotations_are_both_stored() -> None:
    objects, store = opened(OURS)
    lease = create_lease_of_ann(objects, store)
    other_store = EtagStore(objects, OURS)
    objects.before = call_before_request("new notes/0", lambda: other_store.write(AnnotateLease(lease, "theirs", "1")))
    annotated_lease = expect_applied(store.write(AnnotateLease(lease, "ours", "2")))
    assert annotated_lease.annotations == (("ours", "2"), ("theirs", "1"))


@define
class DelayedReads(ObjectMemory):
    """A bucket that delays the response to the last read of another thread until the response is outdated."""

    last: str = ""
    read: Event = field(factory=Event)
    written: Event = field(factory=Event)

    def list(self, prefix: str) -> tuple[StoredObject, ...]:
        listed_objects = ObjectMemory.list(self, prefix)
        self._hold_back(f"list {prefix.rstrip('/').rpartition('/')[2]}")
        return listed_objects

    def get(self, name: str) -> StoredObject | None:
        stored_object = ObjectMemory.get(self, name)
        self._hold_back(f"get {name.split('/')[-2]}")
        return stored_object

    def _hold_back(self, line: str) -> None:
        if current_thread() is not main_thread() and line == self.last:
            self.read.set()
            assert self.written.wait(WAIT)


@LAYOUTS
@pytest.mark.parametrize("reading", ["list", "get"])
def test_an_outdated_read_never_returns_an_older_checkpoint(layout: Layout, reading: str) -> None:
    """After an outdated read, the owner's next write does not return an older checkpoint, which the owner would use."""
    objects = DelayedReads(last=f"{reading} {layout.parts[-1]}")
    store = EtagStore(objects, layout)
    lease = create_lease_of_ann(objects, store)
    with ThreadPoolExecutor(1) as pool:
        readings = list[Future[object]]()

        def read() -> None:
            readings.append(pool.submit(store.list if reading == "list" else lambda: store.get(["0"])))
            assert objects.read.wait(WAIT)

        # At this point, the ownership has been renewed, and only the new checkpoint is missing from the read.
        objects.before = call_before_request("over checkpoint/0", read)
        lease = expect_applied(store.write(CheckpointLease(lease, AT_9)))
        objects.written.set()
        readings[0].result()
    assert expect_applied(store.write(RenewLease(lease))).checkpoint == AT_9


CHANGES: tuple[Callable[[Lease], Write], ...] = (
    RenewLease,
    lambda lease: CheckpointLease(lease, AT_9),
    lambda lease: AnnotateLease(lease, "seal", "8"),
    lambda lease: RequestLease(lease, "bob"),
    lambda lease: GiveLease(lease, AT_10),
    lambda lease: ClaimLease(lease, "bob"),
    lambda lease: ReleaseLease(lease, "bob"),
    lambda lease: ResetLease(lease, TRIM_HORIZON),
    lambda lease: ResetLease(lease, LATEST),
    lambda lease: ResetLease(lease, at_timestamp(1_700_000_000_000)),
)
"""Writes that follow each other in the life of a lease that ann owns at first."""


@LAYOUTS
def test_fields_of_other_programs_survive_every_write(layout: Layout) -> None:
    objects, store = opened(layout)
    expect_applied(store.write(AnnotateLease(create_lease_of_ann(objects, store), "seal", "7")))
    objects.stored = {
        name: evolve(stored_object, fields={**stored_object.fields, "theirs": "1"})
        for name, stored_object in objects.stored.items()
    }
    store = EtagStore(objects, layout)
    (lease,) = store.get(["0"])
    for make_write in CHANGES:
        write = make_write(lease)
        lease = expect_applied(store.write(write))
        assert {stored_object.fields.get("theirs") for stored_object in objects.stored.values()} == {"1"}, write


@LAYOUTS
def test_a_reset_leaves_nothing_of_the_former_position(layout: Layout) -> None:
    objects, store = opened(layout)
    lease = expect_applied(store.write(CreateLease(Lease("0"))))
    positions = (TRIM_HORIZON, LATEST, at_timestamp(1_700_000_000_000), Position("9", 0, "4520"))
    for former_position, position in permutations(positions, 2):
        lease = expect_applied(store.write(ResetLease(lease, former_position)))
        lease = expect_applied(store.write(ResetLease(lease, position)))
        (stored_lease,) = EtagStore(objects, layout).get(["0"])
        assert (stored_lease.checkpoint, stored_lease.checkpoint.token) == (position, position.token)


@pytest.mark.parametrize("length", [DEDUPLICATION_LENGTH_MAX, DEDUPLICATION_LENGTH_MAX + 1])
def test_deduplication_data_are_stored_up_to_their_maximum_length(length: int) -> None:
    objects, store = opened(HUB)
    token = f"4520 {'a' * length}"
    expect_applied(store.write(CheckpointLease(create_lease_of_ann(objects, store), Position("9", 0, token))))
    assert (store.get(["0"])[0].checkpoint.token == token) is (length == DEDUPLICATION_LENGTH_MAX)


@LAYOUTS
def test_a_checkpoint_at_the_same_position_stores_its_token(layout: Layout) -> None:
    """A Spark sink may have repeated more rows although its position has not moved."""
    objects, store = opened(layout)
    lease = expect_applied(store.write(CheckpointLease(create_lease_of_ann(objects, store), AT_9)))
    expect_applied(store.write(CheckpointLease(lease, Position("9", 0, "4520 a:7"))))
    assert [row.checkpoint.token for row in EtagStore(objects, layout).get(["0"])] == ["4520 a:7"]


@LAYOUTS
def test_a_deleted_lease_is_missing_from_cheap_reads(layout: Layout) -> None:
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    released_lease = expect_applied(store.write(ReleaseLease(lease, "ann")))
    expect_applied(store.write(DeleteLease(released_lease)))
    assert store.get(["0"], stale_ok=True) == ()


class GuardedParts(dict[str, Parts]):
    """A cache that may only be changed by a thread that holds the lock of its store."""

    def __init__(self, store: EtagStore) -> None:
        super().__init__(store._cached_parts)  # noqa: SLF001  the cache is replaced
        self._lock = store._cache_lock  # noqa: SLF001

    def __setitem__(self, key: str, parts: Parts) -> None:
        assert self._lock.locked()
        super().__setitem__(key, parts)

    def pop(self, key: str, *default: None) -> Parts | None:  # type: ignore[override]
        assert self._lock.locked()
        return super().pop(key, *default)


@LAYOUTS
def test_the_cache_is_changed_only_under_its_lock(layout: Layout) -> None:
    """Otherwise, a slow read could replace the objects that another thread has just written."""
    objects, store = opened(layout)
    lease = create_lease_of_ann(objects, store)
    store._cached_parts = GuardedParts(store)  # noqa: SLF001
    lease = expect_applied(store.write(CheckpointLease(lease, AT_9)))
    store.get(["0"])
    store.list()
    expect_applied(store.write(DeleteLease(lease)))
    store.list()


STORES: dict[str, Callable[[ObjectMemory], Store]] = {
    "ours": lambda objects: EtagStore(objects, OURS),
    "event-hubs": lambda objects: EtagStore(objects, HUB),
    "sessions": lambda objects: SessionStore(ObjectCells(objects, ""), gather_seconds=0.0),
}


@pytest.mark.parametrize("kind", STORES)
def test_a_closed_store_leaves_no_threads_and_no_connections(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing twice is harmless."""
    closed: list[str] = []
    monkeypatch.setattr(ObjectMemory, "close", lambda _objects: closed.append(kind))
    threads_before = set(enumerate_threads())
    store = STORES[kind](ObjectMemory())
    for key in ("0", "1"):
        create_lease_with_owner(store, Lease(key, owner="ann"))
    store.get(["0", "1"])
    new_threads = set(enumerate_threads()) - threads_before
    assert new_threads
    for _ in range(2):
        store.close()
    assert [thread.name for thread in new_threads if thread.is_alive()] == []
    assert set(closed) == {kind}
