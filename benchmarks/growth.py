"""Measures how the cost of a worker's decisions grows with its fleet, as exponents of function calls and of time.

    python benchmarks/growth.py [--json] [--check]

There are ten leases per worker in fleets of increasing size, except in rows with a fixed number of workers. An exponent
of 1 means that a fleet of twice the size has twice the cost, and an exponent of 2 means four times the cost. The
interpreter counts function calls, so their number is the same in each run and on each machine. The work inside built-in
functions shows only in the processor time, which is the minimum of three runs. The last rows compare our planner with
azure-eventhub's `_balance_ownership`, which gets the same table.

`make check` runs this with --check: only calls are counted, in smaller fleets, and the exit status is 1 if an exponent
is above 1.1.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from itertools import count, cycle
from unittest.mock import Mock

import orjson
from attrs import evolve, field, frozen
from azure.eventhub import LoadBalancingStrategy
from azure.eventhub._eventprocessor.ownership_manager import OwnershipManager
from rich.console import Console
from rich.table import Table

from leasehold.adapters.consumer.status import lags_of, statuses_of
from leasehold.adapters.ops.explaining import plans
from leasehold.adapters.ops.watching import WatchedTable, describe_table
from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.renewing import Renewing
from leasehold.balancer.actions import Look
from leasehold.balancer.bulletin import BulletinTracker
from leasehold.balancer.config import Config
from leasehold.balancer.lineage import deletable
from leasehold.balancer.lookout import lookout_ranks
from leasehold.balancer.model import SHARD_END, Lease, Me, Position, Version
from leasehold.balancer.plan import look_again, plan, renewals
from leasehold.balancer.watch import Watch
from leasehold.stores.aws_calls.pages import parse_page
from leasehold.stores.dynamodb.rows import Item, RowDecoder, to_item
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.simulator.run import disable_gc

LEASES_EACH = 10
SIZES, CHECK_SIZES = (10, 100, 1_000), (10, 20, 40)
"""The numbers of workers, and those with --check."""

MOST = 1.1
"""The largest exponent that --check allows."""

PAGE_ROWS = 2_000

CONFIG = Config(lease_seconds=10.0)
ME = Me("w-0", turn=1)

Work = Callable[[], object]


@frozen
class Growth:
    """The cost of an operation, by the number of workers in the fleet."""

    what: str
    calls: dict[int, int] = field(factory=dict)
    milliseconds: dict[int, float] = field(factory=dict)

    @property
    def exponent(self) -> float:
        """The exponent of the number of calls, which is 0 if the cost is constant."""
        return _exponent(self.calls)


def main() -> None:
    """Measure, and print the results. With --check, the exit status is 1 if an exponent is too large."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--check", action="store_true", help="count calls in small fleets only, and judge")
    arguments = options.parse_args()
    growths: dict[str, Growth] = {}
    for size in CHECK_SIZES if arguments.check else SIZES:
        for operation, work in (
            operations(size) if arguments.check else operations(size) | peer_operations(size)
        ).items():
            growth = growths.setdefault(operation, Growth(operation))
            growth.calls[size] = _calls(work)
            if not arguments.check:
                growth.milliseconds[size] = 1e3 * min(_seconds(work) for _ in range(3))
    if arguments.json:
        json_rows = {
            growth_of_operation.what: {
                "calls": growth_of_operation.calls,
                "milliseconds": growth_of_operation.milliseconds,
            }
            for growth_of_operation in growths.values()
        }
        print(
            json.dumps(
                {operation: row | {"exponent": growths[operation].exponent} for operation, row in json_rows.items()}
            )
        )
    else:
        _print(list(growths.values()))
    sys.exit(
        1
        if arguments.check and any(growth_of_operation.exponent > MOST for growth_of_operation in growths.values())
        else 0
    )


