"""A call says whom a look of the lookout asks to act, at which rows, and which row carries the bulletin (C6, C7).

The lookout has read the whole table, and all that read alike decide alike. So it knows who will claim which free lease,
and who will be asked for which of its own. It writes that beside the bulletin's counts, on all its rows:

    8 0 s-17,s-5 4f2a91c0=s-3,s-4 9be01d22
    | | |    |   |                a worker that should read the whole table
    | | |    |   a worker, by the first digits of its digest, and the rows that it should read
    | | |    a row of whoever stands in first, and of the next ones: their bulletins would stand there
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

from collections.abc import Mapping, Sequence
from functools import lru_cache

from attrs import field, frozen

from leasehold.balancer.chance import digest_under
from leasehold.balancer.model import Bulletin, Lease, Notes

CALL = "call"
"""Our attribute with the call."""

CALL_MOST = 2000
"""A call is no longer than so many characters: it stands on each row of the lookout. Above it, everybody is called."""

DIGITS = 8
"""Of a worker's digest. Two workers of one name would both read the rows, and one of them be refused."""

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
    """The same notes while a listing has gone on for so many seconds: nobody should stand in for it (C8)."""
    told = []
    for name, text in notes:
        call = call_of(text) if name == CALL else None
        longer = call is not None and int(seconds) > call.seconds
        looks, _, rest = text.partition(" ")
        told.append((name, f"{looks} {int(seconds)} {rest.partition(' ')[2]}" if longer else text))
    return tuple(told)
