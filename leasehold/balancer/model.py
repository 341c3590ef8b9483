"""Defines the data types that all rules use: leases, shards, positions, and the worker that plans.

These types do not depend on any store or cloud. Each store and each source converts its own format to these types.
"""

import math
from typing import Any, NewType

from attrs import Factory, field, frozen

Version = NewType("Version", str)
"""A store's compare-and-swap token (a leaseCounter or an ETag). It is opaque, and is compared only for equality."""

HashRange = tuple[int, int]
"""The first and the last hash key of a shard. Both are inclusive, and both are within 0 .. 2**128 - 1."""

Annotations = tuple[tuple[str, str], ...]
"""The attributes that this library adds to a lease row, as (name, value) pairs sorted by name."""

HASH_KEYS: HashRange = (0, 2**128 - 1)
"""The range of all hash keys of a stream."""

SENTINELS = frozenset({"TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "SHARD_END"})


DIGITS_MAX = 129
"""The maximum number of digits of a sequence number. kcl-rust has the same limit. No service comes near it."""


def _check_position(position: Any, _attribute: object, sequence: Any) -> None:  # noqa: ANN401  as given
    # attrs runs validators after it has set all fields, so this function can validate all fields of a position.
    if not (isinstance(sequence, str) and isinstance(position.sub, int) and isinstance(position.token, str)):
        message = f"checkpoint: {position!r} needs a str, an int and a str"
        raise TypeError(message)
    is_number = sequence.isascii() and sequence.isdigit() and len(sequence) <= DIGITS_MAX
    if sequence not in SENTINELS and not is_number:
        message = f"checkpoint: {sequence!r} is neither one of {sorted(SENTINELS)} nor a decimal sequence number"
        raise ValueError(message)


@frozen
class Position:
    """A point in a shard. All records up to and including (sequence, sub) have been read.

    Attributes:
        sequence: "TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "SHARD_END", or a sequence number in decimal.
        sub: The index of a user record within an aggregated record, starting at 0. In an AT_TIMESTAMP position, it is
            the time in milliseconds since 1970, because kcl-rust stores the time there.
        token: An opaque offset (Event Hubs).

    Raises:
        ValueError: If `sequence` is neither a sentinel nor a decimal number. The message names the field.
        TypeError: If a field has the wrong type.

    Examples:
        >>> from leasehold import Position
        >>> Position("1000").order > Position("999").order  # compared as numbers, not as text
        True
    """

    sequence: str = field(validator=_check_position)
    sub: int = 0
    token: str = field(default="", eq=False)

    @property
    def numbered(self) -> bool:
        """Whether the sequence is a number rather than a sentinel."""
        return self.sequence not in SENTINELS

    @property
    def ended(self) -> bool:
        """Whether every record of the shard has been processed."""
        return self.sequence == "SHARD_END"

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key. Sentinels such as LATEST come first, then numbers, by value and `sub`, and then SHARD_END.

        Sentinels are recognized by name and not by length, because numbers may be short.
        """
        if self.sequence in SENTINELS:
            return (2, 0, 0) if self.sequence == "SHARD_END" else (0, 0, 0)
        return (1, int(self.sequence), self.sub)


TRIM_HORIZON = Position("TRIM_HORIZON")
LATEST = Position("LATEST")
SHARD_END = Position("SHARD_END")


def at_timestamp(milliseconds: int) -> Position:
    """Return the position of the first record that arrived at or after a time (milliseconds since 1970).

    Examples:
        >>> from leasehold import at_timestamp
        >>> at_timestamp(1_700_000_000_000).sequence
        'AT_TIMESTAMP'
    """
    return Position("AT_TIMESTAMP", milliseconds)


WEIGHT_MAX = 10**15
"""The maximum weight of a lease, in bytes per second.

The maximum is a thousand terabytes per second. With this limit, sums of weights stay exact even in stores that keep
numbers as floats.
"""


def _check_weight(_lease: object, _attribute: object, weight: int | None) -> None:
    if weight is not None and not (type(weight) is int and 0 <= weight <= WEIGHT_MAX):
        message = f"weight: {weight!r} is not a whole number of bytes per second, from 0 to {WEIGHT_MAX}"
        raise ValueError(message)


def _check_names_and_owner(lease: Any, _attribute: object, owner: Any) -> None:  # noqa: ANN401  as given
    # attrs runs validators after it has set all fields, so this function can validate several of them.
    for name in ("key", "stream", "shard"):
        if not isinstance(value := getattr(lease, name), str):
            message = f"{name}: {value!r} is not a str"
            raise TypeError(message)
    if not isinstance(owner, str | None):
        message = f"owner: {owner!r} is neither a str nor None"
        raise TypeError(message)
    if owner == "":
        message = "owner: '' is not a worker id; use None for a lease without an owner"
        raise ValueError(message)


# Do not use slots, because `watched` copies every lease at each read of the table, and copying `__dict__` takes only a
# quarter of the time that copying slots takes.
@frozen(slots=False)
class Lease:
    """A row of the lease table, as it was read.

    Attributes:
        key: The key of the row, unique in the table.
        stream: The stream to which the lease belongs, or "" if the table serves a single stream.
        shard: The source's own shard id. Defaults to the key.
        parents: The keys of the parent leases. After a merge, there are two.
        owner: The worker that processes the shard, or None.
        version: The store's compare-and-swap token.
        idle: The seconds from the end of the read that first showed the version to the start of the latest read (see
            `Watch`). The value is infinite only if the lease had no owner when this worker first read it. In the result
            of a store's `list`, it is the age of the row, if the store records ages.
        checkpoint: The position up to which the shard has been processed.
        hash_range: The first and last hash key, or None if unknown.
        weight: The throughput in whole bytes per second, or None if it is not measured yet. Fractions are not allowed,
            because their sum would depend on the order of addition, so workers that read the same rows could decide
            differently.
        held: The seconds for which the lease has had its present owner, or no owner, as far as this worker has
            observed.
        next_owner: The worker to which a requested hand-off will move the lease.
        next_owner_idle: The seconds for which the lease has had its present next owner, as far as this worker has
            observed.
        yields: Whether the owner responds to hand-off requests.
        leaving: Whether a KCL 3.x hand-off is in progress. If so, `next_owner` is the row's leaseOwner.
        epoch: The fencing number, which grows each time the owner changes. In stores that count every write, it also
            grows with each renewal.
        annotations: The attributes that this library adds to the row.

    Raises:
        ValueError: If the weight is out of range or the owner is an empty string. The message names the field.
        TypeError: If the key, stream, shard, owner or checkpoint has the wrong type.

    Examples:
        >>> from leasehold import Lease
        >>> Lease("shard-0", owner="worker-a", idle=2.5).ended
        False
    """

    key: str
    stream: str = ""
    shard: str = Factory(lambda lease: lease.key, takes_self=True)
    parents: tuple[str, ...] = ()
    owner: str | None = field(default=None, validator=_check_names_and_owner)
    version: Version = Version("")
    idle: float = 0.0
    checkpoint: Position = TRIM_HORIZON
    hash_range: HashRange | None = None
    weight: int | None = field(default=None, validator=_check_weight)
    held: float = math.inf
    next_owner: str | None = None
    next_owner_idle: float = 0.0
    yields: bool = False
    leaving: bool = False
    epoch: int = 0
    annotations: Annotations = ()
    # `ended` is stored and not computed on access, because every rule reads it for every lease in each turn.
    ended: bool = field(init=False, eq=False, repr=False)

    @ended.default
    def _ended(self) -> bool:
        checkpoint: Any = self.checkpoint
        if not isinstance(checkpoint, Position):
            message = f"checkpoint: {checkpoint!r} is not a Position"
            raise TypeError(message)
        return self.checkpoint.ended

    def watched(self, idle: float, held: float, next_owner_idle: float) -> "Lease":
        """Return a copy of the lease with the times that `Watch` has measured, in seconds."""
        fields = self.__dict__.copy()
        fields["idle"], fields["held"], fields["next_owner_idle"] = idle, held, next_owner_idle
        return _copy(fields)

    def written(self, epoch: int, annotations: Annotations) -> "Lease":
        """Return the lease after a write that changes only its counter and its annotations.

        The new counter is also used as the version of the returned lease.
        """
        fields = self.__dict__.copy()
        fields["epoch"], fields["version"], fields["annotations"] = epoch, Version(str(epoch)), annotations
        return _copy(fields)

    def annotation(self, name: str) -> str | None:
        """Return the value of the annotation with this name, or None if the lease has no such annotation."""
        for key, value in self.annotations:
            if key == name:
                return value
        return None


_new_object, _set_fields = object.__new__, vars(Lease)["__dict__"].__set__


def _copy(fields: dict[str, object]) -> Lease:
    """Build a lease from fields that have already been validated.

    If the validators ran again, building a lease would take four times as long.
    """
    copy = _new_object(Lease)
    _set_fields(copy, fields)
    return copy


@frozen
class Shard:
    """A shard of a stream, as the source lists it. Event Hubs partitions are shards without parents.

    `id` is also the key of the shard's lease, and `parents` contains the ids of the parent shards. If a table serves
    several streams, the source adds the name of the stream to each id.

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
    """A hash range of a stream that no unfinished lease covers.

    `times` is the number of consecutive full reads of the table that have shown the hole.

    Examples:
        >>> from leasehold.planner import Hole
        >>> Hole("", 100, 199, times=2).last
        199
    """

    stream: str
    first: int
    last: int
    times: int


@frozen(order=True)
class Bulletin:
    """Three counts with which the lookout informs the other workers (C4).

    The lookout is the worker that regularly reads the whole table. It counts its reads (`looks`), the reads that showed
    work for other workers (`acts`), and the reads that showed an owner that may be dead (`warns`).

    A new lookout continues the counts of the previous one. Bulletins are compared by these counts, in this order, so
    the greatest bulletin is the latest.
    """

    looks: int = 0
    acts: int = 0
    warns: int = 0


@frozen
class BulletinState:
    """The worker's knowledge about bulletins after all reads of the table so far (C7, C8).

    Attributes:
        latest: The greatest bulletin that has been read so far.
        acts_read: The value of `acts` in the bulletin that was the latest at the last full read.
        acts_still: The seconds since `acts` last grew; infinite if it never has grown.
        looks_still: The seconds since `looks` last grew.
        warned: The seconds since `warns` last grew; infinite if it never has grown.
        turned: Whether the last read was a read of a few rows, and one of these rows was missing, or its owner had
            changed since the last full read.
        call: The call that belongs to the latest bulletin (`bulletin.py`), or "" if there is none.
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
    """What the rules need to know about earlier reads of the table.

    `Watch` computes it, so that rules can be pure functions.

    Attributes:
        owners_still: The seconds since any lease last changed its owner.
        fleet_still: The seconds since the set of owners and next owners last changed.
        holes: The uncovered hash ranges, each with the number of consecutive full reads that have shown it.
        gaps: For each owner, sorted by name, the longest gap among its leases at the last full read. The gap of a lease
            is the shorter of its last two intervals without a renewal, in seconds. A gap is a lower bound for the
            owner's renewal interval.
        paces: For each owner, another lower bound for its renewal interval, in seconds. If the store counts renewals,
            this is the time between two reads, divided by the number of renewals plus one. A high value shows that the
            owner is slow, or that it died before the second read (C16).
        full_still: The seconds since the whole table was last read; 0 right after such a read.
        full_apart: The seconds between the last two reads of the whole table; infinite before the second such read.
        full_took: The duration of the last read of the whole table, in seconds.
        hearing: The state of the bulletins, or None if every worker lists the table itself (C14).
        led: The living workers of a KCL 3.x leader, sorted by name, each with the seconds since it was last given a
            lease (M14).
        gone: The leases whose rows have been deleted, as they were last read, sorted by key.

    Examples:
        >>> from leasehold.planner import History
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
    """The worker that plans.

    `turn` counts the plans of this worker. All random choices are derived from `worker` and `turn`.

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
    """A fault in a listing of shards. It is returned by `problems` and never raised.

    Examples:
        >>> from leasehold import Shard, problems
        >>> [problem.shard for problem in problems([Shard("shard-0"), Shard("shard-1", parents=("shard-0",))])]
        ['shard-0']
    """

    stream: str
    shard: str
    what: str
