"""Decides when a query over what is there now (`trigger(availableNow=True)`) has read all of it.

Each shard that is held has a `ShardTip`, which says when what was there at the start is read. `AvailableNow` says which
shards are still waited for, and why. Spark commits a batch only when it plans the next one, so some shards can go on
only after an empty batch, a flush: `flush_due` says when one is planned.

A1. An open shard is read up to its latest record at the time when it was opened, and a closed one to its end.
A2. A shard of ours is waited for until all of that is handed over, and what Spark has committed is written.
A3. A shard of another worker is waited for until its lease is renewed once: its owner is alive and reads it.
A4. A free shard is waited for once its parents are done. Before that its parents are waited for, each by its own rule.
A5. A child of shards that this query has read to their ends is waited for until it has a lease.
A6. A flush waits for no shard where a shard waits for a commit: for its end, or to be handed off.
"""

import logging
from collections.abc import Collection, Iterable, Mapping

from attrs import define, frozen

from leasehold.balancer.lineage import readable
from leasehold.balancer.model import Lease, Position, Shard, Version
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

SILENT_SECONDS = 60.0
"""How long nothing may come before the end of what is there now is believed to be reached."""
PAST_SECONDS = 10.0  # past the time at which the end was asked for: sources round how far behind they are


@define
class ShardTip:
    """The end of what was there in one shard when it was opened (A1).

    key      of the shard's lease
    target   the latest record, or the time, when it was asked for; None before that
    asked    when that was
    heard    when a record was read last
    reached  whether reading has come there
    """

    key: str
    target: Position | None = None
    asked: float = 0.0
    heard: float = 0.0
    reached: bool = False

    def begin(self, target: Position, now: float) -> None:
        """Set the target."""
        self.target, self.asked = target, now

    def look(self, read: Position, now: float, behind: float | None, *, closed: bool) -> bool:
        """Return whether the target has just been reached exactly, by its number.

        Args:
            read: How far the shard has been read.
            now: When this is.
            behind: Seconds behind the latest record, if the source has told.
            closed: Whether the shard is known to have been closed.
        """
        if (target := self.target) is None or self.reached:
            return False
        if not target.numbered:
            # A time of zero means that the shard never had a record; else the source says how far behind it is.
            # Where records never cease, it is enough that reading is well past the time that was asked for.
            past = behind is not None and now - self.asked > behind + PAST_SECONDS
            # A closed shard may bring its last records in one reading, and its end only in the next.
            self.reached = target.sub == 0 or (behind == 0 and not closed) or past
        elif read.order >= target.order:
            self.reached = True
            return read.order == target.order
        elif now - self.heard > SILENT_SECONDS:
            log.warning("shard %s: nothing comes up to %s, taken for past retention", self.key, target.sequence)
            self.reached = True
        return False


@frozen
class HeldShard:
    """A shard that this query reads.

    opened  whether it is known where the query goes on
    idle    whether all that was there is handed over, and all commits are written
    """

    opened: bool
    idle: bool


class AvailableNow:
    """Knows which shards a query over what is there now still waits for."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._first_seen: dict[str, Version] = {}
        self._alive: set[str] = set()

    @staticmethod
    def unread(feeds: Mapping[str, HeldShard]) -> Mapping[str, str]:
        """Return the shards of ours with more to read or to write (A2), each with the reason."""
        return {key: "its end is not reached" for key, feed in feeds.items() if feed.opened and not feed.idle}

    def left(
        self,
        feeds: Mapping[str, HeldShard],
        leases: Mapping[str, Lease],
        listed: Iterable[Shard] = (),
        ended: Collection[str] = (),
    ) -> Mapping[str, str]:
        """Return the shards that are waited for, each with the reason.

        Args:
            feeds: The shards of ours, by key.
            leases: The whole table, by key.
            listed: The last listing of the stream.
            ended: The shards that this query has read to their ends, and committed.
        """
        if unread := self.unread(feeds):
            return unread
        # An empty table is not a stream that is read up: its leases are still to be created.
        if not leases:
            return {"(all)": "there are no leases yet"}
        reasons = {key: self._reason(lease, leases, feeds.get(key)) for key, lease in leases.items()}
        begun = {parent for lease in leases.values() for parent in lease.parents}.union(leases, ended)
        unborn = [
            each.id for each in listed if each.id not in begun and each.parents and set(each.parents) <= set(ended)
        ]
        return {key: reason for key, reason in reasons.items() if reason} | dict.fromkeys(unborn, "it has no lease yet")

    def _reason(self, lease: Lease, leases: Mapping[str, Lease], feed: HeldShard | None) -> str:
        if lease.ended:
            return ""
        if lease.owner is None or lease.owner == self._me:
            if (feed is not None and feed.opened and lease.owner) or not readable(lease, leases):  # A2, A4
                return ""
            return "it cannot be opened" if lease.owner else "nobody owns it"
        if self._first_seen.setdefault(lease.key, lease.version) != lease.version:
            self._alive.add(lease.key)
        return "" if lease.key in self._alive else f"{lease.owner} owns it and does not renew it"  # A3


def flush_due(*, owed: bool, left: bool, ended: bool, handing_off: bool, on_idle: bool) -> bool:
    """Return whether a query over what is there now plans a flush, where no rows can be taken (A6).

    Args:
        owed: Whether the last batch has ranges, and is not committed.
        left: Whether shards are waited for.
        ended: Whether the last batch reached the end of a shard.
        handing_off: Whether a lease is handed off once Spark has committed.
        on_idle: Whether the options want the last batch committed when nothing is left.
    """
    return owed and (ended or handing_off or (on_idle and not left))
