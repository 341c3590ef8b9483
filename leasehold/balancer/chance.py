"""A deterministic shuffle, the same in every run, machine and language: sort by a salted digest.

The digest of a string under a salt is BLAKE2b, with the salt in its salt field and no key:

    field  = BLAKE2b(salt as UTF-8, digest size 16)
    digest = BLAKE2b(text as UTF-8, digest size 8, salt field)

Digests compare as bytes, first byte first; equal digests compare by the strings themselves. Lone surrogates, which JSON
can carry, are encoded as the three bytes of their code point.

The salt of a turn is the worker's id, a zero byte, and the turn as a decimal number. The worker's id makes contenders
choose differently, and the turn keeps them from colliding repeatedly.
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from heapq import nsmallest

from leasehold.balancer.model import Lease, Me


def digest_under(salt: str) -> Callable[[str], bytes]:
    """Return a function that computes the 8-byte digest of a string under this salt."""
    blank = _salted(salt)

    def digest(text: str) -> bytes:
        hashing = blank.copy()
        hashing.update(text.encode("utf-8", "surrogatepass"))
        return hashing.digest()

    return digest


def order_under(salt: str) -> Callable[[Lease], tuple[bytes, str]]:
    """Return a sort key for leases that is the same for everyone who uses this salt."""
    blank = _salted(salt)

    def sort_key(lease: Lease) -> tuple[bytes, str]:
        key = lease.key  # runs for perhaps ten thousand leases, so make as few calls as possible
        hashing = blank.copy()
        hashing.update(key.encode("utf-8", "surrogatepass"))
        return hashing.digest(), key

    return sort_key


def draw(leases: Iterable[Lease], me: Me, count: int) -> tuple[Lease, ...]:
    """Return `count` of these leases (or all, if fewer), as this worker draws them in this turn."""
    return tuple(nsmallest(max(count, 0), leases, key=order_under(f"{me.worker}\0{me.turn}")))


def draw_owner(counts: Mapping[str, int], me: Me) -> str:
    """Return a random owner, weighted by its number of leases.

    Drawing one of its leases afterwards is then the same as drawing among all leases. The owner is found by taking the
    digest of the empty string as a number, modulo the number of leases, and counting along the sorted names.
    """
    position = int.from_bytes(digest_under(f"{me.worker}\0{me.turn}")("")) % sum(counts.values())
    for owner in sorted(counts):
        position -= counts[owner]
        if position < 0:
            return owner
    raise AssertionError("a position after the last lease")


def _salted(salt: str) -> blake2b:
    """Return a hash that has consumed its salt. Copying it takes a third of the time of creating a new one."""
    field = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return blake2b(digest_size=8, salt=field)
