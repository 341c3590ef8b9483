"""Opens the pairs of tables between which leases are swapped: new, empty stores of every kind on local services."""

from collections.abc import Callable, Iterable
from itertools import count

import pytest
from boto3 import Session
from object_stores import AgelessBlobs, AgelessGcs, bucket, container

from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.protocol import Store
from leasehold.stores.sessions.store import SessionStore, SupportsSessionsLayout
from leasehold.stores.urls import open_store
from leasehold_lab.standins.postgres import build_store_url

_numbers = count()
_AWS = Session()
"""One session for all tables, because loading the description of a service takes long."""


def memory(_request: pytest.FixtureRequest) -> Store:
    """Open an in-memory table."""
    return MemoryStore()


def dynamodb(request: pytest.FixtureRequest) -> Store:
    """Open a table in the KCL's layout."""
    return DynamoStore(f"swapped-{next(_numbers)}", endpoint=request.getfixturevalue("dynalite_url"), session=_AWS)


def postgres(request: pytest.FixtureRequest) -> Store:
    """Open a table on a real server."""
    return open_store(build_store_url(request.getfixturevalue("postgres_service"), f"swapped_{next(_numbers)}"))


def blob(request: pytest.FixtureRequest) -> Store:
    return EtagStore(AgelessBlobs(container(request.getfixturevalue("azurite_connection"))), ObjectLayout("fleet/one"))


def s3(request: pytest.FixtureRequest) -> Store:
    """Open a bucket on a service that checks conditions correctly even if writes are concurrent."""
    return EtagStore(bucket(request.getfixturevalue("versitygw_url")), ObjectLayout("fleet/one"))


def gcs(request: pytest.FixtureRequest) -> Store:
    """Open a prefix of one bucket."""
    objects = AgelessGcs("swapped", endpoint=request.getfixturevalue("gcs_url"))
    objects.ensure_bucket(create=True)
    return EtagStore(objects, ObjectLayout(f"fleet/{next(_numbers)}"))


def by_session(kind: Callable[[pytest.FixtureRequest], Store]) -> Callable[[pytest.FixtureRequest], Store]:
    """Return a function that opens a table of this kind in the `sessions` layout."""

    def open_sessions(request: pytest.FixtureRequest) -> Store:
        store = kind(request)
        assert isinstance(store, SupportsSessionsLayout)
        return SessionStore(store.cells(), gather_seconds=0.0)

    return open_sessions


Opening = Callable[[pytest.FixtureRequest], Store]

PAIRS: dict[str, tuple[Opening, Opening]] = {
    "counters": (memory, memory),
    "to sessions": (memory, by_session(memory)),
    "from sessions": (by_session(memory), memory),
    "between sessions": (by_session(memory), by_session(memory)),
    "dynamodb to postgres": (dynamodb, postgres),
    "the KCL's layout to sessions": (dynamodb, by_session(dynamodb)),
    "aws to azure": (dynamodb, blob),
    "azure to aws": (blob, dynamodb),
    "s3 to google": (s3, gcs),
}
"""The opening functions of the source and the target table, by the name of the pair."""

MARKS = {
    "dynamodb to postgres": (pytest.mark.services,),
    "the KCL's layout to sessions": (pytest.mark.services,),
    "aws to azure": (pytest.mark.services,),
    "azure to aws": (pytest.mark.services,),
    "s3 to google": (
        pytest.mark.services,
        pytest.mark.more,
        pytest.mark.timeout(1800),
    ),  # the services may have to be built first
}


def pairs(names: Iterable[str] = PAIRS, *more: pytest.MarkDecorator) -> list[object]:
    """Return the pairs with these names as fixture parameters, marked by `more` and by the services that they need."""
    return [
        pytest.param(name, marks=(*MARKS[name], *more) if name in MARKS else (), id=name.replace(" ", "-"))
        for name in names
    ]


def opened_pair(request: pytest.FixtureRequest) -> tuple[Store, Store]:
    """Open the two tables of the pair that the fixture's parameter names, and close them after the test."""
    source, target = (opening(request) for opening in PAIRS[request.param])
    for store in (source, target):
        request.addfinalizer(store.close)
    return source, target
