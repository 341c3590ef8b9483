"""Keeps a number of readers alive: one that ends is started again after a pause that grows."""

import logging
from abc import abstractmethod
from threading import Event, Thread
from time import monotonic

from leasehold.adapters.sources.backoff import Backoff
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

AGAIN_SECONDS = 0.2, 30.0
END_SECONDS = 5.0


class KeptReaders:
    """So many readers, from `begin` until they are closed."""

    def __init__(self, number: int) -> None:
        self._over = Event()
        self._threads = [
            Thread(target=self._keep, args=(place,), name="leasehold-reader", daemon=True) for place in range(number)
        ]

    def begin(self) -> None:
        """Start them all."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End them, and start no more: what a reader has is not needed any more, or read again."""
        self._over.set()
        self._end()
        for thread in self._threads:
            thread.join(END_SECONDS)

    @abstractmethod
    def _live(self, place: int) -> str:
        """Start one, and wait for its end; what it ended with."""

    @abstractmethod
    def _end(self) -> None:
        """Have all end that live."""

    def _tell(self, text: str) -> None:
        log.warning("%s", text)

    def _keep(self, place: int) -> None:
        pause = Backoff(*AGAIN_SECONDS)
        while not self._over.is_set():
            began = monotonic()
            try:
                status = self._live(place)
            except Exception as fault:  # noqa: BLE001  no fork, no descriptor, no memory: there may be one later
                status = f"{type(fault).__name__}: {fault}"
            if monotonic() - began > AGAIN_SECONDS[1]:
                pause.reset()  # it read well: a query of months loses some
            if not self._over.is_set():
                wait = pause.next()
                self._tell(f"reader {place} ended with {status}, starting another in {wait:.1f} s")
                self._over.wait(wait)
