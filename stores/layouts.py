"""What a layout of leases over objects must say: names and fields, purely; `EtagStore` does the rest."""

from typing import Literal, Protocol

from attrs import evolve, frozen

from balancer.model import Lease, Version
from stores.objects import Fields, Stored
from stores.protocol import Promises

Part = Literal["ownership", "checkpoint", "notes"]
"""Which object of a lease; the first may be missing where nobody has owned it yet."""


@frozen
class Parts:
    """The objects of one lease, as far as they exist."""

    ownership: Stored | None = None
    checkpoint: Stored | None = None
    notes: Stored | None = None

    @property
    def etag(self) -> str:
        """The ownership's; empty where nobody has ever owned the lease."""
        return self.ownership.etag if self.ownership else ""

    @property
    def existing(self) -> tuple[Stored, ...]:
        """The objects that exist, the ownership first."""
        return tuple(one for one in (self.ownership, self.checkpoint, self.notes) if one)

    def part(self, part: Part) -> Stored | None:
        """One of them."""
        stored: Stored | None = getattr(self, part)
        return stored

    def fields(self, part: Part) -> Fields:
        """What one of them says; nothing where it does not exist."""
        stored = self.part(part)
        return stored.fields if stored else {}

    def having(self, part: Part, stored: Stored | None) -> "Parts":
        """The same with this one in its place."""
        return evolve(self, **{part: stored})


def handoff_version(before: Lease, after: Lease) -> str:
    """What an ownership must say so that a request, or its withdrawal, leaves the version alone; else nothing.

    It is no sign of its owner's life: whoever watches would take a dead owner for alive, and the
    owner would find its own next write refused.
    """
    return before.version if before.heir != after.heir and before.epoch == after.epoch else ""


def version_of(parts: Parts, *, yields: bool) -> Version:
    """The ownership's ETag, or what it was before somebody asked for the lease; that only of an owner that answers.

    Others may keep metadata that they do not know when they renew.
    """
    said = parts.fields("ownership").get("handoffversion") if yields else None
    return Version(said or parts.etag)


class Layout(Protocol):
    """How a lease is written down. Every method is pure."""

    @property
    def promises(self) -> Promises:
        """What the layout has room for."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """The objects of one lease, in the order in which they are to be read."""
        ...

    @property
    def owned_before_checkpoint(self) -> bool:
        """Whether an ownership without a checkpoint is a lease."""
        ...

    def prefix(self, part: Part) -> str:
        """What the names of all objects of this part begin with."""
        ...

    def name(self, key: str, part: Part) -> str:
        """The name of one object."""
        ...

    def key(self, name: str, part: Part) -> str | None:
        """The lease that an object of this name belongs to; None for a stranger's."""
        ...

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """The lease these objects say, or None if they say none. Raises BadField."""
        ...

    def ownership(self, stored: Fields, before: Lease, after: Lease) -> Fields:
        """The ownership object's new fields; those not understood are kept. Raises StoreError."""
        ...

    def checkpoint(self, stored: Fields, after: Lease) -> Fields:
        """The checkpoint object's new fields; those not understood are kept. Raises StoreError."""
        ...

    def notes(self, stored: Fields, before: Lease, after: Lease) -> Fields:
        """The notes object's new fields, where the layout has one."""
        ...
