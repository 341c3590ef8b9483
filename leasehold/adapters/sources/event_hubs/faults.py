"""The faults of the Event Hubs client, as sentences that a user can act on."""

from azure.eventhub.exceptions import AuthenticationError, EventHubError

from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING, Access
from leasehold.adapters.sources.protocol import SourceError, SourceUnavailable, Trimmed

_EXPIRED = "CBS Authentication Expired"
"""What the client says, without asking the service, where a process slept through a token or its clock was set."""


class Contended(SourceUnavailable):
    """Another reader took the partition's link: the lease is lost, or a reader has none."""


def explained(error: BaseException, access: Access, partition: str | None = None) -> SourceError:
    """The fault as an error that says what to do; SourceUnavailable if trying again later may help.

    Nothing of a connection string is repeated: the client's own texts hold none.
    """
    where = f"event hub {access.hub!r} in {access.namespace}" + (f", partition {partition}" if partition else "")
    if isinstance(error, SourceError):
        return error
    if isinstance(error, AuthenticationError):
        if _EXPIRED in str(error):
            return SourceUnavailable(f"{where}: its token has expired by this machine's clock; the next one is fetched")
        return SourceError(f"{where}: access refused: {_sign_in(access)} ({_first_line(error)})")
    if isinstance(error, ImportError):
        return SourceError(f"{where}: websockets need aiohttp; install leasehold[azure]")
    if isinstance(error, ValueError):
        return SourceError(f"{where}: {_first_line(error)}")
    return _by_condition(error, access, where)


def _by_condition(error: BaseException, access: Access, where: str) -> SourceError:
    condition = (error.error if isinstance(error, EventHubError) else None) or ""
    said = _first_line(error)
    match condition:
        case "link:stolen":
            return Contended(f"{where}: another reader of group {access.group!r} took it: lease lost, or contended")
        case "not-found":
            return SourceError(f"{where}: there is no such hub or consumer group {access.group!r}; check the URL")
        case "unauthorized-access":
            return SourceError(f"{where}: access refused: {_sign_in(access)} ({said})")
        case "argument-error" | "argument-out-of-range" | "invalid-field":
            hint = "if the hub was made anew, set the checkpoints back with `leasehold reset`"
            return Trimmed(f"{where}: the starting position is refused; {hint} ({said})")
        case "resource-limit-exceeded":
            hint = f"give this fleet a consumer group of its own, as others read in {access.group!r} too"
            return SourceUnavailable(f"{where}: too many readers; {hint} ({said})")
        case _:
            return SourceUnavailable(f"{where}: {said}")


def _sign_in(access: Access) -> str:
    if access.secret:
        return f"check the key in {CONNECTION_STRING}, which must allow listening, and this machine's clock"
    return "this identity needs the role 'Azure Event Hubs Data Receiver'"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
