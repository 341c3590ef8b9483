"""Rights, each used once, and what came of it.

Rule 1: a refusal by name is told apart from silence. Rule 2: where the service cannot be reached, or what everything
else is about is not there, nothing more is asked. Rule 3: what has no consequence is found out by `ask`; whatever
it writes, it removes.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from leasehold.adapters.sources.protocol import SourceError, SourceUnavailable
from leasehold.adapters.steering.doctor.findings import Finding
from leasehold.stores.endpoints import date_of
from leasehold.stores.objects.requests import SkewWarning
from leasehold.stores.protocol import OutcomeUnknown, StoreError

_DENIED = frozenset({"AccessDeniedException", "AccessDenied", "KMSAccessDeniedException"})
_DENIED_STATUS = 403
REQUEST_SECONDS = 5.0
"""Of one request, sent once: whoever asks what is wrong sits and waits."""

HALF_SECOND = 0.5
"""A Date header is cut to whole seconds, so it is that much early on the average."""


class NotTried(Exception):
    """A right could not be used without another one, or without a consequence."""


class NotThere(Exception):
    """The table, container, bucket or consumer does not exist, which the first worker may mend."""


class NotOurs(StoreError):
    """The table is of another shape than a lease table."""


@frozen
class RightAttempt:
    """The use of one right.

    right   by the service's own name
    ask     uses it without a consequence, and returns a text if there is more to say than that it is allowed; raises
            StoreError, SourceError, or one of the three above
    writes  whether it is a right to write
    """

    right: str
    ask: Callable[[], object]
    writes: bool = False


@frozen
class RightsTrial:
    """The rights on a store, or on one stream, and how to try them.

    name      for sentences and for the clock
    attempts  its rights; the first one reaches it
    clock     what the service's answers said about the time; None where it has no clock of its own
    prove     tries conditional writes; raises StoreError if they are ignored; None: there are none
    close     closes all connections
    """

    name: str
    attempts: tuple[RightAttempt, ...]
    clock: "ServiceClock | None" = None
    prove: Callable[[], None] | None = None
    close: Callable[[], None] = lambda: None


class ServiceClock(SkewWarning):
    """Keeps how far our clock is ahead of a service's, in place of warning of it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._now = clock
        self.ahead: float | None = None

    def saw(self, service_now: float) -> None:
        """Note the difference to the service's clock (seconds since 1970, in whole ones)."""
        self.ahead = self._now() - service_now - HALF_SECOND

    def heard(self, http_response: Any, **_more: object) -> None:  # noqa: ANN401  botocore gives hooks what it likes
        """Take the time from an answer's Date header: a hook after a call of botocore's, refusals included."""
        if (now := date_of(http_response.headers.get("date"))) is not None:
            self.saw(now)


def attempted(trial: RightsTrial, *, read_only: bool) -> Iterator[Finding]:
    """Try one right after the other (rule 2)."""
    for attempt in trial.attempts:
        if attempt.writes and read_only:
            yield Finding(attempt.right, "unknown", f"{trial.name}: not tried, as it is a right to write (--read-only)")
            continue
        finding, last = _tried(attempt, trial.name)
        yield finding
        if last:
            return


def _tried(attempt: RightAttempt, name: str) -> tuple[Finding, bool]:
    """The finding of an attempt, and whether the attempts after it would fail alike."""
    right = attempt.right
    try:
        said = attempt.ask()
        return Finding(right, "ok", f"{name}: {said if isinstance(said, str) else 'allowed'}"), False
    except NotThere as error:
        return Finding(right, "unknown", str(error), "let the first worker make it, and ask again"), True
    except NotTried as error:
        return Finding(right, "unknown", f"{name}: {error}"), False
    except NotOurs as error:
        return Finding("table", "wrong", str(error)), True
    except (StoreError, SourceError) as error:
        return _failed(right, error)


def _failed(right: str, error: Exception) -> tuple[Finding, bool]:
    if isinstance(error, OutcomeUnknown | SourceUnavailable):
        if _answered(error):
            return Finding(right, "unknown", f"no usable answer: {error}", "ask again later"), False
        return Finding(right, "wrong", f"not reached: {error}", "check the name, the region, the network"), True
    denied = _denied(error)
    return Finding(right, "wrong", str(error), f"allow {right}" if denied else ""), not denied


def _answered(error: Exception) -> bool:
    """Whether the service said something at all."""
    return getattr(error.__cause__, "response", None) is not None


def _denied(error: Exception) -> bool:
    cause: Any = error.__cause__
    answer = getattr(cause, "response", None)
    if isinstance(answer, dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return answer.get("Error", {}).get("Code") in _DENIED or status == _DENIED_STATUS
    return getattr(cause, "status_code", None) == _DENIED_STATUS
