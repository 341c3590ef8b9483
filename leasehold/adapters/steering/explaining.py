"""Explains what each worker would do now and by which rule, why a lease is where it is, and when it would move."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from leasehold.adapters.json_form.answer import action_json
from leasehold.adapters.json_form.lease import lease_json
from leasehold.adapters.reading.status import Status
from leasehold.adapters.steering.sentences import SENTENCES
from leasehold.adapters.steering.shares import shares
from leasehold.adapters.steering.watching import WatchedTable
from leasehold.adapters.worker.reach import reach_of
from leasehold.balancer.actions import Action, Claim, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.census import signers
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.loads import slack
from leasehold.balancer.shards.contradictions import noted
from leasehold.stores.fields import kilobytes


@frozen
class WorkerPlan:
    """The actions that one worker would take now.

    ours     whether it signs its leases as our workers do; another library follows rules of its own
    held     unfinished leases that it holds
    share    how many it should hold
    actions  without renewals
    loads    the throughput of its leases and of the mean worker, in bytes a second, where counts may differ for it
    """

    worker: str
    ours: bool
    held: int
    share: int
    actions: tuple[Action, ...]
    loads: tuple[int, int] | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """The actions as sentences, or why there is none."""
        return tuple(said(action) for action in self.actions) or (self.rest,)

    @property
    def rest(self) -> str:
        """Why it does nothing."""
        if self.held == self.share:
            return "nothing: it holds its share"
        if self.loads is not None:
            own, mean = map(kilobytes, self.loads)
            than = "more" if self.held > self.share else "less"
            loads = f"its leases bring {own:.1f} KB/s, those of the mean worker {mean:.1f}"
            return f"nothing: it holds {than} than its share, as throughput is balanced before counts (M13): {loads}"
        if self.held > self.share:
            return "nothing: it holds more than its share, and leaves the others alone (M3)"
        return "nothing: it holds less than its share, and nothing that it may take is there"

    def as_json(self) -> dict[str, Any]:
        """Values that `json.dumps` takes."""
        actions = [action_json(action) | {"says": said(action)} for action in self.actions]
        told = {"worker": self.worker, "ours": self.ours, "leases": self.held, "share": self.share, "actions": actions}
        return told | ({} if actions else {"why": self.rest})


def said(action: Action) -> str:
    """An action as a worker's own sentence would end: 'would ...'."""
    key, by = action.lease.key, f"({action.rule})"
    match action:
        case Claim():
            return f"would claim {key}, {_state(action.lease)} {by}"
        case Steal(victim=victim):
            return f"would steal {key} from {victim} {by}"
        case RequestHandoff(victim=victim):
            return f"would ask {victim} for {key} {by}"
        case Release(heir=None):
            return f"would let {key} go {by}"
        case Release(heir=heir):
            return f"would finish its batch of {key} and give it to {heir} {by}"
        case _:
            return f"would {type(action).__name__.lower()} {key} {by}"


def _state(lease: Lease) -> str:
    return "which is free" if lease.owner is None else f"which {lease.owner} has not renewed for {lease.idle:.1f} s"


def plans(table: WatchedTable, config: Config, more: Sequence[str] = ()) -> tuple[WorkerPlan, ...]:
    """The plan of every worker that the table names, and of `more`; in order of name.

    Each is asked as at its first turn: where the rules leave a choice to chance, a worker may choose another lease.
    """
    living = alive(table.leases, config)
    named = {worker for lease in living for worker in (lease.owner, lease.heir) if worker} | set(more)
    ours, wanted = signers(table.leases), shares(living, config.rules.groups, more)
    loads = _loads(living, wanted, config)
    return tuple(
        WorkerPlan(
            worker,
            worker in ours or worker in more,
            sum(lease.owner == worker and not lease.ended for lease in living),
            wanted.get(worker, 0),
            _actions(table, config, worker),
            loads.get(worker),
        )
        for worker in sorted(named)
    )


