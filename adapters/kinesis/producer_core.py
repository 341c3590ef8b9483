"""Decides what a producer sends next; it reads no clock, starts no thread and speaks with nobody.

In come records, answers, listings of shards and the time; out go requests and what became of the records.
Rule 1: one unit is under way for each shard, and a refused one is sent again before anything newer.
Rule 2: a unit that landed elsewhere counts only if all its records belong there; else none of it
does (KCL drops it whole), and its records go, in order, where the new map says.
Rule 3: while a unit of a shard that has closed is under way, nothing is sent to the shards that follow it.
Together they keep the order of every partition key. What is sent twice is what timed out, and no more.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from math import inf
from typing import assert_never

from attrs import define, field

from adapters.kinesis.producer_lane import SHARD_BYTES_PER_SECOND, Bucket, Entry, Lane, Unit
from adapters.kinesis.producer_map import ShardMap
from adapters.kinesis.producer_metrics import Metrics
from adapters.kinesis.producer_values import Delivered, Late, Outcome, Placed, Refused, Result, Settings, Unknown
from balancer.model import HashRange

REQUEST_RECORDS = 500
REQUEST_BYTES = 10 << 20
_LEAST_WAIT, _MOST_WAIT = 0.05, 1.0


@define(eq=False)
class Core:
    """The producer's state.

    shards    the newest map
    settings  how it sends
    metrics   what it counts
    flushing  whether records wait for no company
    """

    shards: ShardMap
    settings: Settings
    metrics: Metrics = field(factory=Metrics)
    flushing: bool = False
    _lanes: dict[str, Lane] = field(factory=dict)
    _ghosts: list[Lane] = field(factory=list)  # lanes of shards that have closed, with a unit under way
    _round_trip: float = 0.0
    _map_due: float = inf
    _map_faults: int = 0
    _unknown: set[int] = field(factory=set)  # tickets of records that may be in the stream already

    def put(self, entry: Entry) -> bool:
        """Take a record; whether something may be due sooner than before."""
        lane = self._lane(self.shards.shard_of(entry.hash_key))
        before = lane.queued
        lane.append(entry)
        self.metrics.received += 1
        return not before or before < self._target() <= lane.queued

    def due(self) -> float:
        """When `request` will next have something, as far as is known."""
        return min(map(self._lane_due, self._lanes.values()), default=inf)

    def map_due(self) -> float:
        """When the shards should be listed anew."""
        return self._map_due

    def request(self, now: float) -> tuple[Unit, ...]:
        """What to send now, together; perhaps nothing. Each unit is to be answered."""
        units: list[Unit] = []
        room = REQUEST_BYTES
        for lane in self._lanes.values():
            if len(units) == REQUEST_RECORDS or self._lane_due(lane) > now:
                continue
            unit = lane.unit = lane.unit or lane.pack(self._target())
            if unit.size <= room:
                room -= unit.size
                lane.sent = now
                lane.bucket.take(unit.size, now)
                units.append(unit)
        if units:
            self.metrics.sent(units, now)
        return tuple(units)

    def answered(self, unit: Unit, outcome: Outcome, now: float) -> tuple[Result, ...]:
        """What became of a unit that was sent."""
        candidates = (*self._ghosts, *filter(None, [self._lanes.get(unit.shard)]))
        lane = next((each for each in candidates if each.unit is unit), None)
        if lane is None:  # given up in the meantime
            return ()
        match outcome:
            case Placed(shard, sequence_number):
                self._time(now - lane.sent if lane.sent is not None else 0.0)
                lane.sent, lane.landed = None, (shard, sequence_number)
                if shard == unit.shard or len(unit.entries) == 1:
                    # A record alone went where its own hash key falls, whatever our map says.
                    self._want_map(now, wanted=shard != unit.shard)
                    return self._accept(lane)
                self._want_map(now)
                return self._accept(lane) if self._belongs(lane) else ()
            case Refused(code):
                self.metrics.refused(unit, code)
            case Unknown(code):
                self._unknown.update(entry.ticket for entry in unit.entries)
                self.metrics.refused(unit, code)
                self.metrics.unknown += len(unit.entries)
            case _:
                assert_never(outcome)
        self._again(lane, now)
        return ()

    def mapped(self, shards: ShardMap | None, now: float) -> tuple[Result, ...]:
        """A new listing, or None where there is none that can be used."""
        if shards is None:
            self._map_faults += 1
            self._map_due = now + _backoff(self._map_faults)
            return ()
        self.shards, self._map_due = shards, inf
        for lane in [each for each in self._lanes.values() if each.shard not in shards.ids]:
            self._close(lane)
        landed = [each for each in (*self._lanes.values(), *self._ghosts) if each.landed is not None]
        results = tuple(result for lane in landed for result in self._judge(lane, now))
        if self._map_due == inf:  # else this listing lags behind the stream, and the next is asked for later
            self._map_faults = 0
        return results

    def late(self, now: float) -> tuple[Late, ...]:
        """Records whose time is over and that are not with the service; they are given up."""
        if self.settings.on_late == "block":
            return ()
        return tuple(late for lane in self._lanes.values() for late in self._give_up(lane, now))

    def abandon(self) -> tuple[Late, ...]:
        """Give up everything, sent or not."""
        lanes = [*self._lanes.values(), *self._ghosts]
        self._lanes, self._ghosts = {}, []
        given_up = [Late((*(lane.unit.entries if lane.unit else ()), *lane.queue), unknown=True) for lane in lanes]
        return tuple(late for late in given_up if late.entries)

    def _lane(self, shard: str) -> Lane:
        if shard not in self._lanes:
            self._lanes[shard] = Lane(shard, self.shards.ranges[shard], Bucket(self.settings.share))
        return self._lanes[shard]

    def _target(self) -> int:
        """Bytes of an aggregate: what the shard may take while one request goes there and back."""
        full = int(SHARD_BYTES_PER_SECOND * self.settings.share * self._round_trip)
        return min(max(full, self.settings.least_bytes), self.settings.record_bytes)

    def _time(self, seconds: float) -> None:
        self._round_trip = 0.8 * self._round_trip + 0.2 * seconds if self._round_trip else seconds

    def _lane_due(self, lane: Lane) -> float:
        if lane.sent is not None or lane.landed is not None or not (lane.unit or lane.queue):
            return inf
        if any(_overlap(lane.hash_range, ghost.hash_range) for ghost in self._ghosts):  # rule 3
            return inf
        due = max(lane.wait, lane.bucket.ready)
        if lane.unit or self.flushing or lane.queued >= self._target():
            return due
        return max(due, lane.queue[0].arrived + self.settings.linger_seconds)

    def _want_map(self, now: float, *, wanted: bool = True) -> None:
        if wanted:
            self._map_due = min(self._map_due, now + (_backoff(self._map_faults) if self._map_faults else 0.0))

    def _accept(self, lane: Lane) -> tuple[Delivered, ...]:
        unit, landed = lane.unit, lane.landed
        if unit is None or landed is None:
            return ()
        lane.unit = lane.landed = lane.sent = None
        lane.faults, lane.wait = 0, 0.0
        self._unknown.difference_update(entry.ticket for entry in unit.entries)
        self._ghosts = [ghost for ghost in self._ghosts if ghost is not lane]
        self.metrics.accepted(unit)
        return (Delivered(unit.entries, *landed),)

    def _belongs(self, lane: Lane) -> bool:
        """Whether all of a unit's records belong to the shard it went to (rule 2)."""
        if lane.unit is None or lane.landed is None or lane.landed[0] not in self.shards.ranges:
            return False
        first, last = self.shards.ranges[lane.landed[0]]
        return all(first <= entry.hash_key <= last for entry in lane.unit.entries)

    def _judge(self, lane: Lane, now: float) -> tuple[Delivered, ...]:
        if self._belongs(lane):
            return self._accept(lane)
        self._map_faults += 1
        if lane.landed is not None and lane.landed[0] in self.shards.ranges:
            self.metrics.misplaced += 1
            lane.landed = None
            self._again(lane, now)
            if lane.shard in self.shards.ids:  # the listing lags behind the stream
                self._want_map(now)
        else:
            self._want_map(now)
        return ()

    def _again(self, lane: Lane, now: float) -> None:
        """A unit is to be sent again, as it was if its shard is still there (rule 1)."""
        lane.sent = None
        lane.faults += 1
        lane.wait = now + _backoff(lane.faults)
        if lane.shard not in self.shards.ids:
            self._ghosts = [ghost for ghost in self._ghosts if ghost is not lane]
            self._place_anew(lane)

    def _close(self, lane: Lane) -> None:
        """The lane's shard has closed: what waits moves on, what is under way is waited for (rule 3)."""
        del self._lanes[lane.shard]
        if lane.sent is not None or lane.landed is not None:
            self._ghosts.append(lane)
            waiting, lane.queue, lane.queued = lane.queue, deque(), 0
            self._place(waiting)
        else:
            self._place_anew(lane)

    def _place_anew(self, lane: Lane) -> None:
        entries = (*(lane.unit.entries if lane.unit else ()), *lane.queue)
        lane.unit, lane.queue, lane.queued = None, deque(), 0
        self._place(entries)

    def _place(self, entries: Iterable[Entry]) -> None:
        by_shard: dict[str, list[Entry]] = {}
        for entry in entries:
            by_shard.setdefault(self.shards.shard_of(entry.hash_key), []).append(entry)
        for shard, group in by_shard.items():
            self._lane(shard).put_back(group)

    def _give_up(self, lane: Lane, now: float) -> Iterator[Late]:
        if lane.unit and lane.sent is None and lane.landed is None and lane.unit.entries[0].expires <= now:
            entries, lane.unit = lane.unit.entries, None
            lane.put_back(entries)
        late: list[Entry] = []
        while lane.unit is None and lane.queue and lane.queue[0].expires <= now:
            late.append(lane.shift())
        if late:
            self.metrics.late += len(late)
            yield Late(tuple(late), unknown=any(entry.ticket in self._unknown for entry in late))


def _overlap(one: HashRange, two: HashRange) -> bool:
    return one[0] <= two[1] and two[0] <= one[1]


def _backoff(faults: int) -> float:
    return min(_MOST_WAIT, _LEAST_WAIT * float(1 << min(faults - 1, 10)))
