"""Finds contradictions between a listing of shards and the lease table, and plans the restart of leases (L14).

If a stream is deleted and created again under the same name, its new shards have the same ids as the old ones, so the
workers would continue from the old leases. A shard whose old lease is at SHARD_END would never be read, and at an old
checkpoint, reading would skip records.

Therefore, each lease is annotated with the incarnation of its stream, `<stream>:<creation time>`. A lease without this
annotation was written by another library or by an earlier version of this one. Such a lease is assumed to belong to the
present stream, unless it contradicts its shard.
"""

from collections.abc import Collection, Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from attrs import evolve, frozen

from leasehold.balancer.family import Family, families
from leasehold.balancer.lineage import new_lease_for
from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position, Shard

INCARNATION = "incarnation"
"""The name of the row attribute that contains the incarnation of the stream to which the row's checkpoint belongs."""

CONTRADICTION = "contradiction"
"""The name of the row attribute in which workers report a contradiction, for tools that read only the table."""

SETTLED_VALUE = "-"
"""The value of `INCARNATION` and `CONTRADICTION` on a row after an operator or a worker has set the lease's
position."""

REMEDY = "--if-recreated TRIM_HORIZON or LATEST has the workers begin anew, or stop them and use `leasehold reset`"

ContradictionKind = Literal["made anew", "another stream", "old listing", "ended and open", "another shard"]


@frozen
class Contradiction:
    """A contradiction between a listing and a lease.

    Attributes:
        kind: The kind of contradiction. The first three kinds concern a whole stream, whose workers hold no leases
            until the contradiction is resolved. The other kinds concern a single shard, which is not read.
        stream: The name of the stream.
        key: The key of the lease that does not match the listing.
        what: A description for the operator, with the remedy.
    """

    kind: ContradictionKind
    stream: str
    key: str
    what: str

    @property
    def of_stream(self) -> bool:
        """Whether the contradiction concerns all leases of the stream, and not only a single one."""
        return self.kind in {"made anew", "another stream", "old listing"}

    @property
    def restartable(self) -> bool:
        """Whether workers may restart the leases automatically. Leases of a different stream must not be restarted."""
        return self.kind in {"made anew", "ended and open", "another shard"}


def contradictions(
    shards: Iterable[Shard], leases: Iterable[Lease], incarnation: str = ""
) -> tuple[Contradiction, ...]:
    """Return all contradictions between a complete listing and the leases, sorted by stream and key.

    If all leases of a stream contradict the listing, the result contains a single contradiction for the stream.

    Args:
        shards: The listed shards.
        leases: The leases. They must be read before the shards are listed. Otherwise, a shard that ends between the two
            reads would seem to contradict its lease.
        incarnation: The incarnation of the single stream that was listed, or "" if the source does not know it.
    """
    result: list[Contradiction] = []
    for family in families(shards, leases):
        stream_contradictions = [
            contradiction
            for lease in family.leases.values()
            if (contradiction := _stream_contradiction(lease, incarnation))
        ]
        if stream_contradictions:
            result.append(min(stream_contradictions, key=lambda candidate: (candidate.kind, candidate.key)))
            continue
        result += [
            contradiction
            for _, lease in sorted(family.leases.items())
            if (contradiction := _shard_contradiction(lease, family))
        ]
    return tuple(result)


def _stream_contradiction(lease: Lease, incarnation: str) -> Contradiction | None:
    """Return a contradiction if the lease and the listing belong to different incarnations of the stream."""
    annotated_incarnation = lease.annotation(INCARNATION)
    if not incarnation or annotated_incarnation in {None, SETTLED_VALUE, incarnation}:
        return None
    (annotated_stream, annotated_time), (listed_stream, listed_time) = (
        _split_incarnation(annotated_incarnation or ""),
        _split_incarnation(incarnation),
    )
    stream = lease.stream or listed_stream
    if annotated_stream != listed_stream:
        description = (
            f"the leases are those of {annotated_stream}, and {listed_stream} is read: "
            "give each stream a table of its own"
        )
        return Contradiction("another stream", lease.stream, lease.key, description)
    if annotated_time > listed_time:
        description = (
            f"stream {stream} was listed as made at {listed_time}, "
            f"and lease {lease.key} is of one made at {annotated_time}"
        )
        return Contradiction("old listing", lease.stream, lease.key, f"{description}: the shards are listed again")
    description = (
        f"stream {stream} was made anew at {listed_time} s since 1970, "
        f"and its leases are of the one made at {annotated_time}"
    )
    return Contradiction("made anew", lease.stream, lease.key, f"{description}: nothing is read; {REMEDY}")


def created_later(incarnation: str, earlier_incarnation: str) -> bool:
    """Return whether both incarnations have the same stream name and `incarnation` was created later."""
    (stream, time), (earlier_stream, earlier_time) = (
        _split_incarnation(incarnation),
        _split_incarnation(earlier_incarnation),
    )
    return stream == earlier_stream and time > earlier_time


def _split_incarnation(incarnation: str) -> tuple[str, int]:
    """Split an incarnation into stream and creation time. If it is malformed, return the whole string and 0."""
    stream, _, time = incarnation.rpartition(":")
    return (stream, int(time)) if time.isascii() and time.isdigit() and len(time) <= 20 else (incarnation, 0)  # noqa: PLR2004


