"""From a URL to a store: `scheme://place?option=value`, each scheme importing only what it needs.

memory://name                                  a table of this process
sqlite:///folder/leases.db                     a file on this machine; sqlite://leases.db is relative
dynamodb://table?region=…&endpoint=…           Amazon DynamoDB, in the Kinesis Client Library's layout
azblob://account/container?prefix=…            Azure Blob; the key in AZURE_STORAGE_CONNECTION_STRING, else by identity
azblob://account/container?eventhub=…&group=…  the same, in the Azure SDKs' layout: eventhub=<namespace>/<hub>;
                                               `start=` says where a partition without a checkpoint begins, and
                                               `endpoint=` names another service than the account's
s3://bucket/prefix?region=…&endpoint=…         Amazon S3, or a service that keeps its conditional writes
"""

from collections.abc import Mapping
from typing import Protocol, cast

from leasehold.stores.protocol import Store, StoreError
from leasehold.stores.schemes import Scheme, read_url


class _StoreModule(Protocol):
    """The function that each of the modules below provides."""

    def open_url(self, place: str, options: Mapping[str, str], *, create: bool, request_seconds: float | None) -> Store:
        """The store at this place; raises ValueError naming an option it cannot use."""


class _Provable(Protocol):
    """A store on a service that may or may not keep its conditions."""

    def prove(self) -> None:
        """Raises StoreError if it does not."""


_PROVED = frozenset({"dynamodb", "azblob", "s3"})

_SCHEMES = {
    "memory": Scheme("leasehold.stores.embedded.memory"),
    "sqlite": Scheme("leasehold.stores.embedded.sqlite"),
    "dynamodb": Scheme("leasehold.stores.dynamodb.store", frozenset({"region", "endpoint"}), "aws"),
    "azblob": Scheme(
        "leasehold.stores.objects.blob", frozenset({"prefix", "eventhub", "group", "start", "endpoint"}), "azure"
    ),
    "s3": Scheme("leasehold.stores.objects.s3", frozenset({"region", "endpoint"}), "aws"),
}


def open_store(url: str, *, create: bool = True, write: bool = True, request_seconds: float | None = None) -> Store:
    """The store this URL names; its table is made if there is none, unless `create` is False.

    A service is tried first, whether it keeps the conditions of writes, unless `write` is False: then it
    need not even allow writes. No request takes longer than `request_seconds`, its repetitions included: a
    worker gives a third of its `lease_seconds`, so that a stalled request does not cost it the lease. None: as
    long as suits a tool. Raises ValueError, naming what is wrong and never repeating the URL (it may hold a
    secret); StoreError if the store cannot be used as asked; OutcomeUnknown if it cannot be reached.
    """
    scheme, place, options = store_address(url)
    module: _StoreModule = _SCHEMES[scheme].load("store", StoreError)
    store = module.open_url(place, options, create=create, request_seconds=request_seconds)
    return _proved(store) if write and scheme in _PROVED else store


def store_address(url: str) -> tuple[str, str, Mapping[str, str]]:
    """The scheme, the place and the options of a store's URL. Raises ValueError, never repeating the URL."""
    return read_url(url, "store", _SCHEMES)


def _proved(store: Store) -> Store:
    try:
        cast("_Provable", store).prove()
    except BaseException:
        store.close()
        raise
    return store
