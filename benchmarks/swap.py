"""Measures how long the reading of a shard is interrupted while its lease moves to another table.

    python benchmarks/swap.py

Two workers read four shards of a local stream, which get records every tenth of a second. The leases move from a
DynamoDB stand-in to SQLite and back several times. The benchmark takes the longest time between two records of each
shard, and prints the maximum and the median of these times, both for periods of rest and for swaps. It also prints the
judge's verdict.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha1
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from uuid import uuid4

from attrs import define, field

from leasehold.stores.swap import SwapStore, get_or_create_control_row
from leasehold.stores.urls import display_name, open_store
from leasehold_lab.demo.stage import Stage, Stream, run_services
from leasehold_lab.judge.events import SentRecord

SHARDS, EACH_SECONDS, SETTLE_SECONDS = 4, 0.1, 60.0
SETTINGS = ("--lease-seconds", "10", "--initial-position", "TRIM_HORIZON")
Window = tuple[float, float]


@define
class Producer:
    """Puts a record for each of 16 keys, which are in all shards, every tenth of a second."""

    stream: Stream
    sent: list[SentRecord] = field(factory=list)
    ended: Event = field(factory=Event)

    def run(self) -> None:
        """Put records until `ended` is set."""
        number = 0
        due = time.monotonic()
        while not self.ended.wait(max(0.0, due - time.monotonic())):
            due += EACH_SECONDS
            rows = [(f"key-{key}", b"%d" % (number + key)) for key in range(16)]
            self.stream.put(*rows)
            self.sent += [
                SentRecord(key, int(data), sha1(data, usedforsecurity=False).hexdigest()) for key, data in rows
            ]
            number += len(rows)


def longest_gaps(stage: Stage, window: Window) -> list[float]:
    """Return, for each shard, the longest time between two dispatched records within a window (seconds since 1970)."""
    events = [event for event in stage.history.events if event.event == "record"]
    times: dict[str, list[float]] = {}
    for event in events:
        if window[0] <= event.t <= window[1]:
            times.setdefault(event.shard, []).append(event.t)
    return [
        max(later - earlier for earlier, later in pairwise(sorted(shard_times)))
        for shard_times in times.values()
        if len(shard_times) > 1
    ]


def run_swap(urls: Sequence[str], stage: Stage, *more: str) -> Window:
    """Run `leasehold swap` until all leases have moved, and return its start and end."""
    began = time.time()
    words = (sys.executable, "-m", "leasehold.adapters.cli.main", "swap", *urls, *more)
    with closing(_Command(words)) as command:
        if not stage.until(lambda: command.process.poll() is not None, SETTLE_SECONDS):
            raise SystemExit("the swap did not end")
    return began, time.time()


class _Command:
    """A running command whose output is discarded."""

    def __init__(self, words: Sequence[str]) -> None:
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL)  # noqa: S603  our own command

    def close(self) -> None:
        """Kill the command."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Run the benchmark, and print the results."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--turns", type=int, default=3, help="there and back, so often")
    turns = arguments.parse_args().turns
    with run_services() as (kinesis, dynamodb), tempfile.TemporaryDirectory() as folder:
        name = f"swap-{uuid4().hex[:8]}"
        urls = (f"dynamodb://{name}?region=eu-west-1&endpoint={dynamodb}", f"sqlite://{folder}/leases.db")
        names = (display_name(urls[0]), display_name(urls[1]))
        with closing(Stream(kinesis, name, SHARDS)) as stream:
            tables = (open_store(urls[0]), open_store(urls[1]))
            get_or_create_control_row(tables, names)
            with closing(SwapStore(tables, names[1])) as store:
                stage = Stage(Path(folder), stream, store, urls[0], ("--to", urls[1], *SETTINGS))
                producer = Producer(stream)
                thread = Thread(target=producer.run)
                try:
                    verdict = _measure(stage, urls, thread, producer, turns)
                finally:
                    producer.ended.set()
                    stage.kill_all_workers()
    print(verdict)


def _measure(stage: Stage, urls: Sequence[str], thread: Thread, producer: Producer, turns: int) -> str:
    stage.join("ours-1")
    stage.join("ours-2")
    thread.start()
    if not stage.until(stage.is_balanced, SETTLE_SECONDS):
        raise SystemExit("the fleet did not come to rest")
    gaps_at_rest, gaps_of_moves = list[float](), list[float]()
    for turn in range(2 * turns):
        began = time.time()
        stage.pause(10.0)
        rest_window = (began, time.time())
        # A swap to TO is not completed, because afterwards the leases could not move back.
        move_window = run_swap(urls, stage, "--back") if turn % 2 else _move_to_target(urls, stage)
        stage.pause(2.0)
        gaps_at_rest += longest_gaps(stage, rest_window)
        gaps_of_moves += longest_gaps(stage, move_window)
    producer.ended.set()
    thread.join()
    stage.until(lambda: len(stage.distinct_records) == len(producer.sent), SETTLE_SECONDS)
    stage.end()
    verdict = stage.verdict(producer.sent)
    return "\n".join(
        (
            f"records      {verdict.produced:,} sent, {verdict.lost} lost, {verdict.duplicates} handed over twice",
            f"breaches     {len(verdict.faults)}",
            f"moves        {len(gaps_of_moves)} of a lease, {turns} times there and back",
            f"at rest      longest gap of a shard {max(gaps_at_rest):.2f} s, usually {median(gaps_at_rest):.2f} s",
            f"on the move  longest gap of a shard {max(gaps_of_moves):.2f} s, usually {median(gaps_of_moves):.2f} s",
        )
    )


def _move_to_target(urls: Sequence[str], stage: Stage) -> Window:
    """Move all leases to TO, but kill the command before it completes the swap, so that they can move back."""
    began = time.time()
    words = (sys.executable, "-m", "leasehold.adapters.cli.main", "swap", *urls)
    with closing(_Command(words)):
        arrived = stage.until(lambda: all(lease.version.startswith("to:") for lease in stage.leases), SETTLE_SECONDS)
    if not arrived:
        raise SystemExit("the leases did not arrive")
    return began, time.time()


if __name__ == "__main__":
    main()
