"""Each dead letter in a stream is replayed once, by a separate group of workers that end by themselves."""

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
class DeadLetterStream:
    """A stream of dead letters with two shards, a lease table for its replays, and the replayed dead letters."""

    store: MemoryStore = field(factory=MemoryStore)
    source: ListSource = field(factory=ListSource)
    taken: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.source.listed = [create_shard("p", 0, 9), create_shard("q", 10, 19)]
        self.source.shard_logs = {"p": ShardRecords([], size=2), "q": ShardRecords([], size=2)}

    def put(self, entry: DeadLetterEntry) -> None:
        """Put a dead letter at the end of its shard."""
        records = self.source.shard_logs[entry.shard].records
        records.append(Record(entry.line, str(1000 + len(records)), partition_key="k"))

    def close(self) -> None:
        """Nothing to close."""

    def deliver(self, entry: DeadLetterEntry) -> None:
        self.taken.append(entry.record.sequence_number)

    def replay(self, name: str, deliver: Callable[[DeadLetterEntry], None] | None = None) -> ReplayVerdict:
        """Replay the dead letters in the stream with a worker of this name."""
        table = exclusive_table(self.store, "replay", "letters")
        config = Config(initial_position=TRIM_HORIZON, lease_seconds=1.0)
        worker = Worker(store=table, source=DeadLetterSource(self.source, name), me=name, config=config)
        return replay_stream(worker, self, deliver or self.deliver, lambda *_: None, look_seconds=0.05)


def filled(*numbers: str) -> DeadLetterStream:
    """Return a stream with these dead letters in the first shard, and one dead letter in the second."""
    letter_stream = DeadLetterStream()
    for sequence_number in numbers:
        letter_stream.put(dead_letter(sequence_number, shard="p"))
    letter_stream.put(dead_letter("9", shard="q"))
    return letter_stream


def test_each_dead_letter_is_replayed_once_and_in_order() -> None:
    """A further replay delivers only newer dead letters."""
    letter_stream = filled("1", "2", "3")
    assert letter_stream.replay("r-1") == ReplayVerdict(done=4)
    assert [number for number in letter_stream.taken if number != "9"] == ["1", "2", "3"]
    assert letter_stream.replay("r-2") == ReplayVerdict()
    letter_stream.put(dead_letter("4", shard="p"))
    assert letter_stream.replay("r-3") == ReplayVerdict(done=1)
    assert sorted(letter_stream.taken) == ["1", "2", "3", "4", "9"]
    assert all(lease.owner is None for lease in letter_stream.store.list().leases)


def test_replay_killed_half_way_is_completed_by_the_next() -> None:
    """The dead letter that was being handled is replayed again. Those handled before it are not."""
    letter_stream = filled("1", "2", "3")

    def killed(entry: DeadLetterEntry) -> None:
        letter_stream.deliver(entry)
        if entry.record.sequence_number == "2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        letter_stream.replay("r-1", killed)
    letter_stream.replay("r-2")
    assert [number for number in letter_stream.taken if number != "9"] == ["1", "2", "2", "3"]


def test_two_concurrent_replays_share_the_dead_letters_and_end() -> None:
    letter_stream, verdicts = filled("1", "2", "3"), list[ReplayVerdict]()
    threads = [
        threading.Thread(target=lambda n=name: verdicts.append(letter_stream.replay(n))) for name in ("r-1", "r-2")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(verdict.done for verdict in verdicts) == 4
    assert sorted(letter_stream.taken) == ["1", "2", "3", "9"]


def test_lease_table_of_another_group_is_rejected() -> None:
    """The table of another group is rejected because its leases may have the same shard ids."""
    letter_stream = filled("1")
    exclusive_table(letter_stream.store, "slice", "0..9")
    letter_stream.replay("r-1")
    assert {lease.annotation(NOTE) for lease in letter_stream.store.list().leases} == {"letters"}
    with pytest.raises(ValueError, match="replay: its table holds leases of another replay"):
        exclusive_table(letter_stream.store, "replay", "other letters")
