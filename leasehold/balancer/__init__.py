"""Decides what a worker does next, based on the rows of the lease table. All functions in this package are pure."""

from leasehold.balancer.actions import Action, Claim, Create, Delete, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.counting import slow_owners
from leasehold.balancer.family import problems
from leasehold.balancer.lineage import children_to_create, readable
from leasehold.balancer.model import (
    HASH_KEYS,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    Annotations,
    HashRange,
    History,
    Hole,
    Lease,
    Me,
    Position,
    Problem,
    Shard,
    Version,
    at_timestamp,
)
from leasehold.balancer.plan import look_again, plan, renewals
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.watch import Watch

__all__ = [
    "HASH_KEYS",
    "LATEST",
    "SHARD_END",
    "TRIM_HORIZON",
    "Action",
    "Annotations",
    "Claim",
    "Config",
    "Create",
    "Delete",
    "EventHubs",
    "HashRange",
    "History",
    "Hole",
    "Kcl",
    "KclRust",
    "Lease",
    "Look",
    "Me",
    "Minimal",
    "Position",
    "Problem",
    "Release",
    "Renew",
    "RequestHandoff",
    "RuleSet",
    "Shard",
    "Steal",
    "Version",
    "Watch",
    "at_timestamp",
    "children_to_create",
    "look_again",
    "plan",
    "problems",
    "readable",
    "renewals",
    "slow_owners",
]
