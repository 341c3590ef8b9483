"""Tests the S3 store on moto: conditional writes, and problems such as a wrong clock."""

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError
from object_stores import bucket, try_conditions

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects.s3 import S3Objects
from leasehold.stores.urls import open_store

pytestmark = pytest.mark.services

_FORBIDDEN: Any = {"HTTPStatusCode": 403}


@pytest.fixture
def objects(moto_url: str) -> Iterator[S3Objects]:
    objects_of_bucket = bucket(moto_url)
    yield objects_of_bucket
    objects_of_bucket.close()


def test_conditional_writes_follow_the_matrix(objects: S3Objects) -> None:
    try_conditions(objects)
    assert objects.list("") == ()


def test_a_clock_that_the_service_rejects_is_reported(objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(_client: object, operation: str, _arguments: object) -> object:
        raise ClientError({"Error": {"Code": "RequestTimeTooSkewed"}, "ResponseMetadata": _FORBIDDEN}, operation)

    monkeypatch.setattr(BaseClient, "_make_api_call", reject)
    with pytest.raises(StoreError, match=r"RequestTimeTooSkewed \(HTTP 403\); set this machine's clock"):
        objects.get("a")


def test_an_invalid_bucket_name_is_a_fault(moto_url: str) -> None:
    with pytest.raises(StoreError, match="bucket 'no bucket'") as exc_info:
        open_store(f"s3://no%20bucket?endpoint={moto_url}")
    assert not isinstance(exc_info.value, OutcomeUnknown)
