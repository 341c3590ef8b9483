"""Creates containers and buckets for one test. Their stores return leases that can be compared as whole values."""

import json
from uuid import uuid4

import boto3
from attrs import evolve
from azure.storage.blob import ContainerClient

from leasehold.balancer.model import Lease
from leasehold.stores.objects.blob import BlobObjects
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.gcs import GcsObjects
from leasehold.stores.objects.s3 import S3Objects
from leasehold.stores.requests import ObjectFields, Objects, Part, Parts, StoredObject


class _Ageless:
    """A mixin that sets the age of every object to zero. Two reads of an unchanged lease are then always equal."""

    def list(self, prefix: str) -> tuple[StoredObject, ...]:
        return tuple(evolve(stored_object, age=0.0) for stored_object in super().list(prefix))  # type: ignore[misc]  # of what it is mixed into

    def get(self, name: str) -> StoredObject | None:
        stored_object: StoredObject | None = super().get(name)  # type: ignore[misc]  # likewise
        return stored_object and evolve(stored_object, age=0.0)


class AgelessBlobs(_Ageless, BlobObjects):
    """A blob container whose objects have age zero."""


class AgelessS3(_Ageless, S3Objects):
    """An S3 bucket whose objects have age zero."""


class AgelessGcs(GcsObjects):
    """A Google bucket whose objects have age zero."""

    def _parse_blob(self, blob: object) -> StoredObject:
        return evolve(super()._parse_blob(blob), age=0.0)


def container(connection: str) -> ContainerClient:
    client = ContainerClient.from_connection_string(connection, f"test-{uuid4().hex}", retry_total=0)
    client.create_container()
    return client


def bucket(endpoint: str) -> AgelessS3:
    name = f"test-{uuid4().hex}"
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    client.close()
    return AgelessS3(name, endpoint=endpoint)


def try_conditions(objects: Objects) -> None:
    """Write, overwrite and delete "a/b" under conditions that hold and under conditions that don't.

    The object is gone afterwards.
    """
    first = objects.put_if_absent("a/b", {"counter": "1"})
    assert first is not None
    assert objects.put_if_absent("a/b", {"counter": "2"}) is None
    second = objects.put_if_match("a/b", {"counter": "2"}, first)
    assert second not in (None, first)
    assert second is not None
    assert objects.put_if_match("a/b", {"counter": "3"}, first) is None
    assert objects.put_if_match("absent", {"counter": "3"}, first) is None
    assert objects.get("absent") is None
    assert objects.get("a/b") == StoredObject("a/b", second, {"counter": "2"})
    deleted = [objects.delete("a/b", first), objects.delete("a/b", second), objects.delete("a/b", first)]
    assert deleted == [False, True, True]


class RoomyLayout(EventHubLayout):
    """The Azure SDKs' layout, extended by fields that partitions do not have, so that every clause can be tested.

    Any key is accepted as a partition, and the constant fields are stored in one additional field. A number without an
    offset gets a made-up offset, which encodes the sub-sequence number.
    """

    def name(self, key: str, part: Part) -> str:
        """Return the name with the key unchanged, because the case of letters matters in the names of shards."""
        return self.prefix(part) + key

    def key(self, name: str, part: Part) -> str | None:
        """Return the key, which may be any string."""
        return name.removeprefix(self.prefix(part))

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """Return the lease including the extra fields."""
        lease = super().lease(key, parts)
        if lease is None:
            return None
        parents, hash_range, weight = json.loads(parts.fields("checkpoint").get("room", "[[], null, null]"))
        sub, _, token = lease.checkpoint.token.partition("/")
        return evolve(
            lease,
            stream="",
            parents=tuple(parents),
            hash_range=tuple(hash_range) if hash_range else None,
            weight=weight if lease.weight is None else lease.weight,
            checkpoint=evolve(lease.checkpoint, sub=int(sub), token=token)
            if lease.checkpoint.numbered
            else lease.checkpoint,
        )

    def checkpoint(self, stored: ObjectFields, after: Lease) -> ObjectFields:
        """Return the checkpoint including the extra fields."""
        position = after.checkpoint
        encoded = evolve(position, sub=0, token=f"{position.sub}/{position.token}") if position.numbered else position
        fields = super().checkpoint(stored, evolve(after, checkpoint=encoded))
        return {**fields, "room": json.dumps([after.parents, after.hash_range, after.weight])}
