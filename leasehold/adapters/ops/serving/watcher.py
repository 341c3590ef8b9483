"""Reads a table periodically in its own thread, and keeps the state that pages and monitoring systems request.

The history of moves and lag is kept in memory, or in a SQLite file if the user names one. A page receives only the rows
that it shows, which are the first rows in its sort order. Its traffic therefore does not grow with the table.
"""

import sqlite3
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any

from attrs import evolve, frozen

from leasehold.adapters.consumer.status import Status, fleet_lag, group_status
from leasehold.adapters.ops.chart import curve
from leasehold.adapters.ops.explaining import plans, rules_between, rules_of, story
from leasehold.adapters.ops.watching import SeenMove, TableWatch, WatchedTable, describe_table, owner_changes
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.threads import spawn
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above
from leasehold.errors import SourceError, StoreError
from leasehold.stores.printable import error_summary, limited_error_text
from leasehold.stores.protocol import Store

SCHEMA = """
CREATE TABLE IF NOT EXISTS moves (store TEXT, at REAL, key TEXT, before TEXT, after TEXT, rule TEXT);
CREATE TABLE IF NOT EXISTS lag (store TEXT, at REAL, most REAL, total REAL);
CREATE INDEX IF NOT EXISTS moves_at ON moves (store, at);
CREATE INDEX IF NOT EXISTS lag_at ON lag (store, at)
"""

LOCKED_SECONDS = 0.5
"""How long to wait for another process's lock on the file. If the lock is not free by then, the moves are written after
the next read."""

RETENTION_SECONDS = 7 * 86400.0
"""The age at which moves and lag are deleted."""


@frozen
class LagPoint:
    """The lag of a group at a point in time.

    Attributes:
        at: The time, in seconds since 1970.
        most: The lag of the lease that was furthest behind, in seconds; None if no row contained a lag.
        total: The lag of all leases together, in seconds.
    """

    at: float
    most: float | None
    total: float


LAG_READS_MAX = 120
"""The number of reads for which the lag of each lease is kept. Each read takes 4 bytes per lease."""

MOVES_SHOWN, WORKERS_SHOWN = 20, 50
"""The maximum numbers of rows in a page's tables of moves and of workers."""

SORT_KEYS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "status": lambda row: (-row["number"], -(row["lag"].get("seconds") or 0.0)),
    "key": lambda row: row["key"],
    "owner": lambda row: row["owner"] or "",
    "lag": lambda row: -(row["lag"].get("seconds") or 0.0),
    "age": lambda row: -(row["lag"].get("age") or 0.0),
    "kbps": lambda row: -(row["kbps"] or 0.0),
    "idle": lambda row: -(row["idle"] or 0.0),
    "switches": lambda row: -(row["lag"].get("moves") or 0),
    "host": lambda row: row["lag"].get("host") or "",
}
"""The sort orders of a page, with their keys. Strings are sorted in ascending order, numbers in descending order."""


@frozen
class ViewRequest:
    """The part of a table's leases that a page requests.

    Attributes:
        sort: The sort order, one of the names in `SORT_KEYS`.
        down: Whether to reverse the order.
        text: Selects the leases whose rows contain this text. It must be in lower case.
        most: The maximum number of rows.
    """

    sort: str = "status"
    down: bool = False
    text: str = ""
    most: int = 25


class HistoryError(Exception):
    """The history cannot be read or written now."""


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise HistoryError(f"the history cannot be used now: {error}") from error


