"""Leases in an Azure Blob container: empty block blobs whose metadata holds everything.

A blob is created by Put Blob under If-None-Match: *, never by Set Metadata, whose condition the service does
not keep. Every later write is Set Metadata under If-Match, which leaves no soft-deleted copies behind; a blob
that does not change is not rewritten, and only `delete` deletes.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobClient, BlobProperties, ContainerClient
from requests import Session

from leasehold.balancer.model import LATEST, TRIM_HORIZON, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects.event_hubs_layout import EventHubLayout, full_namespace
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.http_adapter import DeadlineAdapter
from leasehold.stores.objects.store import EtagStore, Layout
from leasehold.stores.printable import said
from leasehold.stores.protocol import Patience
from leasehold.stores.requests import ObjectFields, SkewWarning, Stored, age, bare, unanswered
from leasehold.stores.urls import date_of, endpoint_of, without_credentials

CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
"""The environment variable that holds the account's key, where one is used."""

_STARTS: Mapping[str, Position] = {"TRIM_HORIZON": TRIM_HORIZON, "LATEST": LATEST}
_REFUSED = frozenset({"BlobAlreadyExists", "BlobNotFound", "ConditionNotMet", "TargetConditionNotMet"})
_UNSIGNED = frozenset({401, 403})
_SIGN_IN = f"check the key in {CONNECTION_STRING}, or give the identity the role 'Storage Blob Data Contributor'"


def _check_echo(response: Any) -> None:  # noqa: ANN401  the pipeline's response has no public type
    """Raises LookupError if this is the response to another request: the service repeats the id of each request."""
    name = "x-ms-client-request-id"
    echoed = response.http_response.headers.get(name)
    if echoed is not None and echoed != response.http_request.headers.get(name):
        raise LookupError("it is the response to another request")


_ONCE: Mapping[str, Any] = {"retry_total": 0, "raw_response_hook": _check_echo}
"""A write sent twice could be refused by its own first try (rule 3 of `objects`)."""

_CLIENT: Mapping[str, Any] = {"initial_backoff": 0.2, "increment_base": 2, "random_jitter_range": 1}
PAGE_LEASES = 20
"""All metadata of a blob have 8 KB, and notes of a lease some 300 bytes."""

PATIENCE = Patience(connect_seconds=5, read_seconds=10, attempts=3)
_CONNECTIONS = 64
"""Kept open: a runner claims with twenty threads, and those beyond the SDK's ten would connect for each request."""


def open_url(place: str, options: Mapping[str, str], *, create: bool, request_seconds: float | None) -> EtagStore:
    """The store at `account/container`.

    With `eventhub=<namespace>/<hub>` and `group` (default $Default) the blobs are the Azure SDKs'
    own, and `start` says where a partition begins that an official worker has owned without ever
    checkpointing it; else leases of any source stand below `prefix`. The account's key comes from the
    connection string in the environment; without one, the identity of this machine or user is
    asked for. Raises ValueError, StoreError.
    """
    layout = _layout(options)
    endpoint = endpoint_of(options.get("endpoint"))
    client = open_container(place, endpoint, create=create, request_seconds=request_seconds)
    return EtagStore(BlobObjects(client), layout, page_leases=PAGE_LEASES)


def open_container(
    place: str, endpoint: str | None, *, create: bool, request_seconds: float | None = None
) -> ContainerClient:
    """A client of `account/container`, which is made if need be. Raises ValueError, StoreError."""
    client = client_of(place, endpoint, request_seconds)
    _ensure(client, create=create)
    return client


