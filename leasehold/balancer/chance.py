"""Shuffles leases deterministically, by sorting them by a salted digest.

The resulting order is the same in every run, on every machine and in every programming language.

The digest of a string under a salt is computed by BLAKE2b, with the salt in its salt field and without a key:

    field  = BLAKE2b(salt as UTF-8, digest size 16)
    digest = BLAKE2b(text as UTF-8, digest size 8, salt field)

Digests are compared as bytes, starting with the first byte. If two digests are equal, the strings themselves are
compared. Lone surrogates, which JSON may contain, are encoded as the three bytes of their code point.

The salt for a worker's turn consists of the worker's id, a zero byte, and the number of the turn in decimal. Because
the id is part of the salt, competing workers choose different leases. Because the turn is part of the salt, two workers
that have chosen the same lease once are unlikely to do so again.
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from heapq import nsmallest

from leasehold.balancer.model import Lease, Me


def digest_under(salt: str) -> Callable[[str], bytes]:
    """Return a function that computes the 8-byte digest of a string under this salt."""
    salted_hash = _hash_with_salt(salt)

    def digest(text: str) -> bytes:
        hasher = salted_hash.copy()
        hasher.update(text.encode("utf-8", "surrogatepass"))
        return hasher.digest()

    return digest


def order_under(salt: str) -> Callable[[Lease], tuple[bytes, str]]:
    """Return a sort key for leases. All workers that use this salt get the same order."""
    salted_hash = _hash_with_salt(salt)

    def sort_key(lease: Lease) -> tuple[bytes, str]:
        key = lease.key  # no other function is called, because this may run for ten thousand leases
        hasher = salted_hash.copy()
        hasher.update(key.encode("utf-8", "surrogatepass"))
        return hasher.digest(), key

    return sort_key


def draw_leases(leases: Iterable[Lease], me: Me, count: int) -> tuple[Lease, ...]:
    """Return up to `count` of these leases, in an order that depends on the worker and its turn."""
    return tuple(nsmallest(max(count, 0), leases, key=order_under(f"{me.worker}\0{me.turn}")))


def draw_owner(counts: Mapping[str, int], me: Me) -> str:
    """Choose an owner with a probability proportional to its number of leases.

    If the caller then draws a random lease of the chosen owner, all leases have the same probability.

    The digest of the empty string, modulo the number of leases, is a position in the list of leases sorted by owner.
    The owner at that position is returned.
    """
    position = int.from_bytes(digest_under(f"{me.worker}\0{me.turn}")("")) % sum(counts.values())
    for owner in sorted(counts):
        position -= counts[owner]
        if position < 0:
            return owner
    raise AssertionError("a position after the last lease")


def _hash_with_salt(salt: str) -> blake2b:
    """Return a hash object for this salt.

    Callers copy it, because copying a hash object takes a third of the time that creating one takes.
    """
    salt_field = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return blake2b(digest_size=8, salt=salt_field)
