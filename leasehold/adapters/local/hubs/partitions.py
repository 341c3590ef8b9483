"""Hubs, their partitions, and where in a partition a reader starts.

Rule: nothing here knows of AMQP links or sockets.
"""

import re
import time
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

from attrs import Factory, define

from leasehold.adapters.local.hubs.messages import annotated, events, partition_key

FILTER = re.compile(r"amqp\.annotation\.x-opt-(offset|sequence-number|enqueued-time)\s*(>=|>)\s*'([^']*)'")
BEGINNING, LATEST = "-1", "@latest"


class HubRefusal(Exception):
    """A request that a hub answers with an AMQP error condition."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(description)
        self.condition = condition
        self.description = description


@define
class Partition:
    """Events in order. An offset counts bytes, so that nobody can mistake it for a sequence number.

    first  the sequence number of the oldest event that is kept
    """

    events: list[bytes] = Factory(list)
    offsets: list[int] = Factory(list)
    times: list[int] = Factory(list)
    readers: list[Any] = Factory(list)
    first: int = 0
    last: tuple[int, str, int] = (-1, BEGINNING, 0)
    """Sequence number, offset and time (ms) of the last event ever; of none -1, "-1" and 0."""
    _size: int = 0

    def append(self, event: bytes, now_ms: int) -> None:
        """Enqueue one event."""
        self.last = self.last[0] + 1, str(self._size), now_ms
        self.events.append(annotated(event, *self.last))
        self.offsets.append(self._size)
        self.times.append(now_ms)
        self._size += len(event)

    def trim(self, before: int) -> int:
        """Forget the events before this number, as retention does; how many there were."""
        count = max(0, min(before - self.first, len(self.events)))
        for kept in (self.events, self.offsets, self.times):
            del kept[:count]
        self.first += count
        return count

    def start(self, selector: str | None) -> int:
        """The sequence number a reader with this filter begins at; raises HubRefusal for a filter we cannot read.

        What is no longer kept is passed over without a word, and what was never enqueued is refused.
        """
        if selector is None:
            return self.first
        match = FILTER.fullmatch(selector.strip())
        if match is None:
            raise HubRefusal("com.microsoft:argument-error", f"filter not understood: {selector}")
        what, operator, value = match.groups()
        if value == LATEST:
            return self.last[0] + 1
        if not re.fullmatch(r"-?\d+", value):
            raise HubRefusal("com.microsoft:argument-error", f"filter value is no number: {selector}")
        return self._from(what, int(value), inclusive=operator == ">=")

    def _from(self, what: str, value: int, *, inclusive: bool) -> int:
        number, offset, _ = self.last
        if what == "sequence-number":
            _insist("sequence number", value, number)
            return max(self.first, value if inclusive else value + 1)
        if what == "offset":
            _insist("offset", value, int(offset))
        places = self.offsets if what == "offset" else self.times
        return self.first + (bisect_left(places, value) if inclusive else bisect_right(places, value))


def _insist(what: str, value: int, last: int) -> None:
    if value > last:
        text = f"The supplied {what} '{value}' is invalid. The last {what} in the system is '{last}'"
        raise HubRefusal("com.microsoft:argument-error", text)


@define
class Hub:
    """An event hub. `groups` are its consumer groups, lower case; with none, any name will do."""

    name: str
    partitions: list[Partition]
    groups: frozenset[str] = frozenset()
    created_ms: int = 0
    _turn: int = 0

    @classmethod
    def of(cls, name: str, count: int, groups: Iterable[str] = ()) -> "Hub":
        """A new hub with so many empty partitions."""
        known = frozenset(group.lower() for group in groups)
        return cls(name, [Partition() for _ in range(count)], known, int(time.time() * 1000))

    def add(self, count: int) -> None:
        """Partitions added at run time, empty, after those there are."""
        self.partitions.extend(Partition() for _ in range(count))

    def partition(self, number: str) -> Partition:
        """The partition of this id; raises HubRefusal."""
        if not (number.isdigit() and int(number) < len(self.partitions)):
            last = len(self.partitions) - 1
            raise HubRefusal("com.microsoft:argument-out-of-range", f"partition {number} is not within 0-{last}")
        return self.partitions[int(number)]

    def check_group(self, group: str) -> None:
        """Raises HubRefusal if there is no such consumer group."""
        if self.groups and group.lower() not in self.groups:
            raise HubRefusal("amqp:not-found", f"the consumer group {group} of {self.name} could not be found")

    def enqueue(self, message: bytes, number: str | None) -> Partition:
        """Store a message or a batch in the partition named, or the key's, or the next in turn."""
        partition = self.partition(number) if number is not None else self._choose(message)
        now_ms = int(time.time() * 1000)
        for event in events(message):
            partition.append(event, now_ms)
        return partition

    def _choose(self, message: bytes) -> Partition:
        key = partition_key(message)
        if key is None:
            self._turn += 1
            return self.partitions[(self._turn - 1) % len(self.partitions)]
        # The service's own hash is not published; all that users may count on is one key, one partition.
        return self.partitions[zlib.crc32(key.encode()) % len(self.partitions)]
