"""Small objects under ETags: the operations that a service of blobs must offer to hold leases.

Rule 1: an ETag here is bare; services list it bare and answer it quoted. Rule 2: a refused write
is None, never an exception. Rule 3: a write is sent once; if its reply is lost it raises
`OutcomeUnknown`, for a silent second try would be refused by its own first.
"""

import logging
import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Protocol

from attrs import frozen

from leasehold.stores.printable import escaped

ObjectFields = Mapping[str, str]
"""The content of an object: names in lower case, values in ASCII."""

SKEW_SECONDS = 60.0
"""A local clock further off than this from the service's is worth a warning."""

log = escaped(logging.getLogger("leasehold.objects"))


@frozen
class Stored:
    """An object as a reading showed it.

    etag   bare, compared for equality only
    age    seconds since it was last written, both ends by the service's own clock, less the
           second to which the service rounds; never below 0
    """

    name: str
    etag: str
    fields: ObjectFields
    age: float = 0.0


class Objects(Protocol):
    """A container or bucket. Every method raises `OutcomeUnknown` if the service cannot be reached."""

    def list(self, prefix: str) -> tuple[Stored, ...]:
        """Every object whose name begins with this, on however many pages; strongly consistent."""

    def get(self, name: str) -> Stored | None:
        """The object of this name, by a consistent reading; None if it is not there."""

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Write it if the name is free (If-None-Match: *); its ETag, or None if refused."""

    def put_over(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        """Replace it if it is still this one (If-Match); its new ETag, or None if refused."""

    def delete(self, name: str, etag: str) -> bool:
        """Remove it if it is still this one; False if refused, True also if it was gone."""

    def close(self) -> None:
        """Close all connections."""


def bare(etag: str) -> str:
    """The ETag without its quotes."""
    return etag.strip('"')


def age(service_now: float, last_modified: float) -> float:
    """Seconds since an object was written, both by the service's clock, less its rounding of 1 s."""
    return max(0.0, service_now - last_modified - 1.0)


class SkewWarning:
    """Says once, with the measured seconds, that the local clock is far off the service's.

    Nothing here depends on the local clock: ages come from the service's own. What may depend
    on it is everything else on this machine, and peers that judge expiry by theirs.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._said = False

    def saw(self, service_now: float) -> None:
        """Compare with the service's clock (seconds since 1970), as its Date header tells it."""
        skew = self._clock() - service_now
        with self._lock:
            far = abs(skew) > SKEW_SECONDS and not self._said
            self._said = self._said or far
        if far:
            log.warning(
                "the local clock is %.0f s %s the storage service's; leases are judged by the service's clock",
                abs(skew),
                "ahead of" if skew > 0 else "behind",
            )