class FleetRecord:
    """The recorded moves and lag of all stores. Several threads may use an instance at the same time.

    Args:
        path: The path of a SQLite file, which is created if it does not exist; None to keep the record in memory.

    Raises:
        OSError: The file cannot be used.
    """

    def __init__(self, path: str | None = None) -> None:
        self._lock = Lock()
        try:
            self._connection = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=LOCKED_SECONDS)
            self._connection.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise OSError(f"--history: {path}: {error}") from error

    def add(self, store: str, moves: tuple[SeenMove, ...], lag: LagPoint) -> None:
        """Record the moves and the lag of one read of the table, in one transaction. Raises HistoryError."""
        rows = [(store, move.at, move.key, move.before, move.after, move.rule) for move in moves]
        with _translate_errors(), self._lock, self._connection as connection:
            connection.executemany("INSERT INTO moves VALUES (?, ?, ?, ?, ?, ?)", rows)
            connection.execute(
                "INSERT INTO lag (store, at, most, total) VALUES (?, ?, ?, ?)", (store, lag.at, lag.most, lag.total)
            )
            for table in ("moves", "lag"):
                connection.execute(f"DELETE FROM {table} WHERE at < ?", (lag.at - RETENTION_SECONDS,))  # noqa: S608  our own names

    def moves(self, store: str, limit: int = 100) -> tuple[SeenMove, ...]:
        """Return the latest moves, newest first. Raises HistoryError."""
        query = "SELECT at, key, before, after, rule FROM moves WHERE store = ? ORDER BY at DESC, key LIMIT ?"
        with _translate_errors(), self._lock:
            return tuple(SeenMove(*row) for row in self._connection.execute(query, (store, limit)))

    def lag(self, store: str, limit: int = 300) -> tuple[LagPoint, ...]:
        """Return the latest lag points, oldest first. Raises HistoryError."""
        query = "SELECT at, most, total FROM lag WHERE store = ? ORDER BY at DESC LIMIT ?"
        with _translate_errors(), self._lock:
            return tuple(LagPoint(*row) for row in self._connection.execute(query, (store, limit)))[::-1]

    def count(self, store: str) -> int:
        """Return the number of recorded moves. Raises HistoryError."""
        with _translate_errors(), self._lock:
            return int(self._connection.execute("SELECT count(*) FROM moves WHERE store = ?", (store,)).fetchone()[0])

    def close(self) -> None:
        with self._lock:
            self._connection.close()


UNWRITTEN_MAX = 10_000
"""The maximum number of moves to keep while the history cannot be written. The oldest moves are dropped first."""


@frozen
class WatchedFleet:
    """The state of a table when it was last read.

    Attributes:
        table: The state, with the latest moves of the history. None before the first read.
        trouble: The reason why a later read failed, or "".
        lag: The latest lag points in the history.
        count: The number of moves in the history.
        unwritten: Moves that could not be written to the history yet.
        history_fault: The reason why the history could not be read or written, or "".
    """

    table: WatchedTable | None = None
    trouble: str = ""
    lag: tuple[LagPoint, ...] = ()
    count: int = 0
    unwritten: tuple[SeenMove, ...] = ()
    history_fault: str = ""

    @property
    def at(self) -> float:
        """When the table was read, in seconds since 1970, or 0 before the first read."""
        return 0.0 if self.table is None else self.table.at


