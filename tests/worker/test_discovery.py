"""When a worker lists the shards of a stream, and which messages it logs about a listing."""

import logging
from typing import Literal

import pytest
from attrs import define, evolve
from virtual_fleet import KCL, DrivenWorker, FaultySource, FaultyStore, RecordingConsumer, four_shards, member
from waiters import Clock

from leasehold.adapters.sources.protocol import REJECTION_RETRIES, TransientRejection
from leasehold.adapters.worker.annotations import latest_annotations, pinned_latest
from leasehold.adapters.worker.discovery import Discovery, LeaseRestarter, StreamRecreated
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import CONTRADICTION, INCARNATION, SETTLED_VALUE, reported_contradictions
from leasehold.balancer.model import (
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    BulletinState,
    History,
    Hole,
    Lease,
    Me,
    Position,
    Shard,
)
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.protocol import Capabilities, Listing, Malformed
from leasehold.stores.writes import AnnotateLease, CreateLease, DeleteLease, ReleaseLease, ResetLease, Write
from leasehold_lab.simulator.world.world import ListSource, create_shard

HEALTHY = Listing(())
ME = Me("a-1")


BROKEN = Listing((), (Malformed("s-1", "leaseCounter", "is missing"),))


def test_unreadable_row_holds_back_only_its_own_descendants(caplog: pytest.LogCaptureFixture) -> None:
    """Descendants of the unreadable row's shard wait, because they might start at the tip. Other shards are read."""
    family = [
        *four_shards(),
        create_shard("s-1a", 25, 49, "s-1"),
        create_shard("s-1b", 25, 49, "s-1a"),
        create_shard("s-3a", 75, 99, "s-3"),
    ]
    source = ListSource(family)
    discovery = Discovery(source)
    listings = [discovery.shards(now, BROKEN, ME) for now in (0.0, 1.0)]
    assert [shards and [shard.id for shard in shards] for shards in listings] == [["s-0", "s-2", "s-3", "s-3a"], None]
    message = (
        "row s-1: leaseCounter is missing; until it is fixed, no lease is created for "
        "ancestors and descendants of its shard, and none is deleted"
    )
    assert [text for text in caplog.messages if "s-1:" in text] == [message], "once, not every turn"
    assert discovery.shards(2.0, HEALTHY, ME) == tuple(family)


def test_no_lease_is_deleted_while_a_row_is_unreadable() -> None:
    """A finished lease stays, because the unreadable row may belong to a child that has not begun."""
    discovery = Discovery(ListSource(four_shards(), missing={"s-9"}))
    shards = discovery.shards(0.0, BROKEN, ME) or ()
    assert not discovery.deletable(Lease("s-0"), shards)
    assert not discovery.deletable(Lease("s-9"), shards)
    discovery.shards(1.0, HEALTHY, ME)
    assert discovery.deletable(Lease("s-9"), shards)


def test_new_partition_at_latest_waits_for_an_unreadable_row() -> None:
    """With LATEST, new partitions wait, because the unreadable row may be the row of one of them."""
    partitions = [Shard(str(number)) for number in range(3)]
    discovery = Discovery(ListSource(partitions))
    assert discovery.shards(0.0, Listing((), (Malformed("1", "offset", "is missing"),)), ME) == ()
    listing_with_unrelated_row = Listing((), (Malformed("notes.txt", "offset", "is missing"),))
    assert discovery.shards(1.0, listing_with_unrelated_row, ME) == tuple(partitions)


def test_hole_causes_a_listing_at_every_third_reading() -> None:
    """A hole may come from a stale read of the table, so only every third read that shows it causes a listing."""
    source = ListSource(four_shards())
    discovery = Discovery(source)
    discovery.shards(0.0, HEALTHY, ME)
    histories = [History(holes=(Hole("", 0, 9, reads),)) for reads in (1, 2, 3, 3, 4, 5, 6)]
    has_listed = [discovery.shards(1.0, HEALTHY, evolve(ME, history=history)) is not None for history in histories]
    assert has_listed == [False, False, True, False, False, False, True]


