"""Letters in a stream are handed over again once each, by a group of its own that ends by itself."""

import threading
from collections.abc import Callable

import pytest
from attrs import define, evolve, field
from test_letters import letter

from leasehold.adapters.proving.simulator.world.world import ListSource, ShardRecords, shard
from leasehold.adapters.reading.dead_letters.letter import Letter, LetterError, letter_of
from leasehold.adapters.reading.dead_letters.replaying import LetterSource, ReplayVerdict, replay_stream
from leasehold.adapters.reading.slices import NOTE, own_table
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.embedded.memory import MemoryStore


@define
class Post:
    """A stream of letters of two shards, a table for replays of it, and what they hand over and say."""

    store: MemoryStore = field(factory=MemoryStore)
    source: ListSource = field(factory=ListSource)
    taken: list[str] = field(factory=list)
    told: list[str] = field(factory=list)
    poison: set[str] = field(factory=set)
    closed: bool = False
    fault: Exception = field(factory=lambda: ValueError("again"))

    def __attrs_post_init__(self) -> None:
        self.source.listed = [shard("p", 0, 9), shard("q", 10, 19)]
        self.source.shard_logs = {"p": ShardRecords([], size=2), "q": ShardRecords([], size=2)}

    def put(self, one: Letter) -> None:
        """Put a letter at the end of its shard."""
        if self.closed:
            raise LetterError("no such stream")
        self.put_line(one.line, one.shard)

    def put_line(self, line: bytes, name: str = "p") -> None:
        """Put a record at the end of this shard."""
        rows = self.source.shard_logs[name].records
        rows.append(Record(line, str(1000 + len(rows)), partition_key="k"))

    def close(self) -> None:
        """Nothing to close."""

    def deliver(self, one: Letter) -> Exception | None:
        number = one.record.sequence_number
        self.taken.append(number)
        return self.fault if number in self.poison else None

    def replay(self, name: str, deliver: Callable[[Letter], Exception | None] | None = None) -> ReplayVerdict:
        """Hand over all that is there."""
        table = own_table(self.store, "replay", "letters")
        config = Config(initial_position=TRIM_HORIZON, lease_seconds=1.0)
        worker = Worker(store=table, source=LetterSource(self.source, name), me=name, config=config)
        tell = lambda name, why: self.told.append(f"{name}: {why}")  # noqa: E731  it is one line of a log
        return replay_stream(worker, self, deliver or self.deliver, tell, look_seconds=0.05)


def filled(*numbers: str) -> Post:
    """A stream with these letters in its first shard, and one in the other."""
    post = Post()
    for number in numbers:
        post.put(letter(number, shard="p"))
    post.put(letter("9", shard="q"))
    return post


def test_each_letter_is_handed_over_once_in_order_and_the_next_replay_begins_behind_them() -> None:
    """Without it what was mended by one replay would be done again by the next, or new letters be left out."""
    post = filled("1", "2", "3")
    assert post.replay("r-1") == ReplayVerdict(done=4)
    assert [number for number in post.taken if number != "9"] == ["1", "2", "3"]
    assert post.replay("r-2") == ReplayVerdict()
    post.put(letter("4", shard="p"))
    assert post.replay("r-3") == ReplayVerdict(done=1)
    assert sorted(post.taken) == ["1", "2", "3", "4", "9"]
    assert all(lease.owner is None for lease in post.store.list().leases)


def test_a_letter_that_fails_again_is_put_back_for_the_next_replay_with_its_attempt_counted() -> None:
    """Without it a replay would lose the letter, or hand it over for ever."""
    post = filled("1", "2", "3")
    post.poison = {"2"}
    assert post.replay("r-1") == ReplayVerdict(done=3, failed=1)
    assert post.told == ["the letter at 1001: ValueError: again"]
    last = letter_of(post.source.shard_logs["p"].records[-1].data)
    assert evolve(last, time_ms=1) == evolve(letter("2", shard="p"), alone=1, worker="r-1", text="again")
    post.poison = set()
    assert post.replay("r-2") == ReplayVerdict(done=1)
    assert sorted(post.taken) == ["1", "2", "2", "3", "9"]


def test_a_record_that_is_no_letter_is_said_counted_and_passed() -> None:
    """Without it a foreign record would hold up all letters behind it, or be passed in silence."""
    post = filled("1")
    post.put_line(b"mine")
    post.put(letter("2", shard="p"))
    assert post.replay("r-1") == ReplayVerdict(done=3, strange=1)
    assert post.told == ["the letter at 1001: it is no letter: it is not JSON"]


def test_a_stream_that_takes_nothing_ends_the_replay_and_nothing_is_behind_the_checkpoint() -> None:
    """Without it a letter that failed again would be gone."""
    post = filled("1", "2", "3")
    post.poison, post.closed = {"2"}, True
    with pytest.raises(LetterError, match="no such stream"):
        post.replay("r-1")
    post.poison, post.closed = set(), False
    post.replay("r-2")
    assert [number for number in post.taken if number != "9"] == ["1", "2", "2", "3"]


def test_a_replay_that_is_killed_half_way_does_the_rest_the_next_time() -> None:
    """Without it those that are done would come again, or the letter at work be lost."""
    post = filled("1", "2", "3")

    def killed(one: Letter) -> Exception | None:
        post.deliver(one)
        if one.record.sequence_number == "2":
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        post.replay("r-1", killed)
    post.replay("r-2")
    assert [number for number in post.taken if number != "9"] == ["1", "2", "2", "3"]


def test_two_replays_at_once_share_the_letters_and_both_end() -> None:
    """Without it each would wait for the other's shards for ever."""
    post, verdicts = filled("1", "2", "3"), list[ReplayVerdict]()
    threads = [threading.Thread(target=lambda n=name: verdicts.append(post.replay(n))) for name in ("r-1", "r-2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(verdict.done for verdict in verdicts) == 4
    assert sorted(post.taken) == ["1", "2", "3", "9"]


def test_the_table_of_a_fleet_is_refused() -> None:
    """Without it a replay would take the leases of those that read, whose shards have the same names."""
    post = filled("1")
    own_table(post.store, "slice", "0..9")
    post.replay("r-1")
    assert {lease.note(NOTE) for lease in post.store.list().leases} == {"letters"}
    with pytest.raises(ValueError, match="replay: its table holds leases of another replay"):
        own_table(post.store, "replay", "other letters")
