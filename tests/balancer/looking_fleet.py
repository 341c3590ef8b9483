"""A fleet of six workers with a lookout and eighteen leases, for tests of when workers read the table."""

from typing import Any

from attrs import evolve

from leasehold.balancer.actions import Action, Look
from leasehold.balancer.bulletin import bulletin_annotations
from leasehold.balancer.config import Config
from leasehold.balancer.lookout import bulletin_row, lookout_ranks
from leasehold.balancer.model import Annotations, Bulletin, BulletinState, History, Lease, Me
from leasehold.balancer.plan import look_again
from leasehold.balancer.rules.minimal import Minimal

CONFIG = Config(rules=Minimal())
HEARING = BulletinState(latest=Bulletin(7, 2, 1), acts_read=2)
QUIET = History(owners_still=90.0, fleet_still=90.0, full_still=5.0, hearing=HEARING)
"""The history of a worker that has just read one row, and found no news in it."""

FULL = evolve(QUIET, full_still=0.0)
"""The history of a worker that has just listed the whole table."""


def heard(**fields: Any) -> History:  # noqa: ANN401  any field of a BulletinState
    return evolve(QUIET, hearing=evolve(HEARING, **fields))


def row(key: str, owner: str | None, idle: float = 1.0, bulletin: str = "0 0 0") -> Lease:
    return Lease(key, owner=owner, idle=idle, annotations=(("bulletin", bulletin), ("process", f"p/{owner}")))


TABLE = tuple(row(f"s-{place:02}", f"w-{place % 6}") for place in range(18))
LOOKOUT, NEXT, *THIRDS, READER, LAST = lookout_ranks(TABLE, CONFIG).ranks
TABLE = tuple(row(lease.key, lease.owner, bulletin="7 2 1") if lease.owner == LOOKOUT else lease for lease in TABLE)
BOARD = bulletin_row(TABLE, LOOKOUT)
ROWS = [each.key for name in (LOOKOUT, NEXT, *THIRDS) if (each := bulletin_row(TABLE, name)) is not None]
"""The keys of the bulletin rows of the lookout and of its possible stand-ins."""


def told(looks: int, acts: int, warns: int, *called_workers: str, row: str = "") -> Annotations:
    """Return the annotations that a lookout writes: the counters of the bulletin, and the call."""
    call_text = " ".join((f"{looks} 0 {row or ','.join(ROWS)}", *called_workers))
    return bulletin_annotations(Bulletin(looks, acts, warns), (("call", call_text),))


def table_with_idle_owner(idle: float, owner: str = LOOKOUT) -> tuple[Lease, ...]:
    return tuple(evolve(lease, idle=idle) if lease.owner == owner else lease for lease in TABLE)


def look(worker: str, leases: tuple[Lease, ...] = TABLE, history: History = QUIET, *actions: Action) -> Look:
    return look_again(actions, leases, Me(worker, history=history), CONFIG)


def on_duty(worker: str, leases: tuple[Lease, ...], history: History = QUIET) -> bool:
    assert history.hearing is not None
    return lookout_ranks(leases, CONFIG).on_duty(Me(worker), history.hearing, CONFIG)
