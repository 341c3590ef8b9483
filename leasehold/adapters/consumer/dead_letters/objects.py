"""Stores dead letters as objects of an S3 bucket."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import boto3

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.errors import DeadLetterError, StoreError
from leasehold.stores.aws import create_boto3_session
from leasehold.stores.objects.s3 import S3Objects


class ObjectSink:
    """A sink that stores each dead letter as an object, with one line of JSON, under one prefix of a bucket."""

    def __init__(self, objects: S3Objects, prefix: str) -> None:
        self._objects, self._prefix = objects, f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""

    def put(self, dead_letter: DeadLetterEntry) -> None:
        """Write the object."""
        with _translate_store_errors():
            self._objects.put_body(self._prefix + dead_letter.name, dead_letter.line)

    def names(self) -> tuple[str, ...]:
        """List the objects directly under the prefix."""
        with _translate_store_errors():
            relative_names = (name.removeprefix(self._prefix) for name in self._objects.names(self._prefix))
            # Objects in deeper folders belong to another sink, whose prefix begins with this one.
            return tuple(name for name in relative_names if name and "/" not in name)

    def get(self, name: str) -> bytes | None:
        """Read the object."""
        with _translate_store_errors():
            return self._objects.body(self._prefix + name)

    def remove(self, name: str) -> None:
        """Remove the object."""
        with _translate_store_errors():
            self._objects.remove(self._prefix + name)

    def close(self) -> None:
        """Close all connections."""
        self._objects.close()


@contextmanager
def _translate_store_errors() -> Iterator[None]:
    try:
        yield
    except StoreError as fault:
        raise DeadLetterError(str(fault)) from fault


def open_url(
    location: str,
    options: Mapping[str, str],
    *,
    create: bool,  # noqa: ARG001  buckets are never created
    session: boto3.Session | None = None,
) -> ObjectSink:
    """Open the objects at `bucket/prefix`.

    Raises ValueError if the location or an option is wrong, and DeadLetterError if the bucket does not exist.
    """
    bucket, _, prefix = location.partition("/")
    if not bucket:
        raise ValueError("letters URL: s3:// wants bucket/prefix")
    aws_session = create_boto3_session(options, "letters URL", session)
    with _translate_store_errors():
        objects = S3Objects(bucket, region=options.get("region"), endpoint=options.get("endpoint"), session=aws_session)
        if objects.missing():
            raise DeadLetterError(f"there is no bucket {bucket!r}")
    return ObjectSink(objects, prefix)
