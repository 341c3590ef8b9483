"""Reads a table again and again in a thread of its own, and keeps what a page and monitoring ask for.

The moves and the lag since the server started, kept in memory, or in a SQLite file if one is named.
"""

import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any

from attrs import Factory, evolve, frozen

from leasehold.adapters.reading.status import (
    GroupWatch,
    LeaseLag,
    Status,
    asked,
    fleet_lag,
    group_status,
    lags_of,
    statuses_of,
)
from leasehold.adapters.sources.protocol import Source, SourceError
from leasehold.adapters.steering.explaining import (
    WatchedTable,
    alive,
    explained,
    moved,
    plans,
    rules_between,
    shares,
    story,
)
from leasehold.adapters.threads import spawn
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above
from leasehold.balancer.model import Lease
from leasehold.balancer.shards.contradictions import noted
from leasehold.balancer.watch import Watch
from leasehold.stores.fields import kilobytes
from leasehold.stores.printable import said, text_of
from leasehold.stores.protocol import Store, StoreError

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
class SeenMove:
    """A change of owner as two readings of a table show it; None is nobody.

    at    seconds since 1970
    rule  by which the new owner took it, or the lookout freed it; "" where the owner before let it go
    """

    at: float
    key: str
    before: str | None
    after: str | None
    rule: str = ""


