"""The nouns every rule speaks of: leases, shards, positions, and who is asking.

Nothing here knows which store or which cloud is in use; codecs translate at the edge.
"""

import math
from typing import Any, NewType

from attrs import Factory, field, frozen

Version = NewType("Version", str)
"""A store's compare-and-swap token (leaseCounter or ETag): opaque, compared for equality only."""

HashRange = tuple[int, int]
"""First and last hash key of a shard, both inclusive, within 0 .. 2**128 - 1."""

Notes = tuple[tuple[str, str], ...]
"""Our own attributes on a lease row: (name, value) pairs, sorted by name."""

HASH_KEYS: HashRange = (0, 2**128 - 1)
"""The whole hash key space of a stream."""

SENTINELS = frozenset({"TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "SHARD_END"})


DIGITS_MAX = 129
"""Digits of the longest sequence number: kcl-rust's own bound, and far above what any service uses."""


def _a_sentinel_or_number(position: Any, _attribute: object, sequence: Any) -> None:  # noqa: ANN401  as given
    # attrs calls this once all the fields are set.
    if not (isinstance(sequence, str) and isinstance(position.sub, int) and isinstance(position.token, str)):
        msg = f"checkpoint: {position!r} wants a str, an int and a str"
        raise TypeError(msg)
    number = sequence.isascii() and sequence.isdigit() and len(sequence) <= DIGITS_MAX
    if sequence not in SENTINELS and not number:
        msg = f"checkpoint: {sequence!r} is neither one of {sorted(SENTINELS)} nor a decimal sequence number"
        raise ValueError(msg)


@frozen
class Position:
    """A position says how far a shard has been read: up to and including (sequence, sub).

    `sequence` is a sentinel or a decimal string; `sub` counts the user records of one
    aggregated record from 0 (under AT_TIMESTAMP it holds the time, in milliseconds since
    1970, as kcl-rust stores it); `token` keeps an opaque offset (Event Hubs).
    Raises ValueError, naming the field, for any other sequence.

    Examples:
        >>> from leasehold import Position
        >>> Position("1000").order > Position("999").order  # numbers, not text
        True
    """

    sequence: str = field(validator=_a_sentinel_or_number)
    sub: int = 0
    token: str = field(default="", eq=False)

    @property
    def numbered(self) -> bool:
        """Whether this is a sequence number and not a sentinel."""
        return self.sequence not in SENTINELS

    @property
    def ended(self) -> bool:
        """Whether every record of the shard has been processed."""
        return self.sequence == "SHARD_END"

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: other sentinels, then numbers as big integers, then SHARD_END.

        Sentinels are told apart by name, never by length: "17" is shorter than "LATEST".
        """
        if self.sequence in SENTINELS:
            return (2, 0, 0) if self.sequence == "SHARD_END" else (0, 0, 0)
        return (1, int(self.sequence), self.sub)


TRIM_HORIZON = Position("TRIM_HORIZON")
LATEST = Position("LATEST")
SHARD_END = Position("SHARD_END")


def at_timestamp(milliseconds: int) -> Position:
    """Start at the first record that arrived at or after this time (ms since 1970).

    Examples:
        >>> from leasehold import at_timestamp
        >>> at_timestamp(1_700_000_000_000).sequence
        'AT_TIMESTAMP'
    """
    return Position("AT_TIMESTAMP", milliseconds)


WEIGHT_MAX = 10**15
"""Bytes a second: a thousand terabytes, so that no sum of weights loses a digit where a store keeps them as floats."""


def _whole_bytes(_lease: object, _attribute: object, weight: int | None) -> None:
    if weight is not None and not (type(weight) is int and 0 <= weight <= WEIGHT_MAX):
        msg = f"weight: {weight!r} is not a whole number of bytes per second, from 0 to {WEIGHT_MAX}"
        raise ValueError(msg)


def _somebody_or_none(lease: Any, _attribute: object, owner: Any) -> None:  # noqa: ANN401  as given
    # Likewise called once all the fields are set.
    for name in ("key", "stream", "shard"):
        if not isinstance(value := getattr(lease, name), str):
            msg = f"{name}: {value!r} is no str"
            raise TypeError(msg)
    if not isinstance(owner, str | None):
        msg = f"owner: {owner!r} is neither a str nor None"
        raise TypeError(msg)
    if owner == "":
        msg = "owner: '' is no worker's id; None says that nobody owns the lease"
        raise ValueError(msg)


# Without slots: a copy with other times is made of every lease at every look, and takes a quarter of the time so.
@frozen(slots=False)
class Lease:
    """A row of the lease table, as a reading showed it.

    key        unique among all leases of the table
    stream     the stream it belongs to; "" where the table serves one stream
    shard      the source's own id of the shard; the key where left out
    parents    keys of the parent leases (two after a merge)
    owner      the worker still processing it, or None
    version    the store's compare-and-swap token
    idle       seconds the version has stood still (see `Watch`); infinite only for a lease
               first seen unowned; in a store's own listing, the row's age where it has one
    checkpoint how far it has been processed
    hash_range first and last hash key, or None if unknown
    weight     throughput in whole bytes per second, or None if unmeasured; whole, because sums of fractions
               depend on their order, and two workers that read the same would decide differently
    held       seconds the present owner has held it, as far as we have watched
    heir       the worker that a planned move has named
    heir_idle  seconds that heir has been named, by our own watching
    yields     whether the owner answers requests for a planned move
    leaving    whether a KCL 3.x hand-off is under way (then `heir` is its leaseOwner)
    epoch      a fencing number that grows with each owner, where the store has one; where it counts
               every write, by one with each renewal
    notes      our own attributes on the row
    Raises ValueError, naming the field, for a weight out of its limits and an owner without a name.

    Examples:
        >>> from leasehold import Lease
        >>> Lease("shard-0", owner="worker-a", idle=2.5).ended
        False
    """

    key: str
    stream: str = ""
    shard: str = Factory(lambda lease: lease.key, takes_self=True)
    parents: tuple[str, ...] = ()
    owner: str | None = field(default=None, validator=_somebody_or_none)
    version: Version = Version("")
    idle: float = 0.0
    checkpoint: Position = TRIM_HORIZON
    hash_range: HashRange | None = None
    weight: int | None = field(default=None, validator=_whole_bytes)
    held: float = math.inf
    next_owner: str | None = None
    next_owner_idle: float = 0.0
    yields: bool = False
    leaving: bool = False
    epoch: int = 0
    notes: Notes = ()
    # Kept as a value because every rule asks it of every lease, each turn.
    ended: bool = field(init=False, eq=False, repr=False)

    @ended.default
    def _ended(self) -> bool:
        checkpoint: Any = self.checkpoint
        if not isinstance(checkpoint, Position):
            msg = f"checkpoint: {checkpoint!r} is no Position"
            raise TypeError(msg)
        return self.checkpoint.ended

    def watched(self, idle: float, held: float, next_owner_idle: float) -> "Lease":
        """The same row with these seconds, which watching has taught."""
        fields = self.__dict__.copy()
        fields["idle"], fields["held"], fields["next_owner_idle"] = idle, held, next_owner_idle
        return _copy(fields)

    def written(self, epoch: int, notes: Notes) -> "Lease":
        """The same row after a write that changed its counter, which is its version, and notes, and nothing else."""
        fields = self.__dict__.copy()
        fields["epoch"], fields["version"], fields["notes"] = epoch, Version(str(epoch)), notes
        return _copy(fields)

    def note(self, name: str) -> str | None:
        """The value of our attribute of this name, or None."""
        for key, value in self.notes:
            if key == name:
                return value
        return None


_new, _set_fields = object.__new__, vars(Lease)["__dict__"].__set__


def _copy(fields: dict[str, object]) -> Lease:
    """A lease of fields of which none that is checked has changed: to check all takes four times as long."""
    copy = _new(Lease)
    _set_fields(copy, fields)
    return copy


@frozen
class Shard:
    """A shard of a stream, as its source lists it; a partition is a shard without parents.

    `id` and `parents` share one name space with lease keys; where a table serves several
    streams the source qualifies them.

    Examples:
        >>> from leasehold import Shard
        >>> Shard("shard-2", parents=("shard-0",), hash_range=(0, 99)).open
        True
    """

    id: str
    stream: str = ""
    parents: tuple[str, ...] = ()
    hash_range: HashRange | None = None
    open: bool = True


@frozen
class Hole:
    """A hash range of a stream that no unended lease covers, and how often in a row it was seen.

    Examples:
        >>> from leasehold import Hole
        >>> Hole("", 100, 199, times=2).last
        199
    """

    stream: str
    first: int
    last: int
    times: int


@frozen(order=True)
class Bulletin:
    """The bulletin counts how often lookouts looked, saw work for others, or had to warn (C4).

    Each count goes on where the last lookout stopped. Bulletins compare by these counts in order, so that the greatest
    is the latest.
    """

    looks: int = 0
    acts: int = 0
    warns: int = 0


@frozen
class BulletinState:
    """The readings taught this about bulletins (C7, C8).

    latest       the furthest of all bulletins ever read
    acts_read    its acts at the last full reading
    acts_still   seconds that the acts stood still; infinite if they never moved
    looks_still  seconds that the looks stood still
    warned       seconds since the warns last grew; infinite if they never did
    turned       whether a row read alone is gone, or has another owner than at the last full reading
    call         whom that bulletin calls, as its lookout wrote it (`bulletin.py`); "" where it says nothing of that
    """

    latest: Bulletin = Bulletin()
    acts_read: int = 0
    acts_still: float = math.inf
    looks_still: float = 0.0
    warned: float = math.inf
    turned: bool = False
    call: str = ""


@frozen
class History:
    """Earlier readings taught this, folded by `Watch`, so that rules with patience stay pure.

    owners_still  seconds since any lease last changed hands
    fleet_still   seconds since the set of owners and heirs last changed
    holes         uncovered hash ranges, with how many full readings in a row showed each
    gaps          by owner, sorted, at the last full reading, the longest of its leases: for how many seconds each was
                  seen to stand still before the owner renewed it, the last two times (the shorter of both; a lower
                  bound of how slowly it renews)
    paces         the same by how far counters moved between two readings, where a store counts renewals:
                  of who is slow, and of who died before the second (C16)
    full_still    seconds since the whole table was last read; 0 right after it was
    full_apart    seconds between the last two readings of the whole table; infinite before the second
    full_took     seconds that the last reading of the whole table took
    hearing       of bulletins; None where everybody lists the table (C14)
    gone          leases that earlier readings showed and the last ones do not, as last read, in order of key
    led           living workers of a KCL 3.x leader, sorted, each with the seconds for which it was given
                  no lease more (M14)

    Examples:
        >>> from leasehold import History
        >>> History(owners_still=30.0).fleet_still
        0.0
    """

    owners_still: float = 0.0
    fleet_still: float = 0.0
    holes: tuple[Hole, ...] = ()
    gaps: tuple[tuple[str, float], ...] = ()
    paces: tuple[tuple[str, float], ...] = ()
    full_still: float = 0.0
    full_apart: float = math.inf
    full_took: float = 0.0
    hearing: BulletinState | None = None
    led: tuple[tuple[str, float], ...] = ()
    gone: tuple[Lease, ...] = ()


@frozen
class Me:
    """The worker that asks, and how often it has planned.

    `turn` counts this worker's plans; with the worker's name it is all the chance there is.

    Examples:
        >>> from leasehold import Me
        >>> Me("worker-a", turn=4).worker
        'worker-a'
    """

    worker: str
    turn: int = 0
    history: History = History()


@frozen
class Problem:
    """A problem is something wrong in a listing of shards: it is reported, never raised.

    Examples:
        >>> from leasehold import Shard, problems
        >>> [problem.shard for problem in problems([Shard("shard-0"), Shard("shard-1", parents=("shard-0",))])]
        ['shard-0']
    """

    stream: str
    shard: str
    what: str