class TableWatcher:
    """Watches one table from `start` to `close`.

    Args:
        name: The table's name on the page, which is its URL without options.
        store: The table.
        config: The configuration of the fleet, from which plans are computed.
        record: The history to which moves and lag are added.
        every: The pause between two reads, in seconds.
        source: The stream. If given, it is queried for the lag of leases whose rows do not contain a lag.
        wall: Returns seconds since 1970.
        clock: Returns the time of a monotonic clock, in seconds.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        config: Config,
        record: FleetRecord,
        *,
        every: float,
        source: Source | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.config, self.every = name, config, every
        self._record, self._wall = record, wall
        self._watch = TableWatch(store, config.lease_seconds, expires_above(config), source, clock=clock, wall=wall)
        self._last_state, self._lock, self._stopping = WatchedFleet(), Lock(), Event()
        self._lags_by_read = deque[tuple[float, tuple[str, ...], "array[float]"]](maxlen=LAG_READS_MAX)
        self._thread: Thread | None = None

    @property
    def last_state(self) -> WatchedFleet:
        """The state of the table when it was last read."""
        with self._lock:
            return self._last_state

    @property
    def is_fresh(self) -> bool:
        """Whether the last read of the table succeeded and is recent."""
        return not self.last_state.trouble and self._wall() - self.last_state.at <= max(30.0, 5 * self.every)

    @property
    def all_statuses_known(self) -> bool:
        """Whether the status of every lease is known."""
        table = self.last_state.table
        return table is not None and all(status.word != "UNKNOWN" for status in table.statuses.values())

    def start(self) -> None:
        """Start reading the table in a thread."""

        def run() -> None:
            while not self._stopping.is_set():
                self.try_look()
                self._stopping.wait(self.every)

        self._thread = spawn("leasehold-serve", run, lambda fault: self._set_trouble(error_summary(fault)))

    def close(self) -> None:
        """End the thread, waiting up to 5 s for a read in progress."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def try_look(self) -> None:
        """Read the table once. If that fails, record the reason in `last_state`."""
        try:
            self.look()
        except (StoreError, SourceError) as error:
            self._set_trouble(limited_error_text(error) or error_summary(error))
        except Exception as error:  # noqa: BLE001  the page shows the reason, and the next read may succeed
            self._set_trouble(error_summary(error))

    def _set_trouble(self, reason: str) -> None:
        with self._lock:
            self._last_state = evolve(self._last_state, trouble=reason)

    def look(self) -> None:
        """Read the table once.

        If the history file cannot be written, the new state is still shown. The lease moves that are missing from the
        file are added after a later read.

        Raises:
            StoreError: The table cannot be read.
            SourceError: The source cannot be read.
        """
        previous_state, table, record = self.last_state, self._watch.look(), self._record
        lag, moves = fleet_lag(table.lags), previous_state.unwritten
        if previous_state.table is not None:
            rules = rules_between(previous_state.table, table, self.config)
            moves += tuple(
                SeenMove(table.at, lease_after.key, lease_before.owner, lease_after.owner, rules[lease_after.key])
                for lease_before, lease_after in owner_changes(previous_state.table, table)
            )
            table = evolve(table, moves=previous_state.table.moves)
        keys = tuple(lease.key for lease in table.leases)
        if self._lags_by_read and self._lags_by_read[-1][1] == keys:
            keys = self._lags_by_read[-1][1]  # share one tuple of keys to save memory
        unknown_lag = float("nan")
        seconds = (table.lag(lease).seconds for lease in table.leases)
        lags_of_read = (table.at, keys, array("f", (unknown_lag if lag is None else lag for lag in seconds)))
        last_state = evolve(previous_state, table=table, trouble="", unwritten=(), history_fault="")
        try:
            record.add(self.name, moves, LagPoint(table.at, lag.most, lag.total))
        except HistoryError as error:
            last_state = evolve(last_state, unwritten=moves[-UNWRITTEN_MAX:], history_fault=str(error))
        try:
            table = evolve(table, moves=record.moves(self.name))
            last_state = evolve(last_state, table=table, lag=record.lag(self.name), count=record.count(self.name))
        except HistoryError as error:
            last_state = evolve(last_state, history_fault=str(error))
        with self._lock:
            self._last_state = last_state
            self._lags_by_read.append(lags_of_read)

    @property
    def status(self) -> Status:
        """The group's status when the table was last read, or UNKNOWN if that was too long ago."""
        last_state = self.last_state
        fault = last_state.trouble or ("" if self.is_fresh else "it has not been read, or not recently")
        return group_status({}, fault) if fault or last_state.table is None else last_state.table.status

    def state(self) -> dict[str, Any]:
        """Return everything that the page shows, as JSON values."""
        last_state, status = self.last_state, self.status
        document = {"store": self.name, "at": last_state.at, "trouble": last_state.trouble or last_state.history_fault}
        document |= {"rules": self.config.rules.name, **status.as_json(), "number": status.number}
        if last_state.table is None:
            return document | {"leases": [], "workers": [], "total": {}, "moves": [], "lag": []}
        table_document = describe_table(last_state.table, self.config)
        moves = [[move.at, move.key, move.before, move.after, move.rule] for move in last_state.table.moves]
        lag = [[point.at, point.most, point.total] for point in last_state.lag]
        return (
            document
            | table_document
            | {"total": table_document["total"] | {"moves": last_state.count}, "moves": moves, "lag": lag}
        )

    def view(self, request: ViewRequest) -> dict[str, Any]:
        """Return the data of a page: totals, the first workers and moves, and the first leases in the sort order."""
        state = self.state()
        leases = []
        for row in state.pop("leases") if state["at"] else ():
            # Search all strings of a row, including the host of the worker that reads the shard.
            row_text = f"{row['key']} {row['owner'] or 'nobody'} {row['status']} {row['lag'].get('host') or ''}"
            if request.text in row_text.lower():
                leases.append(row)
        sorted_leases = sorted(leases, key=SORT_KEYS[request.sort], reverse=request.down)
        known_lags = [max_lag for _, max_lag, _ in state.pop("lag") if max_lag is not None]
        # Sort workers by how far their lease count is from the target, and then by lag.
        workers = sorted(
            state["workers"], key=lambda worker: (-abs(worker["leases"] - worker["target"]), -(worker["lag"] or 0))
        )
        return state | {
            "malformed": state.get("malformed", [])[:MOVES_SHOWN],
            "contradictions": state.get("contradictions", [])[:MOVES_SHOWN],
            "highest": max(known_lags, default=None),
            "moves": state["moves"][:MOVES_SHOWN],
            "workers": workers[:WORKERS_SHOWN],
            "more_workers": max(0, len(workers) - WORKERS_SHOWN),
            "rows": [_filled_fields(row) for row in sorted_leases[: request.most]],
            "found": len(sorted_leases),
        }

    def lag_chart(self, key: str | None = None) -> str:
        """Return an SVG chart of a lease's lag, or of the largest lag, or "" if there are fewer than two points."""
        points = [(point.at, point.most) for point in self.last_state.lag if point.most is not None]
        if key is not None:
            with self._lock:
                lags_by_read = tuple(self._lags_by_read)
            reads_with_index = ((read_at, bisect_left(keys, key), keys, lags) for read_at, keys, lags in lags_by_read)
            points = [
                (read_at, lags[index])
                for read_at, index, keys, lags in reads_with_index
                if keys[index : index + 1] == (key,)
            ]
            points = [(read_at, lag) for read_at, lag in points if lag == lag]  # noqa: PLR0124  drops NaN, an unknown lag
        if len(points) < 2:  # noqa: PLR2004  a line has two ends
            return ""
        times, values = [read_at - points[0][0] for read_at, _ in points], [lag_value for _, lag_value in points]
        return curve(times, values, "seconds", event="the first reading here")

    def explain(self, worker: str | None, key: str | None) -> dict[str, Any] | None:
        """Return the output of `leasehold explain` about a worker or a lease, or None if it does not exist."""
        table = self.last_state.table
        if table is None:
            return None
        if key is None:
            worker_plans = plans(table, self.config)
            selected_plans = [
                worker_plan.as_json() for worker_plan in worker_plans if worker in {None, worker_plan.worker}
            ]
            return (
                {"workers": selected_plans, "rules": rules_of(worker_plans)}
                if selected_plans or worker is None
                else None
            )
        lease = next((row for row in table.leases if row.key == key), None)
        return None if lease is None else story(table, self.config, lease, plans(table, self.config)).as_json()

    def explain_all(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the output of `explain` for these leases and for all workers, by kind ("lease", "worker") and name."""
        table = self.last_state.table
        if table is None:
            return {"lease": {}, "worker": {}}
        worker_plans, leases = plans(table, self.config), {lease.key: lease for lease in table.leases}
        rules = rules_of(worker_plans)
        return {
            "lease": {key: story(table, self.config, leases[key], worker_plans).as_json() for key in keys},
            "worker": {
                worker_plan.worker: {"workers": [worker_plan.as_json()], "rules": rules} for worker_plan in worker_plans
            },
        }


def _filled_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a lease that a page shows, leaving out empty ones."""
    lag = row["lag"]
    fields = {name: row[name] for name in ("key", "owner", "heir", "idle", "kbps", "ended", "status")}
    fields["place"] = row.get("place")
    fields |= {name: lag.get(name) for name in ("seconds", "events", "end", "age", "moves", "host", "at_least")}
    fields["says"] = None if row["status"] == "OK" else row["says"]
    # Compare with `is not False`, because a lag of 0 equals False and must be kept. Send whole numbers without a
    # decimal point, to keep messages small.
    filled_fields = {
        name: value for name, value in fields.items() if value is not None and value is not False and value != ""
    }
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in filled_fields.items()
    }
