"""Leases in an S3 bucket: small JSON objects under conditional writes (If-None-Match: *, If-Match).

A listing names objects and their ETags but not their content, so only what changed since the last
listing is fetched, a few at a time.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)

from stores.etags import EtagStore
from stores.object_names import ObjectLayout
from stores.objects import Fields, SkewWarning, Stored, age, bare
from stores.protocol import OutcomeUnknown, StoreError

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_REFUSED = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412", "409"})
_OUR_FAULT = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, NoRegionError, ParamValidationError)
_BUSY = frozenset({408, 429})
_FETCHES = 8
"""Objects fetched at a time, where a listing shows them changed."""


def open_url(place: str, options: Mapping[str, str], *, create: bool) -> EtagStore:
    """The store at `bucket/prefix`. Raises ValueError, StoreError."""
    bucket, _, prefix = place.partition("/")
    if not bucket:
        raise ValueError("store URL: s3:// wants bucket/prefix")
    objects = S3Objects(bucket, region=options.get("region"), endpoint=options.get("endpoint"))
    objects.ensure(create=create)
    return EtagStore(objects, ObjectLayout(prefix))


class S3Objects:
    """The objects of one bucket. The service must keep If-Match and If-None-Match on PutObject and DeleteObject."""

    def __init__(
        self, bucket: str, *, region: str | None = None, endpoint: str | None = None, skew: SkewWarning | None = None
    ) -> None:
        self.bucket = bucket
        self._skew = skew or SkewWarning()
        # Reading may be tried again at will; a write sent twice could be refused by its own first try.
        with self._asking():
            self._reads = _client(region, endpoint, attempts=3)
            self._writes = _client(region, endpoint, attempts=1)
        self._known: dict[str, Stored] = {}

    def ensure(self, *, create: bool) -> None:
        """Make the bucket if there is none and we may. Raises StoreError."""
        with self._asking():
            try:
                self._reads.list_objects_v2(Bucket=self.bucket, MaxKeys=1)
            except ClientError as absent:
                if not create or _code(absent) != "NoSuchBucket":
                    raise
                self._create()

    def _create(self) -> None:
        region = self._writes.meta.region_name
        where: Mapping[str, Any] = {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            self._writes.create_bucket(Bucket=self.bucket, **({} if region == "us-east-1" else where))
        except ClientError as taken:
            if _code(taken) != "BucketAlreadyOwnedByYou":
                raise

    def list(self, prefix: str) -> tuple[Stored, ...]:
        """All pages; what an earlier listing has fetched is not fetched again until its ETag changes."""
        listed: list[Stored | str] = []
        with self._asking():
            for page in self._reads.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
                now = self._heard(page)
                listed += [self._remembered(row, now) for row in page.get("Contents", [])]
        with ThreadPoolExecutor(_FETCHES) as pool:
            fetched = tuple(pool.map(lambda one: self.get(one) if isinstance(one, str) else one, listed))
        found = {one.name: one for one in fetched if one}
        self._known = {name: one for name, one in self._known.items() if not name.startswith(prefix)} | found
        return tuple(found.values())

    def get(self, name: str) -> Stored | None:
        """One object's content."""
        with self._asking():
            try:
                answer = self._reads.get_object(Bucket=self.bucket, Key=name)
            except ClientError as absent:
                if _code(absent) == "NoSuchKey":
                    return None
                raise
            body = answer["Body"].read()
        written = answer["LastModified"].timestamp()
        return Stored(name, bare(answer["ETag"]), _fields(body), age(self._heard(answer), written))

    def put_new(self, name: str, fields: Fields) -> str | None:
        """PutObject under If-None-Match: *."""
        return self._put(name, fields, {"IfNoneMatch": "*"})

    def put_over(self, name: str, fields: Fields, etag: str) -> str | None:
        """PutObject under If-Match."""
        return self._put(name, fields, {"IfMatch": f'"{etag}"'})

    def delete(self, name: str, etag: str) -> bool:
        """DeleteObject under If-Match."""
        with self._asking():
            try:
                self._writes.delete_object(Bucket=self.bucket, Key=name, IfMatch=f'"{etag}"')
            except ClientError as refused:
                if _code(refused) not in _REFUSED:
                    raise
            else:
                return True
        return self.get(name) is None

    def close(self) -> None:
        """Let connections go."""
        self._reads.close()
        self._writes.close()

    def _put(self, name: str, fields: Fields, condition: Mapping[str, Any]) -> str | None:
        body = json.dumps(dict(fields), sort_keys=True).encode()
        with self._asking():
            try:
                answer = self._writes.put_object(
                    Bucket=self.bucket, Key=name, Body=body, ContentType="application/json", **condition
                )
            except ClientError as refused:
                if _code(refused) in _REFUSED:
                    return None
                raise
        return bare(answer["ETag"])

    def _remembered(self, row: Mapping[str, Any], service_now: float) -> Stored | str:
        known = self._known.get(row["Key"])
        if known is None or known.etag != bare(row["ETag"]):
            return str(row["Key"])
        return Stored(known.name, known.etag, known.fields, age(service_now, row["LastModified"].timestamp()))

    def _heard(self, answer: Mapping[str, Any]) -> float:
        """The service's own clock, from its Date header; long ago, which makes everything new, without one."""
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            return 0.0
        now = parsedate_to_datetime(date).timestamp()
        self._skew.saw(now)
        return now

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turns the SDK's errors into ours; no credential is in any of them."""
        where = f"bucket {self.bucket!r}"
        try:
            yield
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if status < 400 or status >= 500 or status in _BUSY:  # noqa: PLR2004  HTTP's classes of answers
                raise OutcomeUnknown(f"{where}: no usable answer (HTTP {status})") from error
            raise StoreError(f"{where}: the service refused: {_code(error)} (HTTP {status})") from error
        except _OUR_FAULT as fault:
            raise StoreError(f"{where}: {fault}") from fault
        except BotoCoreError as error:
            raise OutcomeUnknown(f"{where}: the service cannot be reached") from error


def _client(region: str | None, endpoint: str | None, *, attempts: int) -> "S3Client":
    config = Config(
        connect_timeout=5,
        read_timeout=10,
        retries={"total_max_attempts": attempts, "mode": "standard"},
        max_pool_connections=2 * _FETCHES,
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    return boto3.client("s3", region_name=region, endpoint_url=endpoint, config=config)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _fields(body: bytes) -> Fields:
    """Nothing at all where the content is not ours: the layout then says which field is missing."""
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    texts = isinstance(fields, dict) and all(isinstance(text, str) for text in fields.values())
    return fields if texts else {}
