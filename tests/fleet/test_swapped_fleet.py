"""A fleet moves its lease table while it reads, there and back; workers and the command are killed meanwhile."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha1
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import define, field

from leasehold.adapters.demo.stage import Stage, Stream, put
from leasehold.adapters.history.events import Sent
from leasehold.stores.protocol import Store
from leasehold.stores.swap import FROM, TO, SwapStore, announced, parted
from leasehold.stores.urls import name_of, open_store

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("fleets")]

KEYS, ROWS, SETTLE_SECONDS = 17, 2000, 60.0
SETTINGS = ("--lease-seconds", "4", "--initial-position", "TRIM_HORIZON", "--checkpoint-seconds", "0.5")


@define
class Puts:
    """Numbered records for a stream, some at each tick, those of one key in order."""

    client: "KinesisClient"
    stream: str
    numbers: "count[int]" = field(factory=count)
    sent: list[Sent] = field(factory=list)

    def __call__(self, _stage: Stage) -> None:
        """The next ten, until all are sent."""
        rows = [(f"k-{number % KEYS}", b"%d" % number) for number in islice(self.numbers, 10) if number < ROWS]
        if rows:
            put(self.client, self.stream, rows)
        self.sent += [Sent(key, int(data), sha1(data, usedforsecurity=False).hexdigest()) for key, data in rows]

    def all_seen(self, stage: Stage) -> bool:
        """Whether everything was sent and handed over."""
        return ROWS == len(self.sent) == len(stage.distinct)


@define
class Ground:
    """A fleet over two tables."""

    stage: Stage
    puts: Puts
    urls: tuple[str, str]
    said: Path
    commands: list["subprocess.Popen[bytes]"] = field(factory=list)

    def swap(self, *more: str) -> "subprocess.Popen[bytes]":
        """Start the command."""
        words = (sys.executable, "-m", "leasehold.adapters.cli.main", "swap", *self.urls, *more)
        with self.said.open("ab") as said:
            self.commands.append(subprocess.Popen(words, stdout=said, stderr=said))
        return self.commands[-1]

    def places(self) -> list[int]:
        """How many leases FROM speaks for, and TO."""
        sides = [parted(lease)[0] for lease in self.stage.leases]
        return [sides.count(FROM), sides.count(TO)]

    def ends_well(self, command: "subprocess.Popen[bytes]") -> None:
        """Wait for the command, while the fleet goes on."""
        assert self.stage.until(lambda: command.poll() is not None, SETTLE_SECONDS), self.stage.leases
        assert command.returncode == 0, self.said.read_text()


@contextmanager
def a_ground(kinesis_url: str, client: "KinesisClient", urls: tuple[str, str], folder: Path) -> Iterator[Ground]:
    """Nobody at work yet."""
    name = f"swapped-{folder.name}"[:60]
    with (
        closing(Stream(kinesis_url, name, 4)) as stream,
        closing(open_store(urls[FROM])) as source,
        closing(open_store(urls[TO])) as target,
    ):
        tables: tuple[Store, Store] = (source, target)
        names = (name_of(urls[FROM]), name_of(urls[TO]))
        announced(tables, names)
        puts = Puts(client, name)
        settings = ("--to", urls[TO], *SETTINGS)
        stage = Stage(folder, stream, SwapStore(tables, names[TO]), urls[FROM], settings, watched=puts)
        ground = Ground(stage, puts, urls, folder / "swap.log")
        try:
            yield ground
        finally:
            stage.abandon()
            for command in ground.commands:
                command.kill()
                command.wait()


def there_and_back(ground: Ground) -> None:
    """Move the table, kill a worker and the command in the middle, go back, split a shard, and move for good."""
    stage = ground.stage
    for worker in ("ours-1", "ours-2", "ours-3"):
        stage.join(worker)
    assert stage.until(stage.balanced, SETTLE_SECONDS)
    dies = ground.swap()
    assert stage.until(lambda: ground.places()[TO] > 0, SETTLE_SECONDS)
    stage.kill("ours-1")
    dies.kill()
    stage.join("ours-4")
    ground.swap("--back").wait(SETTLE_SECONDS)
    assert stage.until(lambda: ground.places() == [4, 0] and stage.balanced(), SETTLE_SECONDS)
    stage.split()
    again = ground.swap()
    assert stage.until(lambda: ground.places()[TO] > 0, SETTLE_SECONDS)
    stage.kill("ours-2")
    ground.ends_well(again)
    assert stage.until(stage.balanced, SETTLE_SECONDS)
    assert stage.until(lambda: ground.puts.all_seen(stage), 2 * SETTLE_SECONDS)
    stage.end()


def test_a_fleet_moves_from_dynamodb_to_sqlite_and_back(
    kinesis_url: str, kinesis_client: "KinesisClient", dynalite_url: str, tmp_path: Path
) -> None:
    """Without it records could be lost, or read by two, by what only real processes and services do."""
    urls = (f"dynamodb://swapped?region=eu-west-1&endpoint={dynalite_url}", f"sqlite://{tmp_path}/leases.db")
    _moves(kinesis_url, kinesis_client, urls, tmp_path)


@pytest.mark.more
def test_a_fleet_moves_to_layout_sessions_and_back(
    kinesis_url: str, kinesis_client: "KinesisClient", dynalite_url: str, tmp_path: Path
) -> None:
    """Without it likewise, where a row of the lease does not change while it is held."""
    there = f"dynamodb://swapped-sessions?region=eu-west-1&endpoint={dynalite_url}"
    _moves(
        kinesis_url,
        kinesis_client,
        (there.replace("swapped-sessions", "swapped-rows"), there.replace("?", "?layout=sessions&")),
        tmp_path,
    )


def _moves(kinesis_url: str, client: "KinesisClient", urls: tuple[str, str], folder: Path) -> None:
    with a_ground(kinesis_url, client, urls, folder) as ground:
        there_and_back(ground)
        verdict = ground.stage.verdict(ground.puts.sent)
    assert (verdict.faults, verdict.produced, verdict.lost) == ((), ROWS, 0)
    assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []
