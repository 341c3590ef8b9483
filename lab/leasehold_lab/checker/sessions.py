"""Checks the table layout `sessions` under every order of requests, crashes and lost responses of a few workers.

A state consists of the table's rows and, for each worker, a snapshot taken between two actions, the action in progress,
and the responses to that action so far. To continue an action, the checker restores the worker from its snapshot and
repeats the action with the recorded responses, up to the next request. It then answers that request in every possible
way. The code under test is therefore the real `SessionStore`. The search is breadth-first and visits each state once,
so the first trace that leads to a fault is one of the shortest.

The model follows three rules:

1. Versions are digests of contents, as in S3, where equal contents have equal versions.
2. Time passes in ticks, each as long as a lease lasts. A tick makes every earlier confirmation stale. A row that a
   worker last saw before the tick counts as expired.
3. A write may be answered, get lost, be applied without a response, or be applied at any later time.

The laws are checked whenever a worker starts to read a lease. In every state, the checker also lets all workers die,
and checks the laws for a new worker that then takes all leases. The laws are:

- Nothing is skipped.
- No write that was confirmed with `Done` is undone.
- Each lease has one reader at a time, by the workers' own clocks.
- The epoch of a lease grows with each new owner.
- No lease gets stuck.
"""

import json
import math
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from hashlib import blake2b
from itertools import count
from typing import Annotated, Any, NamedTuple

import typer
from attrs import Factory, define, evolve, field, frozen

from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.errors import OutcomeUnknown
from leasehold.stores.protocol import Done, Lost, Outcome
from leasehold.stores.requests import ObjectFields, StoredObject
from leasehold.stores.sessions.rows import LEASES
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.writes import (
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    DeleteLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    ResetLease,
    StealLease,
    TakeBackLease,
    Write,
    lease_after_write,
)

TableRows = tuple[tuple[str, Any], ...]
"""The rows of the table, as sorted pairs of name and content.

A content is a JSON string, or a `Lease` if the rows are written by requests with the verb "apply".
"""

RECORDS = 2
"""The number of records in each lease."""

LOST, APPLIED, LATE = "lost", "applied", "late"
"""What happens to a write whose response is lost.

`LOST` is recorded in place of the response. `APPLIED` and `LATE` are faults. With `APPLIED`, the write is applied
immediately; with `LATE`, at any later time.
"""


class CellRequest(NamedTuple):
    """A request to the table: a verb and names of rows. A write also has the new content and the expected version."""

    verb: str
    names: tuple[str, ...]
    content: Any = ""
    version: str = ""


class ResponseNeeded(BaseException):
    """Raised when an action cannot continue until this request is answered."""

    def __init__(self, request: CellRequest) -> None:
        super().__init__()
        self.request = request


def compute_version(content: str) -> str:
    """Return the version of a row with this content: a digest of the content."""
    return blake2b(content.encode(), digest_size=6).hexdigest()


def apply_request(rows: TableRows, request: CellRequest) -> tuple[TableRows, Any]:
    """Apply a request to the table, and return the rows afterwards and the response."""
    table = dict(rows)
    match request.verb:
        case "list":
            return rows, tuple(row for row in rows if row[0].startswith(request.names))
        case "read":
            return rows, tuple(row for row in rows if row[0] in request.names)
        case "apply":
            (name,), write = request.names, request.content
            lease_written = lease_after_write(write, table.get(name))
            outcome: Outcome = Lost(write.lease.key, table.get(name)) if lease_written is None else Done(lease_written)
            if lease_written is not None:
                table[name] = lease_written
                if isinstance(write, DeleteLease):
                    del table[name]
            return tuple(sorted(table.items(), key=lambda row: row[0])), outcome
    (name,) = request.names
    stored_content = table.get(name)
    condition_holds = (
        stored_content is None
        if request.verb == "new"
        else stored_content is not None and compute_version(stored_content) == request.version
    )
    if not condition_holds:
        return rows, name not in table if request.verb == "delete" else None
    if request.verb == "delete":
        del table[name]
        return tuple(sorted(table.items())), True
    table[name] = request.content
    return tuple(sorted(table.items())), compute_version(request.content)


