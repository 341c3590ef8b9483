"""Leases in objects under ETags: ownership, checkpoint and, where the layout has them, notes.

The conditions are those of `writes`; this file puts the writes of a lease's objects in order. `stores/objects` (the
package's own text) tells why, and what a crash between two writes leaves.

Rule 1: an ordinary checkpoint renews the ownership first, under its ETag, so that a worker that has lost its
lease moves no checkpoint. A theft between the two writes is the one exception: the checkpoint then still
moves forward over records that were handled. A request changes the ownership, too: its owner then reads the ownership
in place of renewing it, and writes the checkpoint; the gift that follows is the renewal.
Rule 2: at a shard's end and in a gift that moves the checkpoint, the checkpoint is written first, so that the next
owner starts where the last one stopped. Its first write is not under the ownership's ETag, so the ownership is
read just before.
Rule 3: the answer to a taking carries the checkpoint as read after the taking. Read before, it could miss the
former owner's last checkpoint.
Rule 4: a refused first write has changed nothing, so it is tried again after a reading, as long as the write's
condition holds on what was read. A refused second write is answered by the lease as stored.
Rule 5: a lease is read ownership first, then checkpoint: the reverse of the order of a gift's writes, so that
an heir that reads itself as the owner also reads the giver's last checkpoint.
"""

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.fields import insist, listing_of, readable
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.protocol import ATTEMPTS, Capabilities, Done, Listing, Lost, Malformed, Outcome
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, Objects, Part, Parts, Stored, prove
from leasehold.stores.writes import CreateLease, DeleteLease, LeaseChange, Write, applied, created

_LISTED = 8
"""An object in a listing costs about an eighth of a request of its own, to both ends."""

_READS = 8
"""Objects read at a time."""

_OWNERSHIP = ("owner", "epoch", "next_owner", "yields")
"""The fields of a lease for whose sake the ownership is written; its weight travels along."""

_NOTHING = Parts()

_CHECKPOINT = ("checkpoint", "parents", "hash_range")
"""The fields for whose sake the checkpoint is written; only a reset changes the last two."""


Layout = ObjectLayout | EventHubLayout
"""The form of a lease in objects, without I/O: `parts` in the order in which they are to be read; `prefix`, `name` and
`key` of the objects; `lease`, made of them; and their new fields, `ownership`, `checkpoint` and `notes`, which keep
those not understood. `owned_before_checkpoint` says whether an ownership without a checkpoint is a lease."""


