"""From a URL to a store: `scheme://place?option=value`, each scheme importing only what it needs.

memory://name                                  a table of this process
sqlite:///folder/leases.db                     a file on this machine; sqlite://leases.db is relative
dynamodb://table?region=…&endpoint=…           Amazon DynamoDB, in the Kinesis Client Library's layout;
                                               `wire=boto3` has all calls made by boto3
azblob://account/container?prefix=…            Azure Blob; the key in AZURE_STORAGE_CONNECTION_STRING, else by identity
azblob://account/container?eventhub=…&group=…  the same, in the Azure SDKs' layout: eventhub=<namespace>/<hub>;
                                               `start=` says where a partition without a checkpoint begins, and
                                               `endpoint=` names another service than the account's
s3://bucket/prefix?region=…&endpoint=…         Amazon S3, or a service that keeps its conditional writes

Addresses of stores and sources, `scheme://place?option=value`, and the modules that open them.

Endpoints of services as users name them, never with credentials, which errors would repeat; and their clocks.
"""

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from attrs import frozen

from leasehold.stores.printable import did_you_mean
from leasehold.stores.protocol import Store, StoreError


@frozen
class Scheme:
    """The meaning of a scheme: the module that has `open_url`, the options that it understands, and its libraries.

    extra  the extra of leasehold that brings these libraries; "" where it needs none
    """

    module: str
    options: frozenset[str] = frozenset()
    extra: str = ""

    def load(self, kind: str, fault: type[Exception]) -> Any:  # noqa: ANN401  each kind types its own modules
        """The module. Raises `fault` with what to install where a library is missing."""
        try:
            return import_module(self.module)
        except ModuleNotFoundError as missing:
            if not self.extra:
                raise
            raise fault(f"this {kind} needs {missing.name}; install leasehold[{self.extra}]") from missing


def read_url(url: str, kind: str, schemes: Mapping[str, Scheme]) -> tuple[str, str, Mapping[str, str]]:
    """The scheme, the place and the options of the URL of a store or source (its `kind`).

    Raises ValueError, naming what is wrong and never repeating the URL (it may hold a secret).
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"{kind} URL: it cannot be read as a URL; write scheme://place") from None
    if parts.scheme not in schemes:
        hint = did_you_mean(parts.scheme, schemes)
        raise ValueError(
            f"{kind} URL: unknown scheme {parts.scheme!r}; choose one of {', '.join(sorted(schemes))}{hint}"
        )
    # The secrets of AWS have slashes, and what stands before the first would pass for a place with a port.
    slashed = ":" in parts.netloc and "@" in parts.path
    if parts.username or parts.password or slashed:
        raise ValueError(f"{kind} URL: credentials do not belong in it; use the environment")
    known = schemes[parts.scheme].options
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            choice = f"choose among {', '.join(sorted(known))}" if known else f"this {kind} has none"
            raise ValueError(f"{kind} URL: unknown option {name!r}; {choice}{did_you_mean(name, known)}")
        if not value or name in options:
            hint = "in a shell, $Default and the like want single quotes around the URL"
            raise ValueError(f"{kind} URL: option {name!r} wants one value; {hint}")
        options[name] = value
    return parts.scheme, unquote(parts.netloc + parts.path), options


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
    "dynamodb": Scheme("leasehold.stores.dynamodb.store", frozenset({"region", "endpoint", "wire"}), "aws"),
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
    if write and scheme in _PROVED:
        try:
            cast("_Provable", store).prove()
        except BaseException:
            store.close()
            raise
    return store


def store_address(url: str) -> tuple[str, str, Mapping[str, str]]:
    """The scheme, the place and the options of a store's URL. Raises ValueError, never repeating the URL."""
    return read_url(url, "store", _SCHEMES)


def endpoint_of(url: str | None, where: str = "store URL") -> str | None:
    """The endpoint that a URL of this kind names: a plain http:// or https:// address.

    Raises ValueError, which repeats nothing of it.
    """
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if "@" in url:
        raise ValueError(f"{where}: option 'endpoint': credentials do not belong in it; use the environment")
    if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
        raise ValueError(f"{where}: option 'endpoint' wants http://host:port or https://host")
    return url


def date_of(header: str | None) -> float | None:
    """Seconds since 1970 of an answer's Date header; None where there is none, or none that can be read."""
    try:
        return None if header is None else parsedate_to_datetime(header).timestamp()
    except (ValueError, OverflowError, IndexError, TypeError):
        return None


def without_credentials(endpoint: str) -> None:
    """Raises StoreError if a client's endpoint holds credentials: the SDK of AWS takes it from the environment too."""
    if "@" in endpoint:
        raise StoreError("the endpoint holds credentials, which do not belong in it; name it without them")
