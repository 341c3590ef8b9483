"""Reads and writes the lookout's bulletin and its calls, and tracks the bulletins that a worker has read (C4, C6, C7).

A row contains the bulletin's counts as the string "looks acts warns". The latest bulletin is the greatest ever read, so
an old row that a former lookout left behind has no effect. For each count we keep how long it has not changed, measured
by this worker's own clock as for leases: from the end of the reading that first showed it to the start of the latest
reading.

A call names the workers that should act after a look of the lookout, the rows that each should read, and the row that
carries the bulletin. The lookout has read the whole table, and workers that read the same rows decide the same. So it
knows which worker will claim which free lease, and whose leases will be requested. It writes the call next to the
bulletin's counts, on all its rows:

    8 0 s-17,s-5 4f2a91c0=s-3,s-4 9be01d22
    | | |    |   |                a worker that should read the whole table
    | | |    |   a worker, by the first digits of its digest, and the rows that it should read
    | | |    a row of the worker that stands in first, and of the next ones: the rows where their bulletins would be
    | | the row that carries the bulletin: the lookout renews it more often than any other
    | how many seconds the listing took or, if it is still in progress, has taken so far
    the looks of the bulletin that the call belongs to

A worker that is not named reads nothing. A worker that is named reads those rows, claims the free ones, and hands off
the leases that are requested from it. `*` calls all workers to the whole table.

Rule 1: a call is not an order. A lease is claimed only if its version is still the one that was read, and the store
decides.
Rule 2: a call is valid only next to the bulletin it belongs to. Workers of earlier versions write no calls, but renew
rows that may still contain an old one. Its *looks* then differ, and only the counts are used.
Rule 3: a missed call does no lasting harm, because each look decides again, from the table, which workers have to act.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from attrs import evolve, field, fields, frozen

from leasehold.balancer.chance import digest_under
from leasehold.balancer.model import Annotations, Bulletin, BulletinState, Lease

BULLETIN = "bulletin"
"""Our attribute with the counts, which the lookout writes with each of its renewals (C4)."""

DIGITS_MAX = 18
"""The most digits of a count.

No lookout looks that often, and Python refuses to convert a string of thousands of digits to a number.
"""


def bulletin_annotations(bulletin: Bulletin, call: Annotations = ()) -> Annotations:
    """Return the attributes that a row has for a bulletin and its call."""
    return ((BULLETIN, f"{bulletin.looks} {bulletin.acts} {bulletin.warns}"), *call)


def bulletin_of(lease: Lease) -> Bulletin:
    """Return the bulletin of a row, or one with all counts 0 if there is none or it cannot be parsed."""
    return _parse_counts(lease.annotation(BULLETIN) or "")


@lru_cache(maxsize=1_000)  # rows that a former lookout left behind stay the same for hours
def _parse_counts(text: str) -> Bulletin:
    words = text.split()
    digits = all(word.isascii() and word.isdigit() and len(word) <= DIGITS_MAX for word in words)
    if len(words) != len(fields(Bulletin)) or not digits:
        return Bulletin()
    return Bulletin(*map(int, words))


CALL = "call"
"""Our attribute with the call."""

CALL_LENGTH_MAX = 2000
"""Maximum length of a call, in characters, since the lookout stores it on each of its rows.

A longer call becomes `*`, which calls all workers.
"""

DIGITS = 8
"""How many digits of a worker's digest a call contains.

