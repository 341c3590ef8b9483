"""The bulletin as it stands on a row, whom it calls, and what a reader keeps of all that it has read (C4, C6, C7).

A row carries the bulletin's counts as text, "looks acts warns". The furthest of all bulletins ever read is the latest,
so that an old row that a former lookout left behind says nothing new. For each count the time is kept for which it has
stood still, by this worker's own clock and in the same way as for leases: from the end of the reading that first
showed it to the start of the latest reading.

A call says whom a look of the lookout asks to act, at which rows, and which row carries the bulletin.
The lookout has read the whole table, and all that read alike decide alike. So it knows who will claim which free lease,
and who will be asked for which of its own. It writes that beside the bulletin's counts, on all its rows:

    8 0 s-17,s-5 4f2a91c0=s-3,s-4 9be01d22
    | | |    |   |                a worker that should read the whole table
    | | |    |   a worker, by the first digits of its digest, and the rows that it should read
    | | |    a row of the worker that stands in first, and of the next ones: their bulletins would stand there
    | | the row that carries the bulletin: the lookout renews it more often than any other
    | for how many seconds the listing went on; while one goes on, so far
    the looks of the bulletin that this belongs to

A worker that is not named reads nothing; one that is reads those rows, claims those that are free, and hands over what
it is asked for. `*` calls everybody to the whole table.

Rule 1: a call orders nothing. What is claimed is claimed under the version as read, and the store decides.
Rule 2: a call counts only beside the bulletin that it belongs to. Workers of earlier versions write none, and renew
rows on which an old one still stands: its looks are others then, and the counts alone are heard.
Rule 3: what was missed is not lost. Each look says anew who has to act, from what the table shows then.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from attrs import evolve, field, fields, frozen

from leasehold.balancer.chance import digest_under
from leasehold.balancer.model import Bulletin, BulletinState, Lease, Notes

NOTE = "bulletin"
"""Our attribute with the counts; the lookout writes it with each of its renewals (C4)."""

DIGITS_MAX = 18
"""No fleet looks that often, and Python refuses to make a number of some thousand digits."""


def note_of(bulletin: Bulletin, call: Notes = ()) -> Notes:
    """The bulletin as it is written on a row, and whom it calls."""
    return ((NOTE, f"{bulletin.looks} {bulletin.acts} {bulletin.warns}"), *call)


def bulletin_of(lease: Lease) -> Bulletin:
    """The bulletin of this row; all counts are 0 if there is none, or none that can be read."""
    return _said_in(lease.note(NOTE) or "")


@lru_cache(maxsize=1_000)  # the rows that a lookout left behind say the same for hours
def _said_in(text: str) -> Bulletin:
    words = text.split()
    digits = all(word.isascii() and word.isdigit() and len(word) <= DIGITS_MAX for word in words)
    if len(words) != len(fields(Bulletin)) or not digits:
        return Bulletin()
    return Bulletin(*map(int, words))


CALL = "call"
"""Our attribute with the call."""

CALL_MOST = 2000
"""A call is no longer than so many characters: it stands on each row of the lookout. Above it, everybody is called."""

DIGITS = 8
"""The digits of a worker's digest. Two workers of one digest would both read the rows, and one would be refused."""

SECONDS_MOST = 10**6

rank_digest = lru_cache(maxsize=10_000)(digest_under("lookout"))  # each look ranks everybody


@frozen
class Summons:
    """The call that stands in a note.

    looks    those of the bulletin that it belongs to
    seconds  how long the listing takes
    row      the key of the row that carries the bulletin
    next     a key of each worker that stands in, in this order
    to_all   whether everybody should read the whole table
    names    by the digits of each worker that is called, the keys to read; none: the whole table
    """

    looks: int
    seconds: int
    row: str
    next: tuple[str, ...] = ()
    to_all: bool = False
    names: Mapping[str, tuple[str, ...]] = field(factory=dict)

    def keys(self, worker: str) -> tuple[str, ...]:
        """The rows that this worker is called to."""
        return self.names.get(digits_of(worker), ())

    def lists(self, worker: str) -> bool:
        """Whether this worker is called to the whole table."""
        return self.to_all or self.names.get(digits_of(worker)) == ()


@lru_cache(maxsize=10_000)
def digits_of(worker: str) -> str:
    """The name of a worker in calls."""
    return rank_digest(worker).hex()[:DIGITS]


