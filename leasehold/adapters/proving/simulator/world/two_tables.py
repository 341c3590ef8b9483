"""A swap of lease tables in a simulated fleet: both tables at the other end of the network, and the command.

No table alone can tell which of its rows speaks, so that the history has the writes as their processes saw them.
"""

from itertools import pairwise
from typing import Literal

from attrs import evolve

from leasehold.adapters.history.events import VERBS, WriteAnswer
from leasehold.adapters.proving.simulator.world.cells import sessions_of
from leasehold.adapters.proving.simulator.world.client import Client
from leasehold.adapters.proving.simulator.world.world import Caller, World
from leasehold.adapters.worker.scheduler import Scheduler
from leasehold.stores.protocol import Done, Outcome, PassingStore, Store
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.swap import CONTROL, FROM, LOOK_SECONDS, TO, WISH, SwapStore, parted
from leasehold.stores.writes import AnnotateLease, Write

NAMES = ("memory://from", "memory://to")


class SwapClient(PassingStore):
    """Both tables as one process has them, which tells the history of each write when it was sent and answered.

    source, goal  its stores of the two tables, at the other end of the network
    """

    def __init__(self, world: World, caller: Caller, source: Client, goal: Client, time: Scheduler) -> None:
        there: Store = sessions_of(world, caller, goal, time) if world.scenario.sessions else goal
        super().__init__(SwapStore((source, there), NAMES[TO], clock=time.clock))
        self._world, self._caller = world, caller

    def write(self, write: Write) -> Outcome:
        """Send it; whatever is raised, nobody knows whether it was applied."""
        begun = self._world.tasks.now
        try:
            outcome = super().write(write)
        except BaseException:
            self._tell(write, begun, None)
            raise
        self._tell(write, begun, outcome)
        return outcome

    def _tell(self, write: Write, begun: float, outcome: Outcome | None) -> None:
        lease = write.lease
        row = None if outcome is None else outcome.lease
        found: Literal["done", "lost", "unknown"] = (
            "unknown" if outcome is None else "done" if isinstance(outcome, Done) else "lost"
        )
        answer = WriteAnswer(
            self._world.tasks.now,
            begun,
            self._caller.process_id,
            VERBS[type(write)],
            lease.shard,
            found,
            seen=lease.owner,
        )
        if row is not None:
            place, version = row.checkpoint.order, str(row.version)
            answer = evolve(answer, owner=row.owner, version=version, epoch=row.epoch, checkpoint=place)
        self._world.history.answers.append(answer)


def commanded(world: World) -> None:
    """Send the leases there and back at their times, and carry what nobody owns, as `leasehold swap` does."""
    there: Store = SessionStore(world.cells, gather=0.0) if world.scenario.sessions else world.goal
    store = SwapStore((world.table, there), NAMES[TO], clock=lambda: world.tasks.now)
    for number, (at, end) in enumerate(pairwise((*world.scenario.swaps, world.scenario.seconds))):
        world.tasks.sleep_until(at)
        goal = FROM if number % 2 else TO
        (control,) = there.get([CONTROL])
        there.write(AnnotateLease(control, WISH, ("from", "to")[goal]))
        while world.tasks.now < end:
            leases = store.list().leases
            if {parted(lease)[:2] for lease in leases} == {(goal, False)}:
                world.history.swaps.append((at, world.tasks.now))
                break
            for lease in leases:
                if lease.owner is None:
                    store.carry(lease, goal)
            world.tasks.sleep(LOOK_SECONDS)
