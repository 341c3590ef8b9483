"""A worker that gets no responses from its stream leaves leases to other workers: what it writes to their rows."""

import math

import pytest
from attrs import evolve
from held_leases import HeldLease
from virtual_fleet import FaultyStore
from waiters import Clock

from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.adapters.worker.silence import StreamSilence
from leasehold.balancer.actions import Action, Claim, Release, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Position
from leasehold.balancer.rules.minimal import Minimal


def test_unreachable_lease_shows_when_it_may_be_retried() -> None:
    """The row contains the time of the earliest retry, and not the end of a longer cooldown (D5)."""
    held_lease = HeldLease()
    silence = StreamSilence("ann", Config(Minimal(), lease_seconds=10.0))
    held_lease.holding.progress.call_began(1000.0)
    held_lease.holding.progress.call_returned()
    times = [1000.0 + seconds for seconds in (10, 31, 200)]
    leases_left_at_times = [silence.find_leases_to_leave([held_lease.row], [held_lease.holding], now) for now in times]
    assert [[lease.seconds for lease in leases_left] for leases_left in leases_left_at_times] == [[], [10.0], [10.0]]


def test_each_outage_needs_its_own_proof_that_others_read_the_stream() -> None:
    """A worker that has read the stream during one outage may be as cut off as this worker in the next one."""
    held_lease = HeldLease()
    progress, silence = held_lease.holding.progress, StreamSilence("ann", Config(Minimal(), lease_seconds=10.0))

    def keys_left(seconds: float, checkpoint: str) -> list[str]:
        other_lease = Lease("s-1", owner="bob", checkpoint=Position(checkpoint))
        leases = [held_lease.row, other_lease]
        return [
            lease.holding.key for lease in silence.find_leases_to_leave(leases, [held_lease.holding], 1000.0 + seconds)
        ]

    progress.call_began(1000.0)
    assert [keys_left(5, "7"), keys_left(12, "8")] == [[], ["s-0"]]
    progress.read(Batch((), None, 0.0, 1.0), 1100.0)
    assert keys_left(101, "9") == []
    progress.call_began(1200.0)
    progress.call_returned()
    assert [keys_left(seconds, "9") for seconds in (205, 212, 229)] == [[], [], []]


EMPTY = Batch((), None, 0.0, 1.0)
MINIMAL = Config(Minimal(), lease_seconds=10.0)


class Owner:
    """Worker ann with one holding per key. The wall clock shows the same time as the monotonic one."""

    def __init__(self, *keys: str, stream: str = "") -> None:
        self.silence, self.clock, self.holdings = StreamSilence("ann", MINIMAL), Clock(), list[Holding]()
        for key in keys:
            self.take(key, stream)

    def take(self, key: str, stream: str = "") -> Holding:
        """Begin to hold this lease, about which no response has arrived yet."""
        holding = Holding(
            FaultyStore(),
            Lease(key, owner="ann", stream=stream),
            identity=Identity("ann", "p-1"),
            clock=self.clock,
            write_began=self.clock.now,
            lease_seconds=10.0,
        )
        holding.progress.enable_annotations("host", self.clock, self.clock.now)
        self.holdings = [*(other for other in self.holdings if other.key != key), holding]
        return holding

    def wait_for_response(self, since: float) -> None:
        """Let calls about every shard time out since this time."""
        for holding in self.holdings:
            holding.progress.call_began(since)
            holding.progress.call_returned()

    def leave(self, now: float, *leases: Lease) -> list[str]:
        """Return the keys of the leases to leave at this time."""
        self.clock.now = now
        return [lease.holding.key for lease in self.silence.find_leases_to_leave(leases, self.holdings, now)]

    def leave_times(self, start: int, end: int) -> list[int]:
        """Read the table every second, and return the times at which a lease is left to others."""
        return [now for now in range(start, end) if self.leave(float(now))]


def respond(holding: Holding, began: float, ended: float) -> None:
    holding.progress.call_began(began)
    holding.progress.read(EMPTY, ended)


def fail(holding: Holding, began: float) -> None:
    holding.progress.call_began(began)
    holding.progress.failed("no response", began)