def note_of_call(
    looks: int, seconds: float, rows: Sequence[str], names: Mapping[str, Sequence[str]], *, to_all: bool = False
) -> Notes:
    """The note; everybody is called where the names are too many, and nobody where the row's key cannot be written.

    rows  the bulletin's, and those of who stands in
    """
    words = {digits_of(worker): tuple(dict.fromkeys(keys)) for worker, keys in sorted(names.items())}
    each = [name + ("=" + ",".join(keys) if keys else "") for name, keys in words.items()]
    begin = f"{looks} {min(int(seconds), SECONDS_MOST)} {','.join(rows)}"
    text = " ".join([begin, *each])
    if to_all or len(text) > CALL_MOST or not all(_plain(key) for keys in words.values() for key in keys):
        text = f"{begin} *"
    return ((CALL, text),) if rows and all(map(_plain, rows)) else ((CALL, ""),)


def _plain(key: str) -> bool:
    """Keys of Kinesis and Event Hubs have neither spaces nor commas; of another stream everybody is called."""
    return bool(key) and not set(key) & set(" ,=")


@lru_cache(maxsize=100)
def call_of(text: str) -> Summons | None:
    """The call that this text says; None if it says none, or none that can be read."""
    looks, seconds, row, *words = [*text.split(" "), "", "", ""][: max(3, text.count(" ") + 1)]
    counts = all(word.isascii() and word.isdigit() and len(word) <= 18 for word in (looks, seconds))  # noqa: PLR2004  as a bulletin's
    if not counts or not row:
        return None
    names = {name: tuple(keys.split(",")) if equals else () for name, equals, keys in (w.partition("=") for w in words)}
    to_all, (first, *others) = names.pop("*", None) is not None, row.split(",")
    return Summons(int(looks), min(int(seconds), SECONDS_MOST), first, tuple(others), to_all, names)


def call_beside(lease: Lease, bulletin: Bulletin) -> str:
    """The text of the call on this row, if it belongs to this bulletin."""
    text = lease.note(CALL) or ""
    call = call_of(text)
    return text if call is not None and call.looks == bulletin.looks else ""


def going_on(notes: Notes, seconds: float) -> Notes:
    """The notes of a lookout whose listing has gone on for so many seconds: no worker should stand in for it (C8)."""
    told = []
    for name, text in notes:
        call = call_of(text) if name == CALL else None
        longer = call is not None and int(seconds) > call.seconds
        looks, _, rest = text.partition(" ")
        told.append((name, f"{looks} {int(seconds)} {rest.partition(' ')[2]}" if longer else text))
    return tuple(told)


@frozen
class BulletinTracker:
    """The ear keeps the latest bulletin, and when each count was first read as it is.

    looks_at  end of the first reading that showed the latest *looks*; None before the first reading
    acts_at   the same of *acts*; None until they first move
    warns_at  the same of *warns*; None until they first move
    """

    hearing: BulletinState = field(factory=BulletinState)
    looks_at: float | None = None
    acts_at: float | None = None
    warns_at: float | None = None

    def after(
        self, read: Iterable[Lease], began: float, ended: float, asked: Collection[str] | None, full_at: float
    ) -> "BulletinTracker":
        """Fold this reading in; parameters as those of `Watch.look`, `read` with `held` filled in.

        full_at  when the last full reading ended
        """
        rows, before = tuple(read), self.hearing
        told = [(_said_in(text), lease) for lease in rows if (text := lease.note(NOTE))]
        latest = max([before.latest, *{bulletin for bulletin, _ in told}])
        # While a listing goes on its lookout writes the same call again, with more seconds.
        calls = [call_beside(lease, latest) for bulletin, lease in told if bulletin == latest]
        calls.append(before.call if latest == before.latest else "")
        looks_at = ended if self.looks_at is None or latest.looks != before.latest.looks else self.looks_at
        acts_at = ended if latest.acts != before.latest.acts else self.acts_at
        warns_at = ended if latest.warns != before.latest.warns else self.warns_at
        # A row is kept if its owner is the one of the last full reading: held since before that reading ended.
        kept = {lease.key for lease in rows if lease.held >= began - full_at} if asked is not None else ()
        hearing = BulletinState(
            latest=latest,
            acts_read=latest.acts if asked is None else before.acts_read,
            acts_still=before.acts_still if acts_at is None else max(0.0, began - acts_at),
            looks_still=max(0.0, began - looks_at),
            warned=before.warned if warns_at is None else max(0.0, began - warns_at),
            turned=asked is not None and not set(asked) <= set(kept),
            call=max(calls, key=_seconds_of),
        )
        return evolve(self, hearing=hearing, looks_at=looks_at, acts_at=acts_at, warns_at=warns_at)


def _seconds_of(text: str) -> int:
    call = call_of(text)
    return -1 if call is None else call.seconds
