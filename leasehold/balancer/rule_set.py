"""Defines the base class of rule sets.

A rule set has options, chooses leases, and has properties that other modules use.

To add a rule set, write a class in `rules/`. The class needs attrs fields with validators for its options, and a `take`
method. It overrides those properties below whose defaults do not fit. Then add the class to `RULE_SETS` in `config.py`.
The planner, the JSON form, the commands, the simulator, the checker and the law tests use all classes in this tuple.

Rule 1: other code never checks which rule set it uses. All differences between rule sets are properties or methods of
this class.
Rule 2: rule sets get their settings as `FleetSeconds`. They cannot import `Config`, because its module imports all rule
sets.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

from attrs import Attribute, evolve, fields_dict, frozen

from leasehold.balancer.actions import Action
from leasehold.balancer.census import Census
from leasehold.balancer.model import Me

OPTION_VALUE_MAX = 1e12
"""The maximum of every numeric option. It is far above any real value, and small enough that sums stay finite."""

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def number_validator(
    minimum: float, *, exclusive: bool = False, allow_none: bool = False, whole_only: bool = False
) -> Validator:
    """Return a validator for a number from `minimum` to `OPTION_VALUE_MAX`.

    If `exclusive` is true, `minimum` itself is not allowed. True and False are not accepted as numbers.
    """

    def check(_config: object, attribute: "Attribute[Any]", value: Any) -> None:  # noqa: ANN401  any value is possible
        if allow_none and value is None:
            return
        allowed_types = int if whole_only else (int, float)
        has_valid_type = (
            isinstance(value, allowed_types) and not isinstance(value, bool) and abs(value) <= OPTION_VALUE_MAX
        )
        if not (has_valid_type and (value > minimum if exclusive else value >= minimum)):
            type_name = "whole number" if whole_only else "number"
            raise ValueError(
                f"{attribute.name}: {value!r} is not a {type_name} {'above' if exclusive else 'of at least'} "
                f"{minimum:g}"
                f" (and at most {OPTION_VALUE_MAX:g})"
            )

    return check


class FleetSeconds(Protocol):
    """The settings that rule sets use, in seconds. `Config` implements this protocol."""

    @property
    def lease_seconds(self) -> float:
        """If a lease's version has not changed for this time, its owner counts as dead."""

    @property
    def cycle_seconds(self) -> float:
        """The time between two plans, unless an event requires an earlier plan."""


@frozen
class RuleSet:
    """The base class of rule sets. A subclass implements `take`, and may override any other property or method.

    Attributes:
        name: The name of the rule set in commands, options and the JSON form.
        renewal_rule: The number of the rule that requires renewals.
        keeps_lookout: Whether one worker, the lookout, reads the table for all others (C3 to C16).
        counts_ended: Whether ended leases are counted, claimed, renewed, and kept by their owners.
        children_later: Whether the free lease of a child shard is ignored until the leases of the shard's parents have
            ended (M1).
        starts_at_time: Whether child shards start at the initial position if it is AT_TIMESTAMP.

    Examples:
        >>> from leasehold import Kcl, Minimal
        >>> from leasehold.planner import RuleSet
        >>> [rules.name for rules in RuleSet.__subclasses__() if rules in {Kcl, Minimal}]
        ['kcl', 'minimal']
    """

    name: ClassVar[str]
    renewal_rule: ClassVar[str]
    keeps_lookout: ClassVar[bool] = False
    counts_ended: ClassVar[bool] = False
    children_later: ClassVar[bool] = False
    starts_at_time: ClassVar[bool] = False

    def take(self, census: Census, me: Me, config: FleetSeconds) -> tuple[Action, ...]:
        """Return the actions by which this worker obtains or gives up leases now.

        The result depends only on the arguments.
        """
        raise NotImplementedError

    def calls(self, _census: Census, _me: Me, _config: FleetSeconds) -> Mapping[str, Sequence[str]]:
        """Return, for each worker, the keys of the leases that it will claim or should hand off (C6).

        A worker whose sequence of keys is empty should read the whole table.
        """
        return {}

    @classmethod
    def variants(cls) -> Mapping[str, "RuleSet"]:
        """Return the variants of this rule set that the simulator tests, by name."""
        return {cls.name: cls()}

    def given(self, **options: object) -> Self:
        """Return a copy with these options.

        An option is ignored if its value is None, or if this rule set does not have it.
        """
        own_options = fields_dict(type(self))
        return evolve(
            self, **{name: value for name, value in options.items() if name in own_options and value is not None}
        )

    @property
    def groups(self) -> Literal["prefix"] | tuple[str, ...] | None:
        """How workers form groups (`Groups` in `rules/shares.py`), or None if they form no groups."""
        return None

    @property
    def evens_out(self) -> bool:
        """Whether workers move leases until no two workers differ by more than one lease."""
        return True

    @property
    def again_at_once(self) -> bool:
        """Whether a worker reads the table again immediately after it has taken a lease."""
        return False

    @property
    def weighs_loads(self) -> bool:
        """Whether workers may hold different numbers of leases in order to balance bytes per second (M13)."""
        return False

    @property
    def frees_expired(self) -> bool:
        """Whether the lookout frees expired leases for all workers (C6)."""
        return False

    @property
    def most_leases(self) -> int | None:
        """The maximum number of leases that one worker may hold, or None for no limit."""
        return None

    @property
    def lease_seconds(self) -> float:
        """The default of `Config.lease_seconds`."""
        return 10.0

    def cycle_seconds(self, lease_seconds: float) -> float:
        """Return the default of `Config.cycle_seconds`.

        By default, it is the interval at which KCL 2.x plans: 2 x (`lease_seconds` + 25 ms).
        """
        return 2 * (lease_seconds + 0.025)

    def renew_seconds(self, lease_seconds: float) -> float:
        """Return the default of `Config.renew_seconds`."""
        return lease_seconds / 3

    def expires_above(self, lease_seconds: float) -> float:
        """Return the number of seconds without a renewal above which a lease is expired.

        The planner always compares with `>`. Therefore, a rule set whose leases expire after exactly `lease_seconds`
        returns the next smaller number.
        """
        return lease_seconds

    def overdue_seconds(self, _lease_seconds: float, _cycle_seconds: float) -> float | None:
        """Return how long a lease may be free before the worker that should claim it counts as missing (M9, M14).

        The result is in seconds, or None if workers do not wait for each other.
        """
        return None
