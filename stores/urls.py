"""From a URL to a store: `scheme://place?option=value`, each scheme importing only what it needs.

memory://name                                  a table of this process
sqlite:///folder/leases.db                     a file on this machine; sqlite://leases.db is relative
dynamodb://table?region=…&endpoint=…           Amazon DynamoDB, in the Kinesis Client Library's layout
azblob://account/container?prefix=…            Azure Blob; the key in AZURE_STORAGE_CONNECTION_STRING, else by identity
azblob://account/container?eventhub=…&group=…  the same, in the Azure SDKs' layout: eventhub=<namespace>/<hub>
azblob-eph://account/container?eventhub=…      the retired Event Processor Host's blobs, to copy from
s3://bucket/prefix?region=…&endpoint=…         Amazon S3, or a service that keeps its conditional writes
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from stores.protocol import Store, StoreError


class _Module(Protocol):
    """What each of the modules below provides."""

    def open_url(self, place: str, options: Mapping[str, str], *, create: bool) -> Store:
        """The store at this place; raises ValueError naming an option it cannot use."""
        ...


# scheme: (module, options it understands, the extra that brings its libraries)
_SCHEMES: dict[str, tuple[str, frozenset[str], str]] = {
    "memory": ("stores.memory", frozenset(), ""),
    "sqlite": ("stores.sqlite", frozenset(), ""),
    "dynamodb": ("stores.dynamodb", frozenset({"region", "endpoint"}), "aws"),
    "azblob": ("stores.blob", frozenset({"prefix", "eventhub", "group", "start", "endpoint"}), "azure"),
    "azblob-eph": ("stores.blob_eph", frozenset({"prefix", "eventhub", "group", "endpoint"}), "azure"),
    "s3": ("stores.s3", frozenset({"region", "endpoint"}), "aws"),
}


def open_store(url: str, *, create: bool = True) -> Store:
    """The store this URL names; its table is made if there is none, unless `create` is False.

    Raises ValueError, naming what is wrong and never repeating the URL (it may hold a secret);
    StoreError if the store cannot be used as asked; OutcomeUnknown if it cannot be reached.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("store URL: it cannot be read as a URL; write scheme://place") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"store URL: unknown scheme {parts.scheme!r}; choose one of {', '.join(sorted(_SCHEMES))}")
    if parts.username or parts.password:
        raise ValueError("store URL: credentials do not belong in it; use the environment")
    module, known, extra = _SCHEMES[parts.scheme]
    options = _options(parts.query, known)
    return _load(module, extra).open_url(unquote(parts.netloc + parts.path), options, create=create)


def _options(query: str, known: frozenset[str]) -> Mapping[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            choice = f"choose among {', '.join(sorted(known))}" if known else "this store has none"
            raise ValueError(f"store URL: unknown option {name!r}; {choice}")
        if not value or name in options:
            hint = "in a shell, $Default and the like want single quotes around the URL"
            raise ValueError(f"store URL: option {name!r} wants one value; {hint}")
        options[name] = value
    return options


def _load(module: str, extra: str) -> _Module:
    try:
        return cast("_Module", import_module(module))
    except ModuleNotFoundError as missing:
        if not extra:
            raise
        raise StoreError(f"this store needs {missing.name}; install leasehold[{extra}]") from missing
