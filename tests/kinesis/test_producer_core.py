"""The producer keeps its promises through any mixture of splits, merges, refusals and lost answers."""

from collections import Counter
from itertools import chain
from math import inf
from typing import Any

from attrs import define, field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream_model import Stream

from adapters.kinesis.hash_keys import hash_of
from adapters.kinesis.producer_core import Core
from adapters.kinesis.producer_lane import Bucket, Entry, Unit
from adapters.kinesis.producer_map import ShardMap, mapped
from adapters.kinesis.producer_values import Delivered, Late, Outcome, Refused, Result, Settings, Unknown
from balancer.model import HASH_KEYS, Shard

KEYS = [f"key-{place}" for place in range(12)]
FAULTS = ("none", "none", "none", "throttled", "lost", "lost but written", "lost and written late")
STEPS = st.one_of(
    st.tuples(st.just("burst"), st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=8)),
    st.tuples(st.just("send"), st.sampled_from([0.01, 0.2, 2.0])),
    st.tuples(
        st.just("answer"), st.tuples(st.integers(0, 5), st.lists(st.sampled_from(FAULTS), min_size=4, max_size=4))
    ),
    st.tuples(st.just("split"), st.integers(0, 7)),
    st.tuples(st.just("merge"), st.integers(0, 7)),
    st.tuples(st.just("map"), st.sampled_from([True, True, False])),
    st.tuples(st.just("land"), st.just(0)),
)
ROUNDS = st.tuples(STEPS, STEPS, STEPS, STEPS, STEPS, STEPS, STEPS, STEPS)


def a_map(stream: Stream) -> ShardMap:
    """The stream's present map."""
    found = mapped(stream.shards)
    assert found is not None
    return found


@define
class World:
    """A producer, its stream, and what lies between them."""

    least: int
    stream: Stream = field(factory=Stream)
    now: float = 0.0
    sent: list[tuple[str, bytes]] = field(factory=list)
    under_way: list[tuple[Unit, ...]] = field(factory=list)
    floating: list[Unit] = field(factory=list)
    results: list[Result] = field(factory=list)
    lost: set[int] = field(factory=set)
    listing: ShardMap = field(init=False)
    core: Core = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.listing = a_map(self.stream)
        self.core = Core(self.listing, Settings(least_bytes=self.least))

    def put(self, key: int) -> None:
        ticket = len(self.sent)
        self.sent.append((KEYS[key], b"%d" % ticket))
        self.core.put(Entry(ticket, b"%d" % ticket, KEYS[key], hash_of(KEYS[key]), None, self.now, inf))

    def burst(self, keys: list[int]) -> None:
        for key in keys:
            self.put(key)

    def send(self, seconds: float) -> None:
        self.now += seconds
        if units := self.core.request(self.now):
            shards = [unit.shard for units in (*self.under_way, units) for unit in units]
            assert len(shards) == len(set(shards)), "two units of one shard under way"
            self.under_way.append(units)

    def answer(self, choice: tuple[int, list[str]]) -> None:
        if self.under_way:
            which, faults = choice
            for place, unit in enumerate(self.under_way.pop(which % len(self.under_way))):
                self.results += self.core.answered(unit, self._outcome(unit, faults[place % 4]), self.now)

    def _outcome(self, unit: Unit, fault: str) -> Outcome:
        if fault == "none":
            return self.stream.write(unit)
        if fault == "throttled":
            return Refused("ProvisionedThroughputExceededException")
        self.lost |= {entry.ticket for entry in unit.entries}
        if fault == "lost but written":
            self.stream.write(unit)
        if fault == "lost and written late":
            self.floating.append(unit)
        return Unknown("ReadTimeoutError")

    def land(self, _: object = None) -> None:
        if self.floating:
            self.stream.write(self.floating.pop(0))

    def map(self, fresh: bool) -> None:
        """A listing arrives; an old one was taken when the last fresh one was."""
        self.listing = a_map(self.stream) if fresh else self.listing
        self.results += self.core.mapped(self.listing, self.now)

    def finish(self) -> None:
        """From here on nothing fails; everything must arrive."""
        self.core.flushing = True
        for _ in range(400):
            self.send(1.0)
            while self.under_way:
                self.answer((0, ["none"] * 4))
            if self.core.map_due() <= self.now:
                self.map(fresh=True)
            self.land()

    def do(self, step: tuple[str, Any]) -> None:
        name, argument = step
        getattr(self.stream if name in {"split", "merge"} else self, name)(argument)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.sampled_from([60, 25 << 10]))
def test_order_holds_nothing_is_lost_and_only_what_timed_out_comes_twice(
    rounds: list[tuple[tuple[str, Any], ...]], least: int
) -> None:
    """Records would be lost, reordered or doubled at the first reshard under load."""
    world = World(least)
    for step in chain.from_iterable(rounds):
        world.do(step)
    world.finish()
    seen = list(world.stream.read())
    first: dict[bytes, str] = {}
    for *_, key, data in seen:
        first.setdefault(data, key)
    for key in KEYS:
        sent = [data for each, data in world.sent if each == key]
        assert [data for data, each in first.items() if each == key] == sent
    twice = {int(data) for data, times in Counter(data for *_, data in seen).items() if times > 1}
    assert twice <= world.lost
    told = [
        (result.shard, result.sequence_number, sub, entry.partition_key, entry.data)
        for result in world.results
        if isinstance(result, Delivered)
        for sub, entry in enumerate(result.entries)
    ]
    assert sorted(int(data) for *_, data in told) == list(range(len(world.sent)))
    assert set(told) <= set(seen)