def fleet(count: int, history: History = History()) -> list[tuple[Me, Discovery, ListSource]]:  # noqa: B008  frozen
    """Return workers that have listed the shards once. Each worker has its own source, which counts the listings."""
    sources = [ListSource(four_shards()) for _ in range(count)]
    workers = [
        (Me(f"w-{worker_number}", 0, history), Discovery(source), source)
        for worker_number, source in enumerate(sources)
    ]
    for me, discovery, _ in workers:
        discovery.shards(0.0, HEALTHY, me)
    return workers


def test_hole_seen_by_all_workers_is_listed_by_a_few_in_turn() -> None:
    """Large groups spread listings over time so that the service does not throttle them."""
    workers = fleet(100)
    listing = Listing(tuple(Lease(f"s-{n}", owner=me.worker) for n, (me, *_) in enumerate(workers)))

    def names_of_listing_workers(now: float, history: History = History()) -> set[str]:  # noqa: B008  frozen
        listings_before = [source.listings for *_, source in workers]
        for me, discovery, _ in workers:
            discovery.shards(now, listing, evolve(me, history=history))
        return {
            me.worker
            for (me, _, source), number in zip(workers, listings_before, strict=True)
            if source.listings > number
        }

    workers_of_safety_listings = [names_of_listing_workers(301.0 * number) for number in range(1, 11)]
    workers_of_hole_listings = [
        names_of_listing_workers(3011.0 + number, History(holes=(Hole("", 0, 9, number),))) for number in range(1, 31)
    ]
    assert [len(worker_ids) for worker_ids in workers_of_hole_listings if worker_ids] == [3] * 10
    assert [len(worker_ids) for worker_ids in workers_of_safety_listings] == [3] * 10
    assert len(set.union(*workers_of_safety_listings)) > 20, "others each time"


def test_lookout_lists_shards_for_readers_of_bulletins() -> None:
    ((me, discovery, source),) = fleet(1, History(hearing=BulletinState()))
    listing = Listing(tuple(Lease(f"s-{lease_number}", owner=f"w-{lease_number}") for lease_number in range(100)))
    for number in range(1, 6):
        discovery.shards(301.0 * number, listing, me)
    assert source.listings == 6


