"""An in-memory S3 for one client. It has conditional writes, pages, a clock, and faults that a test injects."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from io import BytesIO
from threading import Barrier
from typing import Any

from attrs import define, field
from botocore.exceptions import ClientError
from waiters import WAIT

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PAGE = 2


def refusal(code: str, status: int) -> ClientError:
    """Return an error response."""
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Any")  # type: ignore[typeddict-item]


@define
class S3Bucket:
    """A bucket, shared by all of its clients.

    Attributes:
        requests: For each call: the client's number of attempts, the operation, and the arguments without the bucket.
        faults: Exceptions that the next calls of an operation raise, one after the other.
        now: The seconds since the bucket was created.
        dated: True if responses contain the time.
        together: A barrier at which reads of objects wait for each other.
    """

    name: str | None = "leases"
    objects: dict[str, tuple[str, bytes, float]] = field(factory=dict)
    requests: list[tuple[int, str, dict[str, Any]]] = field(factory=list)
    faults: dict[str, list[Exception]] = field(factory=dict)
    now: float = 0.0
    dated: bool = True
    together: Barrier | None = None


@define
class S3Memory:
    """A client of one bucket. It is configured to try each read `attempts` times."""

    service: S3Bucket
    attempts: int
    region: str = "eu-west-1"
    closed: bool = False

    @property
    def meta(self) -> "S3Memory":
        """The client itself, which also serves as its metadata."""
        return self

    @property
    def region_name(self) -> str:
        return self.region

    @property
    def objects(self) -> dict[str, tuple[str, bytes, float]]:
        """The objects of its bucket."""
        return self.service.objects

    def close(self) -> None:
        self.closed = True

    def _ask(self, operation: str, Bucket: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401, N803  boto3's own
        service = self.service
        service.requests.append((self.attempts, operation, arguments))
        if service.faults.get(operation):
            raise service.faults[operation].pop(0)
        if service.name != Bucket and operation != "create_bucket":
            raise refusal("NoSuchBucket", 404)
        date = {"date": format_datetime(BEGAN + timedelta(seconds=service.now), usegmt=True)} if service.dated else {}
        return {"ResponseMetadata": {"HTTPHeaders": date}}

    def put_object(self, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Store the object if its conditions hold."""
        response = self._ask("put_object", **arguments)
        name, stored_object = arguments["Key"], self.objects.get(arguments["Key"])
        self._check_write_conditions(stored_object, arguments)
        etag = f'"e-{len(self.service.requests)}"'
        self.objects[name] = (etag, arguments["Body"], self.service.now)
        return {**response, "ETag": etag}

    def delete_object(self, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Remove the object if its conditions hold."""
        response = self._ask("delete_object", **arguments)
        stored_object = self.objects.get(arguments["Key"])
        self._check_write_conditions(stored_object, arguments)
        self.objects.pop(arguments["Key"], None)
        return response

    def get_object(self, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        response = self._ask("get_object", **arguments)
        if self.service.together is not None:
            self.service.together.wait(WAIT)
        if arguments["Key"] not in self.objects:
            raise refusal("NoSuchKey", 404)
        etag, body, last_write = self.objects[arguments["Key"]]
        return {**response, "ETag": etag, "Body": BytesIO(body), "LastModified": BEGAN + timedelta(seconds=last_write)}

    def list_objects_v2(self, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Check that the bucket exists."""
        return {**self._ask("list_objects_v2", **arguments), "Name": self.service.name}

    def head_bucket(self, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        return self._ask("head_bucket", **arguments)

    def create_bucket(self, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        response = self._ask("create_bucket", **arguments)
        self.service.name = arguments["Bucket"]
        return response

    def get_paginator(self, operation: str) -> "S3Memory":
        assert operation == "list_objects_v2"
        return self

    def paginate(self, **arguments: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        """Yield pages with a few objects each. An empty listing is one page without contents."""
        names = [name for name in sorted(self.objects) if name.startswith(arguments["Prefix"])]
        for first in range(0, max(1, len(names)), PAGE):
            response = self._ask("paginate", **arguments)
            rows = [(name, self.objects[name]) for name in names[first : first + PAGE]]
            contents = [
                {"Key": name, "ETag": etag, "LastModified": BEGAN + timedelta(seconds=last_write)}
                for name, (etag, _, last_write) in rows
            ]
            bucket_and_prefix = {"Name": self.service.name, "Prefix": arguments["Prefix"]}
            yield {**response, **bucket_and_prefix, **({"Contents": contents} if contents else {})}

    @staticmethod
    def _check_write_conditions(stored_object: tuple[str, bytes, float] | None, arguments: dict[str, Any]) -> None:
        if arguments.get("IfNoneMatch") == "*" and stored_object:
            raise refusal("PreconditionFailed", 412)
        if "IfMatch" in arguments and stored_object is None:
            raise refusal("NoSuchKey", 404)
        if "IfMatch" in arguments and stored_object and stored_object[0] != arguments["IfMatch"]:
            raise refusal("PreconditionFailed", 412)
