"""The rest of the planner, for those who embed it: what `leasehold` itself does not name.

`plan`, `renewals`, `look_again`, the rule sets, the nouns and the actions are names of `leasehold`.
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
