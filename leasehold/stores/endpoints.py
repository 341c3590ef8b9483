"""Endpoints of services as users name them, never with credentials, which errors would repeat; and their clocks."""

from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from leasehold.stores.protocol import StoreError


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