class EtagStore:
    """Leases of one layout in one container or bucket; safe under threads.

    What was last seen of each lease is remembered, so that a renewal is one conditional write
    and no reading: if the memory is out of date the write is refused, and the lease read anew.
    """

    def __init__(self, objects: Objects, layout: Layout, *, page_leases: int = PAGE_LEASES) -> None:
        """With so many leases in a session's row, where the table is in layout `sessions`."""
        self._page_leases = page_leases
        self._objects = objects
        self._layout = layout
        self._seen: dict[str, Parts] = {}
        self._seeing = Lock()
        self._pool = ThreadPoolExecutor(_READS, thread_name_prefix="leasehold-objects")

    @property
    def capabilities(self) -> Capabilities:
        """The promises of the layout."""
        return self._layout.capabilities

    def list(self) -> Listing:
        """Every lease: one listing for each part; the ownership first."""
        with self._seeing:
            before = dict(self._seen)
        found: dict[str, Parts] = {}
        for part in self._layout.parts:
            for stored in self._objects.list(self._layout.prefix(part)):
                key = self._layout.key(stored.name, part)
                if key is not None:
                    found[key] = found.get(key, Parts()).having(part, stored)
        self._see(before, {key: found.get(key, _NOTHING) for key in before.keys() | found.keys()})
        return listing_of(self._row(key, parts) for key, parts in sorted(found.items()))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Read these leases, in the order asked. Raises StoreError for one that cannot be read as a lease.

        With `stale_ok`, the ownership alone is read, each by one request or all by a listing. If the owner is still
        the remembered one, checkpoint and notes are as remembered.
        """
        leases = [self._lease(key, parts) for key, parts in self._read(keys, stale_ok=stale_ok).items()]
        return tuple(lease for lease in leases if lease)

    def write(self, write: Write) -> Outcome:
        """Write the lease's objects one by one, each under its ETag, in the order that the rules above ask for."""
        match write:
            case CreateLease(lease):
                key, lease = lease.key, created(lease)
                if self._layout.owned_before_checkpoint and self._objects.get(self._layout.name(key, "ownership")):
                    return self._done(key, None)
                # The checkpoint before the ownership: a worker that takes the lease finds where it starts.
                parts = self._put(key, "checkpoint", Parts(), self._layout.checkpoint({}, lease))
                noted = bool(lease.notes) and "notes" not in self._layout.parts
                copied = lease.epoch > 0 and self.capabilities.counts_owners
                if parts and (noted or copied):
                    parts = self._put(key, "ownership", parts, self._layout.ownership({}, lease, lease))
                return self._done(key, parts)
            case DeleteLease(lease):
                for _ in range(ATTEMPTS):
                    parts = self._read_one(lease.key)
                    stored = self._lease(lease.key, parts)
                    if applied(write, stored) is None:
                        return Lost(lease.key, stored)
                    # The ownership first: it guards the version. Each deletion is conditional; the first refused ends
                    # it.
                    if stored is None or all(self._objects.delete(one.name, one.etag) for one in parts.existing):
                        with self._seeing:
                            self._seen.pop(lease.key, None)
                        return Done(lease)
                raise StoreError(f"lease {lease.key!r}: {ATTEMPTS} conditional deletions in a row were refused")
            case _:
                return self._change(write)

    def cells(self) -> "ObjectCells":
        """The rows of layout `sessions` below the same prefix."""
        above = self._layout.above if isinstance(self._layout, ObjectLayout) else ""
        return ObjectCells(self._objects, above, page_leases=self._page_leases)

    def layouts(self, *, asked: bool) -> tuple[bool, bool]:
        """Whether there are rows of layout `sessions`, and of this one, if that is asked for or matters."""
        if not isinstance(self._layout, ObjectLayout):
            return False, True  # the SDKs' own
        sessions = bool(self.cells().list("lease/"))
        return sessions, (sessions or asked) and bool(self._objects.list(self._layout.prefix("checkpoint")))

    def prove(self) -> None:
        """Return if the service keeps its conditions. Raises StoreError."""
        prove(self._objects, self._layout.prefix("ownership").removesuffix("ownership/"))

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown()
        self._objects.close()

    def _change(self, write: LeaseChange) -> Outcome:
        key = write.lease.key
        parts = self._seen.get(key)
        if parts and (outcome := self._attempt(write, parts, fresh=False)):
            return outcome
        for _ in range(ATTEMPTS):
            # After a request the new ownership alone is enough. A refusal carries the whole lease as stored.
            parts = self._fetched({key: parts}, ("ownership",))[key] if parts else None
            if parts is None or not self._fits(write, parts):
                parts = self._read_one(key)
                if not self._fits(write, parts):
                    return Lost(key, self._lease(key, parts))
            if outcome := self._attempt(write, parts, fresh=True):
                return outcome
            parts = None  # notes that another wrote meanwhile are another object
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were refused")

    def _fits(self, write: LeaseChange, parts: Parts) -> bool:
        return applied(write, self._lease(write.lease.key, parts)) is not None

    def _attempt(self, write: LeaseChange, parts: Parts, *, fresh: bool) -> Outcome | None:
        """Try the write once; None if it must be tried again after another reading."""
        key, layout = write.lease.key, self._layout
        before = self._lease(key, parts)
        after = applied(write, before)
        if before is None or after is None:
            return None
        owned_anew = any(getattr(before, name) != getattr(after, name) for name in _OWNERSHIP)
        moved = any(getattr(before, name) != getattr(after, name) for name in _CHECKPOINT)
        moved = moved or before.checkpoint.token != after.checkpoint.token  # positions are equal whatever their tokens
        closing = moved and (after.ended or after.owner != before.owner)
        ownership = layout.ownership(parts.fields("ownership"), before, after)
        if moved:
            # A position that the layout cannot store is refused here, before anything is written.
            layout.checkpoint(parts.fields("checkpoint"), after)
        if fresh and before.next_owner and moved and not closing:
            # Rule 1: the owner was asked for the lease. The ownership was read just now; the gift will be the renewal.
            return self._done(key, self._advance(key, parts, after))
        if owned_anew and not closing:
            renewed = self._put(key, "ownership", parts, ownership)
            if not renewed:
                return None
            if after.owner not in (None, before.owner):
                # Rule 3. If the lease was deleted meanwhile, the ownership is an orphan and goes too.
                taken = renewed.having("checkpoint", self._objects.get(layout.name(key, "checkpoint")))
                if self._lease(key, taken):
                    return self._done(key, taken)
                for orphan in taken.existing:
                    self._objects.delete(orphan.name, orphan.etag)
                return Lost(key, None)
            settled = self._advance(key, renewed, after) if moved else renewed
            if settled and moved and after.owner is None and not self._still(key, settled):
                settled = None  # claimed between the two writes of a reset: perhaps at the former checkpoint
            return self._done(key, settled)
        # Rule 2. The first write does not depend on the ownership's ETag, so the memory of that is not enough.
        if not fresh and not self._still(key, parts):
            return None
        settled = self._advance(key, parts, after) if moved else parts
        if not settled:
            return self._done(key, None)
        if owned_anew or (before.notes != after.notes and "notes" not in layout.parts):
            settled = self._put(key, "ownership", settled, ownership)
        elif before.notes != after.notes:
            settled = self._put(key, "notes", settled, layout.notes(parts.fields("notes"), before, after))
        return self._done(key, settled) if settled else None

    def _advance(self, key: str, parts: Parts, after: Lease) -> Parts | None:
        """Move the checkpoint object forward; None if it is past this position already, or ended."""
        for _ in range(ATTEMPTS):
            moved = self._put(key, "checkpoint", parts, self._layout.checkpoint(parts.fields("checkpoint"), after))
            if moved:
                return moved
            parts = parts.having("checkpoint", self._objects.get(self._layout.name(key, "checkpoint")))
            now = self._lease(key, parts)
            if now is None or now.ended or now.checkpoint.order > after.checkpoint.order:
                return None
        raise StoreError(f"lease {key!r}: {ATTEMPTS} writes of its checkpoint in a row were refused")

    def _put(self, key: str, part: Part, parts: Parts, fields: ObjectFields) -> Parts | None:
        """Write one object over the one in `parts`; None if that one is no longer the stored one."""
        name, over = self._layout.name(key, part), parts.part(part)
        objects = self._objects
        etag = objects.put_over(name, fields, over.etag) if over else objects.put_new(name, fields)
        return None if etag is None else parts.having(part, Stored(name, etag, fields))

    def _read_one(self, key: str) -> Parts:
        return self._read([key])[key]

    def _read(self, keys: Iterable[str], *, stale_ok: bool = False) -> dict[str, Parts]:
        """Read these leases, the ownership before the checkpoint (rule 5)."""
        first, *rest = self._layout.parts
        before = {key: self._seen.get(key, _NOTHING) for key in keys}
        if stale_ok and len(self._seen) < _LISTED * (len(before) - 1):
            # To ask for ten leases of twenty, one listing replaces ten requests.
            stored = {one.name: one for one in self._objects.list(self._layout.prefix(first))}
            found = {
                key: parts.having(first, stored.get(self._layout.name(key, first))) for key, parts in before.items()
            }
        else:
            found = self._fetched(before, (first,))
        doubtful = dict(found)
        for key, parts in before.items() if stale_ok else ():
            old, new = self._lease(key, parts), self._lease(key, found[key])
            if parts.ownership and old and new and old.owner == new.owner:
                del doubtful[key]  # whoever owns it still is believed to stand where it stood
        found |= self._fetched(doubtful, rest)
        self._see(before, found)
        return found

    def _fetched(self, found: Mapping[str, Parts], which: Iterable[Part]) -> dict[str, Parts]:
        """Take these parts as stored now, read side by side."""
        wanted = [(key, part) for part in which for key in found]
        names = [self._layout.name(key, part) for key, part in wanted]
        each = self._pool.map if len(names) > 1 else map  # one alone needs no thread
        anew = dict(found)
        for (key, part), stored in zip(wanted, each(self._objects.get, names), strict=True):
            anew[key] = anew[key].having(part, stored)
        return anew

    def _see(self, before: Mapping[str, Parts], found: Mapping[str, Parts]) -> None:
        """Remember what a reading found, and keep what was written since `before` was remembered.

        The reading may be from before that write: the owner's next answer would go back behind its own checkpoint.
        """
        with self._seeing:
            for key, parts in found.items():
                if self._seen.get(key, _NOTHING) is before.get(key, _NOTHING):
                    if parts.existing:
                        self._seen[key] = parts
                    else:
                        self._seen.pop(key, None)

    def _still(self, key: str, parts: Parts) -> bool:
        """Whether the ownership is still this one."""
        now = self._objects.get(self._layout.name(key, "ownership"))
        return now is not None and now.etag == parts.etag

    def _row(self, key: str, parts: Parts) -> Lease | Malformed | None:
        return readable(key, lambda: self._layout.lease(key, parts))

    def _lease(self, key: str, parts: Parts) -> Lease | None:
        row = self._row(key, parts)
        return insist(row) if row else None

    def _done(self, key: str, parts: Parts | None) -> Outcome:
        """The answer: the lease as written, or, where a second write was refused, as it is stored."""
        if parts is None:
            return Lost(key, self._lease(key, self._read_one(key)))
        with self._seeing:
            self._seen[key] = parts
        lease = self._lease(key, parts)
        return Done(lease) if lease else Lost(key, None)


