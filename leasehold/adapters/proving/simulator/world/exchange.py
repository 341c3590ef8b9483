"""The calls of one process: each is counted, and meets the mishap that is planned for it."""

from collections.abc import Callable, Mapping
from typing import Any

from leasehold.adapters.proving.simulator.misdeeds import generated
from leasehold.adapters.proving.simulator.mishaps import (
    DENIED,
    DENIED_SECONDS,
    FREEZE_SECONDS,
    HANG_SECONDS,
    LATE_SECONDS,
    RAISED,
    CallEvent,
)
from leasehold.adapters.proving.simulator.world.caller import Caller
from leasehold.adapters.proving.simulator.world.world import World

PAUSE_SECONDS = 1.0

Lies = Mapping[str, Callable[[], Any]]
"""By name, what else a call may answer or do."""


class Exchange:
    """The way of each call of one process to whatever it calls."""

    def __init__(self, world: World, caller: Caller) -> None:
        self._history, self._tasks, self._caller = world.history, world.tasks, caller
        self._full = world.scenario.full
        self._denied: dict[str, float] = {}
        self._planned = {mishap.number: mishap.fault for mishap in world.scenario.mishaps}

    def call(self, what: str, work: Callable[[], Any], lies: Lies | None = None) -> Any:  # noqa: ANN401  the call's own
        """Do this, or what the mishap of this call makes of it."""
        if not self._full:
            return work()
        calls = self._history.calls
        calls.append(CallEvent(self._tasks.now, self._caller.process_id, what))
        fault = self._planned.get(len(calls) - 1)
        if fault is None:
            self._ask(what)
        return work() if fault is None else self._meet(fault, work, lies or {})

    def _ask(self, what: str) -> None:
        """Raises what the system refuses a call of this name with."""
        for name, until in self._denied.items():
            starts, refusal = DENIED[name]
            if self._tasks.now < until and what.startswith(starts):
                raise refusal()

    def told(self, what: str, work: Callable[[], object]) -> Any:  # noqa: ANN401  a user's callable may return anything
        """Call a callable of a user's."""
        return self.call(what, work, {"answer": lambda: False, "generate": generated})

    def _meet(self, fault: str, work: Callable[[], Any], lies: Lies) -> Any:  # noqa: ANN401  likewise
        answer: Any = None
        waits = {"pause": PAUSE_SECONDS, "hang": HANG_SECONDS, "late": LATE_SECONDS}
        for step in fault.split(" + "):
            match step.split():
                case ["do"]:
                    answer = work()
                case ["raise", name]:
                    fault_raised = RAISED[name]()
                    raise fault_raised
                case ["deny", name]:
                    self._denied[name] = self._tasks.now + DENIED_SECONDS
                    fault_raised = DENIED[name][1]()
                    raise fault_raised
                case ["crash" | "restart"]:
                    self._caller.die(again=step == "restart")
                    self._caller.wait(0.0)
                case ["freeze"]:
                    self._caller.nap(FREEZE_SECONDS)
                case _ if step in waits:
                    self._caller.wait(waits[step])
                case _:
                    answer = lies[step]()
        return answer
