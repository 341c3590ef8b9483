"""Leases in objects under ETags: ownership, checkpoint and, where the layout has them, notes.

The conditions are those of `writes`; this file says in which order the objects are written.
Rule 1: an ordinary checkpoint renews the ownership first, under its ETag, so that a worker that
has lost its lease moves no checkpoint; only a theft between the two writes can slip by. Where a
request got ahead of it, the ownership is read in place of renewed: the gift that follows renews it.
Rule 2: at a shard's end and in a hand-over the checkpoint goes first, so that whoever holds the
lease next starts where the last one stopped. Rule 3: a taken lease is answered with its
checkpoint read after the taking.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from attrs import evolve

from balancer.model import Lease
from stores.fields import BadField, insist
from stores.layouts import Layout, Part, Parts
from stores.objects import Fields, Objects, Stored
from stores.protocol import Done, Listing, Lost, Malformed, Outcome, Promises, StoreError
from stores.transacted import Change, TransactedStore

_ATTEMPTS = 64
"""Each needs a competing write in between; more than so many in a row is no competition but a fault."""

_LISTED = 8
"""An object in a listing costs about an eighth of a request of its own, to both ends."""

_READS = 8
"""Objects read at a time."""


class EtagStore(TransactedStore):
    """Leases of one layout in one container or bucket; safe under threads.

    What was last seen of each lease is remembered, so that a renewal is one conditional write
    and no reading: if the memory is out of date the write is refused, and the lease read anew.
    """

    def __init__(self, objects: Objects, layout: Layout) -> None:
        self._objects = objects
        self._layout = layout
        self._seen: dict[str, Parts] = {}
        self._pool = ThreadPoolExecutor(_READS, thread_name_prefix="leasehold-objects")

    @property
    def promises(self) -> Promises:
        """What the layout has room for."""
        return self._layout.promises

    def list(self) -> Listing:
        """Every lease: one listing for each part; the ownership first."""
        found: dict[str, Parts] = {}
        for part in self._layout.parts:
            for stored in self._objects.list(self._layout.prefix(part)):
                key = self._layout.key(stored.name, part)
                if key is not None:
                    found[key] = found.get(key, Parts()).having(part, stored)
        self._seen = dict(found)
        return _listing(self._layout, found)

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, in the order asked. Raises StoreError for one that cannot be read as a lease.

        Where `stale_ok`, one whose owner has not changed is otherwise as remembered: one request each, or a listing.
        """
        leases = [self._lease(key, parts) for key, parts in self._read(keys, stale_ok=stale_ok).items()]
        return tuple(lease for lease in leases if lease)

    def close(self) -> None:
        """Let connections go."""
        self._pool.shutdown()
        self._objects.close()

    def _insert(self, lease: Lease) -> Outcome:
        key = lease.key
        if self._layout.owned_before_checkpoint and self._objects.get(self._layout.name(key, "ownership")):
            return self._lost(key)
        # The checkpoint before the ownership: whoever takes the lease finds where it starts.
        parts = self._put(key, "checkpoint", Parts(), self._layout.checkpoint({}, lease))
        noted = bool(lease.notes) and "notes" not in self._layout.parts
        if parts and (lease.owner is not None or noted):
            blank = evolve(lease, owner=None, yields=False, notes=())
            parts = self._put(key, "ownership", parts, self._layout.ownership({}, blank, lease))
        return self._done(key, parts) if parts else self._lost(key)

    def _change(self, key: str, change: Change) -> Outcome:
        parts = self._seen.get(key)
        if parts and (outcome := self._attempt(key, parts, change, fresh=False)):
            return outcome
        for _ in range(_ATTEMPTS):
            # A request got ahead of it: then the ownership says enough. A refusal is told of all there is.
            parts = self._fetched({key: parts}, ("ownership",))[key] if parts else None
            if parts is None or not self._fits(key, parts, change):
                parts = self._read_one(key)
                if not self._fits(key, parts, change):
                    return Lost(key, self._lease(key, parts))
            if outcome := self._attempt(key, parts, change, fresh=True):
                return outcome
        raise StoreError(f"lease {key!r}: {_ATTEMPTS} conditional writes in a row were refused")

    def _fits(self, key: str, parts: Parts, change: Change) -> bool:
        before = self._lease(key, parts)
        return before is not None and change(before) is not None

    def _attempt(self, key: str, parts: Parts, change: Change, *, fresh: bool) -> Outcome | None:
        """One try; None if it must be made again after another reading."""
        before = self._lease(key, parts)
        after = change(before) if before else None
        if before is None or after is None:
            return None
        if _moved(before, after):
            # A position the layout has no words for is refused here, before anything is written.
            self._layout.checkpoint(parts.fields("checkpoint"), after)
        if fresh and before.heir and _moved(before, after) and not _closing(before, after):
            settled = self._advance(key, parts, after)
            return self._done(key, settled) if settled else self._lost(key)
        if _owned_anew(before, after) and not _closing(before, after):
            return self._renewed_then_moved(key, parts, before, after)
        # Its first write does not depend on the ownership's ETag, so the memory of that is not enough.
        return self._moved_then_noted(key, parts, before, after) if fresh or self._still(key, parts) else None

    def _renewed_then_moved(self, key: str, parts: Parts, before: Lease, after: Lease) -> Outcome | None:
        fields = self._layout.ownership(parts.fields("ownership"), before, after)
        renewed = self._put(key, "ownership", parts, fields)
        if not renewed:
            return None
        if after.owner not in (None, before.owner):
            return self._taken(key, renewed)
        settled = self._advance(key, renewed, after) if _moved(before, after) else renewed
        return self._done(key, settled) if settled else self._lost(key)

    def _moved_then_noted(self, key: str, parts: Parts, before: Lease, after: Lease) -> Outcome | None:
        settled = self._advance(key, parts, after) if _moved(before, after) else parts
        if not settled:
            return self._lost(key)
        if _owned_anew(before, after) or (before.notes != after.notes and "notes" not in self._layout.parts):
            fields = self._layout.ownership(parts.fields("ownership"), before, after)
            settled = self._put(key, "ownership", settled, fields)
        elif before.notes != after.notes:
            fields = self._layout.notes(parts.fields("notes"), before, after)
            settled = self._put(key, "notes", settled, fields)
        return self._done(key, settled) if settled else None

    def _advance(self, key: str, parts: Parts, after: Lease) -> Parts | None:
        """Move the checkpoint object forward; None if it is past this place already, or ended."""
        for _ in range(_ATTEMPTS):
            moved = self._put(key, "checkpoint", parts, self._layout.checkpoint(parts.fields("checkpoint"), after))
            if moved:
                return moved
            parts = parts.having("checkpoint", self._objects.get(self._layout.name(key, "checkpoint")))
            now = self._lease(key, parts)
            if now is None or now.ended or now.checkpoint.order > after.checkpoint.order:
                return None
        raise StoreError(f"lease {key!r}: {_ATTEMPTS} writes of its checkpoint in a row were refused")

    def _taken(self, key: str, parts: Parts) -> Outcome:
        """Rule 3. If the lease was deleted meanwhile, the ownership is an orphan and goes too."""
        parts = parts.having("checkpoint", self._objects.get(self._layout.name(key, "checkpoint")))
        if self._lease(key, parts):
            return self._done(key, parts)
        for orphan in parts.existing:
            self._objects.delete(orphan.name, orphan.etag)
        return Lost(key, None)

    def _remove(self, key: str, fits: Callable[[Lease], bool]) -> Lost | None:
        for _ in range(_ATTEMPTS):
            parts = self._read_one(key)
            lease = self._lease(key, parts)
            if lease is None:
                return None
            if not fits(lease):
                return Lost(key, lease)
            # The ownership first: it guards the version. Each deletion is conditional; the first refused ends it.
            if all(self._objects.delete(one.name, one.etag) for one in parts.existing):
                self._seen.pop(key, None)
                return None
        raise StoreError(f"lease {key!r}: {_ATTEMPTS} conditional deletions in a row were refused")

    def _put(self, key: str, part: Part, parts: Parts, fields: Fields) -> Parts | None:
        """Write one object over the one in `parts`; None if that one is no longer the stored one."""
        name, over = self._layout.name(key, part), parts.part(part)
        objects = self._objects
        etag = objects.put_over(name, fields, over.etag) if over else objects.put_new(name, fields)
        return None if etag is None else parts.having(part, Stored(name, etag, fields))

    def _read_one(self, key: str) -> Parts:
        return self._read([key])[key]

    def _read(self, keys: Iterable[str], *, stale_ok: bool = False) -> dict[str, Parts]:
        """The ownership before the checkpoint: an heir then sees what its giver wrote before giving."""
        first, *rest = self._layout.parts
        before = {key: self._seen.get(key, Parts()) for key in keys}
        listed = stale_ok and len(self._seen) < _LISTED * (len(before) - 1)
        found = self._listed(before, first) if listed else self._fetched(before, (first,))
        known = {key for key in found if stale_ok and self._same_owner(key, before[key], found[key])}
        found |= self._fetched({key: parts for key, parts in found.items() if key not in known}, rest)
        self._seen.update(found)
        return found

    def _listed(self, found: Mapping[str, Parts], part: Part) -> dict[str, Parts]:
        """The same with this part as listed now: who asked for ten leases of twenty need not send ten requests."""
        stored = {one.name: one for one in self._objects.list(self._layout.prefix(part))}
        return {key: parts.having(part, stored.get(self._layout.name(key, part))) for key, parts in found.items()}

    def _fetched(self, found: Mapping[str, Parts], which: Iterable[Part]) -> dict[str, Parts]:
        """The same with these parts as stored now, read side by side."""
        wanted = [(key, part) for part in which for key in found]
        names = [self._layout.name(key, part) for key, part in wanted]
        each = self._pool.map if len(names) > 1 else map  # one alone needs no thread
        anew = dict(found)
        for (key, part), stored in zip(wanted, each(self._objects.get, names), strict=True):
            anew[key] = anew[key].having(part, stored)
        return anew

    def _still(self, key: str, parts: Parts) -> bool:
        """Whether the ownership is still this one."""
        now = self._objects.get(self._layout.name(key, "ownership"))
        return now is not None and now.etag == parts.etag

    def _same_owner(self, key: str, before: Parts, now: Parts) -> bool:
        old, new = self._lease(key, before), self._lease(key, now)
        return bool(before.ownership and old and new and old.owner == new.owner)

    def _lease(self, key: str, parts: Parts) -> Lease | None:
        row = _read(self._layout, key, parts)
        return insist(row) if row else None

    def _done(self, key: str, parts: Parts) -> Outcome:
        self._seen[key] = parts
        lease = self._lease(key, parts)
        return Done(lease) if lease else Lost(key, None)

    def _lost(self, key: str) -> Lost:
        return Lost(key, self._lease(key, self._read_one(key)))


def _owned_anew(before: Lease, after: Lease) -> bool:
    """Whether the ownership object must be written: it carries owner, counter, heir and willingness."""
    asked = (before.heir, before.yields) != (after.heir, after.yields)
    return asked or (before.owner, before.epoch) != (after.owner, after.epoch)


def _moved(before: Lease, after: Lease) -> bool:
    return (before.checkpoint, before.checkpoint.token) != (after.checkpoint, after.checkpoint.token)


def _closing(before: Lease, after: Lease) -> bool:
    """Rule 2: the present owner's last checkpoint."""
    return _moved(before, after) and (after.ended or after.owner != before.owner)


def _read(layout: Layout, key: str, parts: Parts) -> Lease | Malformed | None:
    try:
        return layout.lease(key, parts)
    except BadField as bad:
        return Malformed(key, bad.field, bad.why)


def _listing(layout: Layout, found: dict[str, Parts]) -> Listing:
    rows = [_read(layout, key, parts) for key, parts in sorted(found.items())]
    return Listing(
        tuple(row for row in rows if isinstance(row, Lease)),
        tuple(row for row in rows if isinstance(row, Malformed)),
    )
