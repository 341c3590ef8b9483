"""Counts the requests of a simulated fleet to a table in layout `sessions`, and computes how services bill them."""

import random
from math import ceil

from attrs import evolve, frozen

from leasehold.adapters.ops.doctor.examination import ROW_BYTES, UNIT_BYTES, WRITE_BYTES
from leasehold.adapters.worker.progress import Progress
from leasehold.balancer.model import Position
from leasehold.stores.dynamodb.cells import item_size_bytes
from leasehold.stores.sessions.rows import Remark, Session, SessionEntry, encode_remarks, encode_session
from leasehold_lab.simulator.question import SimulationQuestion, build_fleet
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Network
from leasehold_lab.simulator.world.world import SimulatedHistory

WARM_SECONDS = 20.0
DIGITS = 56
"""The number of digits of a Kinesis sequence number."""


@frozen
class Rows:
    """The sizes of the two rows of a session, in bytes as DynamoDB counts them."""

    session: int
    told: int


def row_bytes(leases: int) -> Rows:
    """Return the sizes of the rows of a session with this many leases.

    Names, sequence numbers and annotations are as long as real ones. Digits are random, so that they compress as badly
    as real ones.
    """
    draw = random.Random(leases)  # noqa: S311  a seed is the point
    worker = "ip-10-0-1-23.eu-west-1.compute.internal-12345"
    keys = [f"shardId-{draw.randrange(10**6):012}" for _ in range(leases)]
    entries = {
        key: SessionEntry(draw.randrange(1000), Position("49" + "".join(draw.choices("0123456789", k=DIGITS - 2))))
        for key in keys
    }
    now = 1_764_064_762.0

    def recent_time() -> float:
        return round(now - 60 * draw.random(), 3)

    remarks = {
        key: Remark(
            draw.randrange(1000),
            {
                "reach": (
                    Progress(
                        now,
                        worker,
                        worker,
                        3,
                        draw.random(),
                        arrived=recent_time(),
                        read=recent_time(),
                        done=recent_time(),
                        tried=recent_time(),
                        lease=10.0,
                    ).note,
                    draw.randrange(10**5),
                )
            },
            draw.randrange(10**6),
        )
        for key in keys
    }
    return Rows(
        item_size_bytes("session/" + "0" * 32, encode_session(Session(worker, 10**6, entries=entries))),
        item_size_bytes("told/" + "0" * 32, encode_remarks(remarks)),
    )


@frozen
class RequestRates:
    """The requests per second of a balanced fleet that reads. `changed` counts rows that changed between listings."""

    sessions: float
    told: float
    leases: float
    lists: float
    read: float
    changed: float


def simulate_requests(shards: int, workers: int, checkpoints: float, seconds: float) -> RequestRates:
    """Simulate a fleet for `seconds`, and return its requests without those of the start.

    When a fleet starts, its workers make additional listings to find each other.
    """
    question = SimulationQuestion(
        shards, (workers,), kind="steady", pace="own", cycles=0, checkpoints=checkpoints, sessions=True
    )
    scenario = evolve(build_fleet(question).scenario, network=Network(stall=0.0, unanswered=0.0), read_seconds=0.2)
    warm_up, total = (
        _figures(run(evolve(scenario, seconds=length, calm=length)))
        for length in (WARM_SECONDS, WARM_SECONDS + seconds)
    )
    return RequestRates(*((total[index] - warm_up[index]) / seconds for index in range(len(total))))


def _figures(history: SimulatedHistory) -> tuple[float, ...]:
    requests = history.requests
    read = history.fetched - history.fetched_stale / 2
    return (
        requests["session"],
        requests["told"],
        requests["lease"],
        requests["list"],
        read,
        history.changed_since_listed,
    )


def bills(shards: int, workers: int, rates: RequestRates) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the writes and reads per second that DynamoDB bills, and those that S3 bills.

    S3 bills listings as writes.
    """
    rows = row_bytes(ceil(shards / workers))
    units = ceil(rows.session / WRITE_BYTES) * rates.sessions + ceil(rows.told / WRITE_BYTES) * rates.told
    table = shards * ROW_BYTES + workers * (rows.session + rows.told)
    listed = rates.lists * table / UNIT_BYTES / 2
    pages = 2 * ceil(workers / 1000) + ceil(shards / 1000)
    objects = rates.sessions + rates.told + rates.leases + rates.lists * pages
    return (units + rates.leases, listed + rates.read), (objects, rates.changed + rates.read)
