"""Prints the plans of every rule set for random listings. The output must not depend on the hash seed."""

from random import Random

from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Me, Shard
from leasehold.balancer.plan import plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal

RULES: tuple[RuleSet, ...] = (
    Kcl(max_steals=3),
    KclRust(),
    *(EventHubs(dialect, mode) for dialect in ("gist", "dotnet", "java", "python") for mode in ("balanced", "greedy")),
    Minimal(groups="prefix"),
    Minimal(groups=("-",), expected_workers=9),
)


def main() -> None:
    """Print the plans that one worker makes for forty listings under every rule set."""
    random = Random(11)  # noqa: S311  the same listings in every process
    for turn in range(40):
        names = [f"s-{number}" for number in range(30)]
        owners = [None, *(f"{zone}-{number}" for zone in "ab" for number in range(4))]
        leases = [
            Lease(
                key=name,
                parents=(random.choice(names),),
                owner=random.choice(owners),
                idle=random.choice((1.0, 4.0, 11.0)),
                checkpoint=random.choice((TRIM_HORIZON, LATEST, SHARD_END)),
                next_owner=random.choice((None, None, "a-1")),
                yields=random.random() < 0.2,
            )
            for name in random.sample(names, 20)
        ]
        shards = [Shard(name, parents=tuple(names[:index][-1:]), open=index == 29) for index, name in enumerate(names)]
        for rules in RULES:
            print(plan(leases, shards, Me("a-1", turn), Config(rules=rules, lease_seconds=10.0)))  # noqa: T201


main()
