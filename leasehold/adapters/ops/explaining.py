"""Explains which actions each worker would take now and by which rules, and why a lease has its owner.

`plans` computes the plan of each worker, `story` explains one lease, and `RULE_SENTENCES` has a sentence for each rule.

`rules_between` determines by which rule each lease changed its owner between two reads of a table. It computes the new
owner's plan from the earlier read. If that plan doesn't explain the move, some owners may have died or left in between,
so the plan is computed again as if the leases of these owners were free. A worker that joins takes one lease, waits for
others to join, and then takes its share. If the reads are too far apart to show these steps, the worker's plan is
computed as if it had held its first lease for a long time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Factory, evolve, frozen

from leasehold.adapters.consumer.status import LeaseLag, Status
from leasehold.adapters.json_form import format_action_json, format_lease_json
from leasehold.adapters.ops.watching import WatchedTable, leases_by_owner, owner_changes, shares, without_dead_owners
from leasehold.adapters.worker.progress import Progress, progress_of
from leasehold.balancer.actions import Action, Claim, Release, Renew, RequestHandoff, Steal, Taking
from leasehold.balancer.census import FullReading, KnownLeases, our_workers
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import reported_contradictions
from leasehold.balancer.counting import expires_above
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.loads import count_tolerance
from leasehold.stores.fields import convert_to_kilobytes
from leasehold.stores.swap import lease_place

FREES_RULE = "C6"
HANDOFF_RULE = "H2"


def rules_between(table_before: WatchedTable, table_after: WatchedTable, config: Config) -> Mapping[str, str]:
    """Return the rule of each move by lease key, or "" for a move that no plan explains, such as a release."""
    owner_pairs = owner_changes(table_before, table_after)
    if not owner_pairs:
        return {}
    # When a lease was taken, it may have been idle for up to two intervals longer than the earlier read shows. Its
    # version may be almost one interval older than we know, and the worker may have taken it just before the later
    # read.
    unseen_seconds = 2 * (table_after.seconds - table_before.seconds)

    def is_late(owner: str | None) -> bool:
        idle = max((lease.idle for lease in table_before.leases if lease.owner == owner), default=0.0)
        return not math.isinf(idle) and idle + unseen_seconds > expires_above(config)

    def planned_takes(leases: tuple[Lease, ...], worker: str) -> tuple[Taking, ...]:
        actions = plan(leases, None, Me(worker, 0, table_before.history), config)
        return tuple(action for action in actions if isinstance(action, Taking))

    # An owner counts as dead if it renewed none of its leases between the two reads, and is either late or has lost a
    # lease that no worker had requested.
    rows_after = {lease.key: (lease.owner, lease.version) for lease in table_after.leases}
    silent_owners = {lease.owner for lease in table_before.leases if lease.owner is not None}
    silent_owners -= {
        lease.owner
        for lease in table_before.leases
        if (row_after := rows_after.get(lease.key)) is not None
        and row_after[0] == lease.owner
        and row_after[1] != lease.version
    }
    owners_with_losses = {
        lease_before.owner
        for lease_before, lease_after in owner_pairs
        if lease_before.next_owner is None or lease_before.next_owner != lease_after.owner
    }
    dead_owners = frozenset(owner for owner in silent_owners if owner in owners_with_losses or is_late(owner))

    leases_if_freed = tuple(
        evolve(lease, owner=None) if lease.owner in dead_owners else lease for lease in table_before.leases
    )
    new_owners = {lease_after.owner for _, lease_after in owner_pairs if lease_after.owner is not None}
    takes_before = {worker: planned_takes(table_before.leases, worker) for worker in new_owners}
    takes_if_freed = (
        {worker: planned_takes(leases_if_freed, worker) for worker in new_owners} if dead_owners else takes_before
    )
    # Change the leases as if each new worker already owned its first lease and had held its leases for a long time.
    first_leases = {lease_after.owner: lease_after.key for _, lease_after in reversed(owner_pairs)}
    initial_owners = {first_leases[owner]: owner for owner in new_owners - {lease.owner for lease in leases_if_freed}}
    leases_if_joined = tuple(
        evolve(lease, owner=owner, idle=0.0, held=math.inf, next_owner=None) if owner in new_owners else lease
        for lease in leases_if_freed
        for owner in [initial_owners.get(lease.key, lease.owner)]
    )
    takes_if_joined = {
        worker: planned_takes(leases_if_joined, worker) for worker in new_owners if not takes_if_freed[worker]
    }
    rules = {}
    for lease_before, lease_after in owner_pairs:
        if lease_after.owner is None:
            # A living owner renews within `renew_seconds`. If the owner was not late with its renewal, it may have
            # released the lease itself.
            has_expired = (
                lease_before.idle > config.renew_seconds
                and lease_before.owner in dead_owners
                and is_late(lease_before.owner)
            )
            rules[lease_after.key] = FREES_RULE if has_expired and config.rules.frees_expired else ""
        elif lease_before.next_owner == lease_after.owner:
            rules[lease_after.key] = HANDOFF_RULE
        else:
            rules[lease_after.key] = _likely_rule(
                lease_before,
                takes_before[lease_after.owner],
                takes_if_freed[lease_after.owner] or takes_if_joined[lease_after.owner],
            )
    return rules


def _likely_rule(lease_before: Lease, takes_before: tuple[Taking, ...], takes_if_freed: tuple[Taking, ...]) -> str:
    """Return the rule by which the new owner may have taken the lease, or "".

    The first choice is the rule of an action that takes this very lease. The second choice is the rule of an action
    that takes another lease from the same owner. The last choice is the rule of any action of the new owner.
    """
    for action in (*takes_before, *takes_if_freed):
        if lease_before.key in {action.lease.key, *(alternate.lease.key for alternate in action.alternates)}:
            return action.rule
    # Some rules choose at random, so the worker may have chosen another lease of the same owner.
    steal_rules = [
        action.rule
        for action in takes_before
        if isinstance(action, Steal | RequestHandoff) and action.from_owner == lease_before.owner
    ]
    return next(
        iter([*steal_rules, *(action.rule for action in takes_if_freed), *(action.rule for action in takes_before)]), ""
    )


RULE_SENTENCES = {
    "C2": "a worker renews its own leases, so that other workers do not take it for dead",
    "C4": "the lookout adds its bulletin to a renewal, so that the other workers need not read the table",
    "C6": "the lookout frees expired leases, and workers below their share claim them",
    "E3": "Azure's Python rule: a worker below its share takes an inactive partition, else one of an owner above it",
    "E4": "Azure's .NET rule: a worker below its share takes an inactive partition, else one of an owner far above it",
    "E5": "Azure's Java rule: unless all is even, the emptiest takes an inactive partition, else one of the fullest",
    "E6": "the Event Hubs gist: a worker at or below its share takes an inactive partition, else one of a fuller owner",
    "E7": "an owner renews all its partitions before another worker may expire them",
    "H2": "the owner answers requests, so the lease is requested: the owner finishes its batch and hands it off",
    "H3": "the lease was requested: its owner finishes its batch, and hands the lease off to the next owner",
    "H4": "this worker is the next owner: it takes the lease if the owner died, gave it too late, or took it back",
    "K5": "KCL's rule for very old leases: a lease that was long not renewed is taken first, even above the target",
    "K7": "KCL's rule: a worker below its target takes available leases, and steals none meanwhile",
    "K8": "KCL's rule: if no lease is available, a worker below its target steals from the owner with the most leases",
    "K10": "a worker renews its own leases once they are unchanged for a third of lease_seconds",
    "L3": "a shard whose parents have ended gets its lease, at the parents' end",
    "L4": "an open shard gets a lease at the initial position if neither it nor an ancestor has one",
    "L5": "an open shard whose ancestors are leased gets its lease only when its turn comes",
    "L6": "a partition that was added later is read from its beginning",
    "L7": "a hash range that no lease covers gets a lease",
    "L8": "the lease of a finished shard is deleted once its children are being read",
    "L9": "if a shard is gone from the stream, its children get their leases before its own lease is deleted",
    "L10": "the lease of a shard that is gone from the stream is deleted",
    "L13": "a lease whose row was deleted begins at the position where it was last seen",
    "M3": "a worker that holds at least its share takes no leases from others",
    "M5": "a worker without leases takes one first, so that all workers see it before shares are computed again",
    "M6": "a worker below its share takes the leases that it lacks: free leases first, then others' surplus",
    "M9": "another worker should have acted long ago: after `patience` cycles any worker does",
    "M11": "next to workers that never steal, an overloaded worker releases one lease",
    "M12": "a successor in a rolling restart takes as many leases at once as the other workers hold",
    "M13": "counts are even, but throughput is not: one lease moves from the most to the least loaded worker",
    "M14": "a worker of a KCL 3.x leader takes no leases by itself, so the owner gives it those that it lacks",
    "M15": "one of our workers takes the leases of a dead worker at once, because KCL 2.x reads the table seldom",
    "R1": "kcl-rust's rule: a worker claims free leases, up to leases_to_acquire and max_leases",
    "R2": "kcl-rust's rule: if none is free, a worker steals one from the fullest owner if that has at least two more",
    "R3": "a worker renews its own leases",
}
"""A sentence for each rule, by the rule's number in specs/."""


