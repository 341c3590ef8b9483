"""Finds the lease tables at a place, with the URL that opens each, and its layout, owners, age and last write.

Rule 1: Nothing is written. Whatever a service does not report is None, never a guess.
Rule 2: A table that cannot be read is returned with the reason, and the others are still read.

A place is what contains tables: an account and region of DynamoDB, a database, a bucket or a container, or a part of
one. A URL that names a table is the place of that table alone. Finding the tables takes a listing of their names; then
each table is listed once, as `leasehold leases` does.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlencode

from attrs import evolve, field, frozen

from leasehold.errors import StoreError
from leasehold.stores.swap import CONTROL, marked, signs_of_swap
from leasehold.stores.urls import Scheme, endpoint_of, open_store, store_address


@frozen
class ListedTable:
    """A lease table, with what is known about it.

    Attributes:
        url: The URL that opens it.
        layout: How leases are written there: "sessions" in any store, or a name for the store's usual layout.
        leases: The number of leases; None, as the other figures, if the table cannot be read.
        ended: The number of finished leases.
        malformed: The number of rows that cannot be read as leases.
        owners: The owners of unfinished leases.
        streams: The streams that leases name.
        created: When it was created, in seconds since 1970 by the service's clock.
        written: When it was last written, in seconds since 1970 by the service's clock.
        protected: Whether the service refuses to delete it.
        recoverable: Whether point-in-time recovery is enabled.
        swap: Signs that leases are moving, or have moved, to or from another table.
        why: The reason why it cannot be read, or "".
    """

    url: str
    layout: str
    leases: int | None = None
    ended: int | None = None
    malformed: int | None = None
    owners: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    created: float | None = field(default=None, kw_only=True)
    written: float | None = field(default=None, kw_only=True)
    protected: bool | None = field(default=None, kw_only=True)
    recoverable: bool | None = field(default=None, kw_only=True)
    swap: tuple[str, ...] = field(default=(), kw_only=True)
    why: str = field(default="", kw_only=True)


def tables_at(url: str) -> Iterator[ListedTable]:
    """Yield every lease table at this place, sorted by URL.

    Raises:
        ValueError: The URL cannot be used.
        StoreError: The place cannot be read.
    """
    scheme, place, options = store_address(url)
    for table in sorted(_FINDERS[scheme](place, options), key=lambda each: each.url):
        try:
            with closing(open_store(table.url, create=False, write=False)) as store:
                listing = store.list()
                leases = [lease for lease in listing.leases if lease.key != CONTROL]
                # Some stores report the age of each row, which gives the time of the last write.
                ages = [lease.idle for lease in leases if lease.owner and lease.idle > 0]
                written = time.time() - min(ages) if ages and table.written is None else table.written
                yield evolve(
                    table,
                    layout="sessions" if store.capabilities.groups_writes else table.layout,
                    leases=len(leases),
                    ended=sum(lease.ended for lease in leases),
                    malformed=len(listing.malformed),
                    # The owner of a marked row continues in the other table.
                    owners=tuple(
                        sorted({lease.owner for lease in leases if lease.owner and not (lease.ended or marked(lease))})
                    ),
                    streams=tuple(sorted({lease.stream for lease in leases if lease.stream})),
                    written=written,
                    swap=signs_of_swap(listing.leases),
                )
        except (StoreError, ValueError) as fault:
            yield evolve(table, why=str(fault))


def _url(scheme: str, place: str, options: Mapping[str, str]) -> str:
    query = urlencode({name: value for name, value in options.items() if value}, safe="/:$")
    return f"{scheme}://{quote(place, safe='/:[],$')}" + (f"?{query}" if query else "")


def _file(scheme: str, layout: str) -> Callable[[str, Mapping[str, str]], Iterator[ListedTable]]:
    def find(place: str, options: Mapping[str, str]) -> Iterator[ListedTable]:
        try:
            # The newer of the file and its write-ahead log, because SQLite writes to the log first.
            written = max(os.stat(f"{place}{end}").st_mtime for end in ("", "-wal") if os.path.exists(f"{place}{end}"))  # noqa: PTH116, PTH110
        except (OSError, ValueError):
            raise StoreError(f"there is no file {place}") from None
        yield ListedTable(_url(scheme, place, options), layout, written=written)

    return find


def _dynamodb(place: str, options: Mapping[str, str]) -> Iterator[ListedTable]:
    tables = Scheme("leasehold.stores.dynamodb.tables", extra="aws").load("store", StoreError)
    where = {name: value for name, value in options.items() if name not in {"prefix", "protect"}}
    for table in tables.found(place, options):
        yield ListedTable(
            _url("dynamodb", table.table, {"prefix": table.prefix, **where}),
            "KCL's, many applications" if table.prefix else "KCL's",
            created=table.created,
            protected=table.protected,
            recoverable=table.recoverable,
        )


def _postgres(place: str, options: Mapping[str, str]) -> Iterator[ListedTable]:
    module = Scheme("leasehold.stores.postgres", extra="postgres").load("store", StoreError)
    for table, written in module.tables_of(module.place_of(place, options), all_of_them="table" not in options):
        yield ListedTable(_url("postgres", place, {**options, "table": table}), "columns", written=written)


def _objects(scheme: str, client: Callable[[str, Mapping[str, str]], tuple[Any, str, str]]) -> Callable[..., Any]:
    def find(place: str, options: Mapping[str, str]) -> Iterator[ListedTable]:
        objects, root, above = client(place, options)
        with closing(objects):
            # In S3, list names only, without reading objects: the bucket may contain anything.
            named = getattr(objects, "names", None)
            names = named(above) if named else (item.name for item in objects.list(above))
            parts = filter(None, map(_PARTS.fullmatch, names))
            folders = {match["folder"] or "" for match in parts}
        rest = {name: value for name, value in options.items() if name not in {"prefix", "eventhub", "group"}}
        for folder in folders:
            hub = folder.split("/")
            if scheme == "azblob" and len(hub) == 3 and "." in hub[0]:  # noqa: PLR2004  namespace, hub, group
                named = {"eventhub": f"{hub[0]}/{hub[1]}", "group": hub[2], **rest}
                yield ListedTable(_url(scheme, root, named), "the Azure SDKs'")
            elif scheme == "azblob":
                yield ListedTable(_url(scheme, root, {"prefix": folder, **rest}), "objects")
            else:
                yield ListedTable(_url(scheme, f"{root}/{folder}".rstrip("/"), rest), "objects")

    return find


_PARTS = re.compile(r"(?:(?P<folder>.*)/)?(?:ownership|checkpoint|lease)/[^/]+")
"""Matches objects that every table has: a checkpoint in the usual layout, a lease in the layout `sessions`."""


def _s3(place: str, options: Mapping[str, str]) -> tuple[Any, str, str]:
    module = Scheme("leasehold.stores.objects.s3", extra="aws").load("store", StoreError)
    bucket, _, above = place.partition("/")
    if not bucket:
        raise ValueError("store URL: s3:// wants a bucket")
    session = Scheme("leasehold.stores.aws", extra="aws").load("store", StoreError).session_of(options)
    endpoint = endpoint_of(options.get("endpoint"))
    return module.S3Objects(bucket, region=options.get("region"), endpoint=endpoint, session=session), bucket, above


def _gcs(place: str, options: Mapping[str, str]) -> tuple[Any, str, str]:
    module = Scheme("leasehold.stores.objects.gcs", extra="gcs").load("store", StoreError)
    bucket, above = module.bucket_of(place)
    endpoint = endpoint_of(options.get("endpoint"))
    return module.GcsObjects(bucket, project=options.get("project"), endpoint=endpoint), bucket, above


def _azblob(place: str, options: Mapping[str, str]) -> tuple[Any, str, str]:
    module = Scheme("leasehold.stores.objects.blob", extra="azure").load("store", StoreError)
    client = module.client_of(place, endpoint_of(options.get("endpoint")))
    above = "/".join(filter(None, (options.get("eventhub", options.get("prefix", "")), options.get("group", ""))))
    return module.BlobObjects(client), place, above.lower() if "eventhub" in options else above


_FINDERS: Mapping[str, Callable[[str, Mapping[str, str]], Iterator[ListedTable]]] = {
    "memory": lambda place, options: iter([ListedTable(_url("memory", place, options), "memory of this process")]),
    "file": _file("file", "lines of JSON"),
    "sqlite": _file("sqlite", "columns"),
    "dynamodb": _dynamodb,
    "postgres": _postgres,
    "s3": _objects("s3", _s3),
    "gcs": _objects("gcs", _gcs),
    "azblob": _objects("azblob", _azblob),
}
