"""Dead letters in a stream are replayed once each, by a separate group that ends by itself."""

import threading
from collections.abc import Callable

import pytest
from attrs import define, field
from written_dead_letters import dead_letter

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.adapters.consumer.dead_letters.replaying import DeadLetterSource, ReplayVerdict, replay_stream
from leasehold.adapters.consumer.slices import NOTE, exclusive_table
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_shard


@define
class Post:
    """A stream of dead letters with two shards, a table for replays of it, and what they replay."""

    store: MemoryStore = field(factory=MemoryStore)
    source: ListSource = field(factory=ListSource)
    taken: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.source.listed = [create_shard("p", 0, 9), create_shard("q", 10, 19)]
        self.source.shard_logs = {"p": ShardRecords([], size=2), "q": ShardRecords([], size=2)}

    def put(self, entry: DeadLetterEntry) -> None:
        """Put a dead letter at the end of its shard."""
        rows = self.source.shard_logs[entry.shard].records
        rows.append(Record(entry.line, str(1000 + len(rows)), partition_key="k"))

    def close(self) -> None:
        """Nothing to close."""

    def deliver(self, entry: DeadLetterEntry) -> None:
        self.taken.append(entry.record.sequence_number)

    def replay(self, name: str, deliver: Callable[[DeadLetterEntry], None] | None = None) -> ReplayVerdict:
        """Replay everything that is there."""
        table = exclusive_table(self.store, "replay", "letters")
        config = Config(initial_position=TRIM_HORIZON, lease_seconds=1.0)
        worker = Worker(store=table, source=DeadLetterSource(self.source, name), me=name, config=config)
        return replay_stream(worker, self, deliver or self.deliver, lambda *_: None, look_seconds=0.05)


def filled(*numbers: str) -> Post:
    """A stream with these dead letters in its first shard, and one in the other."""
    post = Post()
    for number in numbers:
        post.put(dead_letter(number, shard="p"))
    post.put(dead_letter("9", shard="q"))
    return post


def test_each_dead_letter_is_replayed_once_and_in_order() -> None:
    """A second replay contains only newer dead letters."""
    post = filled("1", "2", "3")
    assert post.replay("r-1") == ReplayVerdict(done=4)
    assert [number for number in post.taken if number != "9"] == ["1", "2", "3"]
    assert post.replay("r-2") == ReplayVerdict()
    post.put(dead_letter("4", shard="p"))
    assert post.replay("r-3") == ReplayVerdict(done=1)
    assert sorted(post.taken) == ["1", "2", "3", "4", "9"]
    assert all(lease.owner is None for lease in post.store.list().leases)


def test_replay_killed_half_way_is_completed_by_the_next() -> None:
    """Dead letters that are done do not come again, and the one being handled is kept."""
    post = filled("1", "2", "3")

    def killed(entry: DeadLetterEntry) -> None:
        post.deliver(entry)
        if entry.record.sequence_number == "2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        post.replay("r-1", killed)
    post.replay("r-2")
    assert [number for number in post.taken if number != "9"] == ["1", "2", "2", "3"]


def test_two_concurrent_replays_share_the_dead_letters_and_end() -> None:
    post, verdicts = filled("1", "2", "3"), list[ReplayVerdict]()
    threads = [threading.Thread(target=lambda n=name: verdicts.append(post.replay(n))) for name in ("r-1", "r-2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(verdict.done for verdict in verdicts) == 4
    assert sorted(post.taken) == ["1", "2", "3", "9"]


def test_lease_table_of_another_group_is_rejected() -> None:
    """The leases of that group have the same shard names."""
    post = filled("1")
    exclusive_table(post.store, "slice", "0..9")
    post.replay("r-1")
    assert {lease.annotation(NOTE) for lease in post.store.list().leases} == {"letters"}
    with pytest.raises(ValueError, match="replay: its table holds leases of another replay"):
        exclusive_table(post.store, "replay", "other letters")