@frozen
class WorkerPlan:
    """The actions that one worker would take now.

    Attributes:
        worker: The worker's name.
        ours: Whether this is a leasehold worker, according to the annotations of its leases. Workers of other libraries
            follow other rules.
        held: The number of unfinished leases that the worker holds.
        share: The number of unfinished leases that the worker should hold.
        actions: The worker's actions, without renewals.
        loads: The throughput of the worker's leases, and the mean throughput of all workers, both in bytes per second.
            None if the rules balance the number of leases first.
    """

    worker: str
    ours: bool
    held: int
    share: int
    actions: tuple[Action, ...]
    loads: tuple[int, int] | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """The actions as sentences, or a single sentence with the reason if there are none."""
        return tuple(describe_action(action) for action in self.actions) or (self.idle_reason,)

    @property
    def idle_reason(self) -> str:
        """Why the worker does nothing."""
        if self.held == self.share:
            return "nothing: it holds its share"
        if self.loads is not None:
            own_load, mean_load = map(convert_to_kilobytes, self.loads)
            comparison = "more" if self.held > self.share else "less"
            loads = f"its leases bring {own_load:.1f} KB/s, and the mean over all workers is {mean_load:.1f}"
            return (
                f"nothing: it holds {comparison} than its share, as throughput is balanced before counts (M13): {loads}"
            )
        if self.held > self.share:
            return "nothing: it holds more than its share, and takes no leases from others (M3)"
        return "nothing: it holds less than its share, but there is no lease that it may take"

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        actions = [format_action_json(action) | {"says": describe_action(action)} for action in self.actions]
        document = {
            "worker": self.worker,
            "ours": self.ours,
            "leases": self.held,
            "share": self.share,
            "actions": actions,
        }
        return document | ({} if actions else {"why": self.idle_reason})


