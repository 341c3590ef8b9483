"""Puts records continuously during a chaos run, and remembers the acknowledged records with their times."""

import time
from collections.abc import Collection
from threading import Event, Lock, Thread

from attrs import define, evolve, field
from grounds import Ground

from leasehold_lab.judge.events import Incident, SentRecord

PUT_SECONDS = 0.25
SLOW_SECONDS = 2.0
"""If a put takes longer than this, the stand-in is so slow that requests of workers may time out too."""
END_SECONDS = 30.0
"""The time in seconds that the last put may take on a busy machine."""


@define
class Feed:
    """Puts records continuously, except while `gate` is held.

    Attributes:
        sent: The records that the stream acknowledged.
        failed: The reasons why the run is void.
        slow: Puts that took longer than `SLOW_SECONDS`, although the feed's own connection has no faults.
        recreated_at: The time when the stream was last recreated.
    """

    ground: Ground
    sent: list[SentRecord] = field(factory=list)
    failed: list[str] = field(factory=list)
    slow: list[Incident] = field(factory=list)
    gate: Lock = field(factory=Lock)
    recreated_at: float = 0.0
    _former: int = 0
    _ended: Event = field(factory=Event)
    _thread: Thread | None = None

    def begin(self) -> None:
        """Start putting records in a thread."""
        self._thread = Thread(target=self._put_records, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop putting records. If the last put does not finish in `END_SECONDS`, the run is void."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(END_SECONDS)
            if thread.is_alive():
                self.failed.append("the feed did not end: what it put last may be missing")

    def record_stream_deletion(self) -> None:
        """Record that the stream was deleted, together with all records put so far."""
        self._former, self.recreated_at = len(self.sent), time.time()

    def list_expected_records(self, dispatched_pairs: Collection[tuple[str, str]]) -> list[SentRecord]:
        """Return the records that must arrive.

        These are all records of the current stream, and the records of deleted streams that are in `dispatched_pairs`,
        which contains pairs of a key and a digest.
        """
        dispatched_records = [
            record for record in self.sent[: self._former] if (record.key, record.digest) in dispatched_pairs
        ]
        return dispatched_records + self.sent[self._former :]

    def _put_records(self) -> None:
        while not self._ended.wait(PUT_SECONDS):
            with self.gate:
                if self._ended.is_set():
                    return
                begin_time = time.time()
                try:
                    records = list(self.ground.put())
                except Exception as error:  # noqa: BLE001  the run is then reported as void
                    self.failed.append(f"the feed ended: {error!r}")
                    return
                end_time = time.time()
                self.sent += [evolve(record, t=end_time) for record in records]
                if (seconds := end_time - begin_time) > SLOW_SECONDS:
                    note = f"the stream itself took {seconds:.1f} s to take a record"
                    self.slow.append(Incident(begin_time, "trouble", "", seconds, note))
