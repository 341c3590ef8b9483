"""Tests which write carries out each action of a plan, and what an alternate inherits from a rejected action."""

import pytest

from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.model import Lease, Position, Version
from leasehold.stores import writes
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.execute import convert_to_write, execute

NOTES = (("process", "p-1/ann"),)
OURS = Lease("s-0", owner="ann", version=Version("7"), next_owner="bob", checkpoint=Position("5"))


@pytest.mark.parametrize(
    ("action", "write"),
    [
        (Create(OURS, "L1"), writes.CreateLease(OURS)),
        (Renew(OURS, "M9", (("a", "1"),)), writes.RenewLease(OURS, (("a", "1"),))),
        (Claim(OURS, "M1"), writes.ClaimLease(OURS, "ann", NOTES)),
        (Steal(OURS, "bob", "M2"), writes.StealLease(OURS, "ann", NOTES)),
        (RequestHandoff(OURS, "bob", "H2"), writes.RequestLease(OURS, "ann")),
        (Release(OURS, "H3", next_owner="bob"), writes.GiveLease(OURS, Position("9"))),
        (Release(OURS, "C6"), writes.ReleaseLease(OURS, "ann")),
        (Release(OURS, "M14", next_owner="java-1"), writes.ReleaseLease(OURS, "ann", "java-1")),
        (Delete(OURS, "L8"), writes.DeleteLease(OURS)),
    ],
)
def test_each_action_maps_to_one_write(action: Action, write: writes.Write) -> None:
    """A release gives the lease to its next owner if it has one, and names the releasing worker."""
    assert convert_to_write(action, "ann", NOTES, Position("9")) == write


def test_a_lease_given_without_a_drain_keeps_its_checkpoint() -> None:
    assert convert_to_write(Release(OURS, "H3", next_owner="bob"), "ann") == writes.GiveLease(OURS, Position("5"))


def test_an_alternate_keeps_the_annotations_of_the_action() -> None:
    """A lease that is won at the second attempt names its process, so it is recognized after a restart."""
    store = MemoryStore()
    for key in ("s-0", "s-1"):
        store.write(writes.CreateLease(Lease(key)))
    taken_lease, unowned_lease = store.get(["s-0", "s-1"])
    store.write(writes.ClaimLease(taken_lease, "bob"))
    execute(store, Claim(taken_lease, "M1", (Claim(unowned_lease, "M1"),)), "ann", annotations=NOTES)
    assert [(lease.owner, lease.annotations) for lease in store.list().leases] == [("bob", ()), ("ann", NOTES)]
