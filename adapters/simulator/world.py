"""What all processes of one run share: the clock, the table, the stream, and the record of what happens."""

from collections.abc import Callable

from attrs import frozen

from adapters.simulator.scenario import Member, Scenario
from adapters.simulator.stream import ListSource
from adapters.simulator.table import Table
from adapters.simulator.tasks import Tasks
from adapters.simulator.told import History


@frozen
class World:
    """The surroundings of a process; `join` starts one more."""

    scenario: Scenario
    tasks: Tasks
    table: Table
    source: ListSource
    history: History
    join: Callable[[Member], None]
