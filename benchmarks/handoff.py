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
from handoff_workers import LEASES, RATE, Faults, Target, fleet

from leasehold.stores.writes import GiveLease, RequestLease
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.judge.events import ReadingEvent, RunHistory
from leasehold_lab.judge.tenures import compute_tenures, group_by_shard
from leasehold_lab.standins.services import AZURITE_ACCOUNT, azurite_connection_string, run_azurite, run_dynalite

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


def cost(events: list[ReadingEvent]) -> Cost:
    """Compute the cost from the events. The hand-offs are the changes of owner away from the giver."""
    shards = group_by_shard(compute_tenures(RunHistory(events=events)).tenures)
    numbers = [[record.place[0] for tenure in readers for record in tenure.records] for readers in shards.values()]
    moves = [
        (before.records[-1].t, after.records[0].t)
        for readers in shards.values()
        for before, after in pairwise(tenure for tenure in readers if tenure.records)
        if before.worker == "giver"
    ]
    return Cost(
        moves=len(moves),
        duplicates=sum(len(record_numbers) - len(set(record_numbers)) for record_numbers in numbers),
        lost=sum(max(record_numbers) + 1 - FIRST - len(set(record_numbers)) for record_numbers in numbers),
        overlap=sum(max(0.0, last - first) for last, first in moves),
        pauses=tuple(sorted(first - last for last, first in moves)),
    )


def longest_silence(events: list[ReadingEvent], shards: Collection[str] | None = None) -> float:
    """Return the longest time without a dispatched record in one of these shards, by default of all shards."""
    times: dict[str, list[float]] = {}
    for event in events:
        if event.event == "record" and (shards is None or event.shard in shards):
            times.setdefault(event.shard, []).append(event.t)
    return max(later - earlier for shard_times in times.values() for earlier, later in pairwise(shard_times))


def measure_handoffs(place: Target, faults: Faults | None = None) -> Cost:
    """Let a taker join, get half of the leases and leave, repeatedly, and return the cost of the hand-offs."""
    with fleet(place, faults) as handoff_fleet:
        for round_number in range(MOVES // (LEASES // 2)):
            taker = f"taker-{round_number}"
            handoff_fleet.join(taker, faults)
            handoff_fleet.until(handoff_fleet.holds(taker, LEASES // 2), 60, f"{taker} holds its half")
            time.sleep(0.5)
            handoff_fleet.leave(taker)
            handoff_fleet.until(handoff_fleet.holds("giver", LEASES), 30, "the giver holds everything again")
        handoff_fleet.leave("giver")
        return cost(handoff_fleet.events)


def silence_after_taker_death(place: Target) -> float:
    """Return the longest silence if a taker dies immediately after its request was written."""
    with fleet(place) as handoff_fleet:
        taker = handoff_fleet.join("taker", Faults(dies_after=RequestLease))
        handoff_fleet.until(lambda: not taker.process.is_alive(), 30, "a request")
        time.sleep(place.lease_seconds + 2)
        return longest_silence(handoff_fleet.events)


def silence_after_giver_death(place: Target) -> tuple[float, float]:
    """Return the longest silence after the giver's death, of the requested shards and of all its shards."""
    with fleet(place) as handoff_fleet:
        taker = handoff_fleet.join("taker")
        handoff_fleet.until(lambda: len(taker.requested) >= LEASES // 2, 30, "requests")
        requested_shards = frozenset(taker.requested)
        handoff_fleet.freeze("giver")
        handoff_fleet.until(handoff_fleet.holds("taker", LEASES), 60, "the taker holds everything")
        time.sleep(0.5)
        handoff_fleet.members["giver"].process.kill()
        return longest_silence(handoff_fleet.events, requested_shards), longest_silence(handoff_fleet.events)


def print_line(label: str, figure: str, *, good: bool) -> bool:
    """Print a line of the table."""
    print(f"{'pass' if good else 'FAIL'}  {label:58} {figure}")
    return good


def measure(name: str, place: Target) -> bool:
    """Run all measurements on one store, and return whether all limits are met."""
    print(f"-- {name}: {LEASES} leases, lease_seconds {place.lease_seconds:g}, {RATE} records/s each")
    costs, costs_with_lost_responses = (
        measure_handoffs(place),
        measure_handoffs(place, Faults(forgets=frozenset({RequestLease, GiveLease}))),
    )
    p99 = costs.pauses[min(len(costs.pauses) - 1, int(0.99 * len(costs.pauses)))]
    median, taker_silence, (requested_silence, total_silence) = (
        statistics.median(costs.pauses),
        silence_after_taker_death(place),
        silence_after_giver_death(place),
    )
    requested_limit, total_limit = place.lease_seconds + GIVER_BAR, place.lease_seconds + CRASH_BAR
    return all(
        [
            print_line(f"{MOVES} planned moves", str(costs.moves), good=costs.moves >= MOVES),
            print_line("records handed over twice: 0", str(costs.duplicates), good=not costs.duplicates),
            print_line("records lost: 0", str(costs.lost), good=not costs.lost),
            print_line("both at work: 0 s", f"{costs.overlap:.3f} s", good=not costs.overlap),
            print_line("pause, median: 0.25 s at most", f"{median:.3f} s", good=median <= PAUSE_BAR),
            print_line("pause, 99th percentile: 0.6 s at most", f"{p99:.3f} s", good=p99 <= PAUSE_99_BAR),
            print_line(
                "every second reply lost: 0 twice, 0 lost",
                f"{costs_with_lost_responses.duplicates}, {costs_with_lost_responses.lost}",
                good=not (costs_with_lost_responses.duplicates or costs_with_lost_responses.lost),
            ),
            print_line(
                f"taker killed after asking: {TAKER_BAR} s at most",
                f"{taker_silence:.2f} s",
                good=taker_silence <= TAKER_BAR,
            ),
            print_line(
                f"giver killed, what it was asked for: {requested_limit:g} s at most",
                f"{requested_silence:.2f} s",
                good=requested_silence <= requested_limit,
            ),
            print_line(
                f"giver killed, all it held: {total_limit:g} s at most",
                f"{total_silence:.2f} s",
                good=total_silence <= total_limit,
            ),
        ]
    )


def main() -> int:
    """Measure on the chosen store, and return 1 if a limit is not met."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--store", choices=("dynalite", "azurite"), default="dynalite")
    options.add_argument("--checkpoint-seconds", type=float, default=0.0, help="0: after every batch (%(default)s)")
    options.add_argument("--lease-seconds", type=float, default=LEASE_SECONDS, help="(%(default)s)")
    arguments = options.parse_args()
    store = arguments.store
    os.environ.update(ENVIRONMENT)
    logging.disable(logging.CRITICAL)  # otherwise each injected fault would be logged
    with ExitStack() as stack:
        if store == "dynalite":
            url = f"dynamodb://{{name}}?endpoint={stack.enter_context(run_dynalite()).url}"
        else:
            service = stack.enter_context(run_azurite())
            os.environ["AZURE_STORAGE_CONNECTION_STRING"] = azurite_connection_string(service)
            url = f"azblob://{AZURITE_ACCOUNT}/{{name}}"
        return 0 if measure(store, Target(url, arguments.checkpoint_seconds, arguments.lease_seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
