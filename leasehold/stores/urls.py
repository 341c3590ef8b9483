"""Opens stores by URL: `scheme://location?option=value`. Only the module of the given scheme is imported.

memory://name                                  a table in this process
sqlite:///folder/leases.db                     a file on this machine; sqlite://leases.db is relative
file:///folder/backup.jsonl                    a backup, which copy-leases writes and reads; workers cannot use it
dynamodb://table?region=…&endpoint=…           Amazon DynamoDB, in the Kinesis Client Library's layout;
                                               with `wire=boto3` boto3 makes all calls
dynamodb://table?protect=on                    creates a missing table with deletion protection and point-in-time
                                               recovery
dynamodb://table?prefix=orders/                one application's part of a table that many applications share (not with
                                               Java workers)
azblob://account/container?prefix=…            Azure Blob, with AZURE_STORAGE_CONNECTION_STRING or an identity
azblob://account/container?eventhub=…&group=…  the same, in the Azure SDKs' layout: eventhub=<namespace>/<hub>;
                                               `start=` is where a partition without a checkpoint begins, and
                                               `endpoint=` replaces the account's own service
s3://bucket/prefix?region=…&endpoint=…         Amazon S3, or a compatible service with conditional writes
gcs://bucket/prefix?project=…&endpoint=…       Google Cloud Storage, with the credentials that Google's libraries find
postgres://host:port/database?table=…          PostgreSQL; libpq finds the password (PGPASSWORD, PGPASSFILE), and also
                                               user and encryption unless `user=` and `sslmode=` are given
…?layout=sessions                              not for files, and only if all workers are ours: one write of a worker
                                               renews and checkpoints all its leases (`specs/sessions.md`)

AWS URLs also accept `profile=NAME`, `role_arn=…` and `external_id=…`, which replace the environment's credentials.

The functions that parse URLs are also used for sources, which have schemes of their own. URLs and endpoints must not
contain credentials, because error messages would repeat them.
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

if TYPE_CHECKING:  # installed with the extra `aws`
    from boto3 import Session


@frozen
class Scheme:
    """A URL scheme.

    Attributes:
        module: The module whose function `open_url(location, options, …)` opens such URLs. This function raises
            ValueError for an option that it cannot use. In modules for AWS, it also takes a boto3 `session`.
        options: The names of the options that the module understands.
        extra: The extra of leasehold that installs the libraries that the module needs, or "" if it needs none.
    """

    module: str
    options: frozenset[str] = frozenset()
    extra: str = ""

    def load(self, kind: str, error_class: type[Exception]) -> Any:  # noqa: ANN401  each kind types its own modules
        """Import the module.

        Args:
            kind: The kind of URL, such as "store", for the error message.
            error_class: The class of the error to raise if a library is missing. The message names the extra to
                install.
        """
        try:
            return import_module(self.module)
        except ModuleNotFoundError as import_error:
            if not self.extra:
                raise
            raise error_class(
                f"this {kind} needs {import_error.name}; install leasehold[{self.extra}]"
            ) from import_error


@frozen(eq=False)
class Schemes(Mapping[str, Scheme]):
    """The URL schemes of stores or sources: our own, and those that other packages add by entry points.

    An entry point names a module that has a function `open_url`. If the module's URLs have options, it lists the names
    of the options in `OPTIONS`.
    """

    kind: str
    builtin: Mapping[str, Scheme]

    def __getitem__(self, scheme: str) -> Scheme:
        """Return the scheme with this name.

        Our own schemes take precedence. Raises KeyError if there is no such scheme.
        """
        if scheme in self.builtin:
            return self.builtin[scheme]
        module = plugins(self.kind)[scheme].load()
        return Scheme(module.__name__, frozenset(getattr(module, "OPTIONS", ())))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all schemes."""
        return iter({**self.builtin, **plugins(self.kind)})

    def __len__(self) -> int:
        """Return the number of schemes."""
        return len({**self.builtin, **plugins(self.kind)})


