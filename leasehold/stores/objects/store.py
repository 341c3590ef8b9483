"""Stores each lease in objects with ETags: the ownership, the checkpoint and, in some layouts, the notes.

The conditions of writes are those of `leasehold.stores.writes`. This module determines the order in which a lease's
objects are written. The docstring of `leasehold.stores.objects` explains this order, and the state after a crash
between two writes.

1. An ordinary checkpoint first renews the ownership on the condition that its ETag has not changed, so a worker that
   has lost its lease cannot move the checkpoint. The only exception is a steal between the two writes. The checkpoint
   then still moves forward, which is harmless, because the records before it were processed. If the lease is requested,
   its owner only reads the ownership before it writes the checkpoint. The ownership is then renewed by the write that
   gives the lease to the next owner.
2. At the end of a shard, and when the lease is given away and its checkpoint moves, the checkpoint is written first.
   Therefore, the next owner starts where the last owner stopped. The write of the checkpoint does not depend on the
   ownership's ETag, so the ownership is read just before this write.
3. The result of a write that takes a lease contains the checkpoint as it was read after that write. If the checkpoint
   were read earlier, it might not be the last one that the former owner wrote. If there is no checkpoint, the lease was
   deleted, and the ownership is deleted again.
4. If the first of two writes is rejected, nothing has changed. Therefore, it is retried after a read, as long as its
   condition holds for the lease that was read. If the second write is rejected, the result is `Lost`, except under rule
   2. There, both writes are tried again under the same condition. This is harmless, because the first write stores the
   same checkpoint again.
5. Reads fetch the ownership before the checkpoint. A write that gives the lease away stores the two in the reverse
   order. Therefore, if the next owner reads that it is the owner, it also reads the last checkpoint of the old owner.
6. A reset writes the ownership, then the checkpoint, and then reads the ownership again. If another worker has claimed
   the lease in the meantime, it may have read the old checkpoint, so the result is `Lost`.
"""

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.fields import build_listing, parse_row, require_valid_lease
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.protocol import ATTEMPTS, Capabilities, Done, Listing, Lost, Malformed, Outcome
from leasehold.stores.requests import (
    PAGE_LEASES,
    ObjectFields,
    Objects,
    Part,
    Parts,
    StoredObject,
    check_conditions_honored,
)
from leasehold.stores.writes import CreateLease, DeleteLease, LeaseChange, Write, lease_after_write, new_row

_OBJECTS_PER_LISTING_COST = 8
"""The number of objects whose listing costs the client and the service about as much as a request for a single
object."""

_CONCURRENT_READS = 8
"""The number of objects to read concurrently."""

_OWNERSHIP_FIELDS = ("owner", "epoch", "next_owner", "yields")
"""If one of these fields changes, the ownership object is written. Each renewal changes `epoch`. The ownership object
also contains the weight."""

_NO_OBJECTS = Parts()

_CHECKPOINT_FIELDS = ("checkpoint", "parents", "hash_range")
"""If one of these fields changes, the checkpoint object is written. Only a reset changes `parents` and `hash_range`."""


Layout = ObjectLayout | EventHubLayout
"""A mapping between leases and objects, without I/O.

`parts` are the objects of a lease in the order in which to read them. `prefix`, `name` and `key` convert between keys
and object names. `lease` parses the objects. `ownership`, `checkpoint` and `annotations` return the new fields of an
object, including those that the layout does not understand. `owned_before_checkpoint` is true if an ownership object
without a checkpoint object is a lease.
"""


