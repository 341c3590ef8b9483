"""Stores leases in an Azure Blob container, in the metadata of empty block blobs.

Blobs are created by Put Blob with `If-None-Match: *`, and never by Set Metadata, for which the service does not honor
this condition. Every later write is a Set Metadata with `If-Match`, which leaves no soft-deleted copies. A blob is not
rewritten if its content does not change, and only the method `delete` deletes blobs.
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
from leasehold.stores.objects.event_hubs_layout import EventHubLayout, qualified_namespace
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.http_adapter import DeadlineAdapter
from leasehold.stores.objects.store import EtagStore, Layout
from leasehold.stores.printable import error_summary
from leasehold.stores.protocol import Timeouts
from leasehold.stores.requests import (
    ObjectFields,
    SkewWarning,
    StoredObject,
    is_outcome_unknown,
    object_age_seconds,
    unquote_etag,
)
from leasehold.stores.urls import check_endpoint, parse_date_header, reject_credentials

CONNECTION_STRING_VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"
"""The environment variable that contains the connection string, which includes the account's key."""

_START_POSITIONS: Mapping[str, Position] = {"TRIM_HORIZON": TRIM_HORIZON, "LATEST": LATEST}
_REJECTION_CODES = frozenset({"BlobAlreadyExists", "BlobNotFound", "ConditionNotMet", "TargetConditionNotMet"})
_UNAUTHORIZED_STATUSES = frozenset({401, 403})
_CREDENTIALS_ADVICE = (
    f"check the key in {CONNECTION_STRING_VARIABLE}, or give the identity the role 'Storage Blob Data Contributor'"
)


def _check_echo(response: Any) -> None:  # noqa: ANN401  the pipeline's response has no public type
    """Raise LookupError if this is the response to another request. The service echoes the id of each request."""
    header = "x-ms-client-request-id"
    echoed_id = response.http_response.headers.get(header)
    if echoed_id is not None and echoed_id != response.http_request.headers.get(header):
        raise LookupError("it is the response to another request")


_SEND_ONCE_OPTIONS: Mapping[str, Any] = {"retry_total": 0, "raw_response_hook": _check_echo}
"""The options of a write. A write must not be sent twice, because its first attempt could make the second fail."""

_CLIENT_RETRY_OPTIONS: Mapping[str, Any] = {"initial_backoff": 0.2, "increment_base": 2, "random_jitter_range": 1}
PAGE_LEASES = 20
"""The maximum number of leases in a session row of layout `sessions`.

The metadata of a blob is limited to 8 KB, and the annotations of a lease take up about 300 bytes.
"""

TIMEOUTS = Timeouts(connect_seconds=5, read_seconds=10, attempts=3)
_POOLED_CONNECTIONS = 64
"""The number of connections to keep open.

A worker claims leases with twenty threads. By default, the SDK keeps only ten connections open, so ten of the threads
would have to connect for each request.
"""


def open_url(location: str, options: Mapping[str, str], *, create: bool, request_seconds: float | None) -> EtagStore:
    """Open the store at `account/container`.

    The account's key is taken from the connection string in the environment. If there is no connection string, the
    identity of this machine or user is used.

    Args:
        location: The account and the container.
        options: If `eventhub=<namespace>/<hub>` and perhaps `group` (default $Default) are set, the blobs are in the
            layout of the Azure SDKs. In this case, `start` is the position at which reading starts if a partition had
            an owner but has no checkpoint. Otherwise, leases of any source are stored below `prefix`.
        create: Whether to create the container if it does not exist.
        request_seconds: The time limit for a request with all its retries.

    Raises:
        ValueError: If the URL is invalid.
        StoreError: If the store cannot be used.
    """
    layout = _parse_layout(options)
    endpoint = check_endpoint(options.get("endpoint"))
    client = open_container(location, endpoint, create=create, request_seconds=request_seconds)
    return EtagStore(BlobObjects(client), layout, page_leases=PAGE_LEASES)


def open_container(
    location: str, endpoint: str | None, *, create: bool, request_seconds: float | None = None
) -> ContainerClient:
    """Return a client of `account/container`.

    The container is created if necessary. Raises ValueError or StoreError.
    """
    client = create_client(location, endpoint, request_seconds)
    _ensure_container(client, create=create)
    return client


