"""Reads and writes bulletins and calls, the row attributes by which the lookout directs other workers (C4, C6, C7).

The lookout is the one worker that regularly reads the whole lease table.

A bulletin consists of three counts, which the lookout writes on its rows as the string "looks acts warns". The counts
only grow, so the greatest bulletin is the latest one, and an old bulletin on the row of a former lookout has no effect.

This module also measures for how long each count of the bulletin has not changed. The time is measured by this worker's
own clock, from the end of the read that first showed the count to the start of the latest read.

A call names the workers that should act, the rows that each of them should read, and the row that carries the bulletin.
The lookout computes the call from a read of the whole table. Workers that read the same rows make the same decisions,
so the lookout knows which worker will claim each free lease, and which leases will be requested from their owners. It
writes the call on all its rows, next to the counts of the bulletin:

    8 0 s-17,s-5 4f2a91c0=s-3,s-4 9be01d22
    | | |    |   |                a worker that should read the whole table
    | | |    |   a worker, by the first digits of its digest, and the rows that it should read
    | | |    a row of the worker that stands in first, and of the next ones: the rows where their bulletins would be
    | | the row that carries the bulletin: the lookout renews it more often than any other
    | how many seconds the listing took or, if it is still in progress, has taken so far
    the looks of the bulletin that the call belongs to

A worker that is not named in the call reads nothing. A worker that is named reads the rows that are listed for it,
claims the free leases among them, and hands off its own leases if they were requested. `*` makes all workers read the
whole table.

Rule 1: a call does not assign leases. Claims are conditional writes, and the store rejects a claim if the lease's
version has changed since it was read.
Rule 2: a call is valid only next to the bulletin to which it belongs. If the *looks* of the call and the bulletin
differ, the call is ignored, because a renewal may write only the counts on a row that still contains an old call.
Rule 3: if a worker misses a call, a later call makes up for it, because at each look, the lookout decides from the
table which workers must act.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from attrs import evolve, field, fields, frozen

from leasehold.balancer.chance import digest_under
from leasehold.balancer.model import Annotations, Bulletin, BulletinState, Lease

BULLETIN = "bulletin"
"""The name of the row attribute that contains the bulletin's counts. The lookout writes them with each renewal (C4)."""

COUNT_DIGITS_MAX = 18
"""The maximum number of digits in one of a bulletin's counts.

Real counts are far shorter. Without a limit, `int` would raise an exception for a string of thousands of digits.
"""


def bulletin_annotations(bulletin: Bulletin, call: Annotations = ()) -> Annotations:
    """Return the row attributes that store a bulletin and its call."""
    return ((BULLETIN, f"{bulletin.looks} {bulletin.acts} {bulletin.warns}"), *call)


def bulletin_of(lease: Lease) -> Bulletin:
    """Return the bulletin on a row, or a bulletin of zeros if the row has no bulletin or an invalid one."""
    return _parse_counts(lease.annotation(BULLETIN) or "")


@lru_cache(maxsize=1_000)  # cached, because the same string may stay on the row of a former lookout for hours
def _parse_counts(text: str) -> Bulletin:
    parts = text.split()
    all_numeric = all(word.isascii() and word.isdigit() and len(word) <= COUNT_DIGITS_MAX for word in parts)
    if len(parts) != len(fields(Bulletin)) or not all_numeric:
        return Bulletin()
    return Bulletin(*map(int, parts))


CALL = "call"
"""The name of the row attribute that contains the call."""

CALL_LENGTH_MAX = 2000
"""The maximum length of a call, in characters.

The limit exists because the lookout writes the call on each of its rows. A longer call is replaced by `*`, which calls
all workers.
"""

WORKER_DIGITS = 8
"""The number of hex digits by which a call identifies a worker. They are the first digits of a digest of the worker's
id.

If two workers happen to have the same digits, both read the same rows and claim the same leases. The store then rejects
the second claim.
"""

CALL_SECONDS_MAX = 10**6

rank_digest = lru_cache(maxsize=10_000)(digest_under("lookout"))  # cached, because all workers are ranked at each look


