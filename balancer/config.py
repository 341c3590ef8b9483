"""What may be tuned, checked when it is built: the rule set, its limits, and the seconds."""

from collections.abc import Callable
from typing import Any, Literal, assert_never

from attrs import Attribute, field, fields, frozen
from attrs.validators import in_, instance_of

from balancer.model import LATEST, Position

LARGEST = 1e12
"""No count and no seconds of a real fleet come near; beyond, sums of them would overflow."""

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def _number(least: float, *, above: bool = False, none: bool = False, whole: bool = False) -> Validator:
    """A number of at least (or above) `least`, up to LARGEST; True and False are no numbers."""

    def check(_config: object, attribute: "Attribute[Any]", value: Any) -> None:  # noqa: ANN401  it is given anything
        if none and value is None:
            return
        kinds = int if whole else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) <= LARGEST
        if not (fits and (value > least if above else value >= least)):
            kind = "whole number" if whole else "number"
            raise ValueError(
                f"{attribute.name}: {value!r} is not a {kind} {'above' if above else 'of at least'} {least:g}"
                f" (and at most {LARGEST:g})"
            )

    return check


def _groups(_config: object, attribute: "Attribute[Any]", value: object) -> None:
    separators = isinstance(value, tuple) and all(isinstance(part, str) and part for part in value)
    if not (value is None or value == "prefix" or separators):
        raise ValueError(f'{attribute.name}: {value!r} is neither none, "prefix" nor a list of separators')


def _workers(config: object, attribute: "Attribute[Any]", value: object) -> None:
    if not (isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)):
        _number(1, whole=True, none=True)(config, attribute, value)


@frozen
class Kcl:
    """The Kinesis Client Library 2.x (rules K1 to K9).

    max_leases           most leases one worker may hold; None: no limit
    max_steals           most leases stolen in one turn
    very_old_multiplier  leases idle for more lease_seconds than this are taken first; 0: off
    """

    max_leases: int | None = field(default=None, validator=_number(1, whole=True, none=True))
    max_steals: int = field(default=1, validator=_number(1, whole=True))
    very_old_multiplier: int = field(default=3, validator=_number(0, whole=True))


@frozen
class KclRust:
    """kcl-rust (rules R1 and R2).

    leases_to_acquire  most free leases claimed in one turn
    max_leases         most leases one worker may hold; None: no limit
    """

    leases_to_acquire: int = field(default=10, validator=_number(1, whole=True))
    max_leases: int | None = field(default=None, validator=_number(1, whole=True, none=True))


@frozen
class EventHubs:
    """The Azure SDKs' P/N rules (rules E1 to E7), in one of their dialects."""

    dialect: Literal["gist", "dotnet", "java", "python"] = field(
        default="dotnet", validator=in_(("gist", "dotnet", "java", "python"))
    )
    mode: Literal["balanced", "greedy"] = field(default="balanced", validator=in_(("balanced", "greedy")))


@frozen
class Minimal:
    """Our own: the least moves, every group balanced (rules M1 to M15).

    groups            how workers form groups: None; "prefix", the text before the last "-";
                      or separators, outermost first, for a tree
    expected_workers  which workers are known to be coming, or only how many; None: only those seen
    max_leases        most leases one worker may hold; None: no limit
    max_steals        most leases taken from the living in one turn; None: no limit
    patience          turns an unbalanced group may stand still before slots are ignored (M9)
    grace_seconds     how long gracefully released leases wait for a joiner (M12); 0: off
    release           whether an overloaded worker gives a lease up for peers that never steal (M11)
    """

    groups: Literal["prefix"] | tuple[str, ...] | None = field(default=None, validator=_groups)
    expected_workers: int | tuple[str, ...] | None = field(default=None, validator=_workers)
    max_leases: int | None = field(default=None, validator=_number(1, whole=True, none=True))
    max_steals: int | None = field(default=None, validator=_number(1, whole=True, none=True))
    patience: int = field(default=3, validator=_number(1, whole=True))
    grace_seconds: float = field(default=0.0, validator=_number(0))
    release: bool = field(default=False, validator=instance_of(bool))


Rules = Kcl | KclRust | EventHubs | Minimal


def _lease_seconds(rules: Rules) -> float:
    match rules:
        case Kcl() | Minimal():
            return 10.0
        case KclRust():
            return 20.0
        case EventHubs():
            return 180.0 if rules.dialect == "python" else 120.0
        case _:
            assert_never(rules)


def _cycle_seconds(rules: Rules, lease_seconds: float) -> float:
    if isinstance(rules, EventHubs):
        return 30.0
    # KCL 2.x plans every 2 x (lease_seconds + 25 ms); kcl-rust every 20 s, its lease_seconds.
    return lease_seconds if isinstance(rules, KclRust) else 2 * (lease_seconds + 0.025)


def _renew_seconds(rules: Rules, lease_seconds: float) -> float:
    match rules:
        case EventHubs():
            return min(20.0, lease_seconds / 3)  # peers may expire at 60 s
        case Minimal():
            return 0.53 * lease_seconds  # C2: two chances before any judge's expiry
        case Kcl() | KclRust():
            return lease_seconds / 3
        case _:
            assert_never(rules)


def _a_start(_config: object, attribute: "Attribute[Any]", value: object) -> None:
    if not isinstance(value, Position) or value.numbered or value.ended:
        raise ValueError(f"{attribute.name}: {value!r} is not TRIM_HORIZON, LATEST or a position at a timestamp")


_A_RULE_SET: Validator = instance_of((Kcl, KclRust, EventHubs, Minimal))
_ABOVE_ZERO = _number(0, above=True)


@frozen
class Config:
    """How one fleet plans; the same for every worker of it.

    rules             the rule set and its own limits
    lease_seconds     a lease whose version stands still for longer has no living owner
    cycle_seconds     seconds between two plans where nothing asks for sooner
    renew_seconds     own leases idle for this long are renewed
    initial_position  where a shard starts that no lease says anything about
    Raises ValueError or TypeError, naming the field, for a value out of its limits.
    """

    rules: Rules = field(factory=Minimal, validator=_A_RULE_SET)
    lease_seconds: float = field(validator=_ABOVE_ZERO)
    cycle_seconds: float = field(validator=_ABOVE_ZERO)
    renew_seconds: float = field(validator=_ABOVE_ZERO)
    initial_position: Position = field(default=LATEST, validator=_a_start)

    # Validators run after all defaults, and what these are made from may be wrong.
    @lease_seconds.default
    def _default_lease_seconds(self) -> float:
        _A_RULE_SET(self, fields(Config).rules, self.rules)
        return _lease_seconds(self.rules)

    @cycle_seconds.default
    def _default_cycle_seconds(self) -> float:
        _A_RULE_SET(self, fields(Config).rules, self.rules)
        _ABOVE_ZERO(self, fields(Config).lease_seconds, self.lease_seconds)
        return _cycle_seconds(self.rules, self.lease_seconds)

    @renew_seconds.default
    def _default_renew_seconds(self) -> float:
        _A_RULE_SET(self, fields(Config).rules, self.rules)
        _ABOVE_ZERO(self, fields(Config).lease_seconds, self.lease_seconds)
        return _renew_seconds(self.rules, self.lease_seconds)
