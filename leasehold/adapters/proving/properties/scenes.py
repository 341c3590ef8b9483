"""The cases on which a law is tried, told as Python that can be pasted into a test."""

import math
from typing import Any

from attrs import NOTHING, Attribute, Factory, fields, frozen, has

from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Me, Shard

_FACTORY: Any = type(Factory(list))


def brief(value: Any) -> str:  # noqa: ANN401  the fields of values are of many kinds
    """The value as Python, without the fields that have their defaults."""
    if isinstance(value, tuple):
        inner = ", ".join(map(brief, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if value == math.inf:
        return "math.inf"
    if not has(type(value)):
        return repr(value)
    shown = []
    for each in fields(type(value)):
        there, usual = getattr(value, each.name), _default(value, each)
        if each.init and there != usual:
            shown.append(brief(there) if usual is NOTHING else f"{each.name}={brief(there)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def _default(value: object, attribute: "Attribute[Any]") -> Any:  # noqa: ANN401  likewise
    default: Any = attribute.default
    if not isinstance(default, _FACTORY):
        return default
    return default.factory(value) if default.takes_self else default.factory()


@frozen(repr=False)
class Scene:
    """A question to `plan`.

    leases, shards, me, config  its arguments
    order                       a seed: of the order in which the same leases and shards are listed a second time
    """

    leases: tuple[Lease, ...]
    shards: tuple[Shard, ...] | None
    me: Me
    config: Config
    order: int = 0

    def __repr__(self) -> str:
        return brief(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401, ARG002  Hypothesis's, and IPython's
        printer.text(repr(self))


@frozen(repr=False)
class SmallFleet:
    """A fleet that plans and acts in turns, each worker by a reading of its own.

    workers  in the order in which they plan
    owners   the owner of each lease at the start, None where it is free
    config   of all of them
    idle     seconds for which each lease has stood still
    turn     the turn that each worker begins with
    """

    workers: tuple[str, ...]
    owners: tuple[str | None, ...]
    config: Config
    idle: float = 0.0
    turn: int = 0

    def __repr__(self) -> str:
        return brief(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401, ARG002  Hypothesis's, and IPython's
        printer.text(repr(self))

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The table at the start."""
        return tuple(Lease(f"s-{place:02}", owner=owner, idle=self.idle) for place, owner in enumerate(self.owners))