def operations(workers: int) -> dict[str, Work]:
    """Return the operations of a worker in a fleet of this size, by name."""
    leases = tuple(_lease(index, workers) for index in range(LEASES_EACH * workers))
    joined = tuple(evolve(lease, owner="w-1") if lease.owner == ME.worker else lease for lease in leases)
    dead = tuple(evolve(lease, idle=60.0) if lease.owner == "w-1" else lease for lease in leases)
    watch, _ = Watch().look(leases, 0.0, 1.0)
    clock = count(2)
    items = [to_item(lease) for lease in leases]
    known_rows, seen_rows, answers = RowDecoder(), Watch(), cycle([_pages(items, counter) for counter in "89"])

    def look_again_at_all() -> object:
        nonlocal seen_rows
        now = float(next(clock))
        pages = (parse_page(body, orjson.loads) for body in next(answers))
        read = known_rows.read(page["Items"] for page in pages if page is not None)
        with disable_gc():
            rows = tuple(sorted(read.leases, key=lambda lease: lease.key))
            seen_rows, leases_now = seen_rows.look(rows, now, now + 0.5)
        return leases_now

    look_again_at_all()
    measured = tuple(evolve(lease, weight=20_000 + 7 * index % 1_000) for index, lease in enumerate(leases))
    lags = lags_of(leases, 0.0, 10.0)
    shown = WatchedTable(leases, lags=lags, statuses=statuses_of(leases, lags, 0.0, 10.0))
    ten_workers = tuple(evolve(lease, owner=f"w-{index % 10}") for index, lease in enumerate(leases))

    signed = tuple(
        evolve(lease, annotations=(("process", f"p/{lease.owner}"), ("bulletin", "1 1 1"))) for lease in leases
    )
    hearing, _ = Watch(bulletins=BulletinTracker()).look(signed, 0.0, 0.5)
    hearing, leases_known = hearing.look(signed[:1], 1.0, 1.1, [signed[0].key])
    row = lookout_ranks(leases_known, CONFIG).row or signed[0]
    (
        lookout_ranks(leases_known, CONFIG),
        plan(leases_known, None, ME, CONFIG),
    )  # builds the index, once per read of the whole table

    def reader() -> object:
        now = float(next(clock))
        renewed = evolve(row, version=Version(f"{now}"))
        after, leases_known = hearing.look([renewed], now, now + 0.01, [row.key])
        me = Me(next(name for name in ("w-0", "w-1") if name != row.owner), turn=1, history=after.history)
        return look_again(plan(leases_known, None, me, CONFIG), leases_known, me, CONFIG)

    def look(rows: tuple[Lease, ...], requested_keys: tuple[str, ...] | None) -> object:
        now = float(next(clock))
        renewed = tuple(evolve(lease, version=Version(f"{lease.epoch}.{now}")) for lease in rows)
        return watch.look(renewed, now, now + 0.5, requested_keys)

    identity = Identity(ME.worker, "p", lambda: "")
    holdings = tuple(
        Holding(MemoryStore(), lease, identity=identity, clock=lambda: 0.0, write_began=0.0, lease_seconds=10.0)
        for lease in leases
    )
    renewing = Renewing(CONFIG, lambda _holding: None)
    renewing.begin(holdings, 0.1, ME, Look(0.0), map)

    def renew() -> object:
        return renewing.begin(holdings, 0.2, ME, Look(0.0), map), renewing.due(0.2)

    return {
        "renew, nothing is due, one worker holds all": renew,
        "plan, everybody has its share": lambda: plan(leases, None, ME, CONFIG),
        "plan of a newcomer": lambda: plan(joined, None, ME, CONFIG),
        "plan, a worker is dead": lambda: plan(dead, None, ME, CONFIG),
        "when to look again": lambda: look_again((), leases, ME, CONFIG),
        "nothing is due for renewal": lambda: renewals(leases[:: max(1, workers)], ME, CONFIG),
        "a reading of the whole table": lambda: look(leases, None),
        "a reader's look at one row": reader,
        "rows of DynamoDB read": lambda: RowDecoder().read([items]),
        "a look at DynamoDB, new counters alone": look_again_at_all,
        "who deletes, all shards have split": lambda: deletable(_split(workers), ME.worker),
        "explain, always 10 workers": lambda: plans(WatchedTable(ten_workers), CONFIG),
        "explain, all of them": lambda: plans(WatchedTable(leases), CONFIG),
        "explain, all of them, loads measured": lambda: plans(WatchedTable(measured), CONFIG),
        "serve, all that a page can show": lambda: describe_table(shown, CONFIG),
    }


