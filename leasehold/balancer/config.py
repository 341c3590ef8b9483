"""Defines the settings of a group of workers (`Config`), and lists the built-in rule sets."""

from typing import Any

from attrs import Attribute, Factory, field, fields, frozen
from attrs.validators import instance_of

from leasehold.balancer.model import LATEST, Position
from leasehold.balancer.rule_set import RuleSet, Validator, number_validator
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal

RULE_SETS: tuple[type[RuleSet], ...] = (Kcl, KclRust, EventHubs, Minimal)
"""The rule sets that the commands, the JSON form, the simulator, the checker and the law tests support."""


def _check_initial_position(_config: object, attribute: "Attribute[Any]", value: object) -> None:
    if not isinstance(value, Position) or value.numbered or value.ended:
        raise ValueError(f"{attribute.name}: {value!r} is not TRIM_HORIZON, LATEST or a position at a timestamp")


_IS_RULE_SET: Validator = instance_of(RuleSet)
_IS_POSITIVE = number_validator(0, exclusive=True)


# attrs computes all defaults before it runs any validator, so each default below validates the fields from which it is
# computed. The defaults are `Factory` objects and not `@lease_seconds.default` methods, because type checkers without
# an attrs plugin don't understand such methods.


def _validated_rules(config: "Config") -> RuleSet:
    _IS_RULE_SET(config, fields(Config).rules, config.rules)
    return config.rules


def _validated_lease_seconds(config: "Config") -> float:
    _IS_POSITIVE(config, fields(Config).lease_seconds, config.lease_seconds)
    return config.lease_seconds


@frozen
class Config:
    """The planner's settings, which must be the same for all workers of a group.

    rules             the rule set, with its own options
    lease_seconds     if a lease's version does not change for longer than this, its owner counts as dead
    cycle_seconds     seconds between two plans unless something requires an earlier one
    renew_seconds     a worker renews its leases once they are idle for this long
    initial_position  where a shard starts if no lease determines its position

    Raises:
        ValueError: If a value is out of range. The message names the field.
        TypeError: If a value has the wrong type. The message names the field.

    Examples:
        >>> from leasehold import Config, Kcl
        >>> Config(rules=Kcl(max_steals=2), lease_seconds=30).cycle_seconds
        60.05
    """

    rules: RuleSet = field(factory=Minimal, validator=_IS_RULE_SET)
    lease_seconds: float = field(
        default=Factory(lambda config: _validated_rules(config).lease_seconds, takes_self=True), validator=_IS_POSITIVE
    )
    cycle_seconds: float = field(
        default=Factory(
            lambda config: _validated_rules(config).cycle_seconds(_validated_lease_seconds(config)), takes_self=True
        ),
        validator=_IS_POSITIVE,
    )
    renew_seconds: float = field(
        default=Factory(
            lambda config: _validated_rules(config).renew_seconds(_validated_lease_seconds(config)), takes_self=True
        ),
        validator=_IS_POSITIVE,
    )
    initial_position: Position = field(default=LATEST, validator=_check_initial_position)
