"""Looks at a table again and again in a thread of its own, and keeps what a page and monitoring ask for.

The moves and the lag since the server started are kept in memory, or in a SQLite file if one is named. A page is told
what it shows and no more: the first rows in the order that it asks for, so that it costs the same for any table.
"""

import sqlite3
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any

from attrs import evolve, frozen

from leasehold.adapters.consumer.status import Status, fleet_lag, group_status
from leasehold.adapters.ops.explaining import plans, rules_between, rules_of, story
from leasehold.adapters.report.page import COLOURS, Line, lines
from leasehold.adapters.report.watching import SeenMove, TableWatch, WatchedTable, moved, picture
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.threads import spawn
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above
from leasehold.errors import SourceError, StoreError
from leasehold.stores.printable import said, text_of
from leasehold.stores.protocol import Store

SCHEMA = """
CREATE TABLE IF NOT EXISTS moves (store TEXT, at REAL, key TEXT, before TEXT, after TEXT, rule TEXT);
CREATE TABLE IF NOT EXISTS lag (store TEXT, at REAL, most REAL, total REAL);
CREATE INDEX IF NOT EXISTS moves_at ON moves (store, at);
CREATE INDEX IF NOT EXISTS lag_at ON lag (store, at)
"""

LOCKED_SECONDS = 0.5
"""How long another process's lock is waited for: what is not written then is written with the next reading."""

KEPT_SECONDS = 7 * 86400.0
"""The age from which moves and lag are removed."""


@frozen
class LagPoint:
    """How far behind the application was at a time; `most` is None where no row told."""

    at: float
    most: float | None
    total: float


STRIP_LOOKS = 120
"""Looks whose lag is kept for each lease: 4 bytes for each of both, whatever a name takes."""

SHOWN_MOVES, SHOWN_WORKERS = 20, 50
"""Rows of the two small tables of a page."""

SORTS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
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
"""Orders of a page: texts from the first, numbers from the largest."""


@frozen
class ViewWanted:
    """The part of a table's leases that a page asks for.

    sort  one of SORTS; `down`: the other way round
    text  in lower case; of the leases whose row has it somewhere
    most  rows
    """

    sort: str = "status"
    down: bool = False
    text: str = ""
    most: int = 25


class HistoryError(Exception):
    """The history takes or tells nothing now, for this reason."""


@contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise HistoryError(f"the history cannot be used now: {error}") from error


