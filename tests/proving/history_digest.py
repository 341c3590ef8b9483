"""A digest of a whole history: two runs that differ in anything have different digests."""

from hashlib import blake2b

from leasehold_lab.simulator.world.world import SimulatedHistory


def digest(history: SimulatedHistory) -> str:
    """Return the digest of every write, event, incident and count, in order."""
    told = blake2b(digest_size=16)
    for each in (*history.first, *history.writes, *history.events, *history.incidents):
        told.update(repr(each).encode())
    counts = sorted(history.requests.items()), history.sent
    rows = history.scanned, history.fetched, history.glimpsed
    told.update(repr((counts, rows)).encode())
    return told.hexdigest()
