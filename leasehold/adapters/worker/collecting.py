"""A pause of the collector of garbage while what is known of every lease is replaced by what a reading taught.

A reading of 100,000 rows makes 300,000 objects, and lets as many old ones go at its end. In between they look like
growth to the collector, which visited every object of the process two to four times a reading: more than half of what a
reading cost. With the pause it sees nothing of it, for as many go as came.

The collector is one for the process, and pauses for all of its threads: for as long as the leases are compared, some
5 µs for each, without a request of the store in between. Several workers of a process may pause it at once: it goes on
when the first of them ends, which costs the others what it did before.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile; where the collector is off already it stays off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
