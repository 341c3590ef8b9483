"""From a URL to a store: `scheme://place?option=value`, each scheme importing only what it needs.

memory://name                                  a table of this process
sqlite:///folder/leases.db                     a file on this machine; sqlite://leases.db is relative
file:///folder/backup.jsonl                    a backup, which copy-leases writes and reads; no fleet works on it
dynamodb://table?region=…&endpoint=…           Amazon DynamoDB, in the Kinesis Client Library's layout;
                                               `wire=boto3` has all calls made by boto3
dynamodb://table?protect=on                    where it is made: with deletion protection and point-in-time recovery
dynamodb://table?prefix=orders/                one application's part of a table that many share, none of them Java
azblob://account/container?prefix=…            Azure Blob; the key in AZURE_STORAGE_CONNECTION_STRING, else by identity
azblob://account/container?eventhub=…&group=…  the same, in the Azure SDKs' layout: eventhub=<namespace>/<hub>;
                                               `start=` says where a partition without a checkpoint begins, and
                                               `endpoint=` names another service than the account's
s3://bucket/prefix?region=…&endpoint=…         Amazon S3, or a service that keeps its conditional writes
gcs://bucket/prefix?project=…&endpoint=…       Google Cloud Storage, with the credentials that Google's libraries find
postgres://host:port/database?table=…          PostgreSQL; the password as libpq finds it (PGPASSWORD, PGPASSFILE), user
                                               and encryption too, unless `user=` and `sslmode=` say them
…?layout=sessions                              all but files, for fleets of ours alone: one write of a worker renews and
                                               checkpoints all its leases (`specs/sessions.md`)

Those of AWS take `profile=NAME`, `role_arn=…` and `external_id=…` in place of the environment's credentials.

Addresses of stores and sources, `scheme://place?option=value`, and the modules that open them.

Endpoints of services as users name them, never with credentials, which errors would repeat; and their clocks.
"""

import re
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from attrs import frozen

from leasehold.errors import StoreError
from leasehold.plugins import plugins
from leasehold.stores.printable import did_you_mean
from leasehold.stores.protocol import Store

if TYPE_CHECKING:  # an extra brings it
    from boto3 import Session


@frozen
class Scheme:
    """The meaning of a scheme: the module that has `open_url`, the options that it understands, and its libraries.

    `open_url(place, options, …)` opens what is there. It raises ValueError, naming an option that it cannot use; a
    module of AWS takes `session`, of boto3's.

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


@frozen(eq=False)
class Schemes(Mapping[str, Scheme]):
    """The schemes of stores or sources: our own, and those that other distributions add by entry points.

    Such an entry point names a module with `open_url` and, if its URLs have options, their names in `OPTIONS`.
    """

    kind: str
    own: Mapping[str, Scheme]

    def __getitem__(self, scheme: str) -> Scheme:
        """Return our own scheme of this name, else the other. Raises KeyError if there is none."""
        if scheme in self.own:
            return self.own[scheme]
        module = plugins(self.kind)[scheme].load()
        return Scheme(module.__name__, frozenset(getattr(module, "OPTIONS", ())))

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names."""
        return iter({**self.own, **plugins(self.kind)})

    def __len__(self) -> int:
        """Count the names."""
        return len({**self.own, **plugins(self.kind)})


def read_url(url: str, kind: str, schemes: Mapping[str, Scheme]) -> tuple[str, str, Mapping[str, str]]:
    """The scheme, the place and the options of the URL of a store or source (its `kind`).

    Raises ValueError, naming what is wrong and never repeating the URL (it may hold a secret).
    """
    try:
        url.encode()  # raises for a lone surrogate
        parts = urlsplit(url)
    except AttributeError:
        raise ValueError(f"{kind} URL: {type(url).__name__} is no str; write scheme://place") from None
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


AWS = frozenset({"region", "endpoint", "profile", "role_arn", "external_id"})
"""The options of every URL of AWS."""