If two workers have the same digits, both read the rows and the store rejects one claim.
"""

CALL_SECONDS_MAX = 10**6

rank_digest = lru_cache(maxsize=10_000)(digest_under("lookout"))  # each look ranks all workers


@frozen
class LookoutCall:
    """A call, parsed from its attribute.

    Attributes:
        looks: The looks of the bulletin that the call belongs to.
        seconds: How many seconds the listing takes.
        row: The key of the row that carries the bulletin.
        next: A key of each worker that may stand in, in this order.
        to_all: Whether all workers should read the whole table.
        names: The keys that each called worker should read, by the digits of its digest. No keys mean the whole table.
    """

    looks: int
    seconds: int
    row: str
    next: tuple[str, ...] = ()
    to_all: bool = False
    names: Mapping[str, tuple[str, ...]] = field(factory=dict)

    def keys(self, worker: str) -> tuple[str, ...]:
        """Return the keys of the rows that this worker is called to read."""
        return self.names.get(worker_digits(worker), ())

    def lists(self, worker: str) -> bool:
        """Return whether this worker is called to read the whole table."""
        return self.to_all or self.names.get(worker_digits(worker)) == ()


@lru_cache(maxsize=10_000)
def worker_digits(worker: str) -> str:
    """Return the name of a worker in calls."""
    return rank_digest(worker).hex()[:DIGITS]


def call_annotation(
    looks: int, seconds: float, rows: Sequence[str], names: Mapping[str, Sequence[str]], *, to_all: bool = False
) -> Annotations:
    """Return the attribute for a call.

    All workers are called if the call would be too long or a called key cannot be written. If one of `rows` cannot be
    written, the call is empty.

    Args:
        looks: The looks of the bulletin that the call belongs to.
        seconds: How many seconds the listing took.
        rows: The key of the bulletin's row, followed by those of the workers that may stand in.
        names: The keys that each called worker should read. No keys mean the whole table.
        to_all: Whether to call all workers.
    """
    words = {worker_digits(worker): tuple(dict.fromkeys(keys)) for worker, keys in sorted(names.items())}
    entries = [name + ("=" + ",".join(keys) if keys else "") for name, keys in words.items()]
    prefix = f"{looks} {min(int(seconds), CALL_SECONDS_MAX)} {','.join(rows)}"
    text = " ".join([prefix, *entries])
    if to_all or len(text) > CALL_LENGTH_MAX or not all(_is_writable(key) for keys in words.values() for key in keys):
        text = f"{prefix} *"
    return ((CALL, text),) if rows and all(map(_is_writable, rows)) else ((CALL, ""),)


def _is_writable(key: str) -> bool:
    """Return whether a key can be written in a call.

    Keys of Kinesis and Event Hubs contain neither spaces nor commas. For other keys, all workers are called.
    """
    return bool(key) and not set(key) & set(" ,=")


@lru_cache(maxsize=100)
def call_of(text: str) -> LookoutCall | None:
    """Parse a call. Return None if there is none or it cannot be parsed."""
    looks, seconds, row, *words = [*text.split(" "), "", "", ""][: max(3, text.count(" ") + 1)]
    valid = all(part.isascii() and part.isdigit() and len(part) <= 18 for part in (looks, seconds))  # noqa: PLR2004  as a bulletin's
    if not valid or not row:
        return None
    names = {
        name: tuple(keys.split(",")) if equals else () for name, equals, keys in (word.partition("=") for word in words)
    }
    to_all, (first, *others) = names.pop("*", None) is not None, row.split(",")
    return LookoutCall(int(looks), min(int(seconds), CALL_SECONDS_MAX), first, tuple(others), to_all, names)


def call_in_row(lease: Lease, bulletin: Bulletin) -> str:
    """Return the call on this row as a string, or "" if it does not belong to this bulletin."""
    text = lease.annotation(CALL) or ""
    call = call_of(text)
    return text if call is not None and call.looks == bulletin.looks else ""


def prolonged_annotations(annotations: Annotations, seconds: float) -> Annotations:
    """Return the attributes of a lookout whose listing has been going on for `seconds`.

    Other workers see this time and do not stand in for the lookout (C8).
    """
    updated = []
    for name, text in annotations:
        call = call_of(text) if name == CALL else None
        prolonged = call is not None and int(seconds) > call.seconds
        looks, _, rest = text.partition(" ")
        updated.append((name, f"{looks} {int(seconds)} {rest.partition(' ')[2]}" if prolonged else text))
    return tuple(updated)


@frozen
class BulletinTracker:
    """Tracks the latest bulletin and when each of its counts last changed.

    Attributes:
        hearing: The state that the rules use.
        looks_at: The end of the first reading that showed the latest *looks*; None before the first reading.
        acts_at: The same for *acts*; None until they first change.
        warns_at: The same for *warns*; None until they first change.
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
        """Return the tracker after another reading.

        Args:
            leases: The leases as read, with `held` filled in.
            began: When the reading began.
            ended: When the reading ended.
            requested_keys: The keys that were requested, or None for a reading of the whole table.
            full_at: When the last full reading ended.
        """
        rows, before = tuple(leases), self.hearing
        bulletins = [(_parse_counts(text), lease) for lease in rows if (text := lease.annotation(BULLETIN))]
        latest = max([before.latest, *{bulletin for bulletin, _ in bulletins}])
        # During a listing, its lookout rewrites the same call with a longer time.
        calls = [call_in_row(lease, latest) for bulletin, lease in bulletins if bulletin == latest]
        calls.append(before.call if latest == before.latest else "")
        looks_at = ended if self.looks_at is None or latest.looks != before.latest.looks else self.looks_at
        acts_at = ended if latest.acts != before.latest.acts else self.acts_at
        warns_at = ended if latest.warns != before.latest.warns else self.warns_at
        # A row counts as unchanged if its owner has held it since before the end of the last full reading.
        unchanged_keys = (
            {lease.key for lease in rows if lease.held >= began - full_at} if requested_keys is not None else ()
        )
        hearing = BulletinState(
            latest=latest,
            acts_read=latest.acts if requested_keys is None else before.acts_read,
            acts_still=before.acts_still if acts_at is None else max(0.0, began - acts_at),
            looks_still=max(0.0, began - looks_at),
            warned=before.warned if warns_at is None else max(0.0, began - warns_at),
            turned=requested_keys is not None and not set(requested_keys) <= set(unchanged_keys),
            call=max(calls, key=_seconds_of),
        )
        return evolve(self, hearing=hearing, looks_at=looks_at, acts_at=acts_at, warns_at=warns_at)


def _seconds_of(text: str) -> int:
    call = call_of(text)
    return -1 if call is None else call.seconds
