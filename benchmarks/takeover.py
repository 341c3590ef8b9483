"""Measures how long a shard is unread after its worker was killed or stopped, with leasehold and with the Java KCL.

    LEASEHOLD_DYNAMODB_LOCAL=1 python benchmarks/takeover.py [--lease-seconds N] [--stop] [--runs N] [FLEET ...]

The workers of a fleet, such as `ours,ours` or `3.5.1,ours`, share four shards to which records are put continuously.
All have the same lease duration. The last worker is killed (SIGKILL) or stopped (SIGTERM). A KCL version with the
suffix -2x runs in its 2.x-compatible mode. For each shard of the lost worker, three times after the signal are
measured: until its lease no longer had that owner (`free`), until it had another owner (`owned`), and until another
worker dispatched a record (`read`). The minimum, median and maximum are printed.
"""

import argparse
import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fleet"))

from mixed import WAIT_SECONDS, Mixed, mixed
from standins.dynamodb_local import dynamodb_local

from leasehold.balancer.model import Lease
from leasehold.stores.writes import CreateLease
from leasehold_lab.demo.child import ENVIRONMENT, HIDDEN_VARIABLES, Child
from leasehold_lab.demo.stage import Stage
from leasehold_lab.standins.services import run_kinesis_local

FLEETS = ("ours,ours", "2.7.2,2.7.2", "3.5.1,3.5.1", "ours,2.7.2", "2.7.2,ours", "ours,3.5.1", "3.5.1,ours")

Spans = dict[str, list[float]]
"""The measured times in seconds, by event."""


def join(fleet: Mixed, kind: str, number: int) -> str:
    """Start a worker of this kind, wait until it has its share of the leases, and return its name."""
    name = f"{kind}-{number}"
    if kind == "ours":
        fleet.stage.join(name)
    else:
        fleet.version, _, mode = kind.partition("-")
        fleet.mode = mode or "own"
        fleet.join_java(name)
    fleet.balanced()
    return name


def stop_worker(fleet: Mixed, lost_worker: str, spans: Spans, *, stop: bool) -> None:
    """Kill or stop a worker, and wait until other workers read its shards."""
    stage = fleet.stage
    shards = {lease.shard for lease in stage.leases if lease.owner == lost_worker and not lease.ended}
    draining: Child | None = None
    if stop:
        draining = stage.drain_worker(lost_worker)
    else:
        stage.kill(lost_worker)
    times: dict[str, dict[str, float]] = {name: dict.fromkeys(shards, math.inf) for name in spans}

    def taken_over() -> bool:
        record_times(stage, lost_worker, times)
        return all(math.isfinite(seconds) for shard_times in times.values() for seconds in shard_times.values())

    if not stage.until(taken_over, 3 * WAIT_SECONDS):
        raise SystemExit(f"FAIL: not everything read by others after {3 * WAIT_SECONDS:g} s: {times}")
    if draining is not None:
        draining.wait()
    for name, shard_times in times.items():
        spans[name] += shard_times.values()


def record_times(stage: Stage, lost_worker: str, times: dict[str, dict[str, float]]) -> None:
    """Record, for each shard, the times at which the table and other workers showed an event."""

    def record(name: str, shard: str, t: float) -> None:
        if shard in times[name]:
            times[name][shard] = min(times[name][shard], t - stage.history.incidents[-1].t)

    for lease in stage.leases:
        if lease.owner != lost_worker:
            record("free", lease.shard, time.time())
            if lease.owner is not None:
                record("owned", lease.shard, time.time())
    for event in stage.history.events:
        if event.event == "record" and event.worker != lost_worker and event.t > stage.history.incidents[-1].t:
            record("read", event.shard, event.t)


def run_once(fleet: Mixed, kinds: list[str], spans: Spans, *, stop: bool) -> None:
    """Run a fleet once. Its leases exist from the start, so that their creation is not measured."""
    for shard in fleet.stage.stream.shards():
        fleet.stage.store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range)))
    names = [join(fleet, kind, number) for number, kind in enumerate(kinds)]
    fleet.stage.pause(2 + time.time() % 4)  # so that the signal comes at a random time in the workers' cycles
    stop_worker(fleet, names[-1], spans, stop=stop)


def format_times(spans: Spans) -> str:
    """Format the minimum, median and maximum of each time."""
    return "".join(
        f"   {name} {min(values):4.1f} {median(values):4.1f} {max(values):4.1f}" for name, values in spans.items()
    )


def main() -> int:
    """Run each fleet, and print a line for it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lease-seconds", type=int, default=3, help="Java's failoverTimeMillis too (%(default)s)")
    options.add_argument("--stop", action="store_true", help="SIGTERM in place of SIGKILL")
    options.add_argument("--runs", type=int, default=3, help="of each fleet (%(default)s)")
    options.add_argument("fleets", nargs="*", default=FLEETS, metavar="FLEET")
    arguments = options.parse_args()
    for name in HIDDEN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    ending = "stopped" if arguments.stop else "killed"
    print(f"lease_seconds {arguments.lease_seconds}, {ending}; least, median, most seconds")
    with ExitStack() as stack:
        kinesis, dynamodb = stack.enter_context(run_kinesis_local()).url, stack.enter_context(dynamodb_local()).url
        for kinds in arguments.fleets:
            spans: Spans = {"free": [], "owned": [], "read": []}
            for _ in range(arguments.runs):
                with mixed(kinesis, dynamodb, "", "own", arguments.lease_seconds) as fleet:
                    run_once(fleet, kinds.split(","), spans, stop=arguments.stop)
            print(f"{kinds:16}{format_times(spans)}   (load {os.getloadavg()[0]:.0f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
