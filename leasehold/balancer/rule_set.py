"""A rule set: its options, its choice of leases, and the values that other parts need to know of it.

A rule set is one file in `rules/`, with one class: options as attrs fields, each with a validator, `take`, and whatever
of the values below differs. The class joins by its line in `RULE_SETS` of `config.py`. From there on the planner, the
JSON form, the commands, the simulator, the checker and the tests of the laws know it.

Rule 1: nothing asks which rule set it has; what it needs to know is a value or a method here.
Rule 2: a rule set sees the settings of its fleet as `FleetSeconds`, for `Config` stands above: it holds a rule set.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

from attrs import Attribute, evolve, fields_dict, frozen

from leasehold.balancer.actions import Action
from leasehold.balancer.census import Census
from leasehold.balancer.model import Me

LARGEST = 1e12
"""No count and no seconds of a real fleet come near; beyond, sums of them would overflow."""

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def number(least: float, *, above: bool = False, none: bool = False, whole: bool = False) -> Validator:
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


class FleetSeconds(Protocol):
    """The seconds of a fleet, as rules need them; `Config` has them."""

    @property
    def lease_seconds(self) -> float:
        """A lease whose version stands still for longer has no living owner."""

    @property
    def cycle_seconds(self) -> float:
        """Seconds between two plans where nothing asks for sooner."""


@frozen
class RuleSet:
    """The properties by which other parts know a rule set; each set overrides those in which it differs.

    name             in commands, options and the JSON form
    renewal_rule     the rule by which its workers renew
    keeps_lookout    whether its workers share one reading of the table, and its cadence (C3 to C16)
    counts_ended     whether ended leases are counted, claimed, renewed, and kept by their owners
    children_later   whether a free child is counted only once its parents' leases have ended (M1)
    starts_at_time   whether children start AT_TIMESTAMP where the stream does

    Examples:
        >>> from leasehold import Kcl, Minimal, RuleSet
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
        """Everything that this worker takes now; pure, and the same for all that read alike."""
        raise NotImplementedError

    def calls(self, _census: Census, _me: Me, _config: FleetSeconds) -> Mapping[str, Sequence[str]]:
        """C6: by worker, the keys of what it will claim or be asked for; no keys: it should read the whole table."""
        return {}

    @classmethod
    def variants(cls) -> Mapping[str, "RuleSet"]:
        """The forms of this set that the simulator tries, by the names that it gives them."""
        return {cls.name: cls()}

    def given(self, **options: object) -> Self:
        """The same set with these options; None, and an option that the set does not have, changes nothing."""
        known = fields_dict(type(self))
        return evolve(self, **{name: value for name, value in options.items() if name in known and value is not None})

    @property
    def groups(self) -> Literal["prefix"] | tuple[str, ...] | None:
        """The way in which its workers form groups (`Groups` in `rules/shares.py`); None: they form none."""
        return None

    @property
    def evens_out(self) -> bool:
        """Whether its workers leave no division alone in which two of them differ by more than one lease."""
        return True

    @property
    def again_at_once(self) -> bool:
        """Whether a worker looks again at once after it took something."""
        return False

    @property
    def weighs_loads(self) -> bool:
        """Whether counts may differ for the sake of bytes a second (M13)."""
        return False

    @property
    def frees_expired(self) -> bool:
        """Whether the lookout frees what has expired, for all (C6)."""
        return False

    @property
    def most_leases(self) -> int | None:
        """The most that one worker may hold; None: no limit."""
        return None

    @property
    def lease_seconds(self) -> float:
        """The default of `Config.lease_seconds`."""
        return 10.0

    def cycle_seconds(self, lease_seconds: float) -> float:
        """The default of `Config.cycle_seconds`; KCL 2.x plans every 2 x (lease_seconds + 25 ms)."""
        return 2 * (lease_seconds + 0.025)

    def renew_seconds(self, lease_seconds: float) -> float:
        """The default of `Config.renew_seconds`."""
        return lease_seconds / 3

    def expires_above(self, lease_seconds: float) -> float:
        """A lease idle for more seconds than this has no living owner.

        Whether the limit itself is still alive follows the original of each rule set; "at the limit" is said as
        "above the next smaller number", so that one comparison serves all.
        """
        return lease_seconds

    def overdue_seconds(self, _lease_seconds: float, _cycle_seconds: float) -> float | None:
        """A lease free for longer is not taken by who should take it; None where nobody waits for others (M9, M14)."""
        return None