@frozen
class LookoutCall:
    """A call, parsed from its attribute.

    Attributes:
        looks: The looks of the bulletin that the call belongs to.
        seconds: The duration of the lookout's read of the table, or of the part so far if the read is still in
            progress.
        row: The key of the row that carries the bulletin.
        stand_in_rows: For each worker that may stand in for the lookout, in order of rank, the key of the row on which
            its bulletin would be.
        to_all: Whether all workers should read the whole table.
        names: The keys that each called worker should read, by the digits of its digest. An empty tuple stands for the
            whole table.
    """

    looks: int
    seconds: int
    row: str
    stand_in_rows: tuple[str, ...] = ()
    to_all: bool = False
    names: Mapping[str, tuple[str, ...]] = field(factory=dict)

    def keys(self, worker: str) -> tuple[str, ...]:
        """Return the keys of the rows that this worker is called to read."""
        return self.names.get(worker_digits(worker), ())

    def reads_whole_table(self, worker: str) -> bool:
        """Return whether this worker is called to read the whole table."""
        return self.to_all or self.names.get(worker_digits(worker)) == ()


@lru_cache(maxsize=10_000)
def worker_digits(worker: str) -> str:
    """Return the hex digits that identify a worker in calls."""
    return rank_digest(worker).hex()[:WORKER_DIGITS]


def call_annotation(
    look_count: int,
    seconds: float,
    row_keys: Sequence[str],
    called_keys: Mapping[str, Sequence[str]],
    *,
    to_all: bool = False,
) -> Annotations:
    """Return the row attribute that stores a call.

    If the call would be too long, or if a key in `called_keys` contains a separator, the call becomes `*`, which calls
    all workers. If a key in `row_keys` contains a separator, the call is empty.

    Args:
        look_count: The looks of the bulletin that the call belongs to.
        seconds: The duration of the read of the whole table.
        row_keys: The key of the row with the bulletin, then the keys of the rows on which stand-ins would write theirs.
        called_keys: The keys that each called worker should read. An empty sequence stands for the whole table.
        to_all: Whether to call all workers.
    """
    keys_by_worker = {worker_digits(worker): tuple(dict.fromkeys(keys)) for worker, keys in sorted(called_keys.items())}
    worker_entries = [digits + ("=" + ",".join(keys) if keys else "") for digits, keys in keys_by_worker.items()]
    prefix = f"{look_count} {min(int(seconds), CALL_SECONDS_MAX)} {','.join(row_keys)}"
    call = " ".join([prefix, *worker_entries])
    if (
        to_all
        or len(call) > CALL_LENGTH_MAX
        or not all(_fits_in_call(key) for keys in keys_by_worker.values() for key in keys)
    ):
        call = f"{prefix} *"
    return ((CALL, call),) if row_keys and all(map(_fits_in_call, row_keys)) else ((CALL, ""),)


def _fits_in_call(key: str) -> bool:
    """Return whether a lease key contains none of the separators that a call uses.

    The keys of Kinesis and Event Hubs shards never contain a separator. If a key from another source contains one, the
    call calls all workers.
    """
    return bool(key) and not set(key) & set(" ,=")


@lru_cache(maxsize=100)
def call_of(text: str) -> LookoutCall | None:
    """Parse a call. Return None if the string is empty or malformed."""
    look_count, seconds, row, *entries = [*text.split(" "), "", "", ""][: max(3, text.count(" ") + 1)]
    numbers_valid = all(part.isascii() and part.isdigit() and len(part) <= 18 for part in (look_count, seconds))  # noqa: PLR2004  as a bulletin's
    if not numbers_valid or not row:
        return None
    keys_by_digits = {
        digits: tuple(keys.split(",")) if separator else ()
        for digits, separator, keys in (entry.partition("=") for entry in entries)
    }
    to_all, (bulletin_key, *stand_in_keys) = keys_by_digits.pop("*", None) is not None, row.split(",")
    return LookoutCall(
        int(look_count), min(int(seconds), CALL_SECONDS_MAX), bulletin_key, tuple(stand_in_keys), to_all, keys_by_digits
    )


