"""Stores leases in an S3 bucket, as small JSON objects with conditional writes (If-None-Match: *, If-Match).

A listing contains the names and ETags of objects but not their content. Therefore, objects that have changed since the
last listing are fetched, a few at a time.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import boto3
from attrs import evolve
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.parsers import ResponseParserError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.aws import (
    CREDENTIALS_FROM,
    RETRIEVAL_ERRORS,
    connection_failure_hint,
    create_boto3_session,
    credentials_failure_advice,
)
from leasehold.stores.deadlines import add_response_deadlines
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
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

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import GetObjectOutputTypeDef, ListObjectsV2OutputTypeDef

_REJECTION_CODES = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412", "409"})
_ALREADY_EXISTS_CODES = frozenset({"PreconditionFailed", "412"})
_NO_CONDITIONS_CODES = frozenset({"NotImplemented", "501"})
_ADVICE = {"RequestTimeTooSkewed": "; set this machine's clock"}
_CONCURRENT_FETCHES = 8
"""The number of changed objects to fetch concurrently after a listing."""
TIMEOUTS = Timeouts(connect_seconds=5, read_seconds=10, attempts=3)
_RETRY_TORN_READS = Retrying(
    retry=retry_if_exception_type(FlexibleChecksumError), stop=stop_after_attempt(8), reraise=True
)
"""Repeats a read if the body does not match its checksum, because some services let a read overlap with a write."""


def open_url(
    location: str,
    options: Mapping[str, str],
    *,
    create: bool,
    request_seconds: float | None,
    session: boto3.Session | None = None,
) -> EtagStore:
    """Open the store at `bucket/prefix`. Raises ValueError or StoreError."""
    bucket, _, prefix = location.partition("/")
    if not bucket:
        raise ValueError("store URL: s3:// wants bucket/prefix")
    timeouts, endpoint = TIMEOUTS.within(request_seconds), check_endpoint(options.get("endpoint"))
    boto_session = create_boto3_session(options, session=session)
    objects = S3Objects(
        bucket, region=options.get("region"), endpoint=endpoint, timeouts=timeouts, session=boto_session
    )
    objects.ensure_bucket(create=create)
    return EtagStore(objects, ObjectLayout(prefix))


class S3Objects:
    """Implements `Objects` by one bucket.

    The service must honor If-Match and If-None-Match in PutObject and DeleteObject.
    """

    def __init__(
        self,
        bucket: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        skew: SkewWarning | None = None,
        timeouts: Timeouts = TIMEOUTS,
        session: boto3.Session | None = None,
    ) -> None:
        self.bucket = bucket
        self._skew = skew or SkewWarning()
        # Use two clients, because reads may be repeated, but a write must not be sent twice: its first attempt could
        # make the second fail.
        with self._translate_errors():
            self._read_client = _create_client(region, endpoint, timeouts, session)
            self._write_client = _create_client(region, endpoint, evolve(timeouts, attempts=1), session)
        self._cached_objects: dict[str, StoredObject] = {}

    def ensure_bucket(self, *, create: bool) -> None:
        """Create the bucket if it does not exist and `create` is true.

        Raises StoreError if the bucket cannot be used.
        """
        with self._translate_errors():
            try:
                _check_listing(self._read_client.list_objects_v2(Bucket=self.bucket, MaxKeys=1), "")
            except ClientError as error:
                if not create or _error_code(error) != "NoSuchBucket":
                    raise
                region = self._write_client.meta.region_name
                configuration: Mapping[str, Any] = {"CreateBucketConfiguration": {"LocationConstraint": region}}
                try:
                    self._write_client.create_bucket(
                        Bucket=self.bucket, **({} if region == "us-east-1" else configuration)
                    )
                except ClientError as create_error:
                    if _error_code(create_error) != "BucketAlreadyOwnedByYou":
                        raise

    def list(self, prefix: str) -> tuple[StoredObject, ...]:
        """Return all objects whose names begin with `prefix`. Only objects whose ETag has changed are fetched again."""
        objects_or_names: list[StoredObject | str] = []
        with self._translate_errors():
            for page in self._list_pages(prefix):
                service_now = self._service_time(page)
                for listed_object in page.get("Contents", []):
                    cached_object = self._cached_objects.get(listed_object["Key"])
                    if cached_object is None or cached_object.etag != unquote_etag(listed_object["ETag"]):
                        objects_or_names.append(listed_object["Key"])
                    else:
                        objects_or_names.append(
                            evolve(
                                cached_object,
                                age=object_age_seconds(service_now, listed_object["LastModified"].timestamp()),
                            )
                        )
        with ThreadPoolExecutor(_CONCURRENT_FETCHES) as pool:
            fetched_objects = tuple(
                pool.map(lambda entry: self.get(entry) if isinstance(entry, str) else entry, objects_or_names)
            )
        objects = {stored_object.name: stored_object for stored_object in fetched_objects if stored_object}
        self._cached_objects = {
            name: stored_object for name, stored_object in self._cached_objects.items() if not name.startswith(prefix)
        } | objects
        return tuple(objects.values())

    def get(self, name: str) -> StoredObject | None:
        """Return the object with this name."""
        if (response_and_body := self._read_object(name)) is None:
            return None
        response, body = response_and_body
        modified_at = response["LastModified"].timestamp()
        return StoredObject(
            name,
            unquote_etag(response["ETag"]),
            _parse_body(body),
            object_age_seconds(self._service_time(response), modified_at),
        )

    def _read_object(self, name: str) -> "tuple[GetObjectOutputTypeDef, bytes] | None":
        def fetch() -> "tuple[GetObjectOutputTypeDef, bytes]":
            response = self._read_client.get_object(Bucket=self.bucket, Key=name)
            return response, response["Body"].read()

        with self._translate_errors():
            try:
                return _RETRY_TORN_READS(fetch)
            except ClientError as error:
                if _error_code(error) != "NoSuchKey":
                    raise
        return None

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create an object by PutObject with If-None-Match: *."""
        return self._put(name, fields, {"IfNoneMatch": "*"})

    def put_if_match(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        """Replace an object by PutObject with If-Match."""
        return self._put(name, fields, {"IfMatch": f'"{etag}"'})

    def delete(self, name: str, etag: str) -> bool:
        """Delete an object by DeleteObject with If-Match."""
        with self._translate_errors():
            try:
                self._write_client.delete_object(Bucket=self.bucket, Key=name, IfMatch=f'"{etag}"')
            except ClientError as error:
                if _error_code(error) not in _REJECTION_CODES:
                    raise
            else:
                return True
        return self.get(name) is None

    # The following methods are for objects with arbitrary content. The name of such an object identifies its content.

    def missing(self) -> bool:
        """Return whether the bucket is missing. Return False if these credentials do not allow the check."""
        with self._translate_errors():
            try:
                self._read_client.head_bucket(Bucket=self.bucket)
            except ClientError as error:
                if _error_code(error) not in {"404", "NoSuchBucket", "403", "AccessDenied"}:
                    raise
                return _error_code(error) in {"404", "NoSuchBucket"}
        return False

    def names(self, prefix: str) -> tuple[str, ...]:
        """Return the names of all objects that begin with `prefix`."""
        with self._translate_errors():
            return tuple(row["Key"] for page in self._list_pages(prefix) for row in page.get("Contents", []))

    def _list_pages(self, prefix: str) -> "Iterator[ListObjectsV2OutputTypeDef]":
        for page in self._read_client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            _check_listing(page, prefix)
            yield page

    def body(self, name: str) -> bytes | None:
        """Return the content of the object with this name, or None if it does not exist."""
        response_and_body = self._read_object(name)
        return None if response_and_body is None else response_and_body[1]

    def put_body(self, name: str, body: bytes) -> None:
        """Store an object unless one with this name exists.

        The client may retry the write, because it is idempotent.
        """
        request: dict[str, Any] = {"Bucket": self.bucket, "Key": name, "Body": body, "ContentType": "application/json"}
        with self._translate_errors():
            try:
                self._read_client.put_object(**request, IfNoneMatch="*")
            except ClientError as error:
                if _error_code(error) in _NO_CONDITIONS_CODES:
                    # Write without a condition. The name identifies the content, so a second write would store the same
                    # content.
                    self._read_client.put_object(**request)
                elif _error_code(error) not in _ALREADY_EXISTS_CODES:
                    raise

    def remove(self, name: str) -> None:
        """Delete an object if it exists."""
        with self._translate_errors():
            self._read_client.delete_object(Bucket=self.bucket, Key=name)

    def close(self) -> None:
        """Close all connections."""
        self._read_client.close()
        self._write_client.close()

    def _put(self, name: str, fields: ObjectFields, condition: Mapping[str, Any]) -> str | None:
        body = json.dumps(dict(fields), sort_keys=True).encode()
        with self._translate_errors():
            try:
                response = self._write_client.put_object(
                    Bucket=self.bucket, Key=name, Body=body, ContentType="application/json", **condition
                )
            except ClientError as error:
                if _error_code(error) in _REJECTION_CODES:
                    return None
                raise
        return unquote_etag(response["ETag"])

    def _service_time(self, response: Mapping[str, Any]) -> float:
        """Return the time in the Date header of a response.

        If the response has no Date header, return 0, so that the ages of objects become 0.
        """
        response_time = parse_date_header(response["ResponseMetadata"]["HTTPHeaders"].get("date"))
        if response_time is None:
            return 0.0
        self._skew.observe(response_time)
        return response_time

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of the SDK into StoreError or OutcomeUnknown, without credentials in the message."""
        bucket_description = f"bucket {self.bucket!r}"
        try:
            yield
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if is_outcome_unknown(status):
                raise OutcomeUnknown(f"{bucket_description}: no usable response (HTTP {status})") from error
            hint = _ADVICE.get(_error_code(error), "")
            raise StoreError(
                f"{bucket_description}: the service refused: {_error_code(error)} (HTTP {status}){hint}"
            ) from error
        except (NoCredentialsError, PartialCredentialsError) as fault:
            raise StoreError(f"{bucket_description}: no credentials of AWS: {CREDENTIALS_FROM}") from fault
        except RETRIEVAL_ERRORS as fault:
            raise OutcomeUnknown(
                f"{bucket_description}: no credentials of AWS: {credentials_failure_advice(fault)}"
            ) from fault
        except NoRegionError as fault:
            raise StoreError(
                f"{bucket_description}: no region is set; add ?region=… to the URL, or set AWS_REGION"
            ) from fault
        except (ProfileNotFound, ParamValidationError) as fault:
            raise StoreError(f"{bucket_description}: {fault}") from fault
        except BotoCoreError as error:
            raise OutcomeUnknown(
                f"{bucket_description}: the service cannot be reached{connection_failure_hint(error)}"
            ) from error
        except (AttributeError, LookupError, RecursionError, TypeError, ResponseParserError) as error:
            # The response has an unexpected form. It may be a proxy's error page, for example.
            raise OutcomeUnknown(
                f"{bucket_description}: a response cannot be parsed: {error_summary(error)}"
            ) from error


def _check_listing(page: Mapping[str, Any], prefix: str) -> None:
    """Raise LookupError if this is not a page of the listing. boto3 parses an unrelated page as an empty one."""
    if not page.get("Name") or (page.get("Prefix") or "") != prefix:
        raise LookupError("it is not the requested listing")
    if not all(row["Key"].startswith(prefix) for row in page.get("Contents", [])):
        raise LookupError("it lists objects that were not requested")


def _create_client(
    region: str | None, endpoint: str | None, timeouts: Timeouts, session: boto3.Session | None = None
) -> "S3Client":
    config = Config(
        connect_timeout=timeouts.connect_seconds,
        read_timeout=timeouts.read_seconds,
        retries={"total_max_attempts": timeouts.attempts, "mode": "standard"},
        max_pool_connections=2 * _CONCURRENT_FETCHES,
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    client = (session or boto3.Session()).client("s3", region_name=region, endpoint_url=endpoint, config=config)
    reject_credentials(client.meta.endpoint_url)
    add_response_deadlines(client)
    return client


def _error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _parse_body(body: bytes) -> ObjectFields:
    """Parse the content of an object.

    If the object has other content, return no fields. The layout then raises an error that names the missing field.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    has_only_strings = isinstance(fields, dict) and all(isinstance(text, str) for text in fields.values())
    return fields if has_only_strings else {}
