"""Exports additional names for programs that embed the planner.

The main names, such as `plan`, `renewals`, `look_again`, the rule sets and the actions, are exported by `leasehold`
itself.
"""

from leasehold.balancer import (
    HASH_KEYS,
    Annotations,
    HashRange,
    History,
    Hole,
    RuleSet,
    Version,
    children_to_create,
    readable,
    slow_owners,
)

__all__ = [
    "HASH_KEYS",
    "Annotations",
    "HashRange",
    "History",
    "Hole",
    "RuleSet",
    "Version",
    "children_to_create",
    "readable",
    "slow_owners",
]