def peer_operations(workers: int) -> dict[str, Work]:
    """Return the same decisions as made by azure-eventhub's function and by our planner."""
    leases = tuple(_lease(index, workers) for index in range(LEASES_EACH * workers))
    dead_workers = {f"w-{number}" for number in range(1, workers, 10)}
    dead = tuple(evolve(lease, idle=60.0) if lease.owner in dead_workers else lease for lease in leases)
    manager = OwnershipManager(Mock(), "$Default", "w-new", None, 1e6, LoadBalancingStrategy.BALANCED, None)
    now, ids = time.time(), [lease.key for lease in leases]

    def azure_operation(rows: tuple[Lease, ...]) -> Work:
        # The function changes its argument, but only one row of ten thousand in each call.
        owned = [
            {
                "partition_id": lease.key,
                "owner_id": lease.owner,
                "etag": lease.key,
                "last_modified_time": 0.0 if lease.owner in dead_workers and rows is dead else now,
            }
            for lease in rows
        ]
        return lambda: manager._balance_ownership(owned, ids)  # noqa: SLF001  the peer's decision, by itself

    new = Me("w-new", turn=1)
    return {
        "one more, ours": lambda: plan(leases, None, new, CONFIG),
        "one more, azure-eventhub": azure_operation(leases),
        "a tenth is dead, one more, ours": lambda: plan(dead, None, new, CONFIG),
        "a tenth is dead, one more, azure-eventhub": azure_operation(dead),
    }


def _lease(index: int, workers: int) -> Lease:
    name = f"shardId-{index:012d}"
    position = Position(str(1_000 + index))
    return Lease(
        name, shard=name, owner=f"w-{index % workers}", version=Version("7"), idle=1.0, checkpoint=position, epoch=7
    )


def _pages(items: list[Item], counter: str) -> list[bytes]:
    """Return DynamoDB's responses with these rows, all of them renewed. Each response has about 2,000 rows."""
    rows = [{**item, "leaseCounter": {"N": counter}} for item in items]
    parts = [rows[start : start + PAGE_ROWS] for start in range(0, len(rows), PAGE_ROWS)]
    return [orjson.dumps({"Count": len(part), "Items": part, "ScannedCount": len(part)}) for part in parts]


def _split(workers: int) -> tuple[Lease, ...]:
    parents = [Lease(f"p-{index}", checkpoint=SHARD_END) for index in range(LEASES_EACH * workers)]
    children = [
        evolve(_lease(index, workers), parents=(parent.key,), yields=True) for index, parent in enumerate(parents)
    ]
    return (*parents, *children)


def _calls(work: Work) -> int:
    counted = 0

    def count_event(_frame: object, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in {"call", "c_call"}

    sys.setprofile(count_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counted


def _seconds(work: Work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _exponent(costs: dict[int, int] | dict[int, float]) -> float:
    smallest, largest = min(costs), max(costs)
    return math.log(max(costs[largest], 1e-9) / max(costs[smallest], 1e-9)) / math.log(largest / smallest)


def _print(growths: list[Growth]) -> None:
    sizes = sorted(growths[0].calls)
    table = Table(title=f"calls by workers, {LEASES_EACH} leases each")
    table.add_column("what")
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    table.add_column("exponent", justify="right")
    timed = bool(growths[0].milliseconds)
    if timed:
        table.add_column(f"ms at {sizes[-1]:,}", justify="right")
        table.add_column("its exponent", justify="right")
    for growth in growths:
        row = [growth.what, *(f"{growth.calls[size]:,}" for size in sizes), f"{growth.exponent:.2f}"]
        if timed:
            row += [f"{growth.milliseconds[sizes[-1]]:,.1f}", f"{_exponent(growth.milliseconds):.2f}"]
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
