"""Checks the swap of two lease tables: runs the requests of a few workers with the real `SwapStore` in every order.

The search, the faults and the laws are the same as in the module `sessions`. The difference is that each request reads
or writes a whole lease in one of the two tables. Both tables check the conditions of writes. A worker can also take the
actions of `leasehold swap`: it chooses the table that leases move to (`--back` chooses table FROM), and it moves
unowned leases to that table.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer
from attrs import define

from leasehold.balancer.model import SHARD_END, Lease
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.protocol import Capabilities, Listing, Outcome
from leasehold.stores.swap import CONTROL_KEY, DIRECTION, TO, SwapStore, split_version
from leasehold.stores.writes import AnnotateLease, Write
from leasehold_lab.checker.sessions import (
    FIRST_WORKER_TAKES_BOTH,
    FIRST_WORKER_TAKES_S0,
    READS,
    CellRequest,
    CheckedCells,
    CheckedWorker,
    SessionEvent,
    SessionModel,
    SessionState,
    WorkerState,
    explore_and_report,
    take_snapshot,
)


def clock_at_zero() -> float:
    """Return 0.0. Because no time passes, the store reads the control row at every call."""
    return 0.0


@define
class CheckedTable:
    """A worker's connection to one of the two tables."""

    cells: CheckedCells
    name: str
    capabilities: Capabilities = Capabilities()  # noqa: RUF009  a frozen value

    def list(self) -> Listing:
        """Return all leases in the table."""
        return Listing(tuple(lease for _, lease in self.cells.replay_response(CellRequest("list", (f"{self.name}/",)))))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002
        """Return the requested leases that exist."""
        names = tuple(f"{self.name}/{key}" for key in keys)
        return tuple(lease for _, lease in self.cells.replay_response(CellRequest("read", names)))

    def write(self, write: Write) -> Outcome:
        """Apply the write if its condition holds."""
        outcome: Outcome = self.cells.replay_response(CellRequest("apply", (f"{self.name}/{write.lease.key}",), write))
        return outcome

    def close(self) -> None:
        """Do nothing, because the model has no connection to close."""


def open_swap_store(cells: CheckedCells) -> Any:  # noqa: ANN401  the search is typed for SessionStore
    """Return the store under test, with its two tables."""
    tables = (CheckedTable(cells, "from"), CheckedTable(cells, "to"))
    store: Any = SwapStore(tables, "to", clock=clock_at_zero, control_interval_seconds=0.0)
    store._versioned_rows = cells  # noqa: SLF001  the search reads this attribute
    return store


@define
class SwappingWorker(CheckedWorker):
    """A worker that may also choose the table that leases move to, as `leasehold swap` does."""

    def list_possible_actions(self, tick: int) -> Iterator[tuple[str, str]]:
        yield from super().list_possible_actions(tick)
        if self.moves > 0:
            yield "send", "to"
            yield "send", "from"
            for key, (lease, _) in self.listed_leases.items():
                if lease.owner is None and key not in self.holdings:
                    yield "carry", key

    def take_action(self, verb: str, key: str, tick: int, now: int) -> list[SessionEvent]:
        if verb not in {"send", "carry"}:
            try:
                return super().take_action(verb, key, tick, now)
            except StoreError as exc:
                return [("contradiction", key, str(exc))]
        self.moves -= 1
        store: Any = self.store
        try:
            if verb == "send":
                table = store._tables[TO]  # noqa: SLF001  the command opens this table itself
                (control,) = table.get([CONTROL_KEY])
                table.write(AnnotateLease(control, DIRECTION, key))
            else:
                lease = self.listed_leases.pop(key)[0]
                store.move_unowned(lease, 1 - split_version(lease)[0])
        except OutcomeUnknown:
            pass
        return []

    def description(self) -> str:
        """Return a string that contains everything on which the worker's next actions depend."""
        store: Any = self.store
        store_state = (store._goal, store._closed)  # noqa: SLF001  the state of the code under test
        return repr(
            (
                self.name,
                self.moves,
                self.holdings,
                self.listed_leases,
                self.leases_given_away,
                self.lost_holdings,
                store_state,
            )
        )