def test_trials_of_a_silent_stream_come_at_growing_intervals() -> None:
    """The first trial comes after three lease times, and each next one after twice a rest of at most 300 s (D4, D5)."""
    owner = Owner("s-1", "s-0")
    owner.wait_for_response(1000.0)
    assert owner.leave_times(1000, 2900) == [1030, 1070, 1150, 1310, 1630, 2230, 2830]
    assert owner.leave(3430.0) == ["s-0"]


def test_response_after_a_rest_makes_the_next_rest_short_again() -> None:
    owner = Owner("s-0")
    owner.wait_for_response(1000.0)
    owner.leave_times(1000, 1320)
    respond(owner.holdings[0], 1500.0, 1500.0)
    assert owner.leave(1501.0) == []
    owner.wait_for_response(1510.0)
    assert owner.leave_times(1510, 1600) == [1540, 1580]


def test_response_from_before_a_rest_does_not_make_the_next_rest_short() -> None:
    owner = Owner("s-0")
    respond(owner.holdings[0], 1000.0, 1000.0)
    owner.wait_for_response(1001.0)
    assert owner.leave_times(1001, 1060) == [1031]
    owner.holdings[0].progress.expect_no_response()
    assert owner.leave(1060.0) == []
    owner.holdings[0].progress.expect_response(1061.0)
    assert owner.leave_times(1061, 1200) == [1091, 1171]


def annotated(owner: str | None, read: float, *, note_of: str = "bob", idle: float = 1.0, stream: str = "") -> Lease:
    """Return lease s-9 of this owner, with a note that shows when the stream was read."""
    note = Progress(read, note_of, read=read).note
    return Lease("s-9", owner=owner, idle=idle, stream=stream, annotations=((PROGRESS_ANNOTATION, note),))


@pytest.mark.parametrize(
    ("lease", "left"),
    [
        pytest.param(annotated("bob", 1004.0), True, id="read since"),
        pytest.param(annotated("bob", 1003.0), False, id="read at about the same time"),
        pytest.param(annotated("bob", 1004.0, idle=10.0), True, id="read by an owner that may live"),
        pytest.param(annotated("bob", 1004.0, idle=10.1), False, id="read by a dead owner"),
        pytest.param(annotated("cyd", 1004.0), False, id="read by the former owner"),
        pytest.param(annotated("ann", 1004.0, note_of="ann"), False, id="read by this worker"),
        pytest.param(annotated(None, 1004.0), False, id="read by no owner"),
        pytest.param(annotated("bob", 1004.0, stream="other"), False, id="another stream"),
    ],
)
def test_all_leases_are_left_once_another_owner_has_read_the_stream(lease: Lease, *, left: bool) -> None:
    """Only a read by a living owner that is clearly later than our last response shows that our connection is dead."""
    owner = Owner("s-0", "s-1")
    owner.wait_for_response(1000.0)
    assert owner.leave(1009.9, lease) == []
    assert owner.leave(1010.0, lease) == (["s-0", "s-1"] if left else [])
    assert [owner.leave(now, lease) for now in (1011.0, 1029.9)] == [[], []]


@pytest.mark.parametrize(("idle", "left"), [(1.0, []), (10.1, ["s-0"])])
def test_trial_is_made_unless_a_living_owner_waits_too(idle: float, left: list[str]) -> None:
    """In an outage of the stream, the present owners keep their leases (D3)."""
    owner = Owner("s-0", "s-1")
    owner.wait_for_response(1000.0)
    assert owner.leave(1300.0, annotated("bob", 1000.0, idle=idle)) == left


def other_row(owner: str | None, checkpoint: Position, stream: str = "") -> Lease:
    return Lease("s-9", owner=owner, checkpoint=checkpoint, stream=stream)


