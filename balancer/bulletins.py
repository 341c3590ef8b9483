"""The bulletin as a row carries it, and the fold of what is heard of it (C1, C4)."""

from collections.abc import Collection, Iterable

from attrs import evolve, field, fields, frozen

from balancer.model import Bulletin, Hearing, Lease, Notes

NOTE = "bulletin"
"""Our attribute with the counts; the lookout writes it with each of its renewals (C4)."""


def note_of(bulletin: Bulletin) -> Notes:
    """As it is written on a row."""
    return ((NOTE, f"{bulletin.looks} {bulletin.acts} {bulletin.warns}"),)


def bulletin_of(lease: Lease) -> Bulletin:
    """What its row says; nothing where it says nothing, or nothing that can be read."""
    words = (lease.note(NOTE) or "").split()
    if len(words) != len(fields(Bulletin)) or not all(word.isascii() and word.isdigit() for word in words):
        return Bulletin()
    return Bulletin(*map(int, words))


@frozen
class Ear:
    """What was heard, and since when: the end of the first reading that showed it; None: not yet."""

    hearing: Hearing = field(factory=Hearing)
    looks_at: float | None = None
    acts_at: float | None = None
    warns_at: float | None = None

    def after(
        self, read: Iterable[Lease], began: float, ended: float, asked: Collection[str] | None, full_at: float
    ) -> "Ear":
        """Fold in one reading; parameters as those of `Watch.look`, `read` with `held` filled in.

        full_at  when the last full reading ended
        """
        rows, before = tuple(read), self.hearing
        latest = max([before.latest, *map(bulletin_of, rows)])
        looks_at = ended if self.looks_at is None or latest.looks != before.latest.looks else self.looks_at
        acts_at = ended if latest.acts != before.latest.acts else self.acts_at
        warns_at = ended if latest.warns != before.latest.warns else self.warns_at
        kept = {lease.key for lease in rows if lease.held >= began - full_at}
        hearing = Hearing(
            latest=latest,
            acts_read=latest.acts if asked is None else before.acts_read,
            acts_still=before.acts_still if acts_at is None else max(0.0, began - acts_at),
            looks_still=max(0.0, began - looks_at),
            warned=before.warned if warns_at is None else max(0.0, began - warns_at),
            turned=asked is not None and not kept.issuperset(asked),
        )
        return evolve(self, hearing=hearing, looks_at=looks_at, acts_at=acts_at, warns_at=warns_at)
