"""Tests the scheduler of virtual time."""

import math

from leasehold_lab.simulator.world.tasks import TaskScheduler


def test_task_that_waits_forever_ends_with_the_run() -> None:
    """A task that is still waiting at the end of a run is ended, so that it keeps no memory."""
    ended_tasks: list[str] = []
    tasks = TaskScheduler()

    def wait(name: str, due: float) -> None:
        try:
            tasks.sleep_until(due)
        finally:
            ended_tasks.append(name)

    tasks.start(lambda: wait("for ever", math.inf))
    tasks.start(lambda: wait("till later", 9.0))
    tasks.start(lambda: wait("till now", 0.0))
    tasks.run(until=1.0)
    assert ended_tasks == ["till now"]
    tasks.close()
    assert ended_tasks == ["till now", "for ever", "till later"]