class FleetRecord:
    """The moves and the lag of all stores since the beginning; safe under threads.

    path  of a SQLite file, made if it is not there; in memory, if left out
    """

    def __init__(self, path: str | None = None) -> None:
        """Raises OSError if the file cannot be used."""
        self._lock = Lock()
        try:
            self._connection = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=LOCKED_SECONDS)
            self._connection.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise OSError(f"--history: {path}: {error}") from error

    def add(self, store: str, moves: tuple[SeenMove, ...], lag: LagPoint) -> None:
        """Keep what one reading showed, all of it or nothing. Raises HistoryError."""
        rows = [(store, move.at, move.key, move.before, move.after, move.rule) for move in moves]
        with _understood(), self._lock, self._connection as connection:
            connection.executemany("INSERT INTO moves VALUES (?, ?, ?, ?, ?, ?)", rows)
            connection.execute(
                "INSERT INTO lag (store, at, most, total) VALUES (?, ?, ?, ?)", (store, lag.at, lag.most, lag.total)
            )
            for table in ("moves", "lag"):
                connection.execute(f"DELETE FROM {table} WHERE at < ?", (lag.at - KEPT_SECONDS,))  # noqa: S608  our own names

    def moves(self, store: str, most: int = 100) -> tuple[SeenMove, ...]:
        """The latest moves, the last one first. Raises HistoryError."""
        asked = "SELECT at, key, before, after, rule FROM moves WHERE store = ? ORDER BY at DESC, key LIMIT ?"
        with _understood(), self._lock:
            return tuple(SeenMove(*row) for row in self._connection.execute(asked, (store, most)))

    def lag(self, store: str, most: int = 300) -> tuple[LagPoint, ...]:
        """The latest points of lag, in order of time. Raises HistoryError."""
        asked = "SELECT at, most, total FROM lag WHERE store = ? ORDER BY at DESC LIMIT ?"
        with _understood(), self._lock:
            return tuple(LagPoint(*row) for row in self._connection.execute(asked, (store, most)))[::-1]

    def count(self, store: str) -> int:
        """How many moves are known. Raises HistoryError."""
        with _understood(), self._lock:
            return int(self._connection.execute("SELECT count(*) FROM moves WHERE store = ?", (store,)).fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


UNWRITTEN_MOST = 10_000
"""Moves that are kept for a history that takes none; the oldest go first."""


@frozen
class SeenFleet:
    """The last reading of a table.

    table       the reading, with the latest moves of the history; None before the first
    trouble     why no later one could be made
    lag, count  the latest of the history, and how many moves that knows
    unwritten   moves that the history has not taken yet, for the reason `refused`
    """

    table: WatchedTable | None = None
    trouble: str = ""
    lag: tuple[LagPoint, ...] = ()
    count: int = 0
    unwritten: tuple[SeenMove, ...] = ()
    refused: str = ""

    @property
    def at(self) -> float:
        """When it was made, seconds since 1970; 0 before the first."""
        return 0.0 if self.table is None else self.table.at


class TableWatcher:
    """Watches one table from `start` to `close`.

    name    how the table is called on the page: its URL without options
    config  the fleet's, by which plans are explained
    source  asked for lag where no row tells it
    wall    seconds since 1970; `clock` never goes back
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
        self._seen, self._lock, self._ending = SeenFleet(), Lock(), Event()
        self._strips = deque[tuple[float, tuple[str, ...], "array[float]"]](maxlen=STRIP_LOOKS)
        self._thread: Thread | None = None

    @property
    def seen(self) -> SeenFleet:
        """The last reading."""
        with self._lock:
            return self._seen

    @property
    def fresh(self) -> bool:
        """Whether a reading is young enough to be believed."""
        return not self.seen.trouble and self._wall() - self.seen.at <= max(30.0, 5 * self.every)

    def start(self) -> None:
        """Watch in a thread."""

        def run() -> None:
            while not self._ending.is_set():
                self.try_look()
                self._ending.wait(self.every)

        self._thread = spawn("leasehold-serve", run, lambda fault: self._troubled(said(fault)))

    def close(self) -> None:
        """End the thread; a reading under way is waited for as long as a page would wait."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def try_look(self) -> None:
        """Read once, or keep why that failed."""
        try:
            self.look()
        except (StoreError, SourceError) as error:
            self._troubled(text_of(error) or said(error))
        except Exception as error:  # noqa: BLE001  the next reading may go well, and the page says why this did not
            self._troubled(said(error))

    def _troubled(self, why: str) -> None:
        with self._lock:
            self._seen = evolve(self._seen, trouble=why)

    def look(self) -> None:
        """Read once. Raises StoreError or SourceError.

        A history that takes nothing for a while makes no table stale: what it missed is written with a later reading.
        """
        before, table, record = self.seen, self._watch.look(), self._record
        whole, moves = fleet_lag(table.lags), before.unwritten
        if before.table is not None:
            rules = rules_between(before.table, table, self.config)
            moves += tuple(
                SeenMove(table.at, new.key, old.owner, new.owner, rules[new.key])
                for old, new in moved(before.table, table)
            )
            table = evolve(table, moves=before.table.moves)
        keys = tuple(lease.key for lease in table.leases)
        if self._strips and self._strips[-1][1] == keys:
            keys = self._strips[-1][1]  # the names are kept once
        nan = float("nan")
        told = (table.lag(lease).seconds for lease in table.leases)
        strip = (table.at, keys, array("f", (nan if lag is None else lag for lag in told)))
        seen = evolve(before, table=table, trouble="", unwritten=(), refused="")
        try:
            record.add(self.name, moves, LagPoint(table.at, whole.most, whole.total))
        except HistoryError as refused:
            seen = evolve(seen, unwritten=moves[-UNWRITTEN_MOST:], refused=str(refused))
        try:
            table = evolve(table, moves=record.moves(self.name))
            seen = evolve(seen, table=table, lag=record.lag(self.name), count=record.count(self.name))
        except HistoryError as refused:
            seen = evolve(seen, refused=str(refused))
        with self._lock:
            self._seen = seen
            self._strips.append(strip)

    @property
    def status(self) -> Status:
        """The group's status by the last reading; UNKNOWN once that is too old to be believed."""
        seen = self.seen
        why = seen.trouble or ("" if self.fresh else "there is no reading of it, or none lately")
        return group_status({} if seen.table is None else seen.table.statuses, why)

    def state(self) -> dict[str, Any]:
        """Everything the page shows, as JSON values."""
        seen, status = self.seen, self.status
        about = {"store": self.name, "at": seen.at, "trouble": seen.trouble or seen.refused}
        about |= {"rules": self.config.rules.name, **status.as_json(), "number": status.number}
        if seen.table is None:
            return about | {"leases": [], "workers": [], "total": {}, "moves": [], "lag": []}
        told = picture(seen.table, self.config)
        moves = [[move.at, move.key, move.before, move.after, move.rule] for move in seen.table.moves]
        lag = [[point.at, point.most, point.total] for point in seen.lag]
        return about | told | {"total": told["total"] | {"moves": seen.count}, "moves": moves, "lag": lag}

    def view(self, wanted: ViewWanted) -> dict[str, Any]:
        """The view of a page: the whole, the first workers and moves, and the first leases in the order asked for."""
        state = self.state()
        leases = []
        for row in state.pop("leases") if state["at"] else ():
            # All that a row shows as words can be looked for, the host of its reader too.
            words = f"{row['key']} {row['owner'] or 'nobody'} {row['status']} {row['lag'].get('host') or ''}"
            if wanted.text in words.lower():
                leases.append(row)
        found = sorted(leases, key=SORTS[wanted.sort], reverse=wanted.down)
        lag = [most for _, most, _ in state.pop("lag") if most is not None]
        # Those furthest from their target first, then those that are furthest behind.
        workers = sorted(
            state["workers"], key=lambda each: (-abs(each["leases"] - each["target"]), -(each["lag"] or 0))
        )
        return state | {
            "malformed": state.get("malformed", [])[:SHOWN_MOVES],
            "contradictions": state.get("contradictions", [])[:SHOWN_MOVES],
            "highest": max(lag, default=None),
            "moves": state["moves"][:SHOWN_MOVES],
            "workers": workers[:SHOWN_WORKERS],
            "more_workers": max(0, len(workers) - SHOWN_WORKERS),
            "rows": [_shown(row) for row in found[: wanted.most]],
            "found": len(found),
        }

    def lag_chart(self, key: str | None = None) -> str:
        """The curve of a lease's lag, or of the lease that is furthest behind; "" where no row has told of it twice."""
        known = [(point.at, point.most) for point in self.seen.lag if point.most is not None]
        if key is not None:
            with self._lock:
                strips = tuple(self._strips)
            places = ((at, bisect_left(keys, key), keys, lags) for at, keys, lags in strips)
            known = [(at, lags[at_key]) for at, at_key, keys, lags in places if keys[at_key : at_key + 1] == (key,)]
            known = [(at, lag) for at, lag in known if lag == lag]  # noqa: PLR0124  of a lag that nobody told it is not
        if len(known) < 2:  # noqa: PLR2004  a line has two ends
            return ""
        times, curve = [at - known[0][0] for at, _ in known], Line("", tuple(most for _, most in known), COLOURS[0])
        return lines(times, [curve], "seconds", since="the first reading here", tall=110.0)

    def explain(self, worker: str | None, key: str | None) -> dict[str, Any] | None:
        """The text of `leasehold explain` about a worker or a lease; None where there is none of this name."""
        table = self.seen.table
        if table is None:
            return None
        if key is None:
            found = plans(table, self.config)
            chosen = [each.as_json() for each in found if worker in {None, each.worker}]
            return {"workers": chosen, "rules": rules_of(found)} if chosen or worker is None else None
        lease = next((row for row in table.leases if row.key == key), None)
        return None if lease is None else story(table, self.config, lease, plans(table, self.config)).as_json()


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a lease that a page shows, without those that are empty."""
    lag = row["lag"]
    told = {name: row[name] for name in ("key", "owner", "heir", "idle", "kbps", "ended", "status")}
    told["place"] = row.get("place")
    told |= {name: lag.get(name) for name in ("seconds", "events", "end", "age", "moves", "host", "at_least")}
    told["says"] = None if row["status"] == "OK" else row["says"]
    # A lag of 0 equals False, and is known all the same. Whole numbers are told without a point: each look pays for it.
    known = {name: value for name, value in told.items() if value is not None and value is not False and value != ""}
    return {name: int(each) if isinstance(each, float) and each.is_integer() else each for name, each in known.items()}
