"""A shuffle that every run, machine and language repeats: order by keyed digest.

The digest of a text under a salt is BLAKE2b, with the salt in its salt field and no key:

    field  = BLAKE2b(salt as UTF-8, digest size 16)
    digest = BLAKE2b(text as UTF-8, digest size 8, salt field)

Digests compare as bytes, first byte first; equal digests compare by the text itself. Lone
surrogates, which JSON can carry, are encoded as the three bytes of their code point.
The salt of a turn is the worker's id, one zero byte, and the turn as a decimal number: the
worker spreads contenders apart, the turn breaks repeated collisions.
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from heapq import nsmallest

from leasehold.balancer.model import Lease, Me


def digest_under(salt: str) -> Callable[[str], bytes]:
    """The 8-byte digest of a text under this salt."""
    blank = _salted(salt)

    def digest(text: str) -> bytes:
        hashing = blank.copy()
        hashing.update(text.encode("utf-8", "surrogatepass"))
        return hashing.digest()

    return digest


def order_under(salt: str) -> Callable[[Lease], tuple[bytes, str]]:
    """A sort key for leases: one order for everybody who uses the same salt."""
    blank = _salted(salt)

    def place(lease: Lease) -> tuple[bytes, str]:
        key = lease.key  # asked of perhaps ten thousand leases: no more calls than needed
        hashing = blank.copy()
        hashing.update(key.encode("utf-8", "surrogatepass"))
        return hashing.digest(), key

    return place


def drawn(leases: Iterable[Lease], me: Me, count: int) -> tuple[Lease, ...]:
    """`count` of these leases (or all, if fewer), as this worker draws them in this turn."""
    return tuple(nsmallest(max(count, 0), leases, key=order_under(f"{me.worker}\0{me.turn}")))


def drawn_owner(counts: Mapping[str, int], me: Me) -> str:
    """An owner drawn as likely as it has leases: drawing among its own then equals drawing among all.

    The digest of the empty text, as a number, modulo the number of leases, counted along the names.
    """
    place = int.from_bytes(digest_under(f"{me.worker}\0{me.turn}")("")) % sum(counts.values())
    for owner in sorted(counts):
        place -= counts[owner]
        if place < 0:
            return owner
    raise AssertionError("a place beyond the last lease")


def _salted(salt: str) -> blake2b:
    """The hash with its salt taken in already: a copy of this takes a third of the time of a new one."""
    field = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return blake2b(digest_size=8, salt=field)
