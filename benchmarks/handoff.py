"""Measures the cost of hand-offs between workers: repeated and lost records, overlaps and pauses.

    python benchmarks/handoff.py [--store dynalite|azurite] [--checkpoint-seconds N] [--lease-seconds N]

One worker, the giver, owns all leases. Another worker, the taker, joins, gets half of them, leaves and joins again.
Each runs in a separate process. The records are generated at a constant rate, so only leases and workers are measured.
A pause is the time from the giver's last record to the taker's first. Further measurements are made with takers and
givers that die during a hand-off, and with lost responses.
"""

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from attrs import frozen
from growing_stream import FIRST
from handoff_workers import LEASES, RATE, Faults, Place, fleet

from leasehold.stores.writes import GiveLease, RequestLease
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.judge.events import ReadingEvent, RunHistory
from leasehold_lab.judge.tenures import by_shard, reading_of
from leasehold_lab.standins.services import AZURITE_ACCOUNT, azurite, azurite_connection_string, dynalite

MOVES = 100
LEASE_SECONDS = 3.0
PAUSE_BAR, PAUSE_99_BAR, TAKER_BAR, GIVER_BAR, CRASH_BAR = 0.25, 0.6, 2.5, 1.0, 8.0


@frozen
class Cost:
    """The cost of the hand-offs in a fleet, in records and seconds."""

    moves: int
    duplicates: int
    lost: int
    overlap: float
    pauses: tuple[float, ...]


def cost(told: list[ReadingEvent]) -> Cost:
    """Compute the cost from the events. The hand-offs are the changes of owner away from the giver."""
    shards = by_shard(reading_of(RunHistory(events=told)).tenures)
    numbers = [[record.place[0] for tenure in readers for record in tenure.records] for readers in shards.values()]
    moves = [
        (before.records[-1].t, after.records[0].t)
        for readers in shards.values()
        for before, after in pairwise(tenure for tenure in readers if tenure.records)
        if before.worker == "giver"
    ]
    return Cost(
        moves=len(moves),
        duplicates=sum(len(each) - len(set(each)) for each in numbers),
        lost=sum(max(each) + 1 - FIRST - len(set(each)) for each in numbers),
        overlap=sum(max(0.0, last - first) for last, first in moves),
        pauses=tuple(sorted(first - last for last, first in moves)),
    )


def silence(told: list[ReadingEvent], shards: Collection[str] | None = None) -> float:
    """Return the longest time without a dispatched record in one of these shards, by default of all shards."""
    times: dict[str, list[float]] = {}
    for event in told:
        if event.event == "record" and (shards is None or event.shard in shards):
            times.setdefault(event.shard, []).append(event.t)
    return max(after - before for each in times.values() for before, after in pairwise(each))


def planned(place: Place, faults: Faults | None = None) -> Cost:
    """Let a taker join, get half of the leases and leave, repeatedly, and return the cost of the hand-offs."""
    with fleet(place, faults) as found:
        for round_ in range(MOVES // (LEASES // 2)):
            taker = f"taker-{round_}"
            found.join(taker, faults)
            found.until(found.holds(taker, LEASES // 2), 60, f"{taker} holds its half")
            time.sleep(0.5)
            found.leave(taker)
            found.until(found.holds("giver", LEASES), 30, "the giver holds everything again")
        found.leave("giver")
        return cost(found.told)


def taker_killed(place: Place) -> float:
    """Return the longest silence if a taker dies immediately after its request was written."""
    with fleet(place) as found:
        taker = found.join("taker", Faults(dies_after=RequestLease))
        found.until(lambda: not taker.process.is_alive(), 30, "a request")
        time.sleep(place.lease_seconds + 2)
        return silence(found.told)


def giver_killed(place: Place) -> tuple[float, float]:
    """Return the longest silence after the giver's death, of the requested shards and of all its shards."""
    with fleet(place) as found:
        taker = found.join("taker")
        found.until(lambda: len(taker.asked) >= LEASES // 2, 30, "requests")
        asked = frozenset(taker.asked)
        found.freeze("giver")
        found.until(found.holds("taker", LEASES), 60, "the taker holds everything")
        time.sleep(0.5)
        found.members["giver"].process.kill()
        return silence(found.told, asked), silence(found.told)


def say(what: str, figure: str, *, good: bool) -> bool:
    """Print a line of the table."""
    print(f"{'pass' if good else 'FAIL'}  {what:58} {figure}")
    return good


def measure(name: str, place: Place) -> bool:
    """Run all measurements on one store, and return whether all limits are met."""
    print(f"-- {name}: {LEASES} leases, lease_seconds {place.lease_seconds:g}, {RATE} records/s each")
    done, forgetful = planned(place), planned(place, Faults(forgets=frozenset({RequestLease, GiveLease})))
    p99 = done.pauses[min(len(done.pauses) - 1, int(0.99 * len(done.pauses)))]
    median, alone, (orphans, rest) = statistics.median(done.pauses), taker_killed(place), giver_killed(place)
    within, owned = place.lease_seconds + GIVER_BAR, place.lease_seconds + CRASH_BAR
    return all(
        [
            say(f"{MOVES} planned moves", str(done.moves), good=done.moves >= MOVES),
            say("records handed over twice: 0", str(done.duplicates), good=not done.duplicates),
            say("records lost: 0", str(done.lost), good=not done.lost),
            say("both at work: 0 s", f"{done.overlap:.3f} s", good=not done.overlap),
            say("pause, median: 0.25 s at most", f"{median:.3f} s", good=median <= PAUSE_BAR),
            say("pause, 99th percentile: 0.6 s at most", f"{p99:.3f} s", good=p99 <= PAUSE_99_BAR),
            say(
                "every second reply lost: 0 twice, 0 lost",
                f"{forgetful.duplicates}, {forgetful.lost}",
                good=not (forgetful.duplicates or forgetful.lost),
            ),
            say(f"taker killed after asking: {TAKER_BAR} s at most", f"{alone:.2f} s", good=alone <= TAKER_BAR),
            say(
                f"giver killed, what it was asked for: {within:g} s at most", f"{orphans:.2f} s", good=orphans <= within
            ),
            say(f"giver killed, all it held: {owned:g} s at most", f"{rest:.2f} s", good=rest <= owned),
        ]
    )


def main() -> int:
    """Measure on the chosen store, and return 1 if a limit is not met."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--store", choices=("dynalite", "azurite"), default="dynalite")
    options.add_argument("--checkpoint-seconds", type=float, default=0.0, help="0: after every batch (%(default)s)")
    options.add_argument("--lease-seconds", type=float, default=LEASE_SECONDS, help="(%(default)s)")
    given = options.parse_args()
    store = given.store
    os.environ.update(ENVIRONMENT)
    logging.disable(logging.CRITICAL)  # otherwise each injected fault would be logged
    with ExitStack() as stack:
        if store == "dynalite":
            url = f"dynamodb://{{name}}?endpoint={stack.enter_context(dynalite()).url}"
        else:
            service = stack.enter_context(azurite())
            os.environ["AZURE_STORAGE_CONNECTION_STRING"] = azurite_connection_string(service)
            url = f"azblob://{AZURITE_ACCOUNT}/{{name}}"
        return 0 if measure(store, Place(url, given.checkpoint_seconds, given.lease_seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
