"""The bulletin as it stands on a row, and what a reader keeps of all that it has read.

A row carries the bulletin's counts as text, "looks acts warns". The furthest of all bulletins ever read is the latest,
so that an old row that a former lookout left behind says nothing new. For each count the time is kept for which it has
stood still, by this worker's own clock and in the same way as for leases: from the end of the reading that first
showed it to the start of the latest reading.
"""

from collections.abc import Collection, Iterable
from functools import lru_cache

from attrs import evolve, field, fields, frozen

from leasehold.balancer.calls import call_beside, call_of
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
