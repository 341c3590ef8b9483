"""The world that all processes of a run share: the clock, the table, the stream, and the record of events."""

from collections.abc import Callable

from attrs import frozen

from leasehold.adapters.proving.simulator.scenario import Member, Scenario
from leasehold.adapters.proving.simulator.world.events import SimulatedHistory
from leasehold.adapters.proving.simulator.world.stream import ListSource
from leasehold.adapters.proving.simulator.world.table import SimulatedTable
from leasehold.adapters.proving.simulator.world.tasks import Tasks


@frozen
class World:
    """The surroundings of a process; `join` starts one more."""

    scenario: Scenario
    tasks: Tasks
    table: SimulatedTable
    source: ListSource
    history: SimulatedHistory
    join: Callable[[Member], None]
