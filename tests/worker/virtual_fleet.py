"""Workers on one memory store under a clock that only the test moves: nothing sleeps, nothing is left to chance."""

from collections.abc import Callable, Iterable

from attrs import define, field

from leasehold.adapters.proving.simulator.world.world import ListSource, even_shards
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.holdings import BackgroundMap
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Shard
from leasehold.balancer.rules.kcl import Kcl
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Listing, Outcome, OutcomeUnknown
from leasehold.stores.writes import CreateLease, DeleteLease, Write

KCL = Config(Kcl(max_steals=10), lease_seconds=10.0, initial_position=TRIM_HORIZON)


@define
class Clock:
    """Seconds that pass when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


class FaultyStore(MemoryStore):
    """A memory store that may be unreachable, lose the reply of one write, or take its time.

    passes  called on the way of each write to the table, and again on the way back
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.lose_replies = 0
        self.writes: list[str] = []
        self.passes: Callable[[], None] = lambda: None

    def _reach(self) -> None:
        if self.down:
            raise OutcomeUnknown("the store cannot be reached")

    def list(self) -> Listing:
        """Every lease, if reachable."""
        self._reach()
        return super().list()

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, if reachable."""
        self._reach()
        return super().get(keys, stale_ok=stale_ok)

    def rewrite(self, key: str, change: Callable[[Lease], Lease]) -> None:
        """Change a row behind everybody's back."""
        self._table.rows[key] = change(self.row(key))

    def row(self, key: str) -> Lease:
        """A row as it is."""
        return super().get([key])[0]

    def write(self, write: Write) -> Outcome:
        """Apply it, if reachable; the reply to a new lease or a deletion is never lost."""
        self._reach()
        self.passes()
        outcome = super().write(write)
        self.passes()
        if not isinstance(write, DeleteLease):
            self.writes.append(write.lease.key)
        if self.lose_replies and not isinstance(write, CreateLease | DeleteLease):
            self.lose_replies -= 1
            raise OutcomeUnknown("the reply was lost")
        return outcome


def four_shards() -> list[Shard]:
    """A stream of four equal shards."""
    return even_shards(("s-0", "s-1", "s-2", "s-3"))


@define
class Kept:
    """A consumer that remembers what it was told; the test does the work."""

    begun: list[Holding] = field(factory=list)
    parting: list[Holding] = field(factory=list)

    def begin(self, holding: Holding) -> None:
        """Remember it."""
        self.begun.append(holding)

    def part(self, holding: Holding) -> None:
        """Part at once, as nothing is running."""
        self.parting.append(holding)
        holding.part()


@define
class Driven:
    """One worker and its appointments under the test's clock."""

    worker: Worker
    clock: Clock
    renew_due: float = 0.0
    turn_due: float = 0.0
    each_renewal: BackgroundMap = map

    def run(self, seconds: float) -> None:
        """Keep its appointments for so long."""
        end = self.clock.now + seconds
        while min(self.renew_due, self.turn_due) <= end:
            self.clock.now = max(self.clock.now, min(self.renew_due, self.turn_due))
            self.step()
        self.clock.now = end

    def step(self) -> None:
        """Whatever is due now."""
        now = self.clock.now
        if self.renew_due <= now:
            self.renew_due = self.worker.renew(now, self.each_renewal)
        if self.turn_due <= now:
            self.turn_due = self.worker.turn(now)

    @property
    def held(self) -> list[str]:
        """The keys it holds."""
        return [holding.key for holding in self.worker.holdings]


def member(  # noqa: PLR0917  a test names the last ones
    store: MemoryStore, source: ListSource, clock: Clock, me: str = "a-1", process: str = "p-1", config: Config = KCL
) -> Driven:
    """A worker that shares, with a consumer that remembers."""
    worker = Worker(store=store, source=source, me=me, config=config, consumer=Kept(), clock=clock, process=process)
    return Driven(worker, clock, clock.now, clock.now)


def together(members: list[Driven], seconds: float) -> None:
    """Keep the appointments of several workers in one order of time."""
    clock = members[0].clock
    end = clock.now + seconds
    while (due := min(min(each.renew_due, each.turn_due) for each in members)) <= end:
        clock.now = max(clock.now, due)
        for each in members:
            each.step()
    clock.now = end
