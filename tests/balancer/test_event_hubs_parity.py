"""Compares the Python dialect of the Event Hubs rules with the class of the installed SDK."""

import time
from types import SimpleNamespace
from typing import Any

from azure.eventhub import LoadBalancingStrategy
from azure.eventhub._eventprocessor.ownership_manager import OwnershipManager
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.balancer.actions import Claim, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.event_hubs import EventHubs

EXPIRY = 180.0


@settings(max_examples=400, deadline=None)
@given(st.text("abcd.x-", max_size=12), st.sampled_from("abcde"), st.booleans())
def test_python_dialect_takes_the_same_leases_as_the_sdk(layout: str, me: str, greedy: bool) -> None:
    """The Python dialect plans exactly the same claims as the installed SDK."""
    ids = [f"{index:02d}" for index in range(len(layout))]
    claimed_ids = {
        record["partition_id"]
        for record in _manager(me, greedy=greedy)._balance_ownership(_records(layout, ids), ids)  # noqa: SLF001  the rule itself
    }
    taken_by_sdk = {pid for pid, letter in zip(ids, layout, strict=True) if pid in claimed_ids and letter != me}
    leases = [_lease(pid, letter) for pid, letter in zip(ids, layout, strict=True)]
    rules = EventHubs("python", "greedy" if greedy else "balanced")
    actions = plan(leases, None, Me(me), Config(rules=rules, lease_seconds=EXPIRY))
    letter_by_id = dict(zip(ids, layout, strict=True))
    assert len(actions) == len(taken_by_sdk)
    assert [action.from_owner for action in actions if isinstance(action, Steal)] == [
        letter_by_id[pid] for pid in taken_by_sdk if letter_by_id[pid] not in ".x-"
    ]
    assert all(isinstance(action, Claim | Steal) for action in actions)


def _manager(me: str, *, greedy: bool) -> OwnershipManager:
    client: Any = SimpleNamespace(_address=SimpleNamespace(hostname="hub.example"), eventhub_name="hub")
    strategy = LoadBalancingStrategy.GREEDY if greedy else LoadBalancingStrategy.BALANCED
    return OwnershipManager(client, "$Default", me, None, EXPIRY, strategy, None)


def _records(layout: str, ids: list[str]) -> list[dict[str, Any]]:
    now = time.time()
    return [
        {
            "partition_id": pid,
            "owner_id": {"-": "", "x": "gone"}.get(letter, letter),
            "last_modified_time": now - (2 * EXPIRY if letter == "x" else 1),
        }
        for pid, letter in zip(ids, layout, strict=True)
        if letter != "."
    ]


def _lease(pid: str, letter: str) -> Lease:
    if letter in ".-":
        return Lease(pid, idle=1.0)
    return Lease(pid, owner="gone" if letter == "x" else letter, idle=2 * EXPIRY if letter == "x" else 1.0)
