"""The findings of an examination, as values."""

from collections.abc import Iterable
from typing import Literal

from attrs import asdict, frozen

from leasehold.stores.objects.requests import SKEW_SECONDS

FindingState = Literal["ok", "wrong", "unknown"]
"""`unknown` is what could not, or should not, be tried."""


@frozen
class Finding:
    """The result of one examination.

    what  its name: a right by the service's own name, or a word such as "clock"
    says  a sentence
    todo  what to do about it; "" where nothing is to be done, or the sentence says it
    """

    what: str
    state: FindingState
    says: str
    todo: str = ""

    def as_json(self) -> dict[str, str]:
        """The fields by their names."""
        return asdict(self)


def well(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong; what is unknown is not."""
    return all(finding.state != "wrong" for finding in findings)


def clock_of(service: str, ahead: float | None) -> Finding:
    """The finding about our clock, which is so many seconds ahead of this service's; None: it did not say."""
    what = f"clock of {service}"
    if ahead is None:
        return Finding(what, "unknown", "the service told no time")
    said = f"ours is {abs(ahead):.1f} s {'ahead of' if ahead >= 0 else 'behind'} it (told in whole seconds)"
    if abs(ahead) <= SKEW_SECONDS:
        return Finding(what, "ok", said)
    return Finding(
        what, "wrong", said, "set the clock: requests are refused at 5 min, and lag is as true as clocks are"
    )