def client_of(place: str, endpoint: str | None, request_seconds: float | None = None) -> ContainerClient:
    """A client of `account/container`; nothing is asked of the service yet. Raises ValueError, StoreError."""
    account, slash, container = place.partition("/")
    if not (account and slash and container) or "/" in container:
        raise ValueError("store URL: azblob:// wants account/container")
    patience, session = PATIENCE.within(request_seconds), Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, DeadlineAdapter(pool_maxsize=_CONNECTIONS))
    transport = RequestsTransport(
        session=session, connection_timeout=patience.connect_seconds, read_timeout=patience.read_seconds
    )
    options: dict[str, Any] = {**_CLIENT, "retry_total": patience.attempts - 1, "transport": transport}
    # Files and pipes end with a line end, which would become part of the host's name or of the signature.
    secret = os.environ.get(CONNECTION_STRING, "").strip()
    if not secret.isprintable():
        raise StoreError(f"{CONNECTION_STRING}: it has a line end or another control character in it")
    if not secret:
        url = endpoint or f"https://{account}.blob.core.windows.net"
        if not url.startswith("https://"):
            raise ValueError(
                f"store URL: option 'endpoint' wants https:// for an identity; else set {CONNECTION_STRING}"
            )
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415  slow to load, and not needed beside a key

        return ContainerClient(url, container, credential=DefaultAzureCredential(), **options)
    if endpoint:
        raise ValueError(f"store URL: option 'endpoint' goes with an identity; {CONNECTION_STRING} names its own")
    try:
        client = ContainerClient.from_connection_string(secret, container, **options)
    except ValueError as bad:
        raise StoreError(f"{CONNECTION_STRING}: it is no storage connection string") from bad
    without_credentials(client.url.partition("?")[0])
    if client.account_name != account:
        raise ValueError(f"store URL: {CONNECTION_STRING} is for account {client.account_name!r}, not {account!r}")
    return client


def _layout(options: Mapping[str, str]) -> Layout:
    if "eventhub" not in options:
        for option in ("group", "start"):
            if option in options:
                raise ValueError(f"store URL: option {option!r} goes with eventhub=<namespace>/<hub>")
        return ObjectLayout(options.get("prefix", ""))
    if "layout" in options:
        raise ValueError("store URL: option 'layout' goes with leases of our own, not with eventhub=")
    start = options.get("start", "TRIM_HORIZON")
    if start not in _STARTS:
        raise ValueError(f"store URL: option 'start' wants one of {', '.join(_STARTS)}")
    return EventHubLayout(*one_hub(options), start=_STARTS[start])


def one_hub(options: Mapping[str, str]) -> tuple[str, str, str]:
    """Namespace, hub and group of a URL's options; `namespace` is short for its full name. Raises ValueError."""
    namespace, slash, hub = options["eventhub"].partition("/")
    if not (namespace and slash and hub) or "/" in hub or "prefix" in options:
        raise ValueError(
            "store URL: option 'eventhub' wants <fully qualified namespace>/<hub>, and no prefix beside it"
        )
    return full_namespace(namespace), hub, options.get("group", "$Default")


def _ensure(client: ContainerClient, *, create: bool) -> None:
    """Asked by a listing: an identity that may use a container need not be allowed to describe it."""
    with asking(client):
        try:
            next(iter(client.list_blobs(results_per_page=1)), None)
        except ResourceNotFoundError:
            if not create:
                raise
            try:
                client.create_container()
            except ResourceExistsError:
                return  # somebody else was faster


