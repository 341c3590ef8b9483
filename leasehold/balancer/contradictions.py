"""L14: where a listing of shards and the lease table contradict each other, and how leases begin anew.

A stream that is deleted and created again under its name has the same shard ids. Its former leases then say of other
records that they are done: a lease at SHARD_END is never read, and a checkpoint may lie beyond records that nobody saw.
So the leases note the incarnation of their stream, `<stream>:<when it was made>`. A lease without that note (written by
another library, or by a version before it) is taken for one of the present stream, unless its shard contradicts it.
"""

from collections.abc import Collection, Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from attrs import evolve, frozen

from leasehold.balancer.family import Family, families
from leasehold.balancer.lineage import lease_of
from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position, Shard

INCARNATION = "incarnation"
"""Our attribute: the incarnation of the stream whose records the checkpoint counts."""

CONTRADICTION = "contradiction"
"""Our attribute: what a worker found wrong between this row and the stream, for those who see the table alone."""

SETTLED = "-"
"""The value of both once the row was set to a place anew, by an operator or by a worker that begins anew."""

DO = "--if-recreated TRIM_HORIZON or LATEST has the workers begin anew, or stop them and use `leasehold reset`"

ContradictionKind = Literal["made anew", "another stream", "old listing", "ended and open", "another shard"]


@frozen
class Contradiction:
    """Two statements of which one is wrong.

    kind   the first three are about the whole stream, and its workers hold nothing while they last; the others are
           about one shard, and nothing but that shard goes unread
    key    of the lease that shows it
    what   a sentence that says what to do
    """

    kind: ContradictionKind
    stream: str
    key: str
    what: str

    @property
    def of_stream(self) -> bool:
        """Whether no lease of the stream can be trusted while this lasts."""
        return self.kind in {"made anew", "another stream", "old listing"}

    @property
    def mendable(self) -> bool:
        """Whether the leases may begin anew by themselves: those of another stream may not."""
        return self.kind in {"made anew", "ended and open", "another shard"}


def contradictions(
    shards: Iterable[Shard], leases: Iterable[Lease], incarnation: str = ""
) -> tuple[Contradiction, ...]:
    """Everything in which a complete listing and the leases contradict each other, in order of stream and key.

    `incarnation` is that of the one stream which was listed, "" where the source has none; leases are to be read
    before the shards are listed, or a shard that ends in between would show. One of the whole stream stands alone.
    """
    found: list[Contradiction] = []
    for family in families(shards, leases):
        of_stream = [each for lease in family.leases.values() if (each := _elsewhere(lease, incarnation))]
        if of_stream:
            found.append(min(of_stream, key=lambda each: (each.kind, each.key)))
            continue
        found += [each for _, lease in sorted(family.leases.items()) if (each := _unlike(lease, family))]
    return tuple(found)


def _elsewhere(lease: Lease, incarnation: str) -> Contradiction | None:
    """The lease is of another incarnation than the one that was listed."""
    noted = lease.note(INCARNATION)
    if not incarnation or noted in {None, SETTLED, incarnation}:
        return None
    (was, made), (now, made_now) = _parted(noted or ""), _parted(incarnation)
    stream = lease.stream or now
    if was != now:
        what = f"the leases are those of {was}, and {now} is read: give each stream a table of its own"
        return Contradiction("another stream", lease.stream, lease.key, what)
    if made > made_now:
        what = f"stream {stream} was listed as made at {made_now}, and lease {lease.key} is of one made at {made}"
        return Contradiction("old listing", lease.stream, lease.key, f"{what}: the shards are listed again")
    what = f"stream {stream} was made anew at {made_now} s since 1970, and its leases are of the one made at {made}"
    return Contradiction("made anew", lease.stream, lease.key, f"{what}: nothing is read; {DO}")


def made_later(incarnation: str, known: str) -> bool:
    """Whether this is an incarnation of the same stream that was made after the one known."""
    (now, made_now), (was, made) = _parted(incarnation), _parted(known)
    return now == was and made_now > made


def _parted(incarnation: str) -> tuple[str, int]:
    """The stream, and when it was made; whatever a row may say."""
    stream, _, made = incarnation.rpartition(":")
    return (stream, int(made)) if made.isascii() and made.isdigit() and len(made) <= 20 else (incarnation, 0)  # noqa: PLR2004


