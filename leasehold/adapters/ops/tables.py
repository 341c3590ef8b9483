"""Which lease tables are at a place: each with the URL that opens it, its layout, whose it is, how old, how alive.

Rule 1: nothing is written, and what a service does not tell is None, never a guess. Rule 2: a table that cannot be
read is told with the reason, and stops no other.

A place is what stands before the name of a table: the account and region of DynamoDB, a database, a bucket or a
container, or a part of one; a URL that names a table tells of that one. Finding them costs a look at their names; each
is then listed once, as `leasehold leases` does.
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
    """A lease table, as far as it can be told.

    url        opens it
    layout     how a lease is written there; "sessions" in whatever store it is
    created, written  seconds since 1970, by the service's clock
    protected  whether the service refuses to delete it; recoverable: whether an earlier moment of it can be had back
    swap       signs that leases go, or went, to or from another table
    why        what keeps it from being read; "" where nothing does
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
    """Every lease table at this place, sorted by URL. Raises ValueError, StoreError."""
    scheme, place, options = store_address(url)
    for found in sorted(_FINDERS[scheme](place, options), key=lambda each: each.url):
        try:
            with closing(open_store(found.url, create=False, write=False)) as store:
                listing = store.list()
                leases = [lease for lease in listing.leases if lease.key != CONTROL]
                # A store that keeps the age of each row says by it when one was written.
                ages = [lease.idle for lease in leases if lease.owner and lease.idle > 0]
                written = time.time() - min(ages) if ages and found.written is None else found.written
                yield evolve(
                    found,
                    layout="sessions" if store.capabilities.groups_writes else found.layout,
                    leases=len(leases),
                    ended=sum(lease.ended for lease in leases),
                    malformed=len(listing.malformed),
                    # A marked row's owner goes on by the other table.
                    owners=tuple(
                        sorted({each.owner for each in leases if each.owner and not (each.ended or marked(each))})
                    ),
                    streams=tuple(sorted({lease.stream for lease in leases if lease.stream})),
                    written=written,
                    swap=signs_of_swap(listing.leases),
                )
        except (StoreError, ValueError) as fault:
            yield evolve(found, why=str(fault))


def _url(scheme: str, place: str, options: Mapping[str, str]) -> str:
    told = urlencode({name: value for name, value in options.items() if value}, safe="/:$")
    return f"{scheme}://{quote(place, safe='/:[],$')}" + (f"?{told}" if told else "")


def _file(scheme: str, layout: str) -> Callable[[str, Mapping[str, str]], Iterator[ListedTable]]:
    def find(place: str, options: Mapping[str, str]) -> Iterator[ListedTable]:
        try:
            # The newest of the file and its log: SQLite writes there first.
            written = max(os.stat(f"{place}{end}").st_mtime for end in ("", "-wal") if os.path.exists(f"{place}{end}"))  # noqa: PTH116, PTH110
        except (OSError, ValueError):
            raise StoreError(f"there is no file {place}") from None
        yield ListedTable(_url(scheme, place, options), layout, written=written)

    return find


def _dynamodb(place: str, options: Mapping[str, str]) -> Iterator[ListedTable]:
    tables = Scheme("leasehold.stores.dynamodb.tables", extra="aws").load("store", StoreError)
    where = {name: value for name, value in options.items() if name not in {"prefix", "protect"}}
    for each in tables.found(place, options):
        yield ListedTable(
            _url("dynamodb", each.table, {"prefix": each.prefix, **where}),
            "KCL's, many applications" if each.prefix else "KCL's",
            created=each.created,
            protected=each.protected,
            recoverable=each.recoverable,
        )


def _postgres(place: str, options: Mapping[str, str]) -> Iterator[ListedTable]:
    module = Scheme("leasehold.stores.postgres", extra="postgres").load("store", StoreError)
    for table, written in module.tables_of(module.place_of(place, options), all_of_them="table" not in options):
        yield ListedTable(_url("postgres", place, {**options, "table": table}), "columns", written=written)


def _objects(scheme: str, client: Callable[[str, Mapping[str, str]], tuple[Any, str, str]]) -> Callable[..., Any]:
    def find(place: str, options: Mapping[str, str]) -> Iterator[ListedTable]:
        objects, root, above = client(place, options)
        with closing(objects):
            # Of S3 names alone are listed: a bucket may hold anything.
            named = getattr(objects, "names", None)
            names = named(above) if named else (each.name for each in objects.list(above))
            parts = filter(None, map(_PARTS.fullmatch, names))
            folders = {each["folder"] or "" for each in parts}
        kept = {name: value for name, value in options.items() if name not in {"prefix", "eventhub", "group"}}
        for folder in folders:
            hub = folder.split("/")
            if scheme == "azblob" and len(hub) == 3 and "." in hub[0]:  # noqa: PLR2004  namespace, hub, group
                named = {"eventhub": f"{hub[0]}/{hub[1]}", "group": hub[2], **kept}
                yield ListedTable(_url(scheme, root, named), "the Azure SDKs'")
            elif scheme == "azblob":
                yield ListedTable(_url(scheme, root, {"prefix": folder, **kept}), "objects")
            else:
                yield ListedTable(_url(scheme, f"{root}/{folder}".rstrip("/"), kept), "objects")

    return find


_PARTS = re.compile(r"(?:(?P<folder>.*)/)?(?:ownership|checkpoint|lease)/[^/]+")
"""Objects that every table has: a checkpoint in the usual layout, a lease in layout `sessions`."""


def _s3(place: str, options: Mapping[str, str]) -> tuple[Any, str, str]:
    module = Scheme("leasehold.stores.objects.s3", extra="aws").load("store", StoreError)
    bucket, _, above = place.partition("/")
    if not bucket:
        raise ValueError("store URL: s3:// wants a bucket")
    session = Scheme("leasehold.stores.aws", extra="aws").load("store", StoreError).session_of(options)
    at = endpoint_of(options.get("endpoint"))
    return module.S3Objects(bucket, region=options.get("region"), endpoint=at, session=session), bucket, above


def _gcs(place: str, options: Mapping[str, str]) -> tuple[Any, str, str]:
    module = Scheme("leasehold.stores.objects.gcs", extra="gcs").load("store", StoreError)
    bucket, above = module.bucket_of(place)
    at = endpoint_of(options.get("endpoint"))
    return module.GcsObjects(bucket, project=options.get("project"), endpoint=at), bucket, above


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