def split_url(url: str, kind: str, schemes: Mapping[str, Scheme]) -> tuple[str, str, Mapping[str, str]]:
    """Split a URL into scheme, location and options.

    Args:
        url: The URL.
        kind: The kind of URL, such as "store", for error messages.
        schemes: The known schemes.

    Raises:
        ValueError: If the URL is invalid. The message never repeats the URL, which may contain a secret.
    """
    try:
        url.encode()  # this raises an error for a lone surrogate
        parts = urlsplit(url)
    except AttributeError:
        raise ValueError(f"{kind} URL: {type(url).__name__} is not a str; write scheme://place") from None
    except ValueError:
        raise ValueError(f"{kind} URL: it is not a valid URL; write scheme://place") from None
    if parts.scheme not in schemes:
        hint = did_you_mean(parts.scheme, schemes)
        raise ValueError(
            f"{kind} URL: unknown scheme {parts.scheme!r}; choose one of {', '.join(sorted(schemes))}{hint}"
        )
    # If a URL contains an AWS secret key that has a slash, urlsplit mistakes the part before the slash for a host and
    # port.
    has_slash_in_secret = ":" in parts.netloc and "@" in parts.path
    if parts.username or parts.password or has_slash_in_secret:
        raise ValueError(f"{kind} URL: credentials do not belong in it; use the environment")
    valid_options = schemes[parts.scheme].options
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in valid_options:
            choice = f"choose among {', '.join(sorted(valid_options))}" if valid_options else f"this {kind} has none"
            raise ValueError(f"{kind} URL: unknown option {name!r}; {choice}{did_you_mean(name, valid_options)}")
        if not value or name in options:
            hint = "in a shell, put single quotes around a URL with $Default"
            raise ValueError(f"{kind} URL: option {name!r} must have one value; {hint}")
        options[name] = value
    return parts.scheme, unquote(parts.netloc + parts.path), options


AWS_OPTIONS = frozenset({"region", "endpoint", "profile", "role_arn", "external_id"})
"""The options that every AWS URL accepts."""

ROLE_ARN_PATTERN = re.compile(r"arn:[\w-]+:iam::\d{12}:role/[\w+=,.@/-]+")
"""The format of the option `role_arn`."""

_PROBED_SCHEMES = frozenset({"dynamodb", "azblob", "s3", "gcs", "postgres"})

_BUILTIN_SCHEMES = {
    "memory": Scheme("leasehold.stores.embedded.memory", frozenset({"layout"})),
    "sqlite": Scheme("leasehold.stores.embedded.sqlite", frozenset({"layout"})),
    "file": Scheme("leasehold.stores.embedded.file"),
    "dynamodb": Scheme("leasehold.stores.dynamodb.store", AWS_OPTIONS | {"prefix", "protect", "wire", "layout"}, "aws"),
    "azblob": Scheme(
        "leasehold.stores.objects.blob",
        frozenset({"prefix", "eventhub", "group", "start", "endpoint", "layout"}),
        "azure",
    ),
    "s3": Scheme("leasehold.stores.objects.s3", AWS_OPTIONS | {"layout"}, "aws"),
    "gcs": Scheme("leasehold.stores.objects.gcs", frozenset({"project", "location", "endpoint", "layout"}), "gcs"),
    "postgres": Scheme("leasehold.stores.postgres", frozenset({"table", "user", "sslmode", "layout"}), "postgres"),
}

_SCHEMES = Schemes("stores", _BUILTIN_SCHEMES)

_SESSIONS_MODULE = Scheme("leasehold.stores.sessions.store")