@define
class CheckedCells:
    """One worker's connection to the table. It replays the recorded responses to requests already answered."""

    responses: deque[Any] = Factory(deque)
    page_leases: int = 1000

    def replay_response(self, request: CellRequest) -> Any:  # noqa: ANN401  the type depends on the verb
        """Return the recorded response to a request. Raises ResponseNeeded if no response is recorded."""
        if not self.responses:
            raise ResponseNeeded(request)
        response = self.responses.popleft()
        if response == LOST:
            raise OutcomeUnknown("no answer")
        return response

    def list(self, *prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:  # noqa: ARG002  every list is consistent
        """Return all rows whose names begin with one of the prefixes."""
        return tuple(_build_stored_row(*row) for row in self.replay_response(CellRequest("list", prefixes)))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:  # noqa: ARG002
        """Return the named cells that exist."""
        # A read of several cells is not a snapshot, so the model makes two requests: first for sessions, then for
        # leases.
        leases = tuple(name for name in names if name.startswith(LEASES))
        other_names = tuple(name for name in names if not name.startswith(LEASES))
        cells = [
            cell
            for requested_names in (other_names, leases)
            if requested_names
            for cell in self.replay_response(CellRequest("read", requested_names))
        ]
        return {name: _build_stored_row(name, content) for name, content in cells}

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create a cell, and return its version, or None if the cell already exists."""
        version: str | None = self.replay_response(CellRequest("new", (name,), _encode_content(fields)))
        return version

    def put_if_match(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace a cell if it still has this version, and return the new version; otherwise return None."""
        new_version: str | None = self.replay_response(CellRequest("over", (name,), _encode_content(fields), version))
        return new_version

    def delete(self, name: str, version: str) -> bool:
        """Delete a cell if it still has this version, and return whether it is gone."""
        return bool(self.replay_response(CellRequest("delete", (name,), "", version)))

    def prove(self) -> None:
        """Do nothing, because the model always checks the conditions of writes."""

    def close(self) -> None:
        """Do nothing, because the model has no connection to close."""


def _encode_content(fields: ObjectFields) -> str:
    return json.dumps(dict(fields), sort_keys=True)


def _build_stored_row(name: str, content: str) -> StoredObject:
    return StoredObject(name, compute_version(content), json.loads(content))


class _NonBlockingSync:
    """Locks and queues that never block, because each worker in the checker does one thing at a time."""

    class NonBlockingQueue(deque[Any]):
        """A queue whose `get` does not wait."""

        put = deque.append

        def get(self, until: float = 0.0) -> Any:  # noqa: ANN401, ARG002
            """Remove and return the next item, or None if the queue is empty."""
            return self.popleft() if self else None

    queue = NonBlockingQueue

    def clock(self) -> float:
        """Return 0.0, because the model has no clock."""
        return 0.0

    def lock(self) -> Any:  # noqa: ANN401
        """Return a lock that does nothing."""
        return nullcontext()


@define
class _SessionIds:
    """Generates the session ids of one process."""

    process: str
    made: int = 0

    def __call__(self) -> str:
        """Return a new session id."""
        self.made += 1
        return f"{self.process}-{self.made}"


@frozen
class CheckedHolding:
    """A lease that a worker reads.

    Attributes:
        lease: The lease as last written.
        handled: The position up to which the worker has handled records.
        tick: The tick in which the last confirmed write was sent.
    """

    lease: Lease
    handled: int
    tick: int


SessionEvent = tuple[Any, ...]


@define
class CheckedWorker:
    """A worker between two actions.

    Attributes:
        store: The real store.
        moves: How many more actions the worker may take.
        holdings: The leases that the worker reads, by key.
        listed_leases: The leases in the worker's last listing, each with the tick of that listing.
        leases_given_away: Leases that the worker gave away, as returned by the write that gave them.
        lost_holdings: Leases that other workers took, as this worker last wrote them.
    """

    name: str
    store: SessionStore
    moves: int
    holdings: dict[str, CheckedHolding] = Factory(dict)
    listed_leases: dict[str, tuple[Lease, int]] = Factory(dict)
    leases_given_away: dict[str, Lease] = Factory(dict)
    lost_holdings: dict[str, CheckedHolding] = Factory(dict)

    def list_possible_actions(self, tick: int) -> Iterator[tuple[str, str]]:
        """Yield the actions that the worker may take next, each as a verb and the key of a lease."""
        if self.moves <= 0:
            return
        yield "look", ""
        for key, holding in self.holdings.items():
            if holding.tick == tick and holding.handled < RECORDS:
                yield "handle", key
            yield "commit", key
            yield "release", key
            if holding.lease.next_owner not in (None, self.name):
                yield "give", key
        for key in self.leases_given_away:
            yield "take back", key
        for key, holding in self.lost_holdings.items():
            if holding.handled > count_records_before_checkpoint(holding.lease):
                yield "late", key
        for key, (lease, listed_tick) in self.listed_leases.items():
            if key in self.holdings:
                continue
            if lease.owner in (None, self.name) or listed_tick < tick:
                yield "claim", key
            if lease.owner not in (None, self.name):
                yield "steal", key
                yield "request", key
            if lease.owner is None:
                yield "reset", key

    def take_action(self, verb: str, key: str, tick: int, now: int) -> list[SessionEvent]:
        """Take an action that begins in tick `tick` and ends in tick `now`, and return the events to judge."""
        self.moves -= 1
        if verb == "handle":
            holding = self.holdings[key]
            self.holdings[key] = evolve(holding, handled=holding.handled + 1)
            return [("handled", key, holding.handled + 1)]
        try:
            if verb == "look":
                self.listed_leases = {lease.key: (lease, now) for lease in self.store.list().leases}
                return []
            if verb == "late":
                holding = self.lost_holdings.pop(key)
                self.store.write(CheckpointLate(holding.lease, Position(str(holding.handled))))
                return []
            return self._write_lease(verb, key, tick)
        except OutcomeUnknown:
            if verb not in {"release", "give"}:
                return []
            # The outcome of the write is unknown, so the reader has stopped. It continues only after a later write has
            # been confirmed with Done.
            self.holdings[key] = evolve(self.holdings[key], tick=-1)
            return [("stops", key)]

    def _write_lease(self, verb: str, key: str, tick: int) -> list[SessionEvent]:
        store, holding = self.store, self.holdings.get(key)
        if holding is not None:
            lease, position = holding.lease, Position(str(holding.handled))
            has_progress = holding.handled > count_records_before_checkpoint(lease)
            write: Write
            match verb:
                case "give":
                    write = GiveLease(lease, position)
                case "release" if not has_progress:
                    write = ReleaseLease(lease, self.name)
                case _:
                    write = CheckpointLease(lease, position) if has_progress else RenewLease(lease)
            outcome = store.write(write)
            if not isinstance(outcome, Done):
                self.lost_holdings[key] = self.holdings.pop(key)
                return [("stops", key)]
            if verb in ("commit", "release") and not isinstance(write, ReleaseLease):
                self.holdings[key] = evolve(holding, lease=outcome.lease, tick=tick)
                confirmed_events = [("done", key, outcome.lease.epoch, holding.handled)] if holding.handled else []
                return [*confirmed_events, ("confirmed", key)]
            del self.holdings[key]
            if verb == "give":
                self.leases_given_away[key] = outcome.lease
            return [("stops", key), *([("done", key, lease.epoch, holding.handled)] if holding.handled else [])]
        lease = self.leases_given_away.pop(key) if verb == "take back" else self.listed_leases[key][0]
        writes_by_verb: Mapping[str, Write] = {
            "claim": ClaimLease(lease, self.name),
            "steal": StealLease(lease, self.name),
            "take back": TakeBackLease(lease, self.name),
            "request": RequestLease(lease, self.name),
            "reset": ResetLease(lease, TRIM_HORIZON),
        }
        self.listed_leases.pop(key, None)
        outcome = store.write(writes_by_verb[verb])
        if not isinstance(outcome, Done) or verb == "request":
            return []
        if verb == "reset":
            return [("reset", key)]
        self.holdings[key] = CheckedHolding(outcome.lease, count_records_before_checkpoint(outcome.lease), tick)
        return [("starts", key, outcome.lease.epoch, count_records_before_checkpoint(outcome.lease), verb)]

    def description(self) -> str:
        """Return a string that contains everything on which the worker's next actions depend."""
        store = self.store
        pages = [
            (
                page.session,
                page.session.stored.etag,
                page.ended,
                page.settled,
                sorted(page.last_counts.items()),
                page.superseded,
            )
            for page in store._pages.values()  # noqa: SLF001  the state of the code under test
        ]
        rows = sorted((key, row, row.stored.etag) for key, row in store._cached_rows.items())  # noqa: SLF001
        free_leases = sorted((key, free_lease.row.stored.etag) for key, free_lease in store._unowned_leases.items())  # noqa: SLF001
        last_sessions, unsettled_etags = sorted(store._last_sessions.items()), store._unsettled_etags  # noqa: SLF001
        store_state = (
            pages,
            rows,
            free_leases,
            last_sessions,
            unsettled_etags,
            sorted(store._ended_sessions),  # noqa: SLF001
            store._make_session_id,  # noqa: SLF001
        )
        return repr(
            (self.moves, self.holdings, self.listed_leases, self.leases_given_away, self.lost_holdings, store_state)
        )


def count_records_before_checkpoint(lease: Lease) -> int:
    """Return the number of records before the lease's checkpoint."""
    return int(lease.checkpoint.sequence) if lease.checkpoint.numbered else 0


class WorkerState(NamedTuple):
    """One worker in a state of the model.

    `snapshot` and `description` contain the worker as it was before the current action. `action` is the current action,
    `responses` are the responses that the action has received so far, and `tick` is the tick in which it began.
    """

    snapshot: bytes
    description: str
    action: tuple[str, str] = ("", "")
    responses: tuple[Any, ...] = ()
    tick: int = 0
    alive: bool = True


class TrueLease(NamedTuple):
    """The true state of a lease, which the checker knows and the workers don't.

    `handled` is the furthest position that any worker has handled, and `done` the furthest checkpoint confirmed with
    Done. `epoch` is the highest epoch so far, and `starter` is the number of the worker that started it.
    """

    handled: int = 0
    done: int = 0
    epoch: int = -1
    starter: int = -1


class SessionState(NamedTuple):
    """A state of the whole model.

    `late` contains the delayed writes that may still arrive. `faults_left` contains each kind of fault, with the number
    of times that it may still happen.
    """

    rows: TableRows
    workers: tuple[WorkerState, ...]
    true_leases: tuple[tuple[str, TrueLease], ...]
    readers: tuple[tuple[str, int, int, bool], ...] = ()
    late: tuple[CellRequest, ...] = ()
    tick: int = 0
    faults_left: tuple[tuple[str, int], ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key that identifies the state. States with equal keys have the same possible futures."""
        workers = tuple(
            (worker.description, worker.action, worker.responses, worker.tick, worker.alive) for worker in self.workers
        )
        return (
            self.rows,
            workers,
            self.true_leases,
            self.readers,
            tuple(sorted(self.late, key=repr)),
            self.tick,
            self.faults_left,
        )


@frozen
class BrokenLaw:
    """A law that was broken, and the shortest trace that breaks it."""

    law: str
    trace: tuple[str, ...]


@frozen
class ExplorationResult:
    """The result of a search. `complete` is False if states were left unvisited."""

    states: int
    complete: bool
    findings: tuple[BrokenLaw, ...]


@define
class SessionModel:
    """A small fleet to explore, with the actions and faults that may occur.

    Attributes:
        moves: How many actions each worker may take.
        leases: The number of leases.
        faults: How often each fault may happen. The faults are "tick", "crash", "restart", "applied" and "late".
        abilities: The verbs that workers may use.
        initial_actions: The actions taken before the search begins, each as a worker's number, a verb and a lease key.
            An optional fourth value stops the action after that many requests and leaves it in progress. The verb
            "tick" lets time pass instead.
        make: Creates a worker's store.
        rows: The rows that the table contains before the leases are created.
    """

    moves: tuple[int, ...]
    leases: int = 1
    faults: Mapping[str, int] = field(factory=dict)
    abilities: frozenset[str] = frozenset({"look", "handle", "commit", "release", "claim", "steal"})
    initial_actions: tuple[Any, ...] = ()
    make: Callable[..., SessionStore] = SessionStore
    rows: TableRows = ()
    _outcomes: dict[tuple[Any, ...], Any] = field(factory=dict)

    def explore(self, max_states: int, max_findings: int = 1) -> ExplorationResult:
        """Visit states breadth-first until none is left, `max_states` are known, or `max_findings` laws are broken."""
        initial_state = self.build_initial_state()
        parents: dict[tuple[Any, ...], tuple[tuple[Any, ...] | None, str]] = {initial_state.identity: (None, "")}
        queue, broken_laws = deque([initial_state]), list[BrokenLaw]()
        while queue and len(parents) < max_states and len(broken_laws) < max_findings:
            state = queue.popleft()
            for description, next_state, law_broken_by_step in self.list_next_steps(state):
                is_visited = next_state.identity in parents
                if not is_visited:
                    parents[next_state.identity] = (state.identity, description)
                    queue.append(next_state)
                broken_law = law_broken_by_step or ("" if is_visited else self.find_broken_recovery_law(next_state))
                if broken_law:
                    trace, parent = list[str](), parents[state.identity]
                    while parent[0] is not None:
                        trace.append(parent[1])
                        parent = parents[parent[0]]
                    broken_laws.append(BrokenLaw(broken_law, (*filter(None, reversed(trace)), description)))
                    break
        return ExplorationResult(len(parents), not queue, tuple(broken_laws))

    def build_initial_state(self) -> SessionState:
        """Return the initial state: the leases exist, and the initial actions have been taken."""
        workers = tuple(self._create_worker(f"w{n}", moves) for n, moves in enumerate(self.moves))
        rows = self.rows
        keys = [f"s{n}" for n in range(self.leases)]
        creating_worker = self._create_worker("c", 0)
        for key in keys:
            lease = Lease(key)
            rows, _ = self._run_alone(rows, creating_worker, lambda store, lease=lease: store.write(CreateLease(lease)))  # type: ignore[misc]
        state = SessionState(
            rows, workers, tuple((key, TrueLease()) for key in keys), faults_left=tuple(sorted(self.faults.items()))
        )
        for worker_index, verb, key, *response_limit in self.initial_actions:
            state_after_tick = state._replace(tick=state.tick + 1)
            state = (
                state_after_tick
                if verb == "tick"
                else self._take_action(state, worker_index, verb, key, *response_limit)
            )
        return state

    def _take_action(
        self, state: SessionState, worker_index: int, verb: str, key: str, max_responses: float = math.inf
    ) -> SessionState:
        current_state, responses_given = self._choose_action(state, worker_index, (verb, key)), 0
        while current_state.workers[worker_index].action != ("", "") and responses_given < max_responses:
            _, current_state, broken_law = next(iter(self._list_possible_responses(current_state, worker_index)))
            responses_given += 1
            if broken_law:
                raise AssertionError(broken_law)
        if current_state.workers[worker_index].action != ("", ""):
            return current_state
        worker_state = current_state.workers[worker_index]
        worker: CheckedWorker = pickle.loads(worker_state.snapshot)  # noqa: S301  our own
        worker.moves += 1
        return current_state._replace(
            workers=_replace_worker(current_state.workers, worker_index, take_snapshot(worker))
        )

    def _create_worker(self, name: str, moves: int) -> WorkerState:
        cells = CheckedCells()
        return take_snapshot(
            CheckedWorker(
                name,
                self.make(cells, sync=_NonBlockingSync(), gather_seconds=0.0, make_session_id=_SessionIds(name)),
                moves,
            )
        )

    def list_next_steps(self, state: SessionState) -> Iterator[tuple[str, SessionState, str]]:
        """Yield each event that may happen next, with the state after it and the law that it breaks (or "")."""
        faults_left = dict(state.faults_left)
        for worker_index, worker_state in enumerate(state.workers):
            if not worker_state.alive:
                continue
            if worker_state.action == ("", ""):
                worker: CheckedWorker = pickle.loads(worker_state.snapshot)  # noqa: S301  our own
                for next_action in worker.list_possible_actions(state.tick):
                    if next_action[0] in self.abilities:
                        yield (
                            f"w{worker_index} begins {' '.join(next_action)}",
                            self._choose_action(state, worker_index, next_action),
                            "",
                        )
            else:
                yield from self._list_possible_responses(state, worker_index)
            if faults_left.get("crash"):
                dead_worker = worker_state._replace(
                    alive=False, action=("", ""), responses=(), description="dead", snapshot=b""
                )
                state_with_dead_worker = state._replace(
                    workers=_replace_worker(state.workers, worker_index, dead_worker),
                    faults_left=_use_fault(state.faults_left, "crash"),
                )
                state_without_readers = state_with_dead_worker._replace(
                    readers=tuple(reader for reader in state_with_dead_worker.readers if reader[1] != worker_index)
                )
                yield f"w{worker_index} crashes", state_without_readers, ""
                if faults_left.get("restart"):
                    restarted_worker = self._create_worker(f"w{worker_index}", self.moves[worker_index])
                    worker_after_restart: CheckedWorker = pickle.loads(restarted_worker.snapshot)  # noqa: S301  our own
                    worker_after_restart.store._make_session_id.process = f"w{worker_index}again"  # type: ignore[attr-defined]  # noqa: SLF001
                    state_after_restart = state_without_readers._replace(
                        workers=_replace_worker(
                            state_without_readers.workers, worker_index, take_snapshot(worker_after_restart)
                        )
                    )
                    yield (
                        f"w{worker_index} is started again",
                        state_after_restart._replace(
                            faults_left=_use_fault(state_after_restart.faults_left, "restart")
                        ),
                        "",
                    )
        for write_index, request in enumerate(state.late):
            rows, _ = apply_request(state.rows, request)
            late_requests = state.late[:write_index] + state.late[write_index + 1 :]
            yield f"late: {_describe_request(request)}", state._replace(rows=rows, late=late_requests), ""
        if faults_left.get("tick"):
            yield (
                "time passes",
                state._replace(tick=state.tick + 1, faults_left=_use_fault(state.faults_left, "tick")),
                "",
            )

    def _choose_action(self, state: SessionState, worker_index: int, next_action: tuple[str, str]) -> SessionState:
        worker_state = state.workers[worker_index]._replace(action=next_action, responses=(), tick=state.tick)
        state_after = state._replace(workers=_replace_worker(state.workers, worker_index, worker_state))
        outcome = self._run_action(worker_state, state.tick)
        return (
            state_after
            if isinstance(outcome, CellRequest)
            else self._end_action(state_after, worker_index, *outcome)[0]
        )

    def _run_action(self, worker_state: WorkerState, now: int) -> Any:  # noqa: ANN401  the next request, or the worker afterwards and its events
        run_key = (worker_state.description, worker_state.action, worker_state.responses, worker_state.tick, now)
        if run_key not in self._outcomes:
            worker: CheckedWorker = pickle.loads(worker_state.snapshot)  # noqa: S301  our own
            cells: Any = worker.store._versioned_rows  # noqa: SLF001  the checker's own cells
            cells.responses = deque(worker_state.responses)
            try:
                events = worker.take_action(*worker_state.action, worker_state.tick, now)
            except ResponseNeeded as exc:
                self._outcomes[run_key] = exc.request
            else:
                cells.responses = deque()
                self._outcomes[run_key] = (take_snapshot(worker), events)
        return self._outcomes[run_key]

    def _list_possible_responses(
        self, state: SessionState, worker_index: int
    ) -> Iterator[tuple[str, SessionState, str]]:
        """Yield the possible outcomes of a worker's pending request."""
        worker_state = state.workers[worker_index]
        request: CellRequest = self._run_action(worker_state, state.tick)
        rows, response = apply_request(state.rows, request)
        response_summary = (
            "refused"
            if response is None or isinstance(response, Lost)
            else f"{len(response)} rows"
            if isinstance(response, tuple)
            else "done"
        )
        yield self._deliver_response(
            state._replace(rows=rows),
            worker_index,
            response,
            f"w{worker_index} {_describe_request(request)}: {response_summary}",
        )
        faults_left = dict(state.faults_left)
        if request.verb in ("list", "read"):
            return
        if faults_left.get(APPLIED) and rows != state.rows:
            state_if_applied = state._replace(rows=rows, faults_left=_use_fault(state.faults_left, APPLIED))
            yield self._deliver_response(
                state_if_applied,
                worker_index,
                LOST,
                f"w{worker_index} {_describe_request(request)}: applied, not answered",
            )
        if faults_left.get(LATE):
            state_if_late = state._replace(late=(*state.late, request), faults_left=_use_fault(state.faults_left, LATE))
            yield self._deliver_response(
                state_if_late,
                worker_index,
                LOST,
                f"w{worker_index} {_describe_request(request)}: on its way, not answered",
            )

    def _deliver_response(
        self,
        state: SessionState,
        worker_index: int,
        response: Any,  # noqa: ANN401  the type depends on the verb
        description: str,
    ) -> tuple[str, SessionState, str]:
        worker_state = state.workers[worker_index]
        worker_state = worker_state._replace(responses=(*worker_state.responses, response))
        state_after = state._replace(workers=_replace_worker(state.workers, worker_index, worker_state))
        outcome = self._run_action(worker_state, state.tick)
        if isinstance(outcome, CellRequest):
            return description, state_after, ""
        state_after_action, broken_law = self._end_action(state_after, worker_index, *outcome)
        return description, state_after_action, broken_law

    def _end_action(
        self, state: SessionState, worker_index: int, worker_after: WorkerState, events: list[SessionEvent]
    ) -> tuple[SessionState, str]:
        """End a worker's action, and check its events against the laws."""
        start_tick = state.workers[worker_index].tick
        state = state._replace(workers=_replace_worker(state.workers, worker_index, worker_after))
        for event in events:
            state, broken_law = self._judge_event(state, worker_index, start_tick, event)
            if broken_law:
                return state, broken_law
        return state, ""

    def _judge_event(
        self, state: SessionState, worker_index: int, start_tick: int, event: SessionEvent
    ) -> tuple[SessionState, str]:
        verb, key, *values = event
        true_leases, readers = dict(state.true_leases), {(reader[0], reader[1]): reader for reader in state.readers}
        true_lease, reader_key = true_leases[key], (key, worker_index)
        match verb:
            case "handled":
                true_leases[key] = true_lease._replace(handled=max(true_lease.handled, values[0]))
            case "done":
                if true_lease.epoch > values[0] and true_lease.starter != worker_index:
                    return state, "Done for a lease that another has"
                true_leases[key] = true_lease._replace(done=max(true_lease.done, values[1]))
            case "confirmed":
                readers[reader_key] = (key, worker_index, start_tick, False)
            case "stops":
                readers.pop(reader_key, None)
            case "reset":
                true_leases[key] = TrueLease(epoch=true_lease.epoch, starter=true_lease.starter)
                if any(
                    reader_lease == key and tick == state.tick and not is_stolen
                    for reader_lease, _, tick, is_stolen in state.readers
                ):
                    return state, "reset under a reader"
                readers = {reader_id: reader for reader_id, reader in readers.items() if reader[0] != key}
            case "starts":
                epoch, start_position, take_verb = values
                if start_position > true_lease.handled:
                    return state, f"skipped: starts at {start_position}, handled up to {true_lease.handled}"
                if start_position < true_lease.done:
                    return state, f"undone: starts at {start_position}, answered Done up to {true_lease.done}"
                if epoch < true_lease.epoch or (epoch == true_lease.epoch and true_lease.starter != worker_index):
                    return state, f"epoch {epoch} after {true_lease.epoch}"
                for other_reader in [
                    reader for reader in state.readers if reader[0] == key and reader[1] != worker_index
                ]:
                    # If a steal by another worker has frozen the lease, the worker that takes the lease completes the
                    # steal (G4).
                    session_rows = [
                        json.loads(row_json)
                        for name, row_json in state.rows
                        if name.startswith(f"session/w{other_reader[1]}")
                    ]
                    is_lease_held = any(json.loads(row["leases"]).get(key, [])[4:] == ["held"] for row in session_rows)
                    if take_verb == "steal" or is_lease_held:
                        readers[other_reader[:2]] = (*other_reader[:3], True)
                    elif other_reader[2] == state.tick and not other_reader[3]:
                        return state, "two readers"
                true_leases[key] = true_lease._replace(epoch=epoch, starter=worker_index)
                readers[reader_key] = (key, worker_index, start_tick, False)
        return state._replace(true_leases=tuple(true_leases.items()), readers=tuple(sorted(readers.values()))), ""

    def find_broken_recovery_law(self, state: SessionState) -> str:
        """Let all workers die and a new worker take every lease. Return the first broken law, or "" if none is."""
        cache_key = ("stuck", state.rows, state.true_leases)
        if cache_key not in self._outcomes:
            self._outcomes[cache_key] = self._check_recovery(state)
        return str(self._outcomes[cache_key])

    def _check_recovery(self, state: SessionState) -> str:
        rows = state.rows
        owned_leases: dict[str, Lease] = {}
        for key, _ in state.true_leases:
            new_worker = self._create_worker(f"heir-of-{key}", 0)
            for _ in range(3):

                def take_lease(store: SessionStore, key: str = key) -> object:
                    (lease,) = store.get([key])
                    return store.write(ClaimLease(lease, "heir"))

                rows, outcome = self._run_alone(rows, new_worker, take_lease)
                if isinstance(outcome, Done):
                    owned_leases[key] = outcome.lease
                    break
        for key, true_lease in state.true_leases:
            if key not in owned_leases:
                return f"{key} sticks"
            start_position = count_records_before_checkpoint(owned_leases[key])
            if start_position > true_lease.handled or start_position < true_lease.done:
                return (
                    f"an heir starts at {start_position}; handled {true_lease.handled}, answered Done {true_lease.done}"
                )
        return ""

    def _run_alone(
        self, rows: TableRows, worker_state: WorkerState, operation: Callable[[SessionStore], Any]
    ) -> tuple[TableRows, Any]:
        """Run `operation` on one worker's store while all other workers stand still."""
        responses: list[Any] = []
        for _ in count():
            worker: CheckedWorker = pickle.loads(worker_state.snapshot)  # noqa: S301  our own
            cells: Any = worker.store._versioned_rows  # noqa: SLF001  the checker's own cells
            cells.responses = deque(responses)
            try:
                return rows, operation(worker.store)
            except ResponseNeeded as exc:
                rows, response = apply_request(rows, exc.request)
                responses.append(response)
        raise AssertionError


READS = ("look", "handle", "commit", "claim")
FIRST_WORKER_TAKES_S0 = ((0, "look", ""), (0, "claim", "s0"), (1, "look", ""))
"""The first worker takes lease s0. Then the second worker reads the table."""
FIRST_WORKER_TAKES_BOTH = ((0, "look", ""), (0, "claim", "s0"), (0, "look", ""), (0, "claim", "s1"), (1, "look", ""))
"""The first worker takes leases s0 and s1. Then the second worker reads the table."""


def build_session_models() -> Mapping[str, SessionModel]:
    """Return the models to explore, by name.

    In most settings, the first worker is reading lease s0, and the second worker has seen that ownership in a listing.
    """
    actions_until_both_listed = ((0, "look", ""), (1, "look", ""))
    actions_until_requested = (
        *FIRST_WORKER_TAKES_S0,
        (1, "request", "s0"),
        (0, "handle", "s0"),
        (0, "commit", "s0"),
    )
    actions_until_progress = (*FIRST_WORKER_TAKES_S0, (0, "handle", "s0"), (0, "commit", "s0"), (0, "handle", "s0"))

    def build_model(
        moves: tuple[int, ...],
        initial_actions: Any,  # noqa: ANN401  as in the model
        *verbs: str,
        leases: int = 1,
        **faults: int,
    ) -> SessionModel:
        return SessionModel(moves, leases, faults, frozenset({*READS, *verbs}), initial_actions)

    return {
        "expiry": build_model((3, 2), FIRST_WORKER_TAKES_S0, tick=1),
        "expiry, crash": build_model((2, 2), FIRST_WORKER_TAKES_S0, tick=1, crash=1),
        "theft": build_model((3, 2), FIRST_WORKER_TAKES_S0, "steal"),
        "theft, crash": build_model((3, 2), FIRST_WORKER_TAKES_S0, "steal", crash=1),
        "theft, lost answer": build_model((3, 2), FIRST_WORKER_TAKES_S0, "steal", applied=1),
        "theft, late write": build_model((3, 2), FIRST_WORKER_TAKES_S0, "steal", late=1),
        "late take": build_model((3, 3), actions_until_both_listed, "release", late=1),
        "lost take": build_model((3, 2), actions_until_both_listed, "steal", applied=1),
        "late release": build_model((5, 1), FIRST_WORKER_TAKES_S0, "release", late=1),
        "hand-over": build_model((3, 3), actions_until_requested, "give", "take back"),
        "hand-over, lost answer": build_model((3, 2), actions_until_requested, "give", "take back", applied=1),
        "hand-over, late write": build_model((3, 2), actions_until_requested, "give", "take back", late=1),
        "hand-over, theft": build_model(
            (3, 2, 2), (*actions_until_requested, (2, "look", "")), "give", "take back", "steal"
        ),
        "reset": build_model((2, 4), actions_until_progress, "release", "reset", tick=1),
        "late checkpoint": build_model((3, 4), actions_until_progress, "release", "reset", "steal", "late"),
        "restart": build_model((3, 1), FIRST_WORKER_TAKES_S0, tick=1, crash=1, restart=1),
        "stale": build_model((4, 2), FIRST_WORKER_TAKES_S0, "steal", "release"),
        "removal": build_model((4, 4), actions_until_progress, tick=1),
        "three workers": build_model((2, 2, 2), (*FIRST_WORKER_TAKES_S0, (2, "look", "")), "steal", tick=1),
        "two leases": build_model((3, 2), FIRST_WORKER_TAKES_BOTH, "steal", leases=2, tick=1),
    }


app = typer.Typer(add_completion=False)


@app.command()
def main(
    limit: Annotated[int, typer.Option(min=1, help="States of each setting at most.")] = 300_000,
    only: Annotated[str, typer.Option(help="One setting.")] = "",
) -> None:
    """Explore every setting; exit 1 if a law is broken."""
    raise typer.Exit(explore_and_report(build_session_models(), limit, only))


def explore_and_report(models: Mapping[str, SessionModel], limit: int, only: str = "") -> int:
    """Explore these settings, print the results, and return 1 if a law is broken."""
    is_law_broken = False
    for name, model in models.items():
        if only in {"", name}:
            result = model.explore(limit)
            extent = "whole" if result.complete else "cut off"
            print(f"{name:<24}{result.states:>10,} states, {extent}", flush=True)  # noqa: T201
            for finding in result.findings:
                is_law_broken = True
                print(f"  {finding.law}", *finding.trace, sep="\n    ")  # noqa: T201
    return int(is_law_broken)


def take_snapshot(worker: CheckedWorker) -> WorkerState:
    """Return the worker's state between two actions."""
    return WorkerState(pickle.dumps(worker), worker.description())


def _replace_worker(
    workers: tuple[WorkerState, ...], worker_index: int, worker_state: WorkerState
) -> tuple[WorkerState, ...]:
    return (*workers[:worker_index], worker_state, *workers[worker_index + 1 :])


def _use_fault(faults_left: tuple[tuple[str, int], ...], fault: str) -> tuple[tuple[str, int], ...]:
    return tuple((name, count_left - (name == fault)) for name, count_left in faults_left)


def _describe_request(request: CellRequest) -> str:
    return f"{request.verb} {' '.join(request.names)}" + (f" {request.content}" if request.content else "")


if __name__ == "__main__":
    app()