@frozen
class LagPoint:
    """How far behind the application was at a time; `most` is None where no row told."""

    at: float
    most: float | None
    total: float


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

    at          when it was made, seconds since 1970; 0 before the first
    trouble     why no later one could be made
    moves, lag  the latest of the history, and how many moves that knows
    unwritten   moves that the history has not taken yet, for the reason `refused`
    """

    at: float = 0.0
    table: WatchedTable | None = None
    lags: Mapping[str, LeaseLag] = Factory(dict)
    trouble: str = ""
    moves: tuple[SeenMove, ...] = ()
    lag: tuple[LagPoint, ...] = ()
    count: int = 0
    unwritten: tuple[SeenMove, ...] = ()
    refused: str = ""

    @property
    def statuses(self) -> Mapping[str, Status]:
        """Of its leases, by key."""
        return {} if self.table is None else self.table.statuses


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
        self._store, self._record, self._source = store, record, source
        self._wall, self._clock = wall, clock
        self._watch, self._window, self._first = Watch(), GroupWatch(), -math.inf
        self._seen, self._lock, self._ending = SeenFleet(), Lock(), Event()
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
        self._thread = spawn("leasehold-serve", self._run, self._troubled)

    def close(self) -> None:
        """End the thread; a reading under way is waited for as long as a page would wait."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._ending.is_set():
            self.try_look()
            self._ending.wait(self.every)

    def try_look(self) -> None:
        """Read once, or keep why that failed."""
        try:
            self.look()
        except (StoreError, SourceError) as error:
            self._troubled(error, text_of(error))
        except Exception as error:  # noqa: BLE001  the next reading may go well, and the page says why this did not
            self._troubled(error)

    def _troubled(self, fault: BaseException, text: str = "") -> None:
        with self._lock:
            self._seen = evolve(self._seen, trouble=text or said(fault))

    def look(self) -> None:
        """Read once. Raises StoreError or SourceError.

        A history that takes nothing for a while makes no table stale: what it missed is written with a later reading.
        """
        began = self._clock()
        listing = self._store.list()
        before, ended = self.seen, self._clock()
        self._first = began if before.table is None else self._first
        self._watch, leases = self._watch.look(listing.leases, began, ended)
        rows, now = tuple(sorted(leases, key=lambda lease: lease.key)), self._wall()
        lags = lags_of(rows, now, expires_above(self.config))
        if self._source is not None:
            lags = asked(self._source, rows, lags)
        self._window = self._window.after(began, rows, lags)
        statuses = statuses_of(rows, lags, now, self.config.lease_seconds, self._window)
        table = WatchedTable(rows, self._watch.history, ended - self._first, listing.malformed, now, statuses)
        whole = fleet_lag(lags)
        moves = (*before.unwritten, *_moves(before.table, table, now, self.config))
        seen = evolve(before, at=now, table=table, lags=lags, trouble="", unwritten=(), refused="")
        try:
            self._record.add(self.name, moves, LagPoint(now, whole.most, whole.total))
        except HistoryError as refused:
            seen = evolve(seen, unwritten=moves[-UNWRITTEN_MOST:], refused=str(refused))
        try:
            record, name = self._record, self.name
            seen = evolve(seen, moves=record.moves(name), lag=record.lag(name), count=record.count(name))
        except HistoryError as refused:
            seen = evolve(seen, refused=str(refused))
        with self._lock:
            self._seen = seen

    @property
    def status(self) -> Status:
        """Of the group, by the last reading; not known where that is too old to be believed."""
        seen = self.seen
        why = seen.trouble or ("" if self.fresh else "there is no reading of it, or none lately")
        return group_status(seen.statuses, why)

    def state(self) -> dict[str, Any]:
        """Everything the page shows, as JSON values."""
        seen = self.seen
        told = {
            "store": self.name,
            "at": seen.at,
            "trouble": seen.trouble or seen.refused,
            "rules": self.config.rules.name,
        }
        told |= self.status.as_json() | {"number": self.status.number}
        if seen.table is None:
            return told | {"leases": [], "workers": [], "total": {}, "moves": [], "lag": []}
        moves = [[move.at, move.key, move.before, move.after, move.rule] for move in seen.moves]
        lag = [[point.at, point.most, point.total] for point in seen.lag]
        return told | {
            "total": self._total(seen),
            "workers": self.workers(),
            "leases": [
                _lease(lease, seen.lags.get(lease.key, LeaseLag()), seen.statuses[lease.key])
                for lease in seen.table.leases
            ],
            "contradictions": list(noted(seen.table.leases)),
            "malformed": [[row.key, row.field, row.why] for row in seen.table.malformed],
            "moves": moves,
            "lag": lag,
        }

    def _total(self, seen: SeenFleet) -> dict[str, Any]:
        rows = () if seen.table is None else seen.table.leases
        working = [lease for lease in rows if not lease.ended]
        whole = fleet_lag(seen.lags)
        return {
            "leases": len(working),
            "finished": len(rows) - len(working),
            "unowned": sum(lease.owner is None for lease in working),
            "workers": len({lease.owner for lease in alive(working, self.config)} - {None}),
            "lag_max": whole.most,
            "lag_sum": whole.total if whole.most is not None else None,
            "not_ok": sum(not status.ok for status in seen.statuses.values()),
            "moves": seen.count,
        }

    def workers(self) -> list[dict[str, Any]]:
        """Every worker with its leases, its target share, and its lag."""
        seen = self.seen
        living = alive(() if seen.table is None else seen.table.unended, self.config)
        told = []
        for worker, target in shares(living, self.config.rules.groups).items():
            held = [lease for lease in living if lease.owner == worker]
            lag = fleet_lag({lease.key: seen.lags[lease.key] for lease in held if lease.key in seen.lags})
            weight = sum(lease.weight or 0 for lease in held)
            told.append(
                {"worker": worker, "leases": len(held), "target": target, "lag": lag.most, "kbps": kilobytes(weight)}
            )
        return told

    def explain(self, worker: str | None, key: str | None) -> dict[str, Any] | None:
        """The text of `leasehold explain` about a worker or a lease; None where there is none of this name."""
        table = self.seen.table
        if table is None:
            return None
        if key is None:
            whole = explained(table, self.config)
            chosen = [each for each in whole["workers"] if worker in {None, each["worker"]}]
            return whole | {"workers": chosen} if chosen or worker is None else None
        lease = next((row for row in table.leases if row.key == key), None)
        return None if lease is None else story(table, self.config, lease, plans(table, self.config)).as_json()


def _lease(lease: Lease, lag: LeaseLag, status: Status) -> dict[str, Any]:
    return {
        "key": lease.key,
        "owner": lease.owner,
        "ended": lease.ended,
        "heir": lease.heir,
        "idle": None if math.isinf(lease.idle) else round(lease.idle, 1),
        "checkpoint": lease.checkpoint.sequence,
        "kbps": None if lease.weight is None else round(kilobytes(lease.weight), 1),
        "lag": lag.as_json(),
        **status.as_json(),
        "number": status.number,
    }


def _moves(before: WatchedTable | None, after: WatchedTable, now: float, config: Config) -> tuple[SeenMove, ...]:
    if before is None:
        return ()
    rules = rules_between(before, after, config)
    return tuple(SeenMove(now, new.key, old.owner, new.owner, rules[new.key]) for old, new in moved(before, after))
