"""Stores leases in a bucket of Google Cloud Storage, as small objects that are written conditionally.

The generation of an object serves as its ETag. The generation is a number that the service assigns to each new content
of the object, and 0 means that there is no object. Objects are empty, because the fields of a lease are stored in the
object's metadata. Listings include metadata, so leases can be listed without reading their objects. The service accepts
about one write per second for each object. If it rejects a write for this reason (429), the write has certainly not
been applied, so it is sent again after a pause.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from threading import local
from typing import Any, TypeVar

import google.auth
import requests
from google.api_core.exceptions import GoogleAPICallError, NotFound, PreconditionFailed, TooManyRequests
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage  # type: ignore[import-untyped]
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.http_adapter import DeadlineAdapter
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.printable import error_summary, limited_error_text, printable
from leasehold.stores.protocol import Timeouts
from leasehold.stores.requests import ObjectFields, SkewWarning, StoredObject, is_outcome_unknown, object_age_seconds
from leasehold.stores.urls import check_endpoint, parse_date_header

T = TypeVar("T")

# Prevent Google's library from looking up the bucket's location for its traces. The lookup runs in another thread, and
# requires permissions that workers do not have.
os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")

OAUTH_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
"""The environment variable that contains the URL of an emulator. Google's own libraries also read this variable."""
PAGE_LEASES = 20
"""The maximum number of leases in a session row of layout `sessions`.

The metadata of an object is limited to 8 KiB, and the annotations of a lease take up about 300 bytes.
"""
TIMEOUTS = Timeouts(connect_seconds=5, read_seconds=10, attempts=3)
_ADVICE: Mapping[int, str] = {
    401: "the credentials are not valid; fetch new ones",
    403: "these credentials may not do this; a worker needs the role Storage Object User on the bucket",
    404: "there is no such bucket; create it, or let a worker make it",
}
_LISTED_FIELDS = "kind,items(name,generation,updated,metadata),nextPageToken"
_LISTING_KIND = "storage#objects"
"""The `kind` of a listing. It distinguishes an empty listing from an unrelated response."""


def open_url(location: str, options: Mapping[str, str], *, create: bool, request_seconds: float | None) -> EtagStore:
    """Open the store at `bucket/prefix`. Raises ValueError or StoreError."""
    bucket, prefix = split_location(location)
    objects = GcsObjects(
        bucket,
        project=options.get("project"),
        location=options.get("location"),
        endpoint=check_endpoint(options.get("endpoint")),
        timeouts=TIMEOUTS.within(request_seconds),
    )
    objects.ensure_bucket(create=create)
    return EtagStore(objects, ObjectLayout(prefix), page_leases=PAGE_LEASES)


def split_location(location: str) -> tuple[str, str]:
    """Split the location in a URL into bucket and prefix. Raises ValueError if there is no bucket."""
    bucket, _, prefix = location.partition("/")
    if not bucket:
        raise ValueError("store URL: gcs:// wants bucket/prefix")
    return bucket, prefix


