"""The producer of a run, which puts records all the time, and records what the stream has acknowledged and when."""

import time
from collections.abc import Collection
from threading import Event, Lock, Thread

from attrs import define, evolve, field
from grounds import Ground

from leasehold_lab.judge.events import Incident, Sent

PUT_SECONDS = 0.25
SLOW_SECONDS = 2.0
"""If the stand-in of a busy machine takes longer, workers' requests may time out too."""
END_SECONDS = 30.0
"""How long the last put may take on a busy machine."""


@define
class Feed:
    """Puts records all the time, except while it is held up.

    slow  when the stream itself took its time, over a connection without faults
    """

    ground: Ground
    sent: list[Sent] = field(factory=list)
    failed: list[str] = field(factory=list)
    slow: list[Incident] = field(factory=list)
    gate: Lock = field(factory=Lock)
    anew: float = 0.0
    _former: int = 0
    _ended: Event = field(factory=Event)
    _thread: Thread | None = None

    def begin(self) -> None:
        """Start putting records in a thread."""
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop putting records. If the last put does not end in time, the run is void."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(END_SECONDS)
            if thread.is_alive():
                self.failed.append("the feed did not end: what it put last may be missing")

    def stream_ended(self) -> None:
        """Note that the stream that took the records so far is gone."""
        self._former, self.anew = len(self.sent), time.time()

    def due(self, handed: Collection[tuple[str, str]]) -> list[Sent]:
        """Return what the present stream took, and what was handled of former ones, by key and digest."""
        handled = [each for each in self.sent[: self._former] if (each.key, each.digest) in handed]
        return handled + self.sent[self._former :]

    def _run(self) -> None:
        while not self._ended.wait(PUT_SECONDS):
            with self.gate:
                if self._ended.is_set():
                    return
                began = time.time()
                try:
                    put = list(self.ground.put())
                except Exception as error:  # noqa: BLE001  the run is then reported as void
                    self.failed.append(f"the feed ended: {error!r}")
                    return
                now = time.time()
                self.sent += [evolve(each, t=now) for each in put]
                if (seconds := now - began) > SLOW_SECONDS:
                    note = f"the stream itself took {seconds:.1f} s to take a record"
                    self.slow.append(Incident(began, "trouble", "", seconds, note))