def _unlike(lease: Lease, family: Family) -> Contradiction | None:
    """The lease contradicts the shard of its name. Neither parents nor hash keys of a shard ever change."""
    shard = family.shards.get(lease.key)
    if shard is None:
        return None
    if lease.ended and shard.open and not family.children.get(lease.key):
        what = f"lease {lease.key} says SHARD_END, and its shard is open and has no children: it is read by nobody"
        return Contradiction("ended and open", lease.stream, lease.key, f"{what}; if the stream was made anew, {DO}")
    ranges = lease.hash_range is not None and shard.hash_range not in {None, lease.hash_range}
    parents = bool(lease.parents) and bool(shard.parents) and set(lease.parents) != set(shard.parents)
    # A parent that is no longer kept may be left out of a listing; one that is listed is named by its child.
    listed = any(parent in family.shards for parent in lease.parents)
    strange = listed and not shard.parents and shard.hash_range is not None
    if ranges or parents or strange:
        what = f"lease {lease.key} has {'hash keys' if ranges else 'parents'} that its shard does not have"
        return Contradiction("another shard", lease.stream, lease.key, f"{what}; if the stream was made anew, {DO}")
    return None


def noted(leases: Iterable[Lease]) -> tuple[str, ...]:
    """The sentences that workers have noted on rows, for those who see the table alone; each once, in order of key."""
    ordered = sorted(leases, key=lambda lease: lease.key)
    return tuple(dict.fromkeys(filter(None, map(noted_on, ordered))))


def noted_on(lease: Lease) -> str:
    """The sentence that a worker has noted on this row; "" where nothing contradicts it."""
    said = lease.note(CONTRADICTION)
    return said if said not in {None, SETTLED} and said else ""


@frozen
class Restart:
    """A step of a new beginning: `stored` becomes `lease`. Without `stored` it is new, without `lease` it goes.

    marks  only the incarnation is noted, and the checkpoint stays
    """

    stored: Lease | None
    lease: Lease | None
    marks: bool = False


def restarts(
    shards: Iterable[Shard],
    leases: Iterable[Lease],
    found: Collection[Contradiction],
    incarnation: str,
    start: Position,
) -> tuple[Restart, ...]:
    """The steps by which leases begin anew at `start`, in the order in which they must be written.

    Where the stream was created again, these are all leases that do not note its present incarnation; else those that
    contradict their shard. Those that note none are marked first, by steps of their own: once the last one that shows
    the contradiction is written, they would be taken for leases of the present stream. Then come leases of shards that
    had none: were a worker to end half-way, they would be made at the initial position, and LATEST would skip records.
    Then parents before children, or a child could be read
    while the former lease of its parent still says SHARD_END. Leases of shards that are not there any more come last.
    From LATEST, a closed shard has nothing to read.
    """
    mended = {each.key for each in found if each.mendable}
    whole = {each.stream for each in found if each.kind == "made anew"}
    steps: list[Restart] = []
    for family in families(shards, leases):
        anew, here = family.stream in whole, family.leases
        old = {
            key: lease
            for key, lease in sorted(here.items())
            if (lease.note(INCARNATION) not in {incarnation, SETTLED} if anew else key in mended)
        }
        former = next((note for lease in old.values() if (note := lease.note(INCARNATION)) is not None), "")
        unmarked = [lease for lease in old.values() if anew and lease.note(INCARNATION) is None]
        if unmarked:
            marked = ((lease, tuple(sorted((*lease.notes, (INCARNATION, former))))) for lease in unmarked)
            steps += [Restart(lease, evolve(lease, notes=notes), marks=True) for lease, notes in marked]
            continue
        names = {name: sorted(shard.parents) for name, shard in sorted(family.shards.items())}
        try:  # parents first
            ordered = [family.shards[name] for name in TopologicalSorter(names).static_order() if name in family.shards]
        except CycleError:  # L2 says so, and nothing of such a stream is touched
            ordered = []
        steps += [
            Restart(None, lease_of(shard, start, ((INCARNATION, incarnation),)))
            for shard in ordered
            if anew and shard.id not in here and (shard.open or start != LATEST)
        ]
        for shard in ordered:
            if shard.id in old:
                at = SHARD_END if start == LATEST and not shard.open else start
                fresh = evolve(old[shard.id], checkpoint=at, parents=shard.parents, hash_range=shard.hash_range)
                steps.append(Restart(old[shard.id], fresh))
        steps += [Restart(lease, None) for key, lease in old.items() if key not in family.shards]
    return tuple(steps)