class GcsObjects:
    """Implements `Objects` by one bucket. The service must honor ifGenerationMatch for inserts and deletions."""

    def __init__(
        self,
        bucket: str,
        *,
        project: str | None = None,
        location: str | None = None,
        endpoint: str | None = None,
        skew: SkewWarning | None = None,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self.bucket, self._location, self._timeouts = bucket, location, timeouts
        self._skew, self._thread_clock = skew or SkewWarning(), local()
        endpoint = endpoint or check_endpoint(
            os.environ.get(EMULATOR_VARIABLE), f"environment variable {EMULATOR_VARIABLE}"
        )
        with self._translate_errors():
            anonymous_credentials = AnonymousCredentials() if endpoint else None  # type: ignore[no-untyped-call]
            credentials, default_project = (
                (anonymous_credentials, "none") if anonymous_credentials else google.auth.default(scopes=[OAUTH_SCOPE])
            )
            self._project = project or default_project
            self._session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
            for scheme in ("https://", "http://"):
                self._session.mount(scheme, DeadlineAdapter())
            self._session.hooks["response"].append(self._update_clock)
            client_options = {"api_endpoint": endpoint} if endpoint else None
            self._client = storage.Client(
                self._project, credentials, _http=self._session, client_options=client_options
            )
            # After the bucket was created, the library would look it up again after each object that it does not find.
            self._client._bucket_metadata_cache = None  # noqa: SLF001  the environment variable does not prevent this
        self._bucket = self._client.bucket(bucket)
        # Do not let the library repeat writes by itself (rule 3 of `leasehold.stores.requests`).
        self._request_options: Any = {"timeout": (timeouts.connect_seconds, timeouts.read_seconds), "retry": None}

    def ensure_bucket(self, *, create: bool) -> None:
        """Create the bucket if it does not exist and `create` is true.

        Raises StoreError if the bucket cannot be used.
        """

        def list_one() -> None:
            next(self._iterate_listing(max_results=1), None)

        try:
            self._read(list_one)
        except StoreError as error:
            if not create or not isinstance(error.__cause__, NotFound):
                raise
            if not self._project:
                raise StoreError(
                    f"{self._bucket_description}: it does not exist, and creating it needs a project; "
                    "add ?project=… to the URL"
                ) from error
            new_bucket = self._client.bucket(self.bucket)
            new_bucket.iam_configuration.uniform_bucket_level_access_enabled = True
            # Disable soft deletion. Otherwise, each overwritten object would be kept and billed for a week.
            new_bucket.soft_delete_policy.retention_duration_seconds = 0
            with self._translate_errors():
                try:
                    self._client.create_bucket(new_bucket, location=self._location, **self._request_options)
                except GoogleAPICallError as error:
                    if error.code != HTTPStatus.CONFLICT:  # another worker has created it
                        raise
            self._read(list_one)

    def list(self, prefix: str) -> tuple[StoredObject, ...]:
        """Return all objects whose names begin with `prefix`."""

        def list_all() -> tuple[StoredObject, ...]:
            objects = tuple(self._parse_blob(blob) for blob in self._iterate_listing(prefix=prefix))
            if not all(stored_object.name.startswith(prefix) for stored_object in objects):
                raise LookupError("it lists objects that were not requested")
            return objects

        return self._read(list_all)

    def _iterate_listing(self, **arguments: Any) -> Iterator[storage.Blob]:  # noqa: ANN401  the library's own
        """Iterate over a listing. Raises LookupError for a response that is not a page of a listing."""
        blobs = self._client.list_blobs(self.bucket, fields=_LISTED_FIELDS, **arguments, **self._request_options)
        start_page = blobs._page_start  # noqa: SLF001  the library has no public access to the response

        def check_page(iterator: object, page: object, response: Mapping[str, Any]) -> None:
            if response.get("kind") != _LISTING_KIND:
                raise LookupError("it is not a listing")
            start_page(iterator, page, response)

        blobs._page_start = check_page  # noqa: SLF001  likewise
        return iter(blobs)

    def get(self, name: str) -> StoredObject | None:
        """Return the object with this name."""

        def get_one() -> StoredObject | None:
            blob = self._bucket.get_blob(name, **self._request_options)
            return blob and self._parse_blob(_check_blob(blob, name))

        return self._read(get_one)

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create an object if its generation is 0, which means that it does not exist."""
        return self._put(name, fields, 0)

    def put_if_match(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        """Replace an object if it still has the generation `etag`."""
        return self._put(name, fields, int(etag)) if etag.isdecimal() else None

    def delete(self, name: str, etag: str) -> bool:
        """Delete an object if it still has the generation `etag`."""
        if etag.isdecimal():
            # Also pass the generation to `blob`, because the tests use fake-gcs-server, which supports no other
            # condition on a deletion.
            blob = self._bucket.blob(name, generation=int(etag))
            with self._translate_errors():
                try:
                    self._retry_throttled(lambda: blob.delete(if_generation_match=int(etag), **self._request_options))
                except (PreconditionFailed, NotFound):
                    pass
                else:
                    return True
        return self.get(name) is None

    def close(self) -> None:
        """Close all connections."""
        self._session.close()  # type: ignore[no-untyped-call]

    def _put(self, name: str, fields: ObjectFields, generation: int) -> str | None:
        blob = self._bucket.blob(name)
        blob.metadata = dict(fields)

        def put() -> None:
            blob.upload_from_string(
                b"", content_type="application/json", if_generation_match=generation, **self._request_options
            )

        with self._translate_errors():
            try:
                self._retry_throttled(put)
            except PreconditionFailed:
                return None
            return str(_check_blob(blob, name).generation)

    def _parse_blob(self, blob: storage.Blob) -> StoredObject:
        response_time = getattr(self._thread_clock, "now", None)
        fields = {str(name): str(text) for name, text in (blob.metadata or {}).items()}
        age_seconds = (
            0.0
            if response_time is None or blob.updated is None
            else object_age_seconds(response_time, blob.updated.timestamp())
        )
        return StoredObject(blob.name, str(blob.generation), fields, age_seconds)

    def _update_clock(self, response: requests.Response, **_arguments: object) -> None:
        """Store the time in the Date header of a response, for use by the thread that waits for the response."""
        self._thread_clock.now = response_time = parse_date_header(response.headers.get("date"))
        if response_time is not None:
            self._skew.observe(response_time)

    def _read(self, send_request: Callable[[], T]) -> T:
        """Send a read, and repeat it if there was no usable response."""
        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, OutcomeUnknown)),
            stop=stop_after_attempt(self._timeouts.attempts),
            wait=wait_random_exponential(multiplier=0.1, max=1),
            reraise=True,
        )

        def send_once() -> T:
            with self._translate_errors():
                return send_request()

        return retrying(send_once)

    def _retry_throttled(self, write: Callable[[], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, TooManyRequests)),
            stop=stop_after_attempt(TIMEOUTS.attempts),
            wait=wait_random_exponential(multiplier=0.25, max=1),
            reraise=True,
        )
        return retrying(write)

    @property
    def _bucket_description(self) -> str:
        return f"bucket {self.bucket!r}"

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of the libraries into StoreError or OutcomeUnknown, without credentials in the message."""
        try:
            yield
        except (TransportError, requests.RequestException) as error:
            raise OutcomeUnknown(f"{self._bucket_description}: the service cannot be reached") from error
        except GoogleAPICallError as error:
            status = int(error.code or 0)
            if is_outcome_unknown(status):
                raise OutcomeUnknown(f"{self._bucket_description}: no usable response (HTTP {status})") from error
            advice = _ADVICE.get(status, printable(limited_error_text(error, 200)))
            raise StoreError(f"{self._bucket_description}: the service refused (HTTP {status}): {advice}") from error
        except GoogleAuthError as error:
            if error.retryable:
                raise OutcomeUnknown(
                    f"{self._bucket_description}: the identity service gave no usable response"
                ) from error
            raise StoreError(f"{self._bucket_description}: {printable(limited_error_text(error, 200))}") from error
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # The response has an unexpected form. It may be a proxy's error page, for example.
            raise OutcomeUnknown(
                f"{self._bucket_description}: a response cannot be parsed: {error_summary(error)}"
            ) from error


def _check_blob(blob: storage.Blob, name: str) -> storage.Blob:
    """Return the blob. Raises LookupError if the response was about another object, or has no generation."""
    if blob._properties.get("name") != name or blob.generation is None:  # noqa: SLF001  `blob.name` is the requested name
        raise LookupError("it is not about the requested object")
    return blob
