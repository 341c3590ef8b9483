"""Explains what each worker would do now and by which rule, why a lease is where it is, and when it would move.

By which rule a lease changed hands between two readings of a table.

The rule is that of the new owner's plan on the earlier reading. Where owners died or left between the two, the workers
planned without them: so a plan that does not explain a move is asked for once more, with all that those held free.
Newcomers take one lease, wait for others to join, and then take their shares; where the readings are too far apart to
show that, their plan is asked for with the first lease theirs for long.

Every rule in a sentence, for people who ask why a worker acts.

The share of each worker: how many leases it should hold, as the default rules divide them.

Watches a table for a while, so that the living are told from the dead where rows keep no time.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import Factory, evolve, frozen

from leasehold.adapters.json_form import action_json, lease_json
from leasehold.adapters.reading.status import GroupWatch, Status, lags_of, statuses_of
from leasehold.adapters.worker.holding import reach_of
from leasehold.balancer.actions import Action, Claim, Release, Renew, RequestHandoff, Steal, Taking
from leasehold.balancer.census import signers
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above
from leasehold.balancer.model import History, Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.loads import slack
from leasehold.balancer.rules.shares import Groups, favoured
from leasehold.balancer.shards.contradictions import noted
from leasehold.balancer.watch import Watch
from leasehold.stores.fields import kilobytes
from leasehold.stores.protocol import Malformed, Store

SENTENCES = {
    "C2": "a worker renews its own leases, so that nobody takes it for dead",
    "C4": "the lookout writes its bulletin with a renewal, so that the others need not read the table",
    "C6": "the lookout frees what has expired, for those whose share it is to claim",
    "E3": "Azure's Python rule: a worker below its share takes an inactive partition, else one of an owner above it",
    "E4": "Azure's .NET rule: a worker below its share takes an inactive partition, else one of an owner far above it",
    "E5": "Azure's Java rule: unless all is even, the emptiest takes an inactive partition, else one of the fullest",
    "E6": "the Event Hubs gist: a worker at or below its share takes an inactive partition, else one of the fuller",
    "E7": "an owner writes all its partitions again, before a peer may expire them",
    "H2": "the owner answers requests, so it is asked: it finishes its batch and gives the lease; nothing comes twice",
    "H3": "the owner was asked for the lease: it finishes its batch, and gives the lease to its heir",
    "H4": "the lease was promised to this worker: it takes it where the owner died, gave too late, or took it back",
    "K5": "KCL's rule for very old leases: what nobody has renewed for long is taken first, above the target too",
    "K7": "KCL's rule: a worker below its target takes what is available, and robs nobody meanwhile",
    "K8": "KCL's rule: with nothing available, a worker below its target steals from the owner with most leases",
    "K10": "a worker renews its own leases once they stood still for a third of lease_seconds",
    "L3": "a shard whose parents have ended gets its lease, at the parents' end",
    "L4": "an open shard that descends from no lease gets one, at the initial position",
    "L5": "an open shard whose ancestors are leased gets its lease only when its turn comes",
    "L6": "a partition that came later is read from its beginning",
    "L7": "a hash range that no lease covers gets its lease",
    "L8": "the lease of a finished shard goes once its children are being read",
    "L9": "the children of a shard that is gone get their leases first",
    "L10": "the lease of a shard that is gone from the stream is removed",
    "L13": "a lease whose row was deleted begins where it was last seen",
    "M3": "a worker that holds no less than its share leaves the others alone",
    "M5": "a worker that holds nothing takes one lease first, so that all see it before shares are made anew",
    "M6": "a worker that holds less than its share takes what it lacks: free leases first, then the others' surplus",
    "M9": "somebody else should have acted long ago: after `patience` cycles anybody does",
    "M11": "beside workers that never steal, the overloaded lets one lease go",
    "M12": "a successor in a rolling restart takes at once as many leases as the others hold",
    "M13": "counts are even, and throughput is not: one lease goes from the most loaded to the least",
    "M14": "a KCL 3.x leader's worker takes nothing by itself, so the owner gives it what it lacks",
    "M15": "what a dead worker left to KCL 2.x, which looks seldom, is taken at once by one of ours",
    "R1": "kcl-rust's rule: free leases are claimed, up to leases_to_acquire and max_leases",
    "R2": "kcl-rust's rule: with nothing free, one lease of the fullest owner, if it has at least two more",
    "R3": "a worker renews its own leases",
}
"""By number; the numbers are those of specs/."""


def shares(leases: Iterable[Lease], groups: Groups = None, more: Collection[str] = ()) -> Mapping[str, int]:
    """The target share by worker: everybody the floor, and one more for those whom rule M2 favours.

    more  workers that hold nothing, and count nevertheless
    An heir counts as the owner already (H1). Whether owners live is for the caller to say: leave out the leases of the
    dead only to see what the living will hold of the rest, else give them without an owner.
    """
    working = [lease for lease in leases if not lease.ended]
    counts = Counter(dict.fromkeys((*more, *(lease.owner for lease in working if lease.owner is not None)), 0))
    counts.update(lease.heir or lease.owner for lease in working if lease.owner is not None)
    if not counts:
        return {}
    floor, extras = divmod(len(working), len(counts))
    lucky = favoured(counts, floor, extras, groups)
    return {worker: floor + (worker in lucky) for worker in sorted(counts)}


LOOK_SECONDS = 1.0
"""Between two looks: often enough to see each renewal of a lease of ten seconds."""


@frozen
class WatchedTable:
    """A table as it is after some watching.

    leases    with how long each stood still, sorted by key
    history   what the watching taught
    seconds   for how long the table was watched
    at        when it was last read, seconds since 1970
    statuses  of the leases then, by key
    """

    leases: tuple[Lease, ...]
    history: History
    seconds: float
    malformed: tuple[Malformed, ...] = ()
    at: float = 0.0
    statuses: Mapping[str, Status] = Factory(dict)

    @property
    def unended(self) -> tuple[Lease, ...]:
        """The leases whose shards are not finished."""
        return tuple(lease for lease in self.leases if not lease.ended)


def watched(
    store: Store,
    seconds: float,
    lease_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> WatchedTable:
    """The table, read again and again for so many seconds, at least once. Raises OutcomeUnknown.

    lease_seconds  the fleet's, for rows that do not say it
    """
    watch, window, first = Watch(), GroupWatch(), clock()
    while True:
        began = clock()
        listing = store.list()
        watch, leases = watch.look(listing.leases, began, clock())
        now = time.time()
        lags = lags_of(leases, now, lease_seconds)
        window = window.after(began, leases, lags)
        left = first + seconds - clock()
        if left <= 0:
            break
        wait(min(left, LOOK_SECONDS))
    rows = tuple(sorted(leases, key=lambda lease: lease.key))
    statuses = statuses_of(rows, lags, now, lease_seconds, window)
    return WatchedTable(rows, watch.history, clock() - first, listing.malformed, now, statuses)


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


FREED = "C6"
GIVEN = "H2"


def moved(before: WatchedTable, after: WatchedTable) -> tuple[tuple[Lease, Lease], ...]:
    """The unfinished leases that changed hands, each as it was and as it is."""
    old = {lease.key: lease for lease in before.leases}
    return tuple(
        (old[lease.key], lease)
        for lease in after.leases
        if lease.key in old and old[lease.key].owner != lease.owner and not lease.ended
    )


def rules_between(before: WatchedTable, after: WatchedTable, config: Config) -> Mapping[str, str]:
    """The rule of each move, by the key of its lease; "" where no plan explains it, as where an owner let it go."""
    moves = moved(before, after)
    if not moves:
        return {}
    readings = _TwoReadings(before, after, config)
    dead = readings.dead()
    freed = tuple(evolve(lease, owner=None) if lease.owner in dead else lease for lease in before.leases)
    movers = {new.owner for _, new in moves if new.owner is not None}
    seen = {worker: _takings(before.leases, worker, before, config) for worker in movers}
    unseen = {worker: _takings(freed, worker, before, config) for worker in movers} if dead else seen
    joined = _joined(freed, moves)
    later = {worker: _takings(joined, worker, before, config) for worker in movers if not unseen[worker]}
    return {
        new.key: readings.freed(old, dead)
        if new.owner is None
        else GIVEN
        if old.heir == new.owner
        else _rule(old, seen[new.owner], unseen[new.owner] or later[new.owner])
        for old, new in moves
    }


@frozen
class _TwoReadings:
    """Two readings, one after the other, and what they tell of owners."""

    before: WatchedTable
    after: WatchedTable
    config: Config

    @property
    def _unseen_seconds(self) -> float:
        """A lease may have stood still for so much longer, when it was taken, than the earlier reading says.

        Its version may be nearly as old as the reading before showed it, and it was taken before the later one.
        """
        return 2 * (self.after.seconds - self.before.seconds)

    def dead(self) -> frozenset[str | None]:
        """The owners that renewed nothing in between, and lost a lease that they were not asked for, or are late."""
        now = {lease.key: lease for lease in self.after.leases}
        silent = {lease.owner for lease in self.before.leases if lease.owner is not None}
        silent -= {
            old.owner
            for old in self.before.leases
            if old.key in now and now[old.key].owner == old.owner and now[old.key].version != old.version
        }
        lost = {old.owner for old, new in moved(self.before, self.after) if old.heir is None or old.heir != new.owner}
        return frozenset(owner for owner in silent if owner in lost or self._late(owner))

    def freed(self, old: Lease, dead: frozenset[str | None]) -> str:
        """The rule by which the lookout freed a lease; "" where its owner let it go."""
        # An owner that lives has renewed by `renew_seconds`: one that was not late there may as well have left.
        overdue = old.idle > self.config.renew_seconds and old.owner in dead and self._late(old.owner)
        return FREED if overdue and self.config.rules.frees_expired else ""

    def _late(self, owner: str | None) -> bool:
        idle = max((lease.idle for lease in self.before.leases if lease.owner == owner), default=0.0)
        return not math.isinf(idle) and idle + self._unseen_seconds > expires_above(self.config)


def _joined(leases: tuple[Lease, ...], moves: tuple[tuple[Lease, Lease], ...]) -> tuple[Lease, ...]:
    """The leases once every new owner has one, and has had what it holds for long."""
    movers = {new.owner for _, new in moves if new.owner is not None}
    firsts = {new.owner: new.key for _, new in reversed(moves)}
    given = {firsts[owner]: owner for owner in movers - {lease.owner for lease in leases}}
    return tuple(
        evolve(lease, owner=owner, idle=0.0, held=math.inf, heir=None) if owner in movers else lease
        for lease in leases
        for owner in [given.get(lease.key, lease.owner)]
    )


def _takings(leases: tuple[Lease, ...], worker: str, table: WatchedTable, config: Config) -> tuple[Taking, ...]:
    found = plan(leases, None, Me(worker, 0, table.history), config)
    return tuple(action for action in found if isinstance(action, Taking))


def _rule(old: Lease, seen: tuple[Taking, ...], unseen: tuple[Taking, ...]) -> str:
    """The rule that names the lease; else one that robs its owner; else whichever its new owner acts by."""
    for action in (*seen, *unseen):
        if old.key in {action.lease.key, *(other.lease.key for other in action.alternates)}:
            return action.rule
    # Where the rules leave a choice to chance, the worker may have chosen another lease of the same owner.
    robbing = [
        action.rule for action in seen if isinstance(action, Steal | RequestHandoff) and action.victim == old.owner
    ]
    return next(iter([*robbing, *(action.rule for action in unseen), *(action.rule for action in seen)]), "")