@pytest.mark.parametrize(
    ("before", "after", "first_read", "left"),
    [
        pytest.param(other_row("bob", Position("7")), other_row("bob", Position("8")), 1003.4, True, id="moved"),
        pytest.param(other_row("bob", Position("7", 1)), other_row("bob", Position("7", 2)), 1004.0, True, id="part"),
        pytest.param(other_row("bob", Position("7")), other_row("bob", Position("7")), 1004.0, False, id="still"),
        pytest.param(other_row("bob", Position("7")), other_row("bob", Position("8")), 1003.3, False, id="too early"),
        pytest.param(other_row("bob", Position("7")), other_row("cyd", Position("8")), 1004.0, False, id="new owner"),
        pytest.param(other_row("ann", Position("7")), other_row("ann", Position("8")), 1004.0, False, id="ours"),
        pytest.param(
            other_row("bob", Position("7"), "other"),
            other_row("bob", Position("8"), "other"),
            1004.0,
            False,
            id="other",
        ),
    ],
)
def test_moved_checkpoint_of_another_owner_shows_a_read(
    before: Lease, after: Lease, first_read: float, *, left: bool
) -> None:
    """The checkpoint must move between two reads of the table that are both clearly later than our last response."""
    owner = Owner("s-0")
    owner.wait_for_response(1000.0)
    assert owner.leave(first_read, before) == []
    assert owner.leave(1010.0, after) == (["s-0"] if left else [])


def test_next_full_read_is_due_when_a_release_is() -> None:
    """A silent stream, a silent shard and a hung call each request a full read at the time of their release."""
    silent_stream = Owner("s-0")
    silent_stream.wait_for_response(1000.0)
    assert silent_stream.silence.due(silent_stream.holdings, 1001.0) == 1010.0
    silent_shard = Owner("s-0", "s-1")
    for holding in silent_shard.holdings:
        respond(holding, 1000.0, 1000.0)
    fail(silent_shard.holdings[1], 1001.0)
    respond(silent_shard.holdings[0], 1008.0, 1008.0)
    assert silent_shard.silence.due(silent_shard.holdings, 1009.0) == 1011.0
    hung_call = Owner("s-0", "s-1")
    hung_call.holdings[1].progress.call_began(1000.0)
    respond(hung_call.holdings[0], 1025.0, 1025.0)
    assert hung_call.silence.due(hung_call.holdings, 1026.0) == 1030.0


def test_silence_that_begins_after_a_check_is_noticed_within_half_a_lease_time() -> None:
    owner = Owner("s-0")
    assert owner.silence.due(owner.holdings, 1000.0) == math.inf
    owner.wait_for_response(1001.0)
    assert owner.silence.due(owner.holdings, 1005.0) == 1011.0


def test_stream_that_owes_a_response_for_a_second_is_not_listed() -> None:
    owner = Owner("s-0", "s-1")
    owner.holdings[0].progress.call_began(1000.0)
    assert [owner.silence.is_silent(owner.holdings, now) for now in (1000.9, 1001.0)] == [False, True]
    respond(owner.holdings[1], 1002.0, 1002.0)
    assert [owner.silence.is_silent(owner.holdings, now) for now in (1002.9, 1003.0)] == [False, True]


def test_resting_worker_takes_only_what_no_other_worker_has_taken() -> None:
    """A free lease is claimed after one lease time, and the lease of a dead owner one lease time after it expired."""
    owner = Owner("s-0")
    owner.wait_for_response(1000.0)
    assert owner.leave(1030.0) == ["s-0"]
    dead = Lease("s-1", owner="bob", idle=20.0)
    allowed: tuple[Action, ...] = (
        Claim(Lease("s-0", idle=10.0), "M5"),
        Claim(dead, "M5"),
        Claim(Lease("s-2", stream="other"), "M5"),
        Release(Lease("s-0", owner="ann"), "M14"),
    )
    held_back: tuple[Action, ...] = (
        Claim(Lease("s-0", idle=9.9), "M5"),
        Claim(evolve(dead, idle=19.9), "M5"),
        Steal(dead, "bob", "M9"),
        RequestHandoff(dead, "bob", "H2"),
    )
    assert owner.silence.without(allowed + held_back, 1049.9) == allowed
    assert owner.silence.without(held_back, 1050.0) == held_back


def silent_shard(response_seconds: float = 1.0) -> Owner:
    """Return an owner of two shards, both of which have responded. Reads of s-1 fail since 1010 s, and s-0 responds."""
    owner = Owner("s-0", "s-1")
    for holding in owner.holdings:
        respond(holding, 1000.0, 1000.0 + response_seconds)
    fail(owner.holdings[1], 1010.0)
    return owner