def create_client(location: str, endpoint: str | None, request_seconds: float | None = None) -> ContainerClient:
    """Return a client of `account/container`. No request is sent. Raises ValueError or StoreError."""
    account, slash, container = location.partition("/")
    if not (account and slash and container) or "/" in container:
        raise ValueError("store URL: azblob:// wants account/container")
    timeouts, session = TIMEOUTS.within(request_seconds), Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, DeadlineAdapter(pool_maxsize=_POOLED_CONNECTIONS))
    transport = RequestsTransport(
        session=session, connection_timeout=timeouts.connect_seconds, read_timeout=timeouts.read_seconds
    )
    options: dict[str, Any] = {**_CLIENT_RETRY_OPTIONS, "retry_total": timeouts.attempts - 1, "transport": transport}
    # A variable that was set from a file may end with a newline, which would become part of the host name or the
    # signature.
    connection_string = os.environ.get(CONNECTION_STRING_VARIABLE, "").strip()
    if not connection_string.isprintable():
        raise StoreError(f"{CONNECTION_STRING_VARIABLE}: it contains a line break or another control character")
    if not connection_string:
        url = endpoint or f"https://{account}.blob.core.windows.net"
        if not url.startswith("https://"):
            raise ValueError(
                "store URL: option 'endpoint' must be https:// for an identity; otherwise, set "
                f"{CONNECTION_STRING_VARIABLE}"
            )
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415  slow to load, and not needed with a key

        return ContainerClient(url, container, credential=DefaultAzureCredential(), **options)
    if endpoint:
        raise ValueError(
            f"store URL: option 'endpoint' requires an identity; {CONNECTION_STRING_VARIABLE} contains its own endpoint"
        )
    try:
        client = ContainerClient.from_connection_string(connection_string, container, **options)
    except ValueError as error:
        raise StoreError(f"{CONNECTION_STRING_VARIABLE}: it is not a storage connection string") from error
    reject_credentials(client.url.partition("?")[0])
    if client.account_name != account:
        raise ValueError(
            f"store URL: {CONNECTION_STRING_VARIABLE} is for account {client.account_name!r}, not {account!r}"
        )
    return client


def _parse_layout(options: Mapping[str, str]) -> Layout:
    if "eventhub" not in options:
        for option in ("group", "start"):
            if option in options:
                raise ValueError(f"store URL: option {option!r} requires eventhub=<namespace>/<hub>")
        return ObjectLayout(options.get("prefix", ""))
    if "layout" in options:
        raise ValueError("store URL: option 'layout' cannot be combined with option 'eventhub'")
    start = options.get("start", "TRIM_HORIZON")
    if start not in _START_POSITIONS:
        raise ValueError(f"store URL: option 'start' must be one of {', '.join(_START_POSITIONS)}")
    return EventHubLayout(*parse_hub_options(options), start=_START_POSITIONS[start])