def call_in_row(lease: Lease, bulletin: Bulletin) -> str:
    """Return the call on this row as a string, or "" if it does not belong to this bulletin."""
    text = lease.annotation(CALL) or ""
    call = call_of(text)
    return text if call is not None and call.looks == bulletin.looks else ""


def prolonged_annotations(annotations: Annotations, seconds: float) -> Annotations:
    """Return a lookout's annotations, updated with the time that its current listing has taken so far.

    While this time grows, the other workers don't stand in for the lookout, even if the listing is slow (C8).
    """
    updated_annotations = []
    for name, text in annotations:
        call = call_of(text) if name == CALL else None
        time_has_grown = call is not None and int(seconds) > call.seconds
        look_count, _, remaining_text = text.partition(" ")
        updated_annotations.append(
            (name, f"{look_count} {int(seconds)} {remaining_text.partition(' ')[2]}" if time_has_grown else text)
        )
    return tuple(updated_annotations)


@frozen
class BulletinTracker:
    """Tracks the latest bulletin, and when each of its counts last changed.

    Attributes:
        hearing: The state of the bulletins, which the rules use.
        looks_at: The end of the first read that showed the latest *looks*, or None before the first read.
        acts_at: The end of the first read that showed the latest *acts*, or None until *acts* first changes.
        warns_at: The end of the first read that showed the latest *warns*, or None until *warns* first changes.
    """

    hearing: BulletinState = field(factory=BulletinState)
    looks_at: float | None = None
    acts_at: float | None = None
    warns_at: float | None = None

    def after(
        self,
        leases: Iterable[Lease],
        began: float,
        ended: float,
        requested_keys: Collection[str] | None,
        full_at: float,
    ) -> "BulletinTracker":
        """Return the tracker after another read of the table.

        Args:
            leases: The leases as they were read, with `held` filled in.
            began: The time at which the read began.
            ended: The time at which the read ended.
            requested_keys: The keys that were requested, or None for a read of the whole table.
            full_at: The time at which the last full read ended.
        """
        rows_read, previous_state = tuple(leases), self.hearing
        bulletins = [(_parse_counts(text), lease) for lease in rows_read if (text := lease.annotation(BULLETIN))]
        latest_bulletin = max([previous_state.latest, *{bulletin for bulletin, _ in bulletins}])
        # Several rows may contain the same call with different times, because the lookout updates the time during a
        # listing.
        calls = [call_in_row(lease, latest_bulletin) for bulletin, lease in bulletins if bulletin == latest_bulletin]
        calls.append(previous_state.call if latest_bulletin == previous_state.latest else "")
        looks_at = (
            ended if self.looks_at is None or latest_bulletin.looks != previous_state.latest.looks else self.looks_at
        )
        acts_at = ended if latest_bulletin.acts != previous_state.latest.acts else self.acts_at
        warns_at = ended if latest_bulletin.warns != previous_state.latest.warns else self.warns_at
        # A row counts as unchanged if it still has the same owner as in the last full read.
        unchanged_keys = (
            {lease.key for lease in rows_read if lease.held >= began - full_at} if requested_keys is not None else ()
        )
        new_state = BulletinState(
            latest=latest_bulletin,
            acts_read=latest_bulletin.acts if requested_keys is None else previous_state.acts_read,
            acts_still=previous_state.acts_still if acts_at is None else max(0.0, began - acts_at),
            looks_still=max(0.0, began - looks_at),
            warned=previous_state.warned if warns_at is None else max(0.0, began - warns_at),
            turned=requested_keys is not None and not set(requested_keys) <= set(unchanged_keys),
            call=max(calls, key=_call_seconds),
        )
        return evolve(self, hearing=new_state, looks_at=looks_at, acts_at=acts_at, warns_at=warns_at)


def _call_seconds(text: str) -> int:
    call = call_of(text)
    return -1 if call is None else call.seconds