def _shard_contradiction(lease: Lease, family: Family) -> Contradiction | None:
    """Return a contradiction if the lease does not match its shard.

    The parents and hash keys of a shard never change, so the lease must have the same ones.
    """
    shard = family.shards.get(lease.key)
    if shard is None:
        return None
    if lease.ended and shard.open and not family.children.get(lease.key):
        description = (
            f"lease {lease.key} is at SHARD_END, but its shard is open and has no children, so nothing reads it"
        )
        return Contradiction(
            "ended and open", lease.stream, lease.key, f"{description}; if the stream was made anew, {REMEDY}"
        )
    range_differs = lease.hash_range is not None and shard.hash_range not in {None, lease.hash_range}
    parents_differ = bool(lease.parents) and bool(shard.parents) and set(lease.parents) != set(shard.parents)
    # A listing may omit the id of a parent whose records have expired. However, if the listing contains the parent
    # itself, the entry of the child must contain the parent's id.
    some_parent_listed = any(parent in family.shards for parent in lease.parents)
    gained_parents = some_parent_listed and not shard.parents and shard.hash_range is not None
    if range_differs or parents_differ or gained_parents:
        description = (
            f"lease {lease.key} has {'hash keys' if range_differs else 'parents'} that its shard does not have"
        )
        return Contradiction(
            "another shard", lease.stream, lease.key, f"{description}; if the stream was made anew, {REMEDY}"
        )
    return None


def reported_contradictions(leases: Iterable[Lease]) -> tuple[str, ...]:
    """Return the contradictions that workers have written on rows, for tools that read only the table.

    The result is sorted by lease key and contains no duplicates.
    """
    sorted_leases = sorted(leases, key=lambda lease: lease.key)
    return tuple(dict.fromkeys(filter(None, map(reported_contradiction, sorted_leases))))


def reported_contradiction(lease: Lease) -> str:
    """Return the contradiction that a worker has written on this row, or "" if there is none."""
    contradiction = lease.annotation(CONTRADICTION)
    return contradiction if contradiction not in {None, SETTLED_VALUE} and contradiction else ""


@frozen
class Restart:
    """One step of a restart of leases. It replaces the row `stored` with `lease`.

    Attributes:
        stored: The lease to replace, or None to create a lease.
        lease: The new lease, or None to delete the stored one.
        marks: Whether the step only writes the incarnation, and keeps the checkpoint.
    """

    stored: Lease | None
    lease: Lease | None
    marks: bool = False


def restarts(
    shards: Iterable[Shard],
    leases: Iterable[Lease],
    contradictions_found: Collection[Contradiction],
    incarnation: str,
    start: Position,
) -> tuple[Restart, ...]:
    """Return the steps that restart leases at `start`, in the order in which they must be written.

    If the stream was recreated, the steps replace all leases that are not annotated with the stream's present
    incarnation. Otherwise, the steps replace the leases that contradict their shards. The steps are in this order:

    - First, leases without an incarnation are annotated with the old one. Otherwise, they would be mistaken for leases
    of the present stream as soon as all annotated leases have been replaced.
    - Then, leases are created for shards that have no lease. If this step came last and the worker stopped before it,
    these leases would later be created at the initial position, and LATEST would skip records.
    - Then, existing leases are replaced, parents before children. Otherwise, a child could be read before its parent,
    because the old lease of the parent is still at SHARD_END.
    - Finally, leases of shards that no longer exist are deleted.

    If `start` is LATEST, nothing is read from closed shards. The existing leases of these shards are set to SHARD_END,
    and missing ones are not created.

    Args:
        shards: The listed shards.
        leases: All leases.
        contradictions_found: The contradictions between the shards and the leases.
        incarnation: The present incarnation of the stream.
        start: The position at which the leases restart.
    """
    restartable_keys = {contradiction.key for contradiction in contradictions_found if contradiction.restartable}
    recreated_streams = {
        contradiction.stream for contradiction in contradictions_found if contradiction.kind == "made anew"
    }
    steps: list[Restart] = []
    for family in families(shards, leases):
        is_recreated, family_leases = family.stream in recreated_streams, family.leases
        leases_to_replace = {
            key: lease
            for key, lease in sorted(family_leases.items())
            if (
                lease.annotation(INCARNATION) not in {incarnation, SETTLED_VALUE}
                if is_recreated
                else key in restartable_keys
            )
        }
        former_incarnation = next(
            (
                previous_incarnation
                for lease in leases_to_replace.values()
                if (previous_incarnation := lease.annotation(INCARNATION)) is not None
            ),
            "",
        )
        leases_without_incarnation = [
            lease for lease in leases_to_replace.values() if is_recreated and lease.annotation(INCARNATION) is None
        ]
        if leases_without_incarnation:
            leases_to_mark = (
                (lease, tuple(sorted((*lease.annotations, (INCARNATION, former_incarnation)))))
                for lease in leases_without_incarnation
            )
            steps += [
                Restart(lease, evolve(lease, annotations=annotations), marks=True)
                for lease, annotations in leases_to_mark
            ]
            continue
        parents_by_shard = {name: sorted(shard.parents) for name, shard in sorted(family.shards.items())}
        try:  # sort the shards so that parents come before their children
            ordered_shards = [
                family.shards[name]
                for name in TopologicalSorter(parents_by_shard).static_order()
                if name in family.shards
            ]
        except CycleError:  # rule L2 reports the cycle, and no lease of such a stream is restarted
            ordered_shards = []
        steps += [
            Restart(None, new_lease_for(shard, start, ((INCARNATION, incarnation),)))
            for shard in ordered_shards
            if is_recreated and shard.id not in family_leases and (shard.open or start != LATEST)
        ]
        for shard in ordered_shards:
            if shard.id in leases_to_replace:
                position = SHARD_END if start == LATEST and not shard.open else start
                new_lease = evolve(
                    leases_to_replace[shard.id], checkpoint=position, parents=shard.parents, hash_range=shard.hash_range
                )
                steps.append(Restart(leases_to_replace[shard.id], new_lease))
        steps += [Restart(lease, None) for key, lease in leases_to_replace.items() if key not in family.shards]
    return tuple(steps)