class BlobObjects:
    """The blobs of one container."""

    def __init__(self, container: ContainerClient, skew: SkewWarning | None = None) -> None:
        self._container = container
        self._skew = skew or SkewWarning()

    def list(self, prefix: str) -> tuple[Stored, ...]:
        """All pages; soft-deleted blobs, old versions and snapshots are not asked for."""
        dated = _Dated(self._skew)
        with asking(self._container):
            blobs = self._container.list_blobs(
                name_starts_with=prefix, include=["metadata"], raw_response_hook=dated.heard
            )
            # A page's date is read with its first blob, before the next page is fetched.
            found = tuple(_stored(blob, dated.now) for blob in blobs)
            if not all(each.name.startswith(prefix) for each in found):
                raise LookupError("it lists blobs that were not asked for")
            return found

    def get(self, name: str) -> Stored | None:
        """The metadata of the blob of this name."""
        dated = _Dated(self._skew)
        with asking(self._container):
            try:
                blob = self._blob(name).get_blob_properties(raw_response_hook=dated.heard)
            except ResourceNotFoundError as absent:
                if _code(absent) == "BlobNotFound":
                    return None
                raise
            return _stored(blob, dated.now)

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Put Blob, which alone keeps If-None-Match: * everywhere."""
        return self._put(lambda: self._blob(name).upload_blob(b"", metadata=dict(fields), overwrite=False, **_ONCE))

    def put_over(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        """Set Metadata under If-Match."""
        match: Mapping[str, Any] = {"etag": etag, "match_condition": MatchConditions.IfNotModified}
        return self._put(lambda: self._blob(name).set_blob_metadata(dict(fields), **match, **_ONCE))

    def delete(self, name: str, etag: str) -> bool:
        """Delete Blob under If-Match; of an absent blob some services say that the condition failed."""
        match: Mapping[str, Any] = {"etag": etag, "match_condition": MatchConditions.IfNotModified}
        with asking(self._container):
            try:
                self._blob(name).delete_blob(**match, **_ONCE)
            except HttpResponseError as refused:
                if _code(refused) not in _REFUSED:
                    raise
            else:
                return True
        return self.get(name) is None

    def close(self) -> None:
        """Close all connections."""
        self._container.close()

    def _blob(self, name: str) -> BlobClient:
        return self._container.get_blob_client(name)

    def _put(self, write: Callable[[], Mapping[str, Any]]) -> str | None:
        with asking(self._container):
            try:
                return bare(str(write()["etag"]))
            except HttpResponseError as refused:
                if _code(refused) in _REFUSED:
                    return None
                raise


class _Dated:
    """The service's own clock, from the Date header of its last response."""

    def __init__(self, skew: SkewWarning) -> None:
        self._skew = skew
        self.now = 0.0

    def heard(self, response: Any) -> None:  # noqa: ANN401  the pipeline's response has no public type
        _check_echo(response)
        now = date_of(response.http_response.headers.get("Date"))
        if now is not None:
            self.now = now
            self._skew.saw(now)


def _stored(blob: BlobProperties, service_now: float) -> Stored:
    # Metadata names are not case-sensitive; a listing says None for an empty value.
    fields = {field.lower(): text or "" for field, text in (blob.metadata or {}).items()}
    return Stored(blob.name, bare(blob.etag), fields, age(service_now, blob.last_modified.timestamp()))


def _code(error: HttpResponseError) -> str:
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code))


@contextmanager
def asking(container: ContainerClient) -> Iterator[None]:
    """Turns the SDK's errors into ours; the account's key, or a signature, is in none of them."""
    name = container.container_name
    try:
        yield
    except ClientAuthenticationError as refused:
        raise StoreError(f"container {name!r}: the service refused the credentials; {_SIGN_IN}") from refused
    except HttpResponseError as error:
        status = error.status_code or 0
        if unanswered(status):
            raise OutcomeUnknown(f"container {name!r}: no usable answer (HTTP {status})") from error
        if status in _UNSIGNED:
            raise StoreError(f"container {name!r}: the service refused: {_code(error)}; {_SIGN_IN}") from error
        if _code(error) == "ContainerNotFound":
            raise StoreError(f"container {name!r}: it does not exist; create it, or allow it to be created") from error
        raise StoreError(f"container {name!r}: the service refused: {_code(error)} (HTTP {status})") from error
    except AzureError as error:
        # Without its cause: that repeats the whole address, signature included where the account is opened by one.
        why = type(error).__name__
        raise OutcomeUnknown(f"container {name!r}: the service cannot be reached ({why})") from None
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as odd:
        # An answer of another shape: a proxy's page, or a service's bad moment.
        raise OutcomeUnknown(f"container {name!r}: an answer cannot be read: {said(odd)}") from odd
