"""Counts the requests per second of a balanced fleet's worker to a table in layout `sessions`, for several fleet sizes.

`python benchmarks/sessions_at_rest.py` prints a table. Small fleets run in the simulator, with records on every shard
and one checkpoint per second. Their figures are the mean of all workers, including the lookout. For large fleets, the
real planner computes the actions and the next read of a worker that is not the lookout. It plans no actions, and reads
one row.
"""

from typing import Annotated

import typer
from attrs import frozen
from session_requests import simulate_requests

from leasehold.adapters.worker.progress import ANNOTATE_SECONDS
from leasehold.balancer.bulletin import bulletin_annotations
from leasehold.balancer.config import Config
from leasehold.balancer.lookout import bulletin_row, lookout_ranks
from leasehold.balancer.model import Bulletin, BulletinState, History, Lease, Me
from leasehold.balancer.plan import look_again, plan

RUN = ((10, 2), (20, 4))
"""The numbers of leases and workers of the simulated fleets."""
ASKED = ((1_000, 50), (10_000, 500), (100_000, 5_000))
CONFIG = Config()


@frozen
class RequestRates:
    """The requests of one worker per second.

    Attributes:
        writes: Writes of sessions, and of the rows in which sessions report their progress.
        reads: Reads and listings of the table.
        rows: Leases per read. Each lease has three rows: its own, that of its session, and the session's progress.
    """

    writes: float
    reads: float
    rows: float


def simulated_requests(leases: int, workers: int, checkpoints: float, seconds: float) -> tuple[float, float]:
    """Return the writes of session and progress rows, and the read units without listings, per worker and second."""
    rates = simulate_requests(leases, workers, checkpoints, seconds)
    return (rates.sessions + rates.told) / workers, rates.read / workers


def planned_requests(leases: int, workers: int, checkpoints: float) -> RequestRates:
    """Return the requests of a worker that has just read the bulletin, which contained nothing new."""
    names = [f"w-{number:04}" for number in range(workers)]
    annotations = bulletin_annotations(Bulletin(7, 2))
    table = tuple(
        Lease(
            f"s-{number:06}",
            owner=(name := names[number % workers]),
            idle=1.0,
            annotations=(("process", f"p/{name}"), *annotations),
        )
        for number in range(leases)
    )
    ranks = lookout_ranks(table, CONFIG).ranks
    row = bulletin_row(table, ranks[0])
    assert row is not None
    call = f"7 0 {row.key}"
    bulletin_state = BulletinState(latest=Bulletin(7, 2), acts_read=2, call=call)
    me = Me(ranks[-1], history=History(owners_still=90.0, fleet_still=90.0, full_still=5.0, hearing=bulletin_state))
    assert plan(table, None, me, CONFIG) == ()  # at rest
    look = look_again((), table, me, CONFIG)
    assert look.keys is not None, "a reader at rest lists nothing"
    # In addition to checkpoints, a worker regularly writes its lag, by writing one row and one session.
    return RequestRates(1 / checkpoints + 2 / ANNOTATE_SECONDS, 1 / look.seconds, len(look.keys))


def main(
    *,
    checkpoint_seconds: Annotated[float, typer.Option(min=0.2)] = 1.0,
    seconds: Annotated[
        float, typer.Option(min=10, help="How long the small fleets are watched, in virtual time.")
    ] = 30.0,
) -> None:
    """Count the requests, and print a table."""
    print("| leases, workers | how | writes | read units | readings | leases a reading |")
    print("|---|---|---|---|---|---|")
    for leases, workers in RUN:
        writes, units = simulated_requests(leases, workers, checkpoint_seconds, seconds)
        print(
            f"| {leases:,}, {workers:,} | run, the lookout with the others | {writes:.2f} | {units:.2f} | | |",
            flush=True,
        )
    for leases, workers in ASKED:
        rates = planned_requests(leases, workers, checkpoint_seconds)
        figures = f"{rates.writes:.2f} | {1.5 * rates.rows * rates.reads:.2f} | {rates.reads:.2f} | {rates.rows:g}"
        print(f"| {leases:,}, {workers:,} | asked of a reader's planner | {figures} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