def _loads(living: Sequence[Lease], wanted: Mapping[str, int], config: Config) -> Mapping[str, tuple[int, int]]:
    """The load of each worker and of the mean one, where M13 lets counts differ for the sake of loads; else nothing."""
    working = [lease for lease in living if not lease.ended]
    held = [lease for lease in working if lease.owner is not None]
    if not (config.rules.weighs_loads and wanted and slack(working, len(working) // len(wanted))):
        return {}
    mean = sum(lease.weight or 0 for lease in held) // len(wanted)
    return {worker: (sum(lease.weight or 0 for lease in held if lease.owner == worker), mean) for worker in wanted}


def _actions(table: WatchedTable, config: Config, worker: str) -> tuple[Action, ...]:
    found = plan(table.leases, None, Me(worker, 0, table.history), config)
    return tuple(action for action in found if not isinstance(action, Renew))


def alive(leases: Sequence[Lease], config: Config) -> tuple[Lease, ...]:
    """The leases, without the owners that have not renewed for too long."""
    limit = expires_above(config)
    return tuple(lease if lease.idle <= limit else evolve(lease, owner=None) for lease in leases)


def explained(table: WatchedTable, config: Config, more: Sequence[str] = ()) -> dict[str, Any]:
    """Every worker's plan as JSON values, with the rules that they name in a sentence each."""
    found = plans(table, config, more)
    return {"workers": [each.as_json() for each in found], "rules": rules_of(found)}


def rules_of(found: Sequence[WorkerPlan]) -> Mapping[str, str]:
    """The rules that these plans name, each with its sentence."""
    named = {action.rule for each in found for action in each.actions}
    named |= {rule for each in found if not each.actions for rule in ("M3", "M13") if f"({rule})" in each.rest}
    return {rule: SENTENCES.get(rule, "see specs/") for rule in sorted(named)}


@frozen
class LeaseStory:
    """Why a lease is where it is.

    past     what its row tells of its owner
    reading  how its reading is, and since when
    should   who should have it, and why
    moves    when it would move
    """

    lease: Lease
    past: tuple[str, ...]
    should: str
    moves: str
    status: Status
    reading: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Values that `json.dumps` takes."""
        told = {"past": list(self.past), "reading": list(self.reading), "should": self.should, "moves": self.moves}
        return {"lease": lease_json(self.lease)} | self.status.as_json() | told


def story(table: WatchedTable, config: Config, lease: Lease, found: Sequence[WorkerPlan]) -> LeaseStory:
    """The story of one lease of the table, `found` being all plans."""
    wanting = [
        (each, action)
        for each in found
        for action in each.actions
        if action.lease.key == lease.key and not isinstance(action, Release)
    ]
    return LeaseStory(
        lease,
        _past(table, lease, config),
        _should(lease, found, wanting),
        _when(lease, config, wanting),
        table.statuses.get(lease.key, Status("UNKNOWN", "it was not watched")),
        _reading(lease, table.at),
    )


def _reading(lease: Lease, now: float) -> tuple[str, ...]:
    """How the reading of a lease is, as its owner tells it in the row."""
    reach = reach_of(lease)
    if lease.ended or reach is None:
        return () if lease.ended else ("its row tells nothing of its reading",)
    now = max(now, reach.at)
    told = "its owner" if reach.owner == lease.owner else f"{reach.owner}, who had it before,"
    lines = [f"{told} told of its reading {now - reach.at:.1f} s ago"]
    behind = (
        "how far behind it was, nobody knows" if reach.behind is None else f"it was {reach.behind:.1f} s behind then"
    )
    read = "was never read by it" if reach.read is None else f"was last read {now - reach.read:.1f} s ago"
    tried = "" if reach.tried in {None, reach.read} else f", and last tried {now - (reach.tried or now):.1f} s ago"
    lines.append(f"{behind}; it {read}{tried}")
    if reach.fault:
        lines.append(f"the last fault: {reach.fault}")
    if reach.excused:
        lines.append(f"it is not read now: {reach.excused}")
    if reach.work is not None:
        lines.append(f"its handler has been at work for {now - reach.work:.1f} s without an end or a checkpoint")
    return tuple(lines)


def _past(table: WatchedTable, lease: Lease, config: Config) -> tuple[str, ...]:
    lines = []
    if lease.ended:
        lines.append("its shard has been read to the end")
    if lease.owner is None:
        lines.append("nobody owns it" if not lease.ended else "nobody needs to own it")
    elif lease.idle > expires_above(config):
        lines.append(f"{lease.owner} owns it and has not renewed it for {lease.idle:.1f} s: it counts as dead")
    else:
        lines.append(f"{lease.owner} owns it{_renewed(table, lease)}")
    if not math.isinf(lease.held) and lease.owner is not None:
        lines.append(f"it came to {lease.owner} {lease.held:.0f} s ago, while this was watching")
    if lease.heir is not None:
        lines.append(f"it is on its way to {lease.heir}")
    if lease.owner is not None and not lease.yields:
        lines.append(f"{lease.owner} answers no requests: whoever should have it steals it")
    return (*lines, f"checkpoint {lease.checkpoint.sequence}", *noted([lease]))


def _renewed(table: WatchedTable, lease: Lease) -> str:
    if lease.idle > 0:
        return f" and renewed it {lease.idle:.1f} s ago"
    return " and renewed it lately" if table.seconds > 1 else "; one look does not tell when it was renewed"


def _should(lease: Lease, found: Sequence[WorkerPlan], wanting: Sequence[tuple[WorkerPlan, Action]]) -> str:
    if lease.ended:
        return "nobody: it is finished"
    if wanting:
        names = ", ".join(each.worker for each, _ in wanting)
        rule = wanting[0][1].rule
        return f"{names}, by {rule}: {SENTENCES.get(rule, 'see specs/')}"
    holder = next((each for each in found if each.worker == lease.owner), None)
    if holder is None:
        return "nobody wants it now: a worker that holds less than its share, or a new one, claims it"
    more = "more than its share, and nobody who lacks one takes this one first (M4)"
    if holder.loads is not None and holder.held != holder.share:
        return f"{holder.worker}: {holder.rest.removeprefix('nothing: it ')}, where its share is {holder.share}"
    fair = more if holder.held > holder.share else "no more than its share"
    return f"{holder.worker}: it holds {holder.held} where its share is {holder.share}, {fair}"


def _when(lease: Lease, config: Config, wanting: Sequence[tuple[WorkerPlan, Action]]) -> str:
    if lease.ended:
        return "never: the row is removed once the children of its shard are being read"
    if wanting and isinstance(wanting[0][1], Claim):
        return f"at {wanting[0][0].worker}'s next look, within {config.cycle_seconds:g} s"
    if wanting:
        return f"at {wanting[0][0].worker}'s next look, within {config.cycle_seconds:g} s, after the running batch"
    if lease.heir is not None:
        return "once its owner has finished the running batch"
    left = expires_above(config) - lease.idle
    if lease.owner is None or left < 0:
        return "when a worker that lacks one looks, or one comes"
    return f"when workers come or go; or if {lease.owner} stands still for {left:.1f} s more"
