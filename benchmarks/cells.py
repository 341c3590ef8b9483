"""Measures a division of 100,000 leases and 5,000 workers into cells: the cost for each worker, and the balance.

    python benchmarks/cells.py [--leases 100000] [--workers 5000] [--cells 20]

The proposal is in specs/cells.md. A digest of its name assigns each worker to a cell. Then `plan` balances the cells,
with each cell in the role of an owner, and each worker in that of a lease. All cells plan from the same read of the
table, and their plans are carried out. Times are the minimum processor time of four measurements.
"""

import argparse
import random
import time
from collections import Counter

from attrs import evolve

from leasehold.balancer.actions import Steal
from leasehold.balancer.bulletin import BulletinTracker
from leasehold.balancer.chance import digest_under
from leasehold.balancer.config import Config
from leasehold.balancer.lookout import BULLETIN_READ_SECONDS
from leasehold.balancer.model import Lease, Me, Version
from leasehold.balancer.plan import look_again, plan
from leasehold.balancer.watch import Watch
from leasehold_lab.simulator.scenario import Capacity

CONFIG = Config()
UNIT_BYTES = 8_192
"""The number of bytes that DynamoDB reads for one unit, with eventual consistency."""


def assign_cells(workers: list[str], cells: list[str]) -> dict[str, str]:
    """Return the cell of each worker, determined by a digest."""
    order = digest_under("cells")
    return {worker: cells[int.from_bytes(order(worker)) % len(cells)] for worker in workers}


def balance_cells(cell_of: dict[str, str], cells: list[str]) -> tuple[dict[str, str], int]:
    """Let each cell take the workers that `plan` chooses. Return the cell of each worker, and the number of moves."""
    table = tuple(Lease(worker, owner=cell, idle=1.0) for worker, cell in cell_of.items())
    plans = {cell: plan(table, None, Me(cell), CONFIG) for cell in cells}
    moves = {
        action.lease.key: cell for cell, actions in plans.items() for action in actions if isinstance(action, Steal)
    }
    return cell_of | moves, len(moves)


def look_seconds(leases: int, workers: int) -> tuple[float, float]:
    """Return the processor seconds of a read of the whole table with a plan, and of a read of a single row."""
    table = tuple(
        Lease(f"s-{index:06}", owner=(name := f"w-{index % workers}"), annotations=(("process", f"p/{name}"),))
        for index in range(leases)
    )
    watch, _ = Watch(bulletins=BulletinTracker()).look(table, 0.0, 0.5)
    now = 1.0

    def look(rows: tuple[Lease, ...], requested_keys: tuple[str, ...] | None) -> None:
        nonlocal watch, now
        now += 1.0
        renewed = tuple(evolve(lease, version=Version(f"{now}")) for lease in rows)
        began = time.process_time()
        watch, leases_seen = watch.look(renewed, now, now + 0.1, requested_keys)
        me = Me("w-0", history=watch.history)
        look_again(plan(leases_seen, None, me, CONFIG), leases_seen, me, CONFIG)
        spent.append(time.process_time() - began)

    minimums = []
    for rows, requested_keys in ((table, None), (table[:1], (table[0].key,))):
        spent: list[float] = []
        for _ in range(4):  # the first read of a single row indexes the table for all later ones
            look(rows, requested_keys)
        minimums.append(min(spent))
    return minimums[0], minimums[1]


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--leases", type=int, default=100_000)
    options.add_argument("--workers", type=int, default=5_000)
    options.add_argument("--cells", type=int, default=20)
    arguments = options.parse_args()
    row_bytes = Capacity().row_bytes
    for name, parts in (("the whole fleet", 1), (f"one of {arguments.cells} cells", arguments.cells)):
        leases, workers = arguments.leases // parts, arguments.workers // parts
        full, single = look_seconds(leases, workers)
        print(
            f"{name}: {leases:,} leases, {workers:,} workers: a reading of the table {1e3 * full:,.0f} ms, of one row "
            f"{1e3 * single:.2f} ms, {leases * row_bytes / UNIT_BYTES:,.0f} units a listing, "
            f"{(workers - 1) / BULLETIN_READ_SECONDS:,.0f} reads of the bulletin's row a second"
        )
    cells = [f"cell-{number:02}" for number in range(arguments.cells)]
    cell_of = assign_cells([f"w-{number}" for number in range(arguments.workers)], cells)
    _print_counts("workers drawn by digest", cell_of, 0)
    cell_of, moves = balance_cells(cell_of, cells)
    _print_counts("evened by plan", cell_of, moves)
    joined, moves = balance_cells(cell_of | assign_cells(["new"], cells), cells)
    _print_counts("one joins", joined, moves)
    draw = random.Random(1)  # noqa: S311  a seed is the point
    dead_workers = set(draw.sample(sorted(cell_of), arguments.workers // 10))
    remaining, moves = balance_cells(
        {worker: cell for worker, cell in cell_of.items() if worker not in dead_workers}, cells
    )
    _print_counts("a tenth dies", remaining, moves)
    _print_shares(arguments.leases, Counter(cell_of.values()), cells)


def _print_shares(leases: int, workers: Counter[str], cells: list[str]) -> None:
    """Print the leases per worker if a digest assigns leases to cells, and if all cells have equally many leases."""
    by_digest = Counter(assign_cells([f"s-{index:06}" for index in range(leases)], cells).values())
    for division, by_cell in (
        ("by digest", by_digest),
        ("in equal parts", Counter(dict.fromkeys(cells, leases // len(cells)))),
    ):
        smallest_share = min(by_cell[cell] // workers[cell] for cell in cells)
        largest_share = max(-(-by_cell[cell] // workers[cell]) for cell in cells)
        print(
            f"leases to cells {division}: {min(by_cell.values()):,} to {max(by_cell.values()):,} a cell, "
            f"{smallest_share} to {largest_share} a worker"
        )


def _print_counts(label: str, cell_of: dict[str, str], moves: int) -> None:
    counts = Counter(cell_of.values())
    print(f"{label}: {min(counts.values())} to {max(counts.values())} workers a cell, {moves} moved")


if __name__ == "__main__":
    main()