class EtagStore:
    """A store of leases that are kept in one container or bucket, in one layout. Thread-safe.

    The store caches the objects of each lease as they were last read, so a renewal takes one conditional write and no
    read. If the cache is stale, the write is rejected, and the lease is read again.
    """

    def __init__(self, objects: Objects, layout: Layout, *, page_leases: int = PAGE_LEASES) -> None:
        """Create a store that keeps leases in these objects.

        Args:
            objects: The container or bucket.
            layout: The layout of the leases in the container or bucket.
            page_leases: The maximum number of leases in one session row, if the table is in layout `sessions`.
        """
        self._page_leases = page_leases
        self._objects = objects
        self._layout = layout
        self._cached_parts: dict[str, Parts] = {}
        self._cache_lock = Lock()
        self._pool = ThreadPoolExecutor(_CONCURRENT_READS, thread_name_prefix="leasehold-objects")

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the layout."""
        return self._layout.capabilities

    def list(self) -> Listing:
        """Return every lease. Each kind of object is listed once, ownerships first."""
        with self._cache_lock:
            cached_parts = dict(self._cached_parts)
        parts_by_key: dict[str, Parts] = {}
        for part in self._layout.parts:
            for stored_object in self._objects.list(self._layout.prefix(part)):
                key = self._layout.key(stored_object.name, part)
                if key is not None:
                    parts_by_key[key] = parts_by_key.get(key, Parts()).replace(part, stored_object)
        self._cache(
            cached_parts, {key: parts_by_key.get(key, _NO_OBJECTS) for key in cached_parts.keys() | parts_by_key.keys()}
        )
        return build_listing(self._row(key, parts) for key, parts in sorted(parts_by_key.items()))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Return those of these leases that exist, in the given order. Raises StoreError if a row cannot be parsed.

        If `stale_ok` is true, read only the ownerships, one by one or in a listing. If the owner of a lease is still
        the cached one, the checkpoint and the annotations are taken from the cache.
        """
        leases = [self._lease(key, parts) for key, parts in self._read(keys, stale_ok=stale_ok).items()]
        return tuple(lease for lease in leases if lease)

    def write(self, write: Write) -> Outcome:
        """Write the lease's objects one by one, each conditional on its ETag, in the order of the rules above."""
        match write:
            case CreateLease(lease):
                key, lease = lease.key, new_row(lease)
                if self._layout.owned_before_checkpoint and self._objects.get(self._layout.name(key, "ownership")):
                    return self._outcome(key, None)
                # Write the checkpoint first, so that a worker that takes the lease finds the position at which to
                # start.
                parts = self._put(key, "checkpoint", Parts(), self._layout.checkpoint({}, lease))
                stores_annotations = bool(lease.annotations) and "notes" not in self._layout.parts
                stores_counter = lease.epoch > 0 and self.capabilities.counts_owners
                if parts and (stores_annotations or stores_counter):
                    parts = self._put(key, "ownership", parts, self._layout.ownership({}, lease, lease))
                return self._outcome(key, parts)
            case DeleteLease(lease):
                for _ in range(ATTEMPTS):
                    parts = self._read_one(lease.key)
                    stored_lease = self._lease(lease.key, parts)
                    if lease_after_write(write, stored_lease) is None:
                        return Lost(lease.key, stored_lease)
                    # Delete the ownership first, because its ETag is the version. The first rejection ends the
                    # deletion.
                    if stored_lease is None or all(
                        self._objects.delete(part.name, part.etag) for part in parts.existing
                    ):
                        with self._cache_lock:
                            self._cached_parts.pop(lease.key, None)
                        return Done(lease)
                raise StoreError(f"lease {lease.key!r}: {ATTEMPTS} conditional deletions in a row were rejected")
            case _:
                return self._change(write)

    def cells(self) -> "ObjectCells":
        """Return the rows of layout `sessions` below the same prefix."""
        folder = self._layout.folder if isinstance(self._layout, ObjectLayout) else ""
        return ObjectCells(self._objects, folder, page_leases=self._page_leases)

    def layouts(self, *, requested: bool) -> tuple[bool, bool]:
        """Return whether there are rows of layout `sessions`, and whether there are rows of this layout.

        If there are no rows of layout `sessions`, and the user has not requested that layout, the second value is False
        without having been checked.
        """
        if not isinstance(self._layout, ObjectLayout):
            return False, True  # the Azure SDKs' layout is never in layout sessions
        has_sessions = bool(self.cells().list("lease/"))
        return has_sessions, (has_sessions or requested) and bool(self._objects.list(self._layout.prefix("checkpoint")))

    def prove(self) -> None:
        """Check that the service honors conditions. Raises StoreError if it does not."""
        check_conditions_honored(self._objects, self._layout.prefix("ownership").removesuffix("ownership/"))

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown()
        self._objects.close()

    def _change(self, write: LeaseChange) -> Outcome:
        key = write.lease.key
        parts = self._cached_parts.get(key)
        if parts and (outcome := self._attempt(write, parts, just_read=False)):
            return outcome
        for _ in range(ATTEMPTS):
            # First read only the ownership, because it is the only object that changes if another worker requests the
            # lease. If the write's condition does not hold, read the whole lease, which becomes part of the result.
            parts = self._fetch({key: parts}, ("ownership",))[key] if parts else None
            if parts is None or not self._condition_holds(write, parts):
                parts = self._read_one(key)
                if not self._condition_holds(write, parts):
                    return Lost(key, self._lease(key, parts))
            if outcome := self._attempt(write, parts, just_read=True):
                return outcome
            # Read all objects in the next attempt, because another worker may have written the notes object.
            parts = None
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were rejected")

    def _condition_holds(self, write: LeaseChange, parts: Parts) -> bool:
        return lease_after_write(write, self._lease(write.lease.key, parts)) is not None

    def _attempt(self, write: LeaseChange, parts: Parts, *, just_read: bool) -> Outcome | None:
        """Try the write once. Return None if it must be retried after another read."""
        key, layout = write.lease.key, self._layout
        old_lease = self._lease(key, parts)
        new_lease = lease_after_write(write, old_lease)
        if old_lease is None or new_lease is None:
            return None
        ownership_changed = any(getattr(old_lease, name) != getattr(new_lease, name) for name in _OWNERSHIP_FIELDS)
        checkpoint_changed = any(getattr(old_lease, name) != getattr(new_lease, name) for name in _CHECKPOINT_FIELDS)
        # Compare the tokens separately, because the equality of positions ignores them.
        checkpoint_changed = checkpoint_changed or old_lease.checkpoint.token != new_lease.checkpoint.token
        checkpoint_first = checkpoint_changed and (new_lease.ended or new_lease.owner != old_lease.owner)
        ownership_fields = layout.ownership(parts.fields("ownership"), old_lease, new_lease)
        if checkpoint_changed:
            # Encode the checkpoint first. If the layout cannot store the position, the error is raised before anything
            # is written.
            layout.checkpoint(parts.fields("checkpoint"), new_lease)
        if just_read and old_lease.next_owner and checkpoint_changed and not checkpoint_first:
            # Another worker has requested the lease, so write only the checkpoint (rule 1). The ownership was just
            # read, and will be renewed when the lease is given to the other worker.
            return self._outcome(key, self._advance(key, parts, new_lease))
        if ownership_changed and not checkpoint_first:
            renewed_parts = self._put(key, "ownership", parts, ownership_fields)
            if not renewed_parts:
                return None
            if new_lease.owner not in (None, old_lease.owner):
                # Read the checkpoint (rule 3). If there is none, the lease was deleted in the meantime, so delete the
                # ownership that was just written.
                current_parts = renewed_parts.replace("checkpoint", self._objects.get(layout.name(key, "checkpoint")))
                if self._lease(key, current_parts):
                    return self._outcome(key, current_parts)
                for leftover_object in current_parts.existing:
                    self._objects.delete(leftover_object.name, leftover_object.etag)
                return Lost(key, None)
            written_parts = self._advance(key, renewed_parts, new_lease) if checkpoint_changed else renewed_parts
            if (
                written_parts
                and checkpoint_changed
                and new_lease.owner is None
                and not self._ownership_is_unchanged(key, written_parts)
            ):
                # Another worker claimed the lease between the two writes of a reset, perhaps at the old checkpoint
                # (rule 6).
                written_parts = None
            return self._outcome(key, written_parts)
        # The first write is not conditional on the ownership's ETag, so check that the cached ownership is current
        # (rule 2).
        if not just_read and not self._ownership_is_unchanged(key, parts):
            return None
        written_parts = self._advance(key, parts, new_lease) if checkpoint_changed else parts
        if not written_parts:
            return self._outcome(key, None)
        if ownership_changed or (old_lease.annotations != new_lease.annotations and "notes" not in layout.parts):
            written_parts = self._put(key, "ownership", written_parts, ownership_fields)
        elif old_lease.annotations != new_lease.annotations:
            written_parts = self._put(
                key, "notes", written_parts, layout.annotations(parts.fields("notes"), old_lease, new_lease)
            )
        return self._outcome(key, written_parts) if written_parts else None

    def _advance(self, key: str, parts: Parts, new_lease: Lease) -> Parts | None:
        """Write the checkpoint of `new_lease`, on the condition that the checkpoint object has not changed.

        If the object has changed, try again. Return None if it is now past this position or at SHARD_END.
        """
        for _ in range(ATTEMPTS):
            written_parts = self._put(
                key, "checkpoint", parts, self._layout.checkpoint(parts.fields("checkpoint"), new_lease)
            )
            if written_parts:
                return written_parts
            parts = parts.replace("checkpoint", self._objects.get(self._layout.name(key, "checkpoint")))
            current_lease = self._lease(key, parts)
            if (
                current_lease is None
                or current_lease.ended
                or current_lease.checkpoint.order > new_lease.checkpoint.order
            ):
                return None
        raise StoreError(f"lease {key!r}: {ATTEMPTS} writes of its checkpoint in a row were rejected")

    def _put(self, key: str, part: Part, parts: Parts, fields: ObjectFields) -> Parts | None:
        """Replace the object in `parts`. Return None if the stored object has changed."""
        name, stored_object = self._layout.name(key, part), parts.part(part)
        objects = self._objects
        etag = (
            objects.put_if_match(name, fields, stored_object.etag)
            if stored_object
            else objects.put_if_absent(name, fields)
        )
        return None if etag is None else parts.replace(part, StoredObject(name, etag, fields))

    def _read_one(self, key: str) -> Parts:
        return self._read([key])[key]

    def _read(self, keys: Iterable[str], *, stale_ok: bool = False) -> dict[str, Parts]:
        """Read the objects of these leases. The ownerships are read before the checkpoints (rule 5)."""
        ownership_kind, *other_kinds = self._layout.parts
        cached_parts = {key: self._cached_parts.get(key, _NO_OBJECTS) for key in keys}
        if stale_ok and len(self._cached_parts) < _OBJECTS_PER_LISTING_COST * (len(cached_parts) - 1):
            # So many of the leases are requested that one listing is cheaper than a request for each ownership. The
            # size of the cache is about the number of leases in the table.
            listed_ownerships = {
                ownership.name: ownership for ownership in self._objects.list(self._layout.prefix(ownership_kind))
            }
            current_parts = {
                key: parts.replace(ownership_kind, listed_ownerships.get(self._layout.name(key, ownership_kind)))
                for key, parts in cached_parts.items()
            }
        else:
            current_parts = self._fetch(cached_parts, (ownership_kind,))
        incomplete_parts = dict(current_parts)
        for key, parts in cached_parts.items() if stale_ok else ():
            cached_lease, current_lease = self._lease(key, parts), self._lease(key, current_parts[key])
            if parts.ownership and cached_lease and current_lease and cached_lease.owner == current_lease.owner:
                del incomplete_parts[key]  # the owner is the same, so use the cached checkpoint
        current_parts |= self._fetch(incomplete_parts, other_kinds)
        self._cache(cached_parts, current_parts)
        return current_parts

    def _fetch(self, cached_parts: Mapping[str, Parts], kinds: Iterable[Part]) -> dict[str, Parts]:
        """Read the objects of these kinds concurrently.

        Return all objects of the leases. Those that were read replace the ones in `cached_parts`.
        """
        key_and_kind_pairs = [(key, part) for part in kinds for key in cached_parts]
        names = [self._layout.name(key, part) for key, part in key_and_kind_pairs]
        map_function = self._pool.map if len(names) > 1 else map  # a single read needs no thread
        updated_parts = dict(cached_parts)
        for (key, part), stored_object in zip(key_and_kind_pairs, map_function(self._objects.get, names), strict=True):
            updated_parts[key] = updated_parts[key].replace(part, stored_object)
        return updated_parts

    def _cache(self, parts_before_read: Mapping[str, Parts], parts_read: Mapping[str, Parts]) -> None:
        """Cache the objects that were read, except for leases that were written since `parts_before_read` was copied.

        The objects of such a lease may have been read before the write. If they were cached, the result of the owner's
        next write could contain an older checkpoint than its last one.
        """
        with self._cache_lock:
            for key, parts in parts_read.items():
                if self._cached_parts.get(key, _NO_OBJECTS) is parts_before_read.get(key, _NO_OBJECTS):
                    if parts.existing:
                        self._cached_parts[key] = parts
                    else:
                        self._cached_parts.pop(key, None)

    def _ownership_is_unchanged(self, key: str, parts: Parts) -> bool:
        """Return whether the stored ownership still has the same ETag as in `parts`."""
        current_ownership = self._objects.get(self._layout.name(key, "ownership"))
        return current_ownership is not None and current_ownership.etag == parts.etag

    def _row(self, key: str, parts: Parts) -> Lease | Malformed | None:
        return parse_row(key, lambda: self._layout.lease(key, parts))

    def _lease(self, key: str, parts: Parts) -> Lease | None:
        row = self._row(key, parts)
        return require_valid_lease(row) if row else None

    def _outcome(self, key: str, parts: Parts | None) -> Outcome:
        """Return `Done` with the lease as written, or `Lost` with the stored lease if `parts` is None."""
        if parts is None:
            return Lost(key, self._lease(key, self._read_one(key)))
        with self._cache_lock:
            self._cached_parts[key] = parts
        lease = self._lease(key, parts)
        return Done(lease) if lease else Lost(key, None)


