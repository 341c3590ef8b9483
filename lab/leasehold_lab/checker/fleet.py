"""Models a small fleet as a state machine. A state contains the owners of leases and the writes in progress.

1. Decisions come from the real `plan`. Only time and the store are modeled.
2. A write may be delayed for any length of time. When it arrives, it is applied only if the condition that the store
   would check still holds.
3. Workers cannot see a worker that holds no lease. The model therefore doesn't distinguish a worker that hasn't started
   yet from one that hasn't read the table yet.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeVar, assert_never

from attrs import field, frozen

from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.handoff import STUCK_SECONDS
from leasehold.balancer.model import History, Lease, Me
from leasehold.balancer.plan import plan

NOBODY = -1
ALIVE, SILENT, DEAD = range(3)
"""The health of a worker.

A worker that crashes becomes `SILENT`. Once its leases have expired for the other workers, it becomes `DEAD`.
"""

WAIT_SECONDS = 1e6
"""A lease that has been idle for this many seconds has exceeded every timeout of the rules."""

T = TypeVar("T")

ModelVerb = Literal["claim", "steal", "request", "give", "release"]
"""The kinds of writes, named as in `WriteVerb`. In this model, "release" hands the lease to a named next owner."""


class ModelWrite(NamedTuple):
    """A conditional write.

    `lease` is the number of the lease. `owner` and `next_owner` are the row's values that the worker had read before it
    sent the write.
    """

    verb: ModelVerb
    lease: int
    owner: int
    next_owner: int = NOBODY


_VERBS_BY_ACTION: dict[type[Action], ModelVerb] = {Claim: "claim", Steal: "steal", RequestHandoff: "request"}

Attempt = tuple[ModelWrite, ...]
"""A write and its alternates. If the store rejects the write, the alternates are tried in order."""


class FleetState(NamedTuple):
    """The owner and next owner of each lease, and the health and the writes in progress of each worker."""

    owners: tuple[int, ...]
    next_owners: tuple[int, ...]
    pending: tuple[tuple[Attempt, ...], ...]
    health: tuple[int, ...]


class Transition(NamedTuple):
    """A possible next step of a worker.

    `moves` is the number of leases that living workers lose in this step. `what` describes the step.
    """

    state: FleetState
    moves: int
    what: str


TableState = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@frozen
class FleetModel:
    """The fleet to check.

    Attributes:
        leases: The number of leases.
        workers: The ids of the workers.
        rules: The configuration of each worker. A worker with None never plans: it is a zombie that only renews its
            leases, unless it is in `led`.
        led: The numbers of the workers that may be given a free lease at any time, as by a KCL 3.x leader (M14).
        crashes: How many workers may crash. A crash may happen at any time.
        yields: Whether owners answer hand-off requests.
        timeouts_may_expire: Whether the timeouts of the rules may expire at any time. Otherwise they expire only when
            nothing else can happen.
        turns: The number of turns for which each plan is tried, because plans depend on the number of the turn.
    """

    leases: int
    workers: tuple[str, ...]
    rules: tuple[Config | None, ...]
    led: frozenset[int] = frozenset()
    crashes: int = 0
    yields: bool = False
    timeouts_may_expire: bool = False
    turns: int = 3
    _plans: dict[tuple[TableState, int, int, bool], tuple[Attempt, ...]] = field(
        factory=dict, init=False, eq=False, repr=False
    )

    def initial_state(self, owners: tuple[int, ...]) -> FleetState:
        """Return the state in which every worker is alive and no write is in progress."""
        worker_count = len(self.workers)
        return FleetState(owners, (NOBODY,) * self.leases, ((),) * worker_count, (ALIVE,) * worker_count)

    def list_next_steps(self, state: FleetState) -> list[Transition]:
        """Return all possible next steps. There are none if the fleet has come to rest."""
        steps: list[Transition] = []
        living_workers = [worker for worker, health in enumerate(state.health) if health == ALIVE]
        # Any write in progress may arrive.
        for worker in living_workers:
            attempts = state.pending[worker]
            for index, attempt in enumerate(attempts):
                pending_after = _replace_item(state.pending, worker, attempts[:index] + attempts[index + 1 :])
                state_after_arrival = state._replace(pending=pending_after)
                for write in attempt:
                    if (state_after_write := _apply_write(state_after_arrival, worker, write)) is not None:
                        owner_before = state.owners[write.lease]
                        owner_loses_lease = (
                            owner_before not in {NOBODY, state_after_write.owners[write.lease]}
                            and state.health[owner_before] == ALIVE
                        )
                        steps.append(
                            Transition(state_after_write, int(owner_loses_lease), f"{self.workers[worker]}: {write}")
                        )
                        break
                else:
                    steps.append(Transition(state_after_arrival, 0, f"{self.workers[worker]}: {attempt} refused"))
        for worker in sorted(self.led.intersection(living_workers)):
            for lease, owner in enumerate(state.owners):
                if owner == NOBODY:
                    description = f"s-{lease} is given to {self.workers[worker]}"
                    steps.append(Transition(_set_owner(state, lease, worker), 0, description))
        steps += self._list_planning_steps(state, living_workers, timeouts_expired=False)
        # Without `timeouts_may_expire`, timeouts expire only if no other step is possible, because only then are all
        # workers known to be waiting. If a worker in `led` has crashed, its reports to the leader must be overdue by
        # then.
        are_reports_overdue = all(state.health[worker] != SILENT for worker in self.led)
        if self.timeouts_may_expire or (are_reports_overdue and not steps):
            steps += self._list_planning_steps(state, living_workers, timeouts_expired=True)
        for worker, health in enumerate(state.health):
            if health == SILENT:
                steps.append(Transition(state._replace(health=_replace_item(state.health, worker, DEAD)), 0, "expiry"))
            elif health == ALIVE and len(state.health) - len(living_workers) < self.crashes:
                pending = _replace_item(state.pending, worker, ())
                health_after_crash = _replace_item(state.health, worker, SILENT)
                state_after_crash = state._replace(pending=pending, health=health_after_crash)
                steps.append(Transition(state_after_crash, 0, f"{self.workers[worker]} crashes"))
        return steps

    def _list_planning_steps(
        self, state: FleetState, living_workers: list[int], *, timeouts_expired: bool
    ) -> Iterator[Transition]:
        table_state = (state.owners, state.next_owners, state.health)
        for worker in living_workers:
            config = self.rules[worker]
            if config is None or state.pending[worker]:
                continue
            plans: dict[tuple[Attempt, ...], None] = {}
            for turn in range(self.turns):
                # Plans are cached, because they are expensive and the same arguments recur in thousands of states.
                arguments = (table_state, worker, turn, timeouts_expired)
                if arguments not in self._plans:
                    self._plans[arguments] = self._plan_attempts(config, *arguments)
                plans[self._plans[arguments]] = None
            for attempts in plans:
                if attempts:
                    pending_attempts = _replace_item(state.pending, worker, attempts)
                    yield Transition(
                        state._replace(pending=pending_attempts), 0, f"{self.workers[worker]} plans {attempts}"
                    )

    def _plan_attempts(
        self, config: Config, table_state: TableState, worker: int, turn: int, timeouts_expired: bool
    ) -> tuple[Attempt, ...]:
        owners, next_owners, health = table_state
        unchanged_seconds = WAIT_SECONDS if timeouts_expired else 0.0
        leases = []
        for number, (owner, next_owner) in enumerate(zip(owners, next_owners, strict=True)):
            owner_is_dead = owner != NOBODY and health[owner] == DEAD
            # Other workers wait a whole cycle before they treat a next owner as dead (H1, H4), so a living next owner
            # acts first.
            next_owner_is_dead = next_owner != NOBODY and health[next_owner] == DEAD
            lease = Lease(
                key=f"s-{number}",
                owner=None if owner == NOBODY else self.workers[owner],
                idle=unchanged_seconds
                if owner == NOBODY
                else (2 * config.lease_seconds + unchanged_seconds) * owner_is_dead,
                next_owner=None if next_owner == NOBODY else self.workers[next_owner],
                next_owner_idle=unchanged_seconds
                if next_owner_is_dead
                else min(unchanged_seconds, config.lease_seconds + STUCK_SECONDS),
                yields=self.yields and owner != NOBODY,
            )
            leases.append(lease)
        led_workers = tuple(
            (self.workers[led_worker], unchanged_seconds)
            for led_worker in sorted(self.led)
            if health[led_worker] != DEAD
        )
        me = Me(
            self.workers[worker],
            turn,
            History(owners_still=unchanged_seconds, fleet_still=unchanged_seconds, led=led_workers),
        )
        actions = plan(leases, None, me, config)
        return tuple(sorted(attempt for action in actions if (attempt := self._list_writes_of_action(action))))

    def _list_writes_of_action(self, action: Action) -> Attempt:
        lease = action.lease
        lease_as_read = (
            int(lease.key.removeprefix("s-")),
            self._find_worker_number(lease.owner),
            self._find_worker_number(lease.next_owner),
        )
        match action:
            case Claim() | Steal() | RequestHandoff():
                alternates = (
                    alternate_write
                    for alternate in action.alternates
                    for alternate_write in self._list_writes_of_action(alternate)
                )
                return (ModelWrite(_VERBS_BY_ACTION[type(action)], *lease_as_read), *alternates)
            case Release(next_owner=next_owner) if next_owner is not None and next_owner != lease.next_owner:
                return (ModelWrite("release", *lease_as_read[:2], self._find_worker_number(next_owner)),)
            case Release():
                return (ModelWrite("give", *lease_as_read),)
            case Renew() | Create() | Delete():
                return ()
            case _:
                assert_never(action)

    def _find_worker_number(self, worker: str | None) -> int:
        return NOBODY if worker is None else self.workers.index(worker)


def _apply_write(state: FleetState, worker: int, write: ModelWrite) -> FleetState | None:
    """Return the state after the write, or None if the store rejects it."""
    if state.owners[write.lease] != write.owner:
        return None
    next_owner = state.next_owners[write.lease]
    match write.verb:
        case "claim":
            return _set_owner(state, write.lease, worker)
        case "steal":
            # After a worker has requested the lease, it can steal the lease only while the row still names it as next
            # owner.
            return (
                _set_owner(state, write.lease, worker) if write.next_owner != worker or next_owner == worker else None
            )
        case "request":
            return (
                _set_next_owner(state, write.lease, worker)
                if next_owner in {NOBODY, worker, write.next_owner}
                else None
            )
        case "give":
            # If the next owner is not alive to accept the lease, the former owner takes it back.
            is_not_accepted = write.next_owner != NOBODY and state.health[write.next_owner] != ALIVE
            return (
                _set_owner(state, write.lease, worker if is_not_accepted else write.next_owner)
                if next_owner == write.next_owner
                else None
            )
        case "release":
            return _set_owner(state, write.lease, write.next_owner) if next_owner == NOBODY else None
        case _:
            assert_never(write.verb)


def _set_owner(state: FleetState, lease: int, owner: int) -> FleetState:
    """Return the state in which the lease has this owner, no next owner and no pending claims.

    A claim succeeds only if the row still has the version that the claiming worker read. The new owner has changed the
    version, so the store would reject every claim that is still pending.
    """
    remaining_attempts = (
        (tuple(write for write in attempt if write.verb != "claim" or write.lease != lease) for attempt in attempts)
        for attempts in state.pending
    )
    pending_attempts = tuple(tuple(sorted(filter(None, attempts))) for attempts in remaining_attempts)
    state_without_next_owner = _set_next_owner(state, lease, NOBODY)
    return state_without_next_owner._replace(owners=_replace_item(state.owners, lease, owner), pending=pending_attempts)


def _set_next_owner(state: FleetState, lease: int, next_owner: int) -> FleetState:
    return state._replace(next_owners=_replace_item(state.next_owners, lease, next_owner))


def _replace_item(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