@define
class SwapModel(SessionModel):
    """A small fleet that moves its leases from table FROM to table TO."""

    def _create_worker(self, name: str, moves: int) -> WorkerState:
        return take_snapshot(SwappingWorker(name, open_swap_store(CheckedCells()), moves))

    def _judge_event(
        self, state: SessionState, worker_index: int, start_tick: int, event: SessionEvent
    ) -> tuple[SessionState, str]:
        if event[0] == "contradiction":
            return state, str(event[2])
        if event[0] == "confirmed" and dict(state.true_leases)[event[1]].starter != worker_index:
            return state, "renewed, and another has taken it"
        return super()._judge_event(state, worker_index, start_tick, event)

    def _check_recovery(self, state: SessionState) -> str:
        try:
            return super()._check_recovery(state)
        except StoreError as exc:
            return f"sticks: {exc}"


_CONTROL_ROW = Lease(CONTROL_KEY, checkpoint=SHARD_END, annotations=((DIRECTION, "to"),))


def build_swap_model(
    moves: tuple[int, ...],
    initial_actions: Any,  # noqa: ANN401  as in the model
    *verbs: str,
    leases: int = 1,
    faults: Mapping[str, int] | None = None,
) -> SwapModel:
    """Return a model that moves leases to table TO.

    `moves` contains the number of actions that each worker may take.
    """
    rows = ((f"to/{CONTROL_KEY}", _CONTROL_ROW),)
    return SwapModel(moves, leases, faults or {}, frozenset(verbs), initial_actions, rows=rows)


def build_swap_models() -> dict[str, SwapModel]:
    """Return the models to explore, by name.

    In most settings, the first worker is reading lease s0, and the second worker has seen that ownership in a listing.
    """
    actions_until_first_moved = (*FIRST_WORKER_TAKES_S0, (0, "handle", "s0"), (0, "commit", "s0"), (1, "look", ""))
    actions_until_sent_back = (*actions_until_first_moved, (1, "send", "from"))
    actions_until_both_saw_two = (*FIRST_WORKER_TAKES_BOTH, (2, "look", ""))
    actions_until_first_released = (*actions_until_first_moved, (0, "release", "s0"), (1, "look", ""))
    return {
        "expiry": build_swap_model((3, 2), FIRST_WORKER_TAKES_S0, *READS, faults={"tick": 1}),
        "expiry, crash": build_swap_model((2, 3), FIRST_WORKER_TAKES_S0, *READS, faults={"tick": 1, "crash": 1}),
        "theft": build_swap_model((3, 3), FIRST_WORKER_TAKES_S0, *READS, "steal"),
        "theft, crash": build_swap_model((2, 3), FIRST_WORKER_TAKES_S0, *READS, "steal", faults={"crash": 1}),
        "lost answer": build_swap_model((3, 2), FIRST_WORKER_TAKES_S0, *READS, "steal", faults={"applied": 1}),
        "late write": build_swap_model((3, 2), FIRST_WORKER_TAKES_S0, *READS, "steal", faults={"late": 1}),
        "back": build_swap_model((3, 3), actions_until_sent_back, *READS, "steal"),
        "back, lost answer": build_swap_model((3, 2), actions_until_sent_back, *READS, "steal", faults={"applied": 1}),
        "back, late write": build_swap_model((3, 2), actions_until_sent_back, *READS, "steal", faults={"late": 1}),
        "to and fro": build_swap_model((4, 3), actions_until_first_moved, *READS, "send", faults={"tick": 1}),
        "release": build_swap_model((3, 3), actions_until_first_moved, *READS, "release", faults={"applied": 1}),
        "hand-over": build_swap_model((3, 3), FIRST_WORKER_TAKES_S0, *READS, "request", "give", "take back"),
        "reset": build_swap_model((2, 4), actions_until_first_released, *READS, "reset", "send"),
        "carried": build_swap_model(
            (2, 4), (*actions_until_first_released, (0, "send", "from")), *READS, "carry", faults={"applied": 1}
        ),
        "carried, late write": build_swap_model(
            (1, 3), (*actions_until_first_released, (0, "send", "from")), *READS, "carry", faults={"late": 1}
        ),
        "three workers": build_swap_model(
            (2, 2, 2), (*FIRST_WORKER_TAKES_S0, (2, "look", "")), *READS, "steal", faults={"tick": 1}
        ),
        "three workers, two leases": build_swap_model(
            (2, 2, 2), actions_until_both_saw_two, *READS, "steal", leases=2, faults={"tick": 1}
        ),
    }


app = typer.Typer(add_completion=False)


@app.command()
def main(
    limit: Annotated[int, typer.Option(min=1, help="States of each setting at most.")] = 150_000,
    only: Annotated[str, typer.Option(help="One setting.")] = "",
) -> None:
    """Explore every setting; exit 1 if a law is broken."""
    raise typer.Exit(explore_and_report(build_swap_models(), limit, only))


if __name__ == "__main__":
    app()
