"""Tests which leases belong to the share of other libraries' workers ("strangers"), and who takes them (M15)."""

from collections import Counter

import pytest
from attrs import evolve

from leasehold.balancer.actions import Claim, Release
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Bulletin, BulletinState, History, Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.minimal import Minimal

CONFIG = Config(Minimal())
HEARD = History(owners_still=5.0, fleet_still=90.0, hearing=BulletinState(latest=Bulletin(7, 2, 1), acts_read=2))
OURS, STRANGERS = ("b-1", "b-2", "b-3"), ("a-java", "c-java")


def owned_leases(owner: str, number: int) -> tuple[Lease, ...]:
    annotations = (("process", f"p/{owner}"),) if owner in OURS else ()
    return tuple(
        Lease(f"{owner}-{index}", owner=owner, idle=1.0, epoch=9, annotations=annotations) for index in range(number)
    )


def free_leases(number: int, epoch: int = 9) -> tuple[Lease, ...]:
    """Return leases without an owner. An epoch other than 0 means that they had owners before."""
    return tuple(
        Lease(f"f-{index:02}", idle=2.0, epoch=epoch, checkpoint=TRIM_HORIZON, parents=()) for index in range(number)
    )


def count_claims(table: tuple[Lease, ...], history: History = HEARD, config: Config = CONFIG) -> Counter[str]:
    """Count by rule the claims that our workers plan from the same listing. Check that no lease is claimed twice."""
    claims = [
        action
        for worker in OURS
        for action in plan(table, None, Me(worker, history=history), config)
        if isinstance(action, Claim)
    ]
    assert len({claim.lease.key for claim in claims}) == len(claims)
    return Counter(claim.rule for claim in claims)


BALANCED_LEASES = tuple(lease for owner in OURS for lease in owned_leases(owner, 6))
TABLE_WITH_DEAD_STRANGER = (
    *BALANCED_LEASES,
    *(lease for owner in STRANGERS for lease in owned_leases(owner, 3)),
    *free_leases(6),
)
"""A table of balanced workers, two living strangers, and six free leases of a dead stranger."""


def test_freed_lease_of_strangers_is_taken_by_our_workers() -> None:
    """Our workers take the freed leases, because strangers may list the table only 20 s later.

    Each lease is taken by only one worker, so our workers do not collide.
    """
    assert count_claims(TABLE_WITH_DEAD_STRANGER) == {"M15": 6}


def test_new_lease_is_left_to_strangers() -> None:
    """A new lease, such as that of a reshard's child, is left to the strangers if it belongs to their share."""
    assert count_claims((*TABLE_WITH_DEAD_STRANGER[:-6], *free_leases(6, epoch=0))) == {}


def test_our_workers_come_before_strangers() -> None:
    """Our workers get their own shares first.

    Otherwise, a worker would have to steal the leases of its share that others took in place of strangers.
    """
    table_with_lacking_worker = tuple(
        lease for lease in TABLE_WITH_DEAD_STRANGER if lease.key not in {"b-3-0", "b-3-1"}
    )
    assert count_claims(table_with_lacking_worker) == {"M6": 1, "M15": 5}
    claimed_table = tuple(
        evolve(lease, owner="b-1", annotations=(("process", "p/b-1"),)) if lease.owner is None else lease
        for lease in table_with_lacking_worker[:-1]
    )
    actions = plan((*claimed_table, table_with_lacking_worker[-1]), None, Me("b-3", history=HEARD), CONFIG)
    assert [(type(action), action.rule) for action in actions] == [(Claim, "M6")]


@pytest.mark.parametrize(
    ("history", "config"),
    [
        (evolve(HEARD, hearing=None), CONFIG),
        (HEARD, Config(Minimal(release=True))),
    ],
    ids=["nothing is heard", "we let go for peers that never steal"],
)
def test_share_of_strangers_is_left_to_them(history: History, config: Config) -> None:
    """A lease that was released for strangers is not taken again by our workers."""
    assert count_claims(TABLE_WITH_DEAD_STRANGER, history, config) == {}


def test_max_leases_applies_to_strangers_leases() -> None:
    """M7: A worker takes at most `max_leases` leases, even of those that fall to strangers."""
    assert count_claims(TABLE_WITH_DEAD_STRANGER, config=Config(Minimal(max_leases=6))) == {}
    assert 0 < count_claims(TABLE_WITH_DEAD_STRANGER, config=Config(Minimal(max_leases=7)))["M15"] <= 3


def test_expected_worker_is_no_stranger() -> None:
    """M1: A fleet that restarts on an old table waits for the workers that its configuration expects."""
    config_with_expected = Config(Minimal(expected_workers=(*OURS, "b-4", "b-5")))
    assert count_claims((*BALANCED_LEASES, *free_leases(12)), config=config_with_expected) == {}


def test_led_worker_gets_its_count_with_known_loads() -> None:
    """A led worker gets its share by count, although the loads would allow a difference of one lease.

    Otherwise, two joiners would both be left without a lease (M13).
    """
    weighed_leases = tuple(evolve(lease, weight=1000) for lease in owned_leases("b-1", 4))
    history = evolve(HEARD, owners_still=90.0, led=(("a-java", 1.0), ("c-java", 1.0)))
    actions = plan(weighed_leases, None, Me("b-1", history=history), CONFIG)
    assert [action.next_owner for action in actions if isinstance(action, Release)] == ["a-java", "c-java"]
