"""Tries the rights of a worker on the objects in an Azure container, or in a bucket of S3 or Google Cloud Storage."""

from collections.abc import Mapping
from functools import partial
from uuid import uuid4

from leasehold.adapters.ops.doctor.attempts import (
    REQUEST_SECONDS,
    Absent,
    RightAttempt,
    RightsTrial,
    ServiceClock,
)
from leasehold.errors import StoreError
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.requests import PROBE_FOLDER, Objects, check_conditions_honored
from leasehold.stores.urls import Scheme, check_endpoint

_ABSENT = frozenset({"NoSuchBucket", "ContainerNotFound", "there is no such bucket"})
_UNKNOWN_ETAG = "0x8D00000000000000"


S3 = ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject")
"""The rights to list, read, write and delete objects, by their names in policies and roles."""

BLOB_RIGHTS = ("blobs/read (list)", "blobs/read", "blobs/write", "blobs/delete")
"""The rights to list, read, write and delete objects in Azure.

The full names of the rights begin with `Microsoft.Storage/storageAccounts/blobServices/containers/`. The role 'Storage
Blob Data Contributor' has all these rights.
"""


def s3_trial(location: str, options: Mapping[str, str]) -> RightsTrial:
    """Return the trial of the rights on `bucket/prefix`. Raises ValueError or StoreError if an option is not valid."""
    module = Scheme("leasehold.stores.objects.s3", extra="aws").load("store", StoreError)
    bucket, _, prefix = location.partition("/")
    if not bucket:
        raise ValueError("store URL: s3:// needs bucket/prefix")
    endpoint, clock = check_endpoint(options.get("endpoint")), ServiceClock()
    timeouts = module.TIMEOUTS.within(REQUEST_SECONDS)
    client_options = {
        "region": options.get("region"),
        "endpoint": endpoint,
        "session": module.create_boto3_session(options),
    }
    objects = module.S3Objects(bucket, skew=clock, timeouts=timeouts, **client_options)
    return _trial(f"bucket {bucket}", objects, ObjectLayout(prefix), S3, clock)


GCS_RIGHTS = ("storage.objects.list", "storage.objects.get", "storage.objects.create", "storage.objects.delete")
"""The rights to list, read, create and delete objects in Google Cloud.

The role 'Storage Object User' has all these rights. To overwrite an object, a worker needs the last two.
"""


def gcs_trial(location: str, options: Mapping[str, str]) -> RightsTrial:
    """Return the trial of the rights on `bucket/prefix`. Raises ValueError or StoreError if an option is not valid."""
    module = Scheme("leasehold.stores.objects.gcs", extra="gcs").load("store", StoreError)
    bucket, prefix = module.split_location(location)
    endpoint, clock = check_endpoint(options.get("endpoint")), ServiceClock()
    timeouts = module.TIMEOUTS.within(REQUEST_SECONDS)
    objects = module.GcsObjects(
        bucket, project=options.get("project"), endpoint=endpoint, skew=clock, timeouts=timeouts
    )
    return _trial(f"bucket {bucket}", objects, ObjectLayout(prefix), GCS_RIGHTS, clock, unknown_etag="1")


def blob_trial(location: str, options: Mapping[str, str]) -> RightsTrial:
    """Return the trial of the rights on `account/container`.

    Raises ValueError or StoreError if an option is not valid.
    """
    module = Scheme("leasehold.stores.objects.blob", extra="azure").load("store", StoreError)
    clock = ServiceClock()
    # Pass a client that sends no request yet. Otherwise a missing container would raise an error here instead of
    # becoming a finding.
    client = module.create_client(location, check_endpoint(options.get("endpoint")), REQUEST_SECONDS)
    hub_layout = EventHubLayout(*module.parse_hub_options(options)) if "eventhub" in options else None
    layout = hub_layout or ObjectLayout(options.get("prefix", ""))
    return _trial(f"container {client.container_name}", module.BlobObjects(client, clock), layout, BLOB_RIGHTS, clock)


def _trial(
    name: str,
    objects: Objects,
    layout: ObjectLayout | EventHubLayout,
    rights: tuple[str, ...],
    clock: ServiceClock,
    *,
    unknown_etag: str = _UNKNOWN_ETAG,
) -> RightsTrial:
    list_right, read_right, write_right, delete_right = rights
    folder = layout.prefix("ownership").removesuffix("ownership/")
    probe_name = f"{folder}{PROBE_FOLDER}{uuid4().hex}"

    def list_objects() -> str:
        try:
            objects.list(probe_name)
        except StoreError as error:
            if any(code in str(error) or code in str(error.__cause__) for code in _ABSENT):
                raise Absent(
                    f"there is no {name}; a worker creates it if it has the right, which was not tried"
                ) from error
            raise
        return "it responds"

    def write_object() -> None:
        """Write an object with a condition that is never true.

        If the service ignores the condition, delete the object.
        """
        if (etag := objects.put_if_match(probe_name, {"probe": "0"}, unknown_etag)) is not None:
            objects.delete(probe_name, etag)

    attempts = (
        RightAttempt(list_right, list_objects),
        RightAttempt(read_right, partial(objects.get, probe_name)),
        RightAttempt(write_right, write_object, writes=True),
        RightAttempt(delete_right, partial(objects.delete, probe_name, unknown_etag), writes=True),
    )
    return RightsTrial(name, attempts, clock, partial(check_conditions_honored, objects, folder), objects.close)