class ObjectCells:
    """The rows of layout `sessions`. Each row is an object below a prefix."""

    def __init__(self, objects: Objects, folder: str, *, page_leases: int = PAGE_LEASES) -> None:
        self.page_leases = page_leases
        self._objects, self._folder_prefix = objects, f"{folder.strip('/')}/".lstrip("/")
        self._pool = ThreadPoolExecutor(_CONCURRENT_READS, thread_name_prefix="leasehold-sessions")

    def list(self, *prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:  # noqa: ARG002  each is consistent
        """Return the rows whose names begin with one of these prefixes."""
        return tuple(
            self._without_folder(row) for prefix in prefixes for row in self._objects.list(self._folder_prefix + prefix)
        )

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:  # noqa: ARG002  never stale
        """Read these rows concurrently, and leave out those that do not exist."""
        map_function = self._pool.map if len(names) > 1 else map  # a single read needs no thread
        rows = map_function(self._objects.get, [self._folder_prefix + name for name in names])
        return {name: self._without_folder(row) for name, row in zip(names, rows, strict=True) if row is not None}

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create a row if the name is free."""
        return self._objects.put_if_absent(self._folder_prefix + name, fields)

    def put_if_match(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace a row if it still has this version."""
        return self._objects.put_if_match(self._folder_prefix + name, fields, version)

    def delete(self, name: str, version: str) -> bool:
        """Delete a row if it still has this version."""
        return self._objects.delete(self._folder_prefix + name, version)

    def prove(self) -> None:
        """Check that the service honors conditions. Raises StoreError if it does not."""
        check_conditions_honored(self._objects, self._folder_prefix)

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown()
        self._objects.close()

    def _without_folder(self, stored_object: StoredObject) -> StoredObject:
        return StoredObject(
            stored_object.name.removeprefix(self._folder_prefix),
            stored_object.etag,
            stored_object.fields,
            stored_object.age,
        )
