"""A process of a simulated fleet, as its client of the table sees it."""

from typing import Protocol


class Caller(Protocol):
    """The process that calls."""

    @property
    def worker_id(self) -> str:
        """The id of the worker that it runs."""

    @property
    def process_id(self) -> str:
        """The process, which never comes again."""

    @property
    def foreign(self) -> bool:
        """Whether it stands for another library."""

    def wait(self, seconds: float) -> None:
        """Let virtual time pass; raises Killed if the process died meanwhile."""

    def nap(self, seconds: float) -> None:
        """Stand still with all its tasks."""

    def die(self, *, again: bool) -> None:
        """Die, and write nothing more; perhaps be started again."""
