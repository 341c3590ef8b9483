"""A digest of a whole history: two runs that differ in anything have different ones."""

from hashlib import blake2b

from adapters.simulator.told import History


def digest(history: History) -> str:
    """Of every write, batch, deed and count, in order."""
    told = blake2b(digest_size=16)
    for each in (*history.first, *history.writes, *history.handed, *history.deeds):
        told.update(repr(each).encode())
    counts = sorted(history.requests.items()), sorted(history.produced.items())
    rows = history.scanned, history.fetched, history.glimpsed
    told.update(repr((counts, rows)).encode())
    return told.hexdigest()
