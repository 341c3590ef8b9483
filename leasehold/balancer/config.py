"""The settings of a fleet, checked when they are built: the rule set and the seconds; and the list of rule sets."""

from typing import Any

from attrs import Attribute, Factory, field, fields, frozen
from attrs.validators import instance_of

from leasehold.balancer.model import LATEST, Position
from leasehold.balancer.rule_set import RuleSet, Validator, number
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal

RULE_SETS: tuple[type[RuleSet], ...] = (Kcl, KclRust, EventHubs, Minimal)
"""Every rule set that commands, the JSON form, the simulator, the checker and the tests of the laws know."""


def _a_start(_config: object, attribute: "Attribute[Any]", value: object) -> None:
    if not isinstance(value, Position) or value.numbered or value.ended:
        raise ValueError(f"{attribute.name}: {value!r} is not TRIM_HORIZON, LATEST or a position at a timestamp")


_A_RULE_SET: Validator = instance_of(RuleSet)
_ABOVE_ZERO = number(0, above=True)


# Validators run after all defaults, and what these are made from may be wrong. The defaults are factories, and no
# methods under `@lease_seconds.default`: of such a default a type checker without a plugin for attrs knows nothing.


def _rules(config: "Config") -> RuleSet:
    _A_RULE_SET(config, fields(Config).rules, config.rules)
    return config.rules


def _seconds(config: "Config") -> float:
    _ABOVE_ZERO(config, fields(Config).lease_seconds, config.lease_seconds)
    return config.lease_seconds


@frozen
class Config:
    """The settings by which one fleet plans; the same for every worker of it.

    rules             the rule set and its own limits
    lease_seconds     a lease whose version stands still for longer has no living owner
    cycle_seconds     seconds between two plans where nothing asks for sooner
    renew_seconds     own leases idle for this long are renewed
    initial_position  where a shard starts that no lease says anything about
    Raises ValueError or TypeError, naming the field, for a value out of its limits.

    Examples:
        >>> from leasehold import Config, Kcl
        >>> Config(rules=Kcl(max_steals=2), lease_seconds=30).cycle_seconds
        60.05
    """

    rules: RuleSet = field(factory=Minimal, validator=_A_RULE_SET)
    lease_seconds: float = field(
        default=Factory(lambda config: _rules(config).lease_seconds, takes_self=True), validator=_ABOVE_ZERO
    )
    cycle_seconds: float = field(
        default=Factory(lambda config: _rules(config).cycle_seconds(_seconds(config)), takes_self=True),
        validator=_ABOVE_ZERO,
    )
    renew_seconds: float = field(
        default=Factory(lambda config: _rules(config).renew_seconds(_seconds(config)), takes_self=True),
        validator=_ABOVE_ZERO,
    )
    initial_position: Position = field(default=LATEST, validator=_a_start)
