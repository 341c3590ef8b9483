"""Exports the names that programs which embed the planner need in addition to those in `leasehold` itself.

`plan`, `renewals`, `look_again`, the rule sets, the data classes and the actions are exported by `leasehold`.
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
