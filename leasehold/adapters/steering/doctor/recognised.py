"""Whether the rows of a table are leases of this stream, purely."""

from collections.abc import Callable, Mapping

from leasehold.adapters.sources.protocol import SourceError
from leasehold.adapters.steering.doctor.findings import Finding
from leasehold.balancer.model import Lease, Shard
from leasehold.stores.protocol import Listing, Malformed

WHAT = "table"
_OTHER = "name another table, or the source that this one belongs to"
NAMED = 3
"""Rows are named up to so many."""


def recognised(listing: Listing, shards: tuple[Shard, ...], reads: Callable[[Lease], bool]) -> tuple[Finding, ...]:
    """Tell whose rows these are. `reads` says whether a source reads a lease's stream, and may raise SourceError."""
    if listing.malformed:
        return (_unreadable(listing.malformed, len(listing.leases)),)
    if not listing.leases:
        return (Finding(WHAT, "ok", f"it has no leases yet; workers make those of {len(shards)} shards"),)
    try:
        ours = tuple(lease for lease in listing.leases if reads(lease))
    except SourceError as error:
        return (Finding(WHAT, "wrong", str(error), _OTHER),)
    return (_of_shards(ours, len(listing.leases) - len(ours), {shard.id: shard for shard in shards}),)


def _unreadable(rows: tuple[Malformed, ...], leases: int) -> Finding:
    one = min(rows, key=lambda row: row.key)
    why = f"for one {one.key!r}: {one.field}: {one.why}"
    if leases:
        said = f"{len(rows)} of {leases + len(rows)} rows cannot be read as leases, {why}"
        return Finding(WHAT, "wrong", said, "mend or remove these rows: their shards are read by nobody")
    return Finding(
        WHAT, "wrong", f"none of its {len(rows)} rows is a lease, {why}: it is another application's", _OTHER
    )


def _of_shards(leases: tuple[Lease, ...], others: int, listed: Mapping[str, Shard]) -> Finding:
    beside = f"; {others} leases are of streams that are not read here" if others else ""
    known = [lease for lease in leases if lease.key in listed]
    if leases and not known:
        said = f"the stream has the shards of none of its {len(leases)} leases ({_names(leases)}): it is another's"
        return Finding(WHAT, "wrong", said + beside, _OTHER)
    if strange := [lease for lease in known if _elsewhere(lease, listed[lease.key])]:
        said = f"{len(strange)} leases ({_names(strange)}) have other hash ranges than the stream's shards"
        return Finding(WHAT, "wrong", f"{said}: it is another stream's, or the stream was made anew{beside}", _OTHER)
    if gone := [lease for lease in leases if lease.key not in listed and not lease.ended]:
        said = f"the stream has not the shards of {len(gone)} unfinished leases ({_names(gone)}): past retention"
        return Finding(WHAT, "unknown", said + beside, "workers remove them; check that nobody was that far behind")
    owners = len({lease.owner for lease in leases if lease.owner})
    return Finding(WHAT, "ok", f"it has {len(leases)} leases of this stream, and {owners} owners{beside}")


def _elsewhere(lease: Lease, shard: Shard) -> bool:
    return None not in {lease.hash_range, shard.hash_range} and lease.hash_range != shard.hash_range


def _names(leases: "tuple[Lease, ...] | list[Lease]") -> str:
    named = ", ".join(lease.key for lease in leases[:NAMED])
    return f"{named} …" if len(leases) > NAMED else named