ROLE = re.compile(r"arn:[\w-]+:iam::\d{12}:role/[\w+=,.@/-]+")
"""The form of `role_arn=`."""

_PROVED = frozenset({"dynamodb", "azblob", "s3", "gcs", "postgres"})

_OURS = {
    "memory": Scheme("leasehold.stores.embedded.memory", frozenset({"layout"})),
    "sqlite": Scheme("leasehold.stores.embedded.sqlite", frozenset({"layout"})),
    "file": Scheme("leasehold.stores.embedded.file"),
    "dynamodb": Scheme("leasehold.stores.dynamodb.store", AWS | {"prefix", "protect", "wire", "layout"}, "aws"),
    "azblob": Scheme(
        "leasehold.stores.objects.blob",
        frozenset({"prefix", "eventhub", "group", "start", "endpoint", "layout"}),
        "azure",
    ),
    "s3": Scheme("leasehold.stores.objects.s3", AWS | {"layout"}, "aws"),
    "gcs": Scheme("leasehold.stores.objects.gcs", frozenset({"project", "location", "endpoint", "layout"}), "gcs"),
    "postgres": Scheme("leasehold.stores.postgres", frozenset({"table", "user", "sslmode", "layout"}), "postgres"),
}

_SCHEMES = Schemes("stores", _OURS)

_LAYOUTS = Scheme("leasehold.stores.sessions.store")


def open_store(
    url: str,
    *,
    create: bool = True,
    write: bool = True,
    request_seconds: float | None = None,
    session: "Session | None" = None,
) -> Store:
    """The store this URL names; its table is made if there is none, unless `create` is False.

    A service is tried first, whether it keeps the conditions of writes, unless `write` is False: then it
    need not even allow writes. No request takes longer than `request_seconds`, its repetitions included: a
    worker gives a third of its `lease_seconds`, so that a stalled request does not cost it the lease. None: as
    long as suits a tool. A `session` of boto3's has the credentials for a URL of AWS; None: the URL's, or the
    environment's. Raises ValueError, naming what is wrong and never repeating the URL (it may hold a
    secret); StoreError if the store cannot be used as asked; OutcomeUnknown if it cannot be reached.

    Examples:
        >>> from leasehold.stores import open_store
        >>> store = open_store("memory://example-open")
        >>> store.close()
    """
    scheme, place, options = store_address(url)
    told = session_for(_SCHEMES[scheme], session, "store URL")
    module = _SCHEMES[scheme].load("store", StoreError)
    store: Any = module.open_url(place, options, create=create, request_seconds=request_seconds, **told)
    try:
        if "layout" in _SCHEMES[scheme].options:
            store = _LAYOUTS.load("layout", StoreError).in_layout(store, options.get("layout"))
        if write and scheme in _PROVED:
            store.prove()
    except BaseException:
        store.close()
        raise
    opened: Store = store
    return opened


def session_for(scheme: Scheme, session: "Session | None", where: str) -> "dict[str, Session]":
    """The argument by which a module of AWS takes a session. Raises ValueError where the URL is none of AWS."""
    if session is not None and scheme.extra != "aws":
        raise ValueError(f"{where}: a session of boto3's has the credentials of AWS, and this URL is none of AWS")
    return {} if session is None else {"session": session}


def store_address(url: str) -> tuple[str, str, Mapping[str, str]]:
    """The scheme, the place and the options of a store's URL. Raises ValueError, never repeating the URL."""
    return read_url(url, "store", _SCHEMES)


_TELLING = ("prefix", "eventhub", "group", "table")
"""Options that tell two lease tables at one place apart; none of them is a secret."""


def name_of(url: str) -> str:
    """The name of a store for people: its URL with no more options than tell it from its neighbours.

    Raises ValueError, never repeating the URL.
    """
    scheme, place, options = store_address(url)
    told = urlencode({name: options[name] for name in _TELLING if name in options}, safe="/:$")
    return f"{scheme}://{place}" + (f"?{told}" if told else "")


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
