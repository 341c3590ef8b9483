"""Tests that an invalid setting is rejected with the name of its field."""

import math
from collections.abc import Callable

import pytest

from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal


@pytest.mark.parametrize(
    ("build", "field"),
    [
        *(
            (lambda value=value: Config(lease_seconds=value), "lease_seconds")
            for value in (0, -1, math.nan, 10**400, True, "3")
        ),
        (lambda: Config(cycle_seconds=math.inf), "cycle_seconds"),
        (lambda: Config(renew_seconds=0), "renew_seconds"),
        (lambda: Config(rules="kcl"), "rules"),  # type: ignore[arg-type]
        (lambda: Config(initial_position="LATEST"), "initial_position"),  # type: ignore[arg-type]
        (lambda: Kcl(max_leases=0), "max_leases"),
        (lambda: Kcl(max_steals=1.5), "max_steals"),  # type: ignore[arg-type]
        (lambda: Kcl(very_old_multiplier=-1), "very_old_multiplier"),
        *(
            (lambda value=value: Minimal(expected_workers=value), "expected_workers")
            for value in (0, 1.5, ("a", ""), ("a", 3), "a")
        ),
        (lambda: KclRust(leases_to_acquire=0), "leases_to_acquire"),
        (lambda: EventHubs(dialect="go"), "dialect"),  # type: ignore[arg-type]
        (lambda: EventHubs(mode="fast"), "mode"),  # type: ignore[arg-type]
        (lambda: Minimal(groups=("",)), "groups"),
        (lambda: Minimal(grace_seconds=-1), "grace_seconds"),
        (lambda: Config(initial_position=SHARD_END), "initial_position"),
        (lambda: Config(initial_position=Position("5")), "initial_position"),
        (lambda: Position("HERE"), "checkpoint"),
        (lambda: Position("\N{SUPERSCRIPT TWO}"), "checkpoint"),
        (lambda: Position("7", "1"), "checkpoint"),  # type: ignore[arg-type]
        (lambda: Position("7", token=None), "checkpoint"),  # type: ignore[arg-type]
        (lambda: Lease(7), "key"),  # type: ignore[arg-type]
        (lambda: Lease("0", stream=None), "stream"),  # type: ignore[arg-type]
        (lambda: Lease("0", shard=7), "shard"),  # type: ignore[arg-type]
        (lambda: Lease("0", owner=7), "owner"),  # type: ignore[arg-type]
        (lambda: Lease("0", checkpoint="7"), "checkpoint"),  # type: ignore[arg-type]
        (lambda: Position("9" * 130), "checkpoint"),
    ],
)
def test_invalid_value_is_rejected_with_its_field_name(build: Callable[[], object], field: str) -> None:
    """An invalid setting is rejected when the configuration is created, with the name of the field."""
    with pytest.raises((TypeError, ValueError), match=field):
        build()


def test_default_intervals_depend_on_the_rule_set() -> None:
    """The default intervals are those of the library whose rules are used."""
    timings = [
        (config.lease_seconds, config.cycle_seconds, round(config.renew_seconds, 2))
        for config in (
            Config(rules=Kcl()),
            Config(rules=KclRust()),
            Config(rules=EventHubs()),
            Config(rules=EventHubs("python")),
            Config(rules=Minimal()),
        )
    ]
    assert timings == [(10, 20.05, 3.33), (20, 20, 6.67), (120, 30, 20), (180, 30, 20), (10, 20.05, 5.3)]


def test_positions_are_ordered_by_number() -> None:
    """Positions are compared as numbers, so "9" comes before "10" and checkpoints never go back."""
    numbers = [Position("9"), Position("10"), Position("10", 1), Position("123456789012345678901")]
    shuffled = [SHARD_END, numbers[3], numbers[2], LATEST, numbers[1], numbers[0]]
    assert sorted(shuffled, key=lambda position: position.order) == [LATEST, *numbers, SHARD_END]


def test_variants_match_their_names() -> None:
    """The variants whose names end in `-greedy` are greedy. All others are balanced."""
    variants = EventHubs.variants()
    assert variants["java-greedy"] == EventHubs("java", "greedy")
    assert {name: variant.mode for name, variant in variants.items() if isinstance(variant, EventHubs)} == {
        name: "greedy" if name.endswith("-greedy") else "balanced" for name in variants
    }


def test_offset_is_no_part_of_a_position() -> None:
    """A checkpoint that a program without offsets has written is the same position."""
    assert Position("7", 1, "offset") == Position("7", 1)
    assert Position("7", 1) != Position("7", 2)
