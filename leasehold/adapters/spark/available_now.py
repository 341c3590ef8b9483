"""Decides when a query with `trigger(availableNow=True)` has read all records that existed at its start.

Each shard that the query holds has a `ShardTip`, which tracks whether the records that existed at the start have been
read. `AvailableNowProgress` returns the shards that the query still waits for, with reasons. Spark commits a batch only
when it plans the next one, so a shard that waits for a commit may need an empty batch (a flush) to continue.
`should_flush` decides when to plan a flush.

A1. An open shard is read up to the record that was its latest when the shard was opened. A closed shard is read to its
    end.
A2. The query waits for a shard that it holds until Spark has all records that A1 requires, and every commit is written.
A3. The query waits for a shard that another worker holds until the shard's lease has been renewed once. A renewal shows
    that the owner is alive and reads the shard.
A4. The query waits for a shard without an owner only once the shard's parents are done. Until then, it waits for the
    parents, to which these rules apply in the same way.
A5. If the query has read all parents of a shard to their ends, it waits until the shard has a lease.
A6. If a shard cannot end or be handed off before a commit, a flush is planned without waiting for other shards.
"""

import logging
from collections.abc import Collection, Iterable, Mapping

from attrs import define, frozen

from leasehold.balancer.lineage import readable
from leasehold.balancer.model import Lease, Position, Shard, Version
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.spark"))

RETENTION_SILENCE_SECONDS = 60.0
"""If no record arrives for this long, we assume that the target record is past retention, and consider the shard fully
read."""
TARGET_MARGIN_SECONDS = 10.0
"""How many seconds past the time of the target a shard must be read. The margin is needed because sources round the lag
that they report."""


@define
class ShardTip:
    """The tip of one shard at the time the shard was opened (A1).

    Attributes:
        key: The key of the shard's lease.
        target: The position of the latest record, as requested when the shard was opened. It is a time if the source
            does not return the record's number, and None before the request.
        requested_at: The time at which the target was requested.
        last_record_at: The time at which a record was last read.
        reached: Whether reading has reached the target.
    """

    key: str
    target: Position | None = None
    requested_at: float = 0.0
    last_record_at: float = 0.0
    reached: bool = False

    def set_target(self, target: Position, now: float) -> None:
        self.target, self.requested_at = target, now

    def update_read_position(
        self, read_position: Position, now: float, behind_seconds: float | None, *, is_closed: bool
    ) -> bool:
        """Record how far the shard has been read. Return True if the target record itself has just been read.

        Args:
            read_position: How far the shard has been read.
            now: The current time.
            behind_seconds: Seconds behind the latest record, if known.
            is_closed: Whether the shard is known to be closed.
        """
        if (target := self.target) is None or self.reached:
            return False
        if not target.numbered:
            # The target is a time. If the time is zero, the shard has never had a record. Otherwise, the target is
            # reached when the source reports no lag. If new records keep arriving, the lag never becomes zero, so it is
            # enough to have read well past the time of the request.
            is_past_target = (
                behind_seconds is not None and now - self.requested_at > behind_seconds + TARGET_MARGIN_SECONDS
            )
            # For a closed shard, zero lag is not enough, because the shard's end may be reported only by the read after
            # the one that returned the last records.
            self.reached = target.sub == 0 or (behind_seconds == 0 and not is_closed) or is_past_target
        elif read_position.order >= target.order:
            self.reached = True
            return read_position.order == target.order
        elif now - self.last_record_at > RETENTION_SILENCE_SECONDS:
            log.warning(
                "shard %s: no record came up to %s, so it is assumed to be past retention", self.key, target.sequence
            )
            self.reached = True
        return False


@frozen
class ShardStatus:
    """A shard that this query reads.

    Attributes:
        is_opened: Whether the position at which the query continues is known.
        is_idle: Whether Spark has all records that existed at the start, and all commits are written.
    """

    is_opened: bool
    is_idle: bool


class AvailableNowProgress:
    """Tracks which shards an AvailableNow query still waits for."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._first_versions: dict[str, Version] = {}
        self._renewed_keys: set[str] = set()

    @staticmethod
    def find_unread_shards(held_shards: Mapping[str, ShardStatus]) -> Mapping[str, str]:
        """Return the held shards with unread records or unwritten commits (A2), each with the reason."""
        return {
            key: "its end is not reached"
            for key, status in held_shards.items()
            if status.is_opened and not status.is_idle
        }

    def find_awaited_shards(
        self,
        held_shards: Mapping[str, ShardStatus],
        leases: Mapping[str, Lease],
        listed_shards: Iterable[Shard] = (),
        ended_keys: Collection[str] = (),
    ) -> Mapping[str, str]:
        """Return the shards that the query waits for, each with the reason.

        Args:
            held_shards: The shards whose leases this worker holds, by key.
            leases: All leases in the table, by key.
            listed_shards: The shards in the last listing of the stream.
            ended_keys: The keys of the shards that this query has read to their ends and committed.
        """
        if unread_shards := self.find_unread_shards(held_shards):
            return unread_shards
        # If the table is empty, no worker has created the leases yet, so the query must wait for all shards.
        if not leases:
            return {"(all)": "there are no leases yet"}
        reasons = {key: self._find_wait_reason(lease, leases, held_shards.get(key)) for key, lease in leases.items()}
        ids_with_lease = {parent_key for lease in leases.values() for parent_key in lease.parents}.union(
            leases, ended_keys
        )
        ids_without_lease = [
            shard.id
            for shard in listed_shards
            if shard.id not in ids_with_lease and shard.parents and set(shard.parents) <= set(ended_keys)
        ]
        return {key: reason for key, reason in reasons.items() if reason} | dict.fromkeys(
            ids_without_lease, "it has no lease yet"
        )

    def _find_wait_reason(self, lease: Lease, leases: Mapping[str, Lease], held_shard: ShardStatus | None) -> str:
        if lease.ended:
            return ""
        if lease.owner is None or lease.owner == self._me:
            if (held_shard is not None and held_shard.is_opened and lease.owner) or not readable(
                lease, leases
            ):  # A2, A4
                return ""
            return "it cannot be opened" if lease.owner else "nobody owns it"
        if self._first_versions.setdefault(lease.key, lease.version) != lease.version:
            self._renewed_keys.add(lease.key)
        return "" if lease.key in self._renewed_keys else f"{lease.owner} owns it and does not renew it"  # A3


def should_flush(
    *,
    has_uncommitted_rows: bool,
    is_awaiting_shards: bool,
    has_ended_shard: bool,
    is_handing_off: bool,
    flushes_when_idle: bool,
) -> bool:
    """Return whether an AvailableNow query should plan a flush if there are no rows to take (A6).

    Args:
        has_uncommitted_rows: Whether the last batch contains rows and is not committed yet.
        is_awaiting_shards: Whether the query waits for shards.
        has_ended_shard: Whether the last batch reached the end of a shard.
        is_handing_off: Whether a lease will be handed off once Spark has committed.
        flushes_when_idle: Whether the last batch should also be committed when no rows are left (option `flushOnIdle`).
    """
    return has_uncommitted_rows and (
        has_ended_shard or is_handing_off or (flushes_when_idle and not is_awaiting_shards)
    )