def open_store(
    url: str,
    *,
    create: bool = True,
    write: bool = True,
    request_seconds: float | None = None,
    session: "Session | None" = None,
) -> Store:
    """Open the store with this URL.

    Args:
        url: The URL, such as `dynamodb://orders-app`.
        create: Whether to create the table if it does not exist.
        write: Whether to check that the service honors the conditions of writes. Without the check, read-only
            permissions are enough.
        request_seconds: The time limit for a request with all its retries. Workers pass a third of their
            `lease_seconds`, so that a stalled request does not cost them a lease. If it is None, the limits are those
            of a command-line tool.
        session: A boto3 session with the credentials for an AWS URL. If it is None, the credentials are those that the
            URL or the environment names.

    Raises:
        ValueError: If the URL is invalid. The message never repeats the URL, which may contain a secret.
        StoreError: If the store cannot be used as requested.
        OutcomeUnknown: If the store cannot be reached.

    Examples:
        >>> from leasehold.stores import open_store
        >>> store = open_store("memory://example-open")
        >>> store.close()
    """
    scheme, location, options = split_store_url(url)
    arguments = session_argument(_SCHEMES[scheme], session, "store URL")
    module = _SCHEMES[scheme].load("store", StoreError)
    store: Any = module.open_url(location, options, create=create, request_seconds=request_seconds, **arguments)
    try:
        if "layout" in _SCHEMES[scheme].options:
            store = _SESSIONS_MODULE.load("layout", StoreError).open_in_layout(store, options.get("layout"))
        if write and scheme in _PROBED_SCHEMES:
            store.prove()
    except BaseException:
        store.close()
        raise
    opened_store: Store = store
    return opened_store


def session_argument(scheme: Scheme, session: "Session | None", url_kind: str) -> "dict[str, Session]":
    """Return the keyword argument that passes `session` to a module for AWS, or no argument if `session` is None.

    Args:
        scheme: The scheme of the URL.
        session: A boto3 session, or None.
        url_kind: The kind of URL, for the error message.

    Raises:
        ValueError: If a session is passed and the URL is not for AWS.
    """
    if session is not None and scheme.extra != "aws":
        raise ValueError(f"{url_kind}: a boto3 session can only be used with an AWS URL")
    return {} if session is None else {"session": session}


def split_store_url(url: str) -> tuple[str, str, Mapping[str, str]]:
    """Split a store URL into scheme, location and options. Raises ValueError, without repeating the URL."""
    return split_url(url, "store", _SCHEMES)


_TABLE_NAME_OPTIONS = ("prefix", "eventhub", "group", "table")
"""The options that distinguish several lease tables at the same location. None of these options is a secret."""


def display_name(url: str) -> str:
    """Return the URL of a store for display, with only those options that distinguish its table from others.

    Raises ValueError, without repeating the URL.
    """
    scheme, location, options = split_store_url(url)
    query = urlencode({name: options[name] for name in _TABLE_NAME_OPTIONS if name in options}, safe="/:$")
    return f"{scheme}://{location}" + (f"?{query}" if query else "")


def check_endpoint(url: str | None, url_kind: str = "store URL") -> str | None:
    """Check the value of the option `endpoint`, and return it.

    Args:
        url: A plain http:// or https:// address, or None.
        url_kind: The kind of URL that has the option, for error messages.

    Raises:
        ValueError: If `url` is not such an address, or if it contains credentials. The message does not repeat the
            value.
    """
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if "@" in url:
        raise ValueError(f"{url_kind}: option 'endpoint': credentials do not belong in it; use the environment")
    if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
        raise ValueError(f"{url_kind}: option 'endpoint' must be http://host:port or https://host")
    return url


def parse_date_header(header: str | None) -> float | None:
    """Parse a Date header into seconds since 1970. Return None if the header is missing or invalid."""
    try:
        return None if header is None else parsedate_to_datetime(header).timestamp()
    except (ValueError, OverflowError, IndexError, TypeError):
        return None


def reject_credentials(endpoint: str) -> None:
    """Raise StoreError if a client's endpoint contains credentials.

    Our URLs cannot contain credentials, but boto3 may take the endpoint from the environment.
    """
    if "@" in endpoint:
        raise StoreError("the endpoint contains credentials; remove them")