def parse_hub_options(options: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the full namespace, the hub and the group from the options of a URL. Raises ValueError."""
    namespace, slash, hub = options["eventhub"].partition("/")
    if not (namespace and slash and hub) or "/" in hub or "prefix" in options:
        raise ValueError(
            "store URL: option 'eventhub' must be <fully qualified namespace>/<hub>, without option 'prefix'"
        )
    return qualified_namespace(namespace), hub, options.get("group", "$Default")


def _ensure_container(client: ContainerClient, *, create: bool) -> None:
    """Check that the container exists, or create it.

    The check lists the container's blobs, because an identity that may use a container might not be allowed to read the
    container's properties.
    """
    with translate_errors(client):
        try:
            next(iter(client.list_blobs(results_per_page=1)), None)
        except ResourceNotFoundError:
            if not create:
                raise
            try:
                client.create_container()
            except ResourceExistsError:
                return  # another worker has created it


class BlobObjects:
    """Implements `Objects` by the blobs in one container."""

    def __init__(self, container: ContainerClient, skew: SkewWarning | None = None) -> None:
        self._container = container
        self._skew = skew or SkewWarning()

    def list(self, prefix: str) -> tuple[StoredObject, ...]:
        """Return all blobs whose names begin with `prefix`, without soft-deleted ones, old versions and snapshots."""
        clock = _ServerClock(self._skew)
        with translate_errors(self._container):
            blobs = self._container.list_blobs(
                name_starts_with=prefix, include=["metadata"], raw_response_hook=clock.observe
            )
            # While the blobs of a page are iterated, `clock.now` is the date of that page's response. The next page is
            # fetched only after the last blob of the current page.
            objects = tuple(_parse_blob(blob, clock.now) for blob in blobs)
            if not all(stored_object.name.startswith(prefix) for stored_object in objects):
                raise LookupError("it lists blobs that were not requested")
            return objects

    def get(self, name: str) -> StoredObject | None:
        """Return the blob with this name."""
        clock = _ServerClock(self._skew)
        with translate_errors(self._container):
            try:
                blob = self._blob_client(name).get_blob_properties(raw_response_hook=clock.observe)
            except ResourceNotFoundError as error:
                if _error_code(error) == "BlobNotFound":
                    return None
                raise
            return _parse_blob(blob, clock.now)

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create a blob by Put Blob, which is the only operation that honors If-None-Match: * on every service."""
        return self._put(
            lambda: self._blob_client(name).upload_blob(
                b"", metadata=dict(fields), overwrite=False, **_SEND_ONCE_OPTIONS
            )
        )

    def put_if_match(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        """Replace the metadata of a blob by Set Metadata with If-Match."""
        condition: Mapping[str, Any] = {"etag": etag, "match_condition": MatchConditions.IfNotModified}
        return self._put(
            lambda: self._blob_client(name).set_blob_metadata(dict(fields), **condition, **_SEND_ONCE_OPTIONS)
        )

    def delete(self, name: str, etag: str) -> bool:
        """Delete a blob by Delete Blob with If-Match.

        If the blob does not exist, some services respond that the condition failed. Therefore, the blob is read after
        such a response.
        """
        condition: Mapping[str, Any] = {"etag": etag, "match_condition": MatchConditions.IfNotModified}
        with translate_errors(self._container):
            try:
                self._blob_client(name).delete_blob(**condition, **_SEND_ONCE_OPTIONS)
            except HttpResponseError as error:
                if _error_code(error) not in _REJECTION_CODES:
                    raise
            else:
                return True
        return self.get(name) is None

    def close(self) -> None:
        """Close all connections."""
        self._container.close()

    def _blob_client(self, name: str) -> BlobClient:
        return self._container.get_blob_client(name)

    def _put(self, write: Callable[[], Mapping[str, Any]]) -> str | None:
        with translate_errors(self._container):
            try:
                return unquote_etag(str(write()["etag"]))
            except HttpResponseError as error:
                if _error_code(error) in _REJECTION_CODES:
                    return None
                raise


class _ServerClock:
    """Tracks the service's clock by the Date header of its last response."""

    def __init__(self, skew: SkewWarning) -> None:
        self._skew = skew
        self.now = 0.0

    def observe(self, response: Any) -> None:  # noqa: ANN401  the pipeline's response has no public type
        _check_echo(response)
        response_time = parse_date_header(response.http_response.headers.get("Date"))
        if response_time is not None:
            self.now = response_time
            self._skew.observe(response_time)


def _parse_blob(blob: BlobProperties, service_now: float) -> StoredObject:
    # The names of metadata fields are not case-sensitive. In listings, empty values are None.
    fields = {field.lower(): text or "" for field, text in (blob.metadata or {}).items()}
    return StoredObject(
        blob.name, unquote_etag(blob.etag), fields, object_age_seconds(service_now, blob.last_modified.timestamp())
    )


def _error_code(error: HttpResponseError) -> str:
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code))


@contextmanager
def translate_errors(container: ContainerClient) -> Iterator[None]:
    """Turn the SDK's errors into StoreError or OutcomeUnknown, without a key or signature in the message."""
    name = container.container_name
    try:
        yield
    except ClientAuthenticationError as error:
        raise StoreError(f"container {name!r}: the service refused the credentials; {_CREDENTIALS_ADVICE}") from error
    except HttpResponseError as error:
        status = error.status_code or 0
        if is_outcome_unknown(status):
            raise OutcomeUnknown(f"container {name!r}: no usable response (HTTP {status})") from error
        if status in _UNAUTHORIZED_STATUSES:
            raise StoreError(
                f"container {name!r}: the service refused: {_error_code(error)}; {_CREDENTIALS_ADVICE}"
            ) from error
        if _error_code(error) == "ContainerNotFound":
            raise StoreError(f"container {name!r}: it does not exist; create it, or allow it to be created") from error
        raise StoreError(f"container {name!r}: the service refused: {_error_code(error)} (HTTP {status})") from error
    except AzureError as error:
        # Drop the cause, because it contains the whole URL. If the account is opened with a signature, the URL includes
        # the signature.
        cause = type(error).__name__
        raise OutcomeUnknown(f"container {name!r}: the service cannot be reached ({cause})") from None
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # The response has an unexpected form. It may be a proxy's error page, for example.
        raise OutcomeUnknown(f"container {name!r}: a response cannot be parsed: {error_summary(error)}") from error