def describe_action(action: Action) -> str:
    """Describe an action in words that follow the worker's name and begin with "would"."""
    key, rule_note = action.lease.key, f"({action.rule})"
    match action:
        case Claim(lease=Lease(owner=None)):
            return f"would claim {key}, which is free {rule_note}"
        case Claim(lease=lease):
            return f"would claim {key}, which {lease.owner} has not renewed for {lease.idle:.1f} s {rule_note}"
        case Steal(from_owner=from_owner):
            return f"would steal {key} from {from_owner} {rule_note}"
        case RequestHandoff(from_owner=from_owner):
            return f"would request {key} from {from_owner} {rule_note}"
        case Release(next_owner=None):
            return f"would release {key} {rule_note}"
        case Release(next_owner=next_owner):
            return f"would finish its batch of {key} and hand the lease off to {next_owner} {rule_note}"
        case _:
            return f"would {type(action).__name__.lower()} {key} {rule_note}"


def plans(table: WatchedTable, config: Config, extra_workers: Sequence[str] = ()) -> tuple[WorkerPlan, ...]:
    """Return the plan of every worker in the table or in `extra_workers`, sorted by name.

    Each plan is computed as if it were the worker's first turn. Some rules choose leases at random, so the actual
    worker may choose leases other than those in its plan.
    """
    live_leases = without_dead_owners(table.leases, config)
    put_aside_by_key = {
        lease.key: progress for lease in live_leases if (progress := put_aside_progress(lease, table.at)) is not None
    }
    # Add the workers that left a lease to other workers, because they may hold no leases themselves.
    extra_workers = (*extra_workers, *{progress.owner for progress in put_aside_by_key.values()})
    worker_names = {worker for lease in live_leases for worker in (lease.owner, lease.next_owner) if worker} | set(
        extra_workers
    )
    our_names, target_shares = our_workers(table.leases), shares(live_leases, config.rules.groups, extra_workers)
    unfinished_leases = [lease for lease in live_leases if not lease.ended]
    # Compute the load of each worker if M13 lets lease counts differ to balance loads. Otherwise, leave `loads` empty.
    loads: dict[str | None, int] = {}
    if (
        config.rules.weighs_loads
        and target_shares
        and count_tolerance(unfinished_leases, len(unfinished_leases) // len(target_shares))
    ):
        loads = dict.fromkeys(target_shares, 0)
        for lease in unfinished_leases:
            if lease.owner is not None:
                loads[lease.owner] += lease.weight or 0
    mean_load = sum(loads.values()) // len(loads) if loads else 0
    owned_leases = leases_by_owner(unfinished_leases)
    # Build the index once for all plans. Otherwise each plan would scan all leases.
    table_index = KnownLeases(FullReading(table.leases), {})
    worker_plans = []
    for worker in sorted(worker_names):
        actions = plan(table_index, None, Me(worker, 0, table.history), config)
        worker_plans.append(
            WorkerPlan(
                worker,
                worker in our_names or worker in extra_workers,
                len(owned_leases.get(worker, ())),
                target_shares.get(worker, 0),
                tuple(
                    action
                    for action in actions
                    if not isinstance(action, Renew) and not _is_left_to_others(action, worker, put_aside_by_key)
                ),
                (loads[worker], mean_load) if worker in loads else None,
            )
        )
    return tuple(worker_plans)


def put_aside_progress(lease: Lease, now: float) -> Progress | None:
    """Return the progress written by the worker that left this free lease to others, or None if no worker did so."""
    progress = None if lease.owner is not None or lease.ended else progress_of(lease)
    return progress if progress is not None and progress.is_put_aside(now, 0.0) else None


def _is_left_to_others(action: Action, worker: str, put_aside_by_key: Mapping[str, Progress]) -> bool:
    progress = put_aside_by_key.get(action.lease.key)
    return progress is not None and progress.owner == worker


def rules_of(worker_plans: Sequence[WorkerPlan]) -> Mapping[str, str]:
    """Return the rules that appear in these plans, each with its sentence."""
    rules = {action.rule for worker_plan in worker_plans for action in worker_plan.actions}
    rules |= {
        rule
        for worker_plan in worker_plans
        if not worker_plan.actions
        for rule in ("M3", "M13")
        if f"({rule})" in worker_plan.idle_reason
    }
    return {rule: RULE_SENTENCES.get(rule, "see specs/") for rule in sorted(rules)}


@frozen
class LeaseStory:
    """The explanation of why a lease has its owner, and of when it would move.

    Attributes:
        lease: The lease.
        past: Sentences about the lease's owner, according to the lease's row.
        should: A sentence about which worker should hold the lease, and why.
        moves: A sentence about when the lease would move.
        status: The lease's status at the last read of the table.
        reading: Sentences about how the lease's shard is read.
        lag: How far the lease is behind.
    """

    lease: Lease
    past: tuple[str, ...]
    should: str
    moves: str
    status: Status
    reading: tuple[str, ...] = ()
    lag: LeaseLag = Factory(LeaseLag)

    def as_json(self) -> dict[str, Any]:
        """Return the story as JSON values."""
        sentences = {"past": list(self.past), "reading": list(self.reading), "should": self.should, "moves": self.moves}
        return (
            {"lease": format_lease_json(self.lease)} | self.status.as_json() | sentences | {"lag": self.lag.as_json()}
        )


def story(table: WatchedTable, config: Config, lease: Lease, worker_plans: Sequence[WorkerPlan]) -> LeaseStory:
    """Explain one lease of the table, given the plans of all workers."""
    planned_takers = [
        (worker_plan, action)
        for worker_plan in worker_plans
        for action in worker_plan.actions
        if action.lease.key == lease.key and not isinstance(action, Release)
    ]
    return LeaseStory(
        lease,
        _describe_past(table, lease, config),
        _describe_target(lease, worker_plans, planned_takers, put_aside_progress(lease, table.at)),
        _describe_next_move(lease, config, planned_takers, table.at),
        table.statuses.get(lease.key, Status("UNKNOWN", "it was not watched")),
        _describe_reading(lease, table.at, table.lag(lease)),
        table.lag(lease),
    )


def _describe_reading(lease: Lease, now: float, lag: LeaseLag) -> tuple[str, ...]:
    """Return sentences about how the lease's shard is read, from the progress that its owner wrote to the row."""
    progress = progress_of(lease)
    if lease.ended or progress is None:
        return () if lease.ended else ("its row tells nothing of its reading",)
    now = max(now, progress.at)
    progress_source = "its owner" if progress.owner == lease.owner else f"{progress.owner}, who had it before,"
    lines = [f"{progress_source} wrote its progress {now - progress.at:.1f} s ago"]
    lag_sentence = "its lag was unknown" if progress.behind is None else f"its lag was {progress.behind:.1f} s then"
    # The progress covers only the time since its owner took the lease. It doesn't cover earlier times when the same
    # worker held the lease.
    unread_sentence = f"has not been read since it came to {progress.owner}"
    read_sentence = unread_sentence if progress.read is None else f"was last read {now - progress.read:.1f} s ago"
    tried_sentence = (
        "" if progress.tried in {None, progress.read} else f", and last tried {now - (progress.tried or now):.1f} s ago"
    )
    lines.append(f"{lag_sentence}; it {read_sentence}{tried_sentence}")
    if lag.at_least and lag.seconds is not None:
        lines.append(f"its lag is at least {lag.seconds:.1f} s: there was no news of the stream since then")
    if progress.cause:
        lines.append(f"the last fault: {progress.cause}")
    if progress.is_put_aside(now, 0.0) and lease.owner is None:
        seconds_left = (progress.aside or now) - now
        lines.append(f"{progress.owner} put it aside, and may take it again in {seconds_left:.0f} s")
    if progress.excused:
        lines.append(f"it is not read now: {progress.excused}")
    if progress.work is not None:
        lines.append(f"its handler has been running for {now - progress.work:.1f} s without an end or a checkpoint")
    return tuple(lines)


def _describe_past(table: WatchedTable, lease: Lease, config: Config) -> tuple[str, ...]:
    lines = []
    if lease.ended:
        lines.append("its shard has been read to the end")
    if lease.owner is None:
        lines.append("nobody owns it" if not lease.ended else "it needs no owner")
    elif lease.idle > expires_above(config):
        lines.append(f"{lease.owner} owns it and has not renewed it for {lease.idle:.1f} s: it counts as dead")
    elif lease.idle > 0:
        lines.append(f"{lease.owner} owns it and renewed it {lease.idle:.1f} s ago")
    elif table.seconds > 1:
        lines.append(f"{lease.owner} owns it and renewed it lately")
    else:
        lines.append(f"{lease.owner} owns it; a single read of the table does not show when it was renewed")
    if not math.isinf(lease.held) and lease.owner is not None:
        lines.append(f"{lease.owner} took it {lease.held:.0f} s ago, while the table was watched")
    if lease.next_owner is not None:
        lines.append(f"it is being handed off to {lease.next_owner}")
    if lease.owner is not None and not lease.yields:
        lines.append(f"{lease.owner} answers no requests, so a worker that should have it steals it")
    if table.swap is not None:
        table_name, _, target_name = lease_place(lease).partition(">")
        lines.append(
            f"a swap is moving it from {table_name} to {target_name}"
            if target_name
            else f"during the swap, it is in {table_name}"
        )
    return (*lines, f"checkpoint {lease.checkpoint.sequence}", *reported_contradictions([lease]))


def _describe_target(
    lease: Lease,
    worker_plans: Sequence[WorkerPlan],
    takers: Sequence[tuple[WorkerPlan, Action]],
    put_aside: Progress | None,
) -> str:
    if lease.ended:
        return "no worker: it is finished"
    if takers:
        taker_names = ", ".join(worker_plan.worker for worker_plan, _ in takers)
        rule = takers[0][1].rule
        return f"{taker_names}, by {rule}: {RULE_SENTENCES.get(rule, 'see specs/')}"
    if put_aside is not None:
        return f"any worker but {put_aside.owner}, which could not handle it and leaves it to others for now"
    holder = next((worker_plan for worker_plan in worker_plans if worker_plan.worker == lease.owner), None)
    if holder is None:
        return "no worker now: a worker below its share, or a new one, will claim it"
    surplus_note = "more than its share, and workers below their share take other leases first (M4)"
    if holder.loads is not None and holder.held != holder.share:
        return f"{holder.worker}: {holder.idle_reason.removeprefix('nothing: it ')}, where its share is {holder.share}"
    share_comparison = surplus_note if holder.held > holder.share else "no more than its share"
    return f"{holder.worker}: it holds {holder.held} where its share is {holder.share}, {share_comparison}"


def _describe_next_move(lease: Lease, config: Config, takers: Sequence[tuple[WorkerPlan, Action]], now: float) -> str:
    if lease.ended:
        return "never: the row is removed once the children of its shard are being read"
    if takers and isinstance(takers[0][1], Claim):
        return f"at {takers[0][0].worker}'s next turn, within {config.cycle_seconds:g} s"
    if takers:
        return f"at {takers[0][0].worker}'s next turn, within {config.cycle_seconds:g} s, after the running batch"
    if lease.next_owner is not None:
        return "once its owner has finished the running batch"
    if (put_aside := put_aside_progress(lease, now)) is not None:
        seconds_left = (put_aside.aside or now) - now
        return f"when {put_aside.owner} may take it again, in {seconds_left:.0f} s; or sooner, at another worker's turn"
    seconds_left = expires_above(config) - lease.idle
    if lease.owner is None or seconds_left < 0:
        return "at the turn of a worker below its share, or when a worker joins"
    return f"when workers join or leave; or if {lease.owner} renews nothing for another {seconds_left:.1f} s"