class ObjectCells:
    """Rows of layout `sessions` as objects below a prefix."""

    def __init__(self, objects: Objects, above: str, *, page_leases: int = PAGE_LEASES) -> None:
        self.page_leases = page_leases
        self._objects, self._above = objects, f"{above.strip('/')}/".lstrip("/")
        self._pool = ThreadPoolExecutor(_READS, thread_name_prefix="leasehold-sessions")

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:  # noqa: ARG002  each is consistent
        """List the objects, once for each kind."""
        return tuple(self._inside(one) for prefix in prefixes for one in self._objects.list(self._above + prefix))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:  # noqa: ARG002  never stale
        """The objects of these names that are there, read side by side."""
        each = self._pool.map if len(names) > 1 else map  # one alone needs no thread
        found = each(self._objects.get, [self._above + name for name in names])
        return {name: self._inside(one) for name, one in zip(names, found, strict=True) if one is not None}

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Write it if the name is free."""
        return self._objects.put_new(self._above + name, fields)

    def put_over(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace it if it is still this one."""
        return self._objects.put_over(self._above + name, fields, version)

    def delete(self, name: str, version: str) -> bool:
        """Remove it if it is still this one."""
        return self._objects.delete(self._above + name, version)

    def prove(self) -> None:
        """Return if the service keeps its conditions. Raises StoreError."""
        prove(self._objects, self._above)

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown()
        self._objects.close()

    def _inside(self, stored: Stored) -> Stored:
        return Stored(stored.name.removeprefix(self._above), stored.etag, stored.fields, stored.age)