@pytest.mark.parametrize(("response_seconds", "left_at"), [(1.0, 1020.0), (5.0, 1020.0), (8.0, 1026.0)])
def test_silent_shard_is_left_after_a_lease_time_or_two_responses(response_seconds: float, left_at: float) -> None:
    """A shard whose responses take long is not left because it is slow (D7)."""
    owner = silent_shard(response_seconds)
    respond(owner.holdings[0], left_at - 1.0, left_at - 1.0)
    assert [owner.leave(now) for now in (left_at - 0.1, left_at)] == [[], ["s-1"]]
    claims = tuple(Claim(Lease(key), "M5") for key in ("s-0", "s-1"))
    assert owner.silence.without(claims, left_at + 19.9) == claims[:1]
    assert owner.silence.without(claims, left_at + 20.0) == claims


def test_silent_shard_goes_to_the_living_owner_with_the_fewest_leases() -> None:
    """The next owner must answer requests, because only then does it count the lease as its own."""
    owner = silent_shard()
    respond(owner.holdings[0], 1019.0, 1019.0)
    rows = [
        Lease("s-1", owner="ann", yields=True),
        Lease("s-2", owner="bob", yields=True),
        Lease("s-3", owner="bob", yields=True),
        Lease("s-4", owner="cyd", yields=True, idle=10.0),
        Lease("s-5", owner="abe", yields=True, idle=10.1),
        Lease("s-6", owner="ada", yields=False),
        Lease("s-7"),
    ]
    (left,) = owner.silence.find_leases_to_leave(rows, owner.holdings, 1020.0)
    assert (left.holding.key, left.to, left.seconds) == ("s-1", "cyd", 10.0)


def test_shard_that_never_responded_is_kept_longer_each_time() -> None:
    """A shard that responds to no worker must not move all the time. A response makes the next rest short again."""
    owner = Owner("s-0")
    for taken_at, kept_seconds in ((1000.0, 30.0), (1100.0, 40.0), (1200.0, 80.0)):
        owner.clock.now = taken_at
        holding = owner.take("s-1")
        respond(owner.holdings[0], taken_at, taken_at)
        assert owner.leave(taken_at) == []
        fail(holding, taken_at)
        respond(owner.holdings[0], taken_at + kept_seconds - 1.0, taken_at + kept_seconds - 1.0)
        assert owner.leave(taken_at + kept_seconds - 0.1) == []
        assert owner.leave(taken_at + kept_seconds) == ["s-1"]
    holding = owner.take("s-1")
    respond(holding, 1500.0, 1501.0)
    assert owner.leave(1502.0) == []
    fail(holding, 1510.0)
    respond(owner.holdings[0], 1519.0, 1519.0)
    assert owner.leave(1520.0) == ["s-1"]
    claims: tuple[Action, ...] = (Claim(Lease("s-1"), "M5"),)
    assert [owner.silence.without(claims, now) for now in (1539.9, 1540.0)] == [(), claims]


def test_shard_without_a_failed_read_is_not_left() -> None:
    owner = silent_shard()
    respond(owner.holdings[1], 1012.0, 1012.0)
    owner.holdings[1].progress.expect_response(1013.0)
    respond(owner.holdings[0], 1099.0, 1099.0)
    assert owner.leave(1100.0) == []


def test_every_shard_gets_the_full_time_after_an_outage_of_its_stream() -> None:
    owner = silent_shard()
    fail(owner.holdings[0], 1010.0)
    living = annotated("bob", 1000.0)
    assert owner.leave(1040.0, living) == []
    respond(owner.holdings[0], 1041.0, 1041.0)
    fail(owner.holdings[1], 1041.0)
    assert owner.leave(1041.0, living) == []
    respond(owner.holdings[0], 1049.0, 1049.0)
    assert [owner.leave(now, living) for now in (1049.9, 1050.0)] == [[], ["s-1"]]


def test_call_that_does_not_return_costs_its_lease_after_thirty_seconds() -> None:
    """With short leases the limit is 30 s, so that slow calls lose nothing (D6)."""
    owner = Owner("s-0", "s-1")
    owner.holdings[1].progress.call_began(1000.0)
    respond(owner.holdings[0], 1029.0, 1029.0)
    assert [owner.leave(now) for now in (1029.9, 1030.0)] == [[], ["s-1"]]
