"""The protocol of a layout of leases over objects: names and fields, purely; `EtagStore` does the rest."""

from typing import Literal, Protocol

from attrs import evolve, frozen

from leasehold.balancer.model import Lease, Version
from leasehold.stores.objects.requests import ObjectFields, Stored
from leasehold.stores.protocol import Promises

Part = Literal["ownership", "checkpoint", "notes"]
"""The kinds of objects of a lease; the first may be missing where nobody has owned it yet."""


@frozen
class Parts:
    """The objects of one lease, as far as they exist."""

    ownership: Stored | None = None
    checkpoint: Stored | None = None
    notes: Stored | None = None

    @property
    def etag(self) -> str:
        """The ownership's ETag; empty where the lease never had an owner."""
        return self.ownership.etag if self.ownership else ""

    @property
    def existing(self) -> tuple[Stored, ...]:
        """The objects that exist, the ownership first."""
        return tuple(one for one in (self.ownership, self.checkpoint, self.notes) if one)

    def part(self, part: Part) -> Stored | None:
        """The object of this part, if it exists."""
        stored: Stored | None = getattr(self, part)
        return stored

    def fields(self, part: Part) -> ObjectFields:
        """The fields of the object of this part; none where it does not exist."""
        stored = self.part(part)
        return stored.fields if stored else {}

    def having(self, part: Part, stored: Stored | None) -> "Parts":
        """The same objects with another in the place of this part."""
        return evolve(self, **{part: stored})


def handoff_version(before: Lease, after: Lease) -> str:
    """The version to keep in an ownership that a request, or its withdrawal, changes; empty for every other write.

    Its owner did not write it. A new version would make watchers take a dead owner for alive, and the
    store would refuse the owner's own next write.
    """
    return before.version if before.heir != after.heir and before.epoch == after.epoch else ""


def version_of(parts: Parts, *, yields: bool) -> Version:
    """The ownership's ETag, or the one before a request for the lease if its owner answers requests.

    Workers that answer none may keep this field when they renew, without knowing it: there it means nothing.
    """
    said = parts.fields("ownership").get("handoffversion") if yields else None
    return Version(said or parts.etag)


class Layout(Protocol):
    """How a lease is written down. Every method is pure."""

    @property
    def promises(self) -> Promises:
        """The promises that this layout can keep."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The objects of one lease, in the order in which they are to be read."""

    @property
    def owned_before_checkpoint(self) -> bool:
        """Whether an ownership without a checkpoint is a lease."""

    def prefix(self, part: Part) -> str:
        """The common beginning of the names of all objects of this part."""

    def name(self, key: str, part: Part) -> str:
        """The name of one object."""

    def key(self, name: str, part: Part) -> str | None:
        """The lease that an object of this name belongs to; None for a foreign object."""

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """The lease that these objects describe, or None if they describe none. Raises BadRowField."""

    def ownership(self, stored: ObjectFields, before: Lease, after: Lease) -> ObjectFields:
        """The ownership object's new fields; those not understood are kept. Raises StoreError."""

    def checkpoint(self, stored: ObjectFields, after: Lease) -> ObjectFields:
        """The checkpoint object's new fields; those not understood are kept. Raises StoreError."""

    def notes(self, stored: ObjectFields, before: Lease, after: Lease) -> ObjectFields:
        """The notes object's new fields, where the layout has one."""