def test_inconsistent_listing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    source = ListSource([create_shard("s-0", 0, 9), create_shard("c-0", 0, 2**128 - 1, "s-0")])
    Discovery(source).shards(0.0, HEALTHY, ME)
    assert caplog.messages == ["shard s-0 is open but has a child, c-0: one of the two is out of date"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_stream_that_never_responded_is_an_error() -> None:
    """A stream that never responded may have a misspelled name. If it has responded before, the listing is retried."""
    source = FaultySource(four_shards())
    source.faults = [SourceUnavailable("slow down"), SourceError("no such stream")]
    discovery = Discovery(source)
    assert discovery.shards(0.0, HEALTHY, ME) is None
    with pytest.raises(SourceError, match="no such stream"):
        discovery.shards(1.0, HEALTHY, ME)
    assert discovery.shards(2.0, HEALTHY, ME) is not None
    discovery.request_listing()
    source.faults = [SourceError("no such stream")]
    assert discovery.shards(3.0, HEALTHY, ME) is None
    assert discovery.shards(4.0, HEALTHY, ME) is not None, "asked again at the next turn"


def test_lease_is_kept_while_the_source_cannot_confirm_its_shard_is_gone() -> None:
    class SilentSource(ListSource):
        def gone(self, shard: str) -> bool:
            raise SourceUnavailable(f"{shard}: no answer")

    (first_shard, *_) = shards = tuple(four_shards())
    discovery = Discovery(SilentSource())
    assert discovery.deletable(Lease(first_shard.id), shards)
    assert not discovery.deletable(Lease("s-9"), shards)


def test_one_worker_lists_once_to_remove_a_finished_lease() -> None:
    source = ListSource(four_shards())
    source.end("s-0", create_shard("c-0", 0, 12, "s-0"), create_shard("c-1", 13, 24, "s-0"))
    workers = [(Me(name), Discovery(source)) for name in ("a-1", "b-1")]

    def listings_at(checkpoint: Position, finished_long_ago: tuple[str, ...] = ("s-0",)) -> int:
        child = Lease("c-0", parents=("s-0",), owner="a-1", yields=True, checkpoint=checkpoint)
        leases = (Lease("s-0", checkpoint=SHARD_END), child, evolve(child, key="c-1", shard="c-1", owner="b-1"))
        for me, discovery in workers:
            discovery.shards(1.0, HEALTHY, me, leases, finished_long_ago)
        return source.listings

    assert listings_at(Position("6"), ()) == 2
    assert [listings_at(position) for position in (TRIM_HORIZON, Position("7"), Position("8"))] == [2, 3, 3]


def test_row_of_a_missing_shard_is_deleted_after_one_attempt_to_read() -> None:
    clock, store, source = Clock(), FaultyStore(), ListSource(four_shards(), missing={"s-9"})
    driven_worker = member(store, source, clock)
    driven_worker.run(60.0)
    store.write(CreateLease(Lease("s-9", hash_range=(0, 9), checkpoint=Position("7"))))
    driven_worker.run(60.0)
    tried_holding = next(holding for holding in driven_worker.worker.holdings if holding.key == "s-9")
    assert source.listings == 1
    driven_worker.worker.exclude("s-9", 60.0)
    tried_holding.ask_release()
    assert tried_holding.release()
    driven_worker.run(40.0)
    # The first further listing showed that the shard is gone, and the second one followed the deletion of its row.
    assert (source.listings, {lease.key for lease in store.list().leases}) == (3, {"s-0", "s-1", "s-2", "s-3"})


def test_shards_are_listed_every_five_minutes() -> None:
    """The regular listing finds shards that earlier listings missed and that leave no hole among the leases."""
    discovery = Discovery(ListSource(four_shards()))
    times = (0.0, 1.0, 299.9, 300.0, 300.1, 599.9, 600.0)
    assert [discovery.shards(now, HEALTHY, ME) is not None for now in times] == [
        *(True, False, False, True, False, False, True)
    ]
    discovery_with_short_interval = Discovery(ListSource(four_shards()), safety_seconds=10.0)
    assert [discovery_with_short_interval.shards(now, HEALTHY, ME) is not None for now in (0.0, 9.9, 10.0)] == [
        True,
        False,
        True,
    ]


def test_fault_is_logged_when_it_starts_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    discovery = Discovery(
        FaultySource(four_shards(), faults=[SourceUnavailable(message) for message in ("no", "no", "yet")])
    )
    has_listed = [discovery.shards(float(now), HEALTHY, ME) is not None for now in range(6)]
    assert has_listed == [False, False, False, True, False, False]
    retry_message = "the shards could not be listed, trying again until they can: "
    assert caplog.messages == [f"{retry_message}no", f"{retry_message}yet", "the shards are listed again"]


@pytest.mark.parametrize("config", [KCL, Config(initial_position=TRIM_HORIZON)], ids=["kcl", "minimal"])
@pytest.mark.parametrize("joined", [False, True], ids=["new group", "later"])
def test_rejected_listing_is_retried_within_seconds(config: Config, *, joined: bool) -> None:
    clock, source = Clock(), FaultySource(four_shards())
    driven_worker = member(FaultyStore(), source, clock, config=config)
    if joined:
        driven_worker.run(60)
        driven_worker.worker.hurry()
        driven_worker.turn_due = clock.now
    listings_before, source.faults = source.listings, [SourceUnavailable("slow down")] * 2
    driven_worker.run(18)
    assert (source.listings - listings_before, driven_worker.held) == (1, ["s-0", "s-1", "s-2", "s-3"])


def test_lease_that_contradicts_its_shard_is_logged_at_the_second_listing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A single listing may be stale, so the contradiction is logged and annotated only at the second one."""
    clock, store, source = Clock(), FaultyStore(), ListSource(four_shards())
    store.write(CreateLease(Lease("s-0", checkpoint=SHARD_END)))
    driven_worker = member(store, source, clock, config=Config(lease_seconds=10.0))
    clock.now += driven_worker.worker.turn(clock.now) - clock.now
    assert (source.listings, driven_worker.worker.discovery.contradictions) == (1, ())
    driven_worker.run(60)
    (contradiction,) = driven_worker.worker.discovery.contradictions
    assert (contradiction.kind, driven_worker.held) == ("ended and open", ["s-1", "s-2", "s-3"])
    assert caplog.messages.count(contradiction.what) == 1
    assert reported_contradictions(store.list().leases) == (contradiction.what,)
    source.end("s-0", create_shard("c-0", 0, 2**126 - 1, "s-0"))
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(60)
    assert (driven_worker.worker.discovery.contradictions, reported_contradictions(store.list().leases)) == ((), ())


def test_contradiction_is_not_written_on_the_row_of_another_owner() -> None:
    """In stores where an annotation changes the version, the write would look like a renewal by that owner."""
    clock, store = Clock(), FaultyStore(Capabilities(free_annotations=False))
    store.write(CreateLease(Lease("s-0")))
    store.rewrite("s-0", lambda row: evolve(row, owner="b-1", checkpoint=SHARD_END))
    driven_worker = member(store, ListSource(four_shards()), clock, config=Config(lease_seconds=10.0))
    driven_worker.run(60)
    (contradiction,) = driven_worker.worker.discovery.contradictions
    assert (contradiction.kind, store.row("s-0").owner) == ("ended and open", "b-1")
    assert reported_contradictions(store.list().leases) == ()


def test_lease_without_an_annotation_restarts_if_the_option_is_set() -> None:
    """The option `if_recreated` also applies to rows written by a version that does not annotate them."""
    clock, store, source = Clock(), FaultyStore(), ListSource(four_shards())
    store.write(CreateLease(Lease("s-0", checkpoint=SHARD_END)))
    store.write(CreateLease(Lease("s-1", checkpoint=Position("7"))))
    driven_worker = member(store, source, clock, if_recreated="TRIM_HORIZON")
    driven_worker.run(120)
    assert (driven_worker.held, store.row("s-0").checkpoint, store.row("s-1").checkpoint) == (
        ["s-0", "s-1", "s-2", "s-3"],
        TRIM_HORIZON,
        Position("7"),
    )


def test_unknown_start_on_recreation_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^if_recreated: 'EARLIEST' is neither TRIM_HORIZON nor LATEST$"):
        Worker(store=FaultyStore(), source=ListSource(), me="a-1", if_recreated="EARLIEST")  # type: ignore[arg-type]


@define
class Named(ListSource):
    """A stream that reports its incarnation when it responds."""

    name: str = "1"
    silent: bool = False

    def incarnation(self) -> str:
        if self.silent:
            raise SourceUnavailable("no answer")
        return self.name


def test_leases_of_a_recreated_stream_are_released_and_not_retaken() -> None:
    clock, store, source = Clock(), FaultyStore(), Named(four_shards())
    driven_worker = member(store, source, clock, config=Config(lease_seconds=10.0))
    driven_worker.run(30)
    assert driven_worker.held == ["s-0", "s-1", "s-2", "s-3"]
    source.name = "2"
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(1)
    assert (driven_worker.held, driven_worker.worker.discovery.leases_unusable) == ([], True)
    store.rewrite("s-0", lambda row: evolve(row, owner="a-1"))
    store.write(DeleteLease(store.row("s-1")))
    driven_worker.run(60)
    assert driven_worker.held == []
    assert [row.key for row in store.list().leases] == ["s-0", "s-2", "s-3"]
    assert not driven_worker.worker.discovery.has_unknown_contradiction(store.list().leases)


def test_contradiction_is_logged_by_the_listing_that_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    discovery = Discovery(ListSource(four_shards()))
    listing = Listing((Lease("s-0", checkpoint=SHARD_END),))
    for now in range(2):
        discovery.request_listing()
        discovery.shards(float(now), listing, ME, listing.leases)
    (contradiction,) = discovery.contradictions
    assert caplog.messages == [contradiction.what]


def test_stream_without_a_known_incarnation_counts_as_unlisted() -> None:
    """Every new lease stores the incarnation of its stream, which shows later whether the stream was recreated."""
    source = Named(four_shards())
    discovery = Discovery(source)
    source.silent = True
    assert discovery.shards(0.0, HEALTHY, ME) is None
    source.silent = False
    shards = discovery.shards(1.0, HEALTHY, ME)
    assert (len(shards or ()), discovery.incarnation) == (4, "1")
    source.silent = True
    discovery.request_listing()
    assert (len(discovery.shards(2.0, HEALTHY, ME) or ()), discovery.incarnation) == (4, "1"), "as it said before"


def test_stream_keeps_its_incarnation_if_it_can_no_longer_be_read() -> None:
    """The permission to describe the stream may be revoked at any time."""
    source = Named(four_shards())
    discovery = Discovery(source)
    discovery.shards(0.0, HEALTHY, ME)
    source.name = ""
    discovery.request_listing()
    assert (len(discovery.shards(1.0, HEALTHY, ME) or ()), discovery.incarnation) == (4, "1")


def worker_of_recreated_stream(store: FaultyStore) -> tuple[DrivenWorker, Named]:
    """Return a worker that holds four leases of a recreated stream, and is configured to read it from the beginning."""
    source, clock = Named(four_shards()), Clock()
    driven_worker = member(store, source, clock, if_recreated="TRIM_HORIZON")
    driven_worker.run(30)
    for holding in driven_worker.worker.holdings:
        assert holding.checkpoint(Position("17"))
    source.name = "2"
    return driven_worker, source


def test_recreated_shard_starts_after_the_running_batch_of_the_old_stream() -> None:
    store = FaultyStore()
    driven_worker, _ = worker_of_recreated_stream(store)
    consumer = driven_worker.worker.consumer
    assert isinstance(consumer, RecordingConsumer)
    consumer.busy = True
    for _ in range(3):
        driven_worker.worker.hurry()
        driven_worker.worker.turn(driven_worker.clock.now)
    assert {row.checkpoint for row in store.list().leases} == {Position("17")}
    consumer.busy = False
    driven_worker.worker.hurry()
    driven_worker.worker.turn(driven_worker.clock.now)
    assert driven_worker.held == [], "asked for before the consumer is told, or it would find nothing to do"
    driven_worker.turn_due = driven_worker.clock.now
    driven_worker.run(60)
    assert (len(driven_worker.held), {row.checkpoint for row in store.list().leases}) == (4, {TRIM_HORIZON})


@pytest.mark.parametrize(("refused", "resets"), [(ReleaseLease, 0), (ResetLease, 1)])
def test_pass_ends_at_the_first_step_that_another_worker_took(refused: type[Write], resets: int) -> None:
    """The later steps were planned for rows that another worker has since changed."""
    store = FaultyStore()
    driven_worker, _ = worker_of_recreated_stream(store)
    driven_worker.worker.hurry()
    driven_worker.worker.turn(driven_worker.clock.now)
    assert driven_worker.held == []
    store.rewrite("s-0", lambda row: evolve(row, owner="b-1"))
    store.write_requests.clear()
    store.refuses = (refused,)
    driven_worker.worker.hurry()
    driven_worker.worker.turn(driven_worker.clock.now)
    assert sum(isinstance(write, ResetLease) for write in store.write_requests) == resets
    store.refuses = ()
    driven_worker.turn_due = driven_worker.clock.now
    driven_worker.run(60)
    assert {row.checkpoint for row in store.list().leases} == {TRIM_HORIZON}


def test_lease_restarted_at_latest_has_no_position_of_the_former_stream() -> None:
    """The next owner resolves LATEST again, because the numbers of the new stream start again."""
    store, source, clock = FaultyStore(), Named(four_shards()), Clock()
    driven_worker = member(store, source, clock, if_recreated="LATEST")
    driven_worker.run(30)
    pins = latest_annotations(Position("77", 0, "4520"))
    store.rewrite("s-0", lambda row: evolve(row, checkpoint=LATEST, annotations=(*row.annotations, *pins)))
    source.name = "2"
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(60)
    row = store.row("s-0")
    assert (row.annotation(INCARNATION), row.checkpoint, pinned_latest(row)) == ("2", LATEST, None)


def test_deleted_finished_lease_leads_to_no_listing() -> None:
    """Only an unfinished lease without a row must be created again."""
    source = ListSource(four_shards())
    discovery = Discovery(source)
    discovery.shards(0.0, HEALTHY, ME)
    gone_leases = (Lease("s-0", checkpoint=SHARD_END), Lease("s-1", checkpoint=Position("7")))
    listings = list[int]()
    for gone in (gone_leases[:1], gone_leases, gone_leases):
        discovery.shards(1.0, HEALTHY, evolve(ME, history=History(gone=gone)))
        listings.append(source.listings)
    assert listings == [1, 2, 2]


def test_call_of_the_source_is_over_when_it_fails() -> None:
    """A worker that ends waits for a call in progress."""
    source, during = FaultySource(four_shards(), faults=[SourceUnavailable("slow down")]), list[bool]()
    discovery = Discovery(source)
    assert discovery.shards(0.0, HEALTHY, ME) is None
    assert not discovery.is_calling_source
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ListSource, "gone", lambda *_: during.append(discovery.is_calling_source))
        discovery.deletable(Lease("s-9"), ())
    assert (during, discovery.is_calling_source) == ([True], False)


def test_rejections_count_from_the_last_success() -> None:
    """A worker survives as many rejections again after each listing, but only a temporary failure hurries its looks."""
    rejections: list[SourceError | None] = [TransientRejection("307")] * REJECTION_RETRIES
    source = FaultySource(four_shards(), faults=[None, *rejections, None, *rejections, SourceError("denied"), None])
    discovery, failing = Discovery(source), list[bool]()
    while source.faults:
        discovery.request_listing()
        discovery.shards(0.0, HEALTHY, ME)
        failing.append(discovery.listing_failed)
    retried = [True] * REJECTION_RETRIES
    assert failing == [False, *retried, False, *retried, False, False]


def test_stream_whose_incarnation_changed_is_listed_again() -> None:
    """The stream may have been recreated between the two calls, so the shards may be the old ones."""
    source = Named(four_shards())
    discovery = Discovery(source)
    discovery.shards(0.0, HEALTHY, ME)
    source.name, current = "2", list[bool]()
    for _ in range(2):
        discovery.request_listing()
        discovery.shards(1.0, HEALTHY, ME)
        current.append(discovery.is_current)
    assert current == [False, True]


def test_contradiction_of_another_worker_leads_to_a_listing() -> None:
    source = ListSource(four_shards())
    discovery = Discovery(source)
    discovery.shards(0.0, HEALTHY, ME)
    lease = Lease("s-0", annotations=((CONTRADICTION, "the stream was made anew"),))
    discovery.shards(1.0, Listing((lease,)), ME, (lease,))
    assert source.listings == 2


def test_restart_is_over_only_once_leases_exist() -> None:
    """While the table is empty, leases are created at the position of the restart, and never at a former one."""
    store, source = FaultyStore(), Named(four_shards())
    discovery = Discovery(source)
    discovery.shards(0.0, HEALTHY, ME)
    restarter = LeaseRestarter(store, "a-1", discovery, "TRIM_HORIZON")
    restarter.is_restarting = True
    names = ("1", SETTLED_VALUE, "0")
    gone = tuple(Lease(f"s-{n}", annotations=((INCARNATION, name),)) for n, name in enumerate(names))
    config, history = restarter.planning_inputs(Config(initial_position=LATEST), History(gone=gone))
    assert (config.initial_position, history.gone) == (TRIM_HORIZON, gone[:2])
    restarter.note_read((), ())
    assert restarter.is_restarting
    restarter.note_read((), gone)
    assert not restarter.is_restarting


def test_bound_stream_ignores_earlier_streams_and_ends_with_a_later_one() -> None:
    """A listing of an earlier stream is stale, but a later stream means that the bound one was deleted."""
    source = Named(four_shards(), name="orders:1")
    discovery = Discovery(source)
    discovery.bind_incarnation("orders:2")
    assert discovery.shards(0.0, HEALTHY, ME) is None
    source.name = "orders:2"
    assert discovery.shards(1.0, HEALTHY, ME) == tuple(four_shards())
    source.name = "orders:3"
    discovery.request_listing()
    with pytest.raises(StreamRecreated):
        discovery.shards(2.0, HEALTHY, ME)


def listing_of(incarnation: str, store: FaultyStore) -> tuple[Discovery, Named]:
    """Return a discovery that has listed this stream. The leases of s-0 and s-1 are of `orders:2`."""
    for key in ("s-0", "s-1"):
        store.write(CreateLease(Lease(key, checkpoint=Position("7"), annotations=((INCARNATION, "orders:2"),))))
    source = Named(four_shards(), name=incarnation)
    discovery = Discovery(source)
    discovery.shards(0.0, HEALTHY, ME, store.list().leases)
    store.write_requests.clear()
    return discovery, source


def test_contradiction_is_written_once_on_every_row() -> None:
    """A write that fails is tried again at the next look, and does not keep the other rows from being written."""
    store = FaultyStore()
    discovery, _ = listing_of("orders:3", store)
    restarter, leases, written = LeaseRestarter(store, "a-1", discovery, None), store.list().leases, list[list[str]]()
    for down in (True, False, False):
        store.down = down
        restarter.restart_or_annotate(leases, ())
        written.append([write.lease.key for write in store.write_requests if isinstance(write, AnnotateLease)])
        store.write_requests.clear()
        store.down = False
        leases = store.list().leases
    assert written == [["s-0", "s-1"], ["s-0", "s-1"], []]


@pytest.mark.parametrize("start", [None, "TRIM_HORIZON"])
def test_listing_of_an_earlier_stream_changes_no_row(start: Literal["TRIM_HORIZON"] | None) -> None:
    """The next listing may resolve the contradiction."""
    store = FaultyStore()
    discovery, _ = listing_of("orders:1", store)
    assert discovery.leases_unusable
    assert not LeaseRestarter(store, "a-1", discovery, start).restart_or_annotate(store.list().leases, ())
    assert store.write_requests == []


def test_leases_restart_only_at_a_current_listing() -> None:
    """The first listing after the stream was recreated may still contain the old shards."""
    store = FaultyStore()
    discovery, source = listing_of("orders:2", store)
    restarter, restarted = LeaseRestarter(store, "a-1", discovery, "TRIM_HORIZON"), list[bool]()
    store.rewrite("s-0", lambda row: evolve(row, annotations=(*row.annotations, (CONTRADICTION, "made anew"))))
    source.name = "orders:3"
    discovery.request_listing()
    for now in (1.0, 2.0):
        leases = store.list().leases
        discovery.shards(now, HEALTHY, ME, leases)
        restarted.append(restarter.restart_or_annotate(leases, ()))
    row = store.row("s-0")
    assert (restarted, row.checkpoint) == ([False, True], TRIM_HORIZON)
    assert (row.annotation(INCARNATION), row.annotation(CONTRADICTION)) == ("orders:3", SETTLED_VALUE)
