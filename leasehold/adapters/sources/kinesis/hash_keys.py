"""The places of records in the hash key space of a stream, 0 to 2**128 - 1."""

import hashlib
from functools import partial
from unicodedata import decimal

try:
    from _md5 import md5  # type: ignore[import-not-found]  # a short key takes it half as long as OpenSSL
except ImportError:
    md5 = partial(hashlib.md5, usedforsecurity=False)

_DIGITS = 39  # of 2**128 - 1


def digest_of(partition_key: bytes) -> bytes:
    """The 16 bytes of `hash_of` a key in UTF-8; they compare as the number does."""
    digest: bytes = md5(partition_key).digest()
    return digest


def hash_of(partition_key: str) -> int:
    """The hash key of a partition key."""
    return int.from_bytes(digest_of(partition_key.encode()))


def place_of(partition_key: str | None, hash_key: str | None) -> int:
    """The hash key of a record: its explicit one, if it has a valid one, else its partition key's."""
    place = number(hash_key) if hash_key is not None else None
    return hash_of(partition_key or "") if place is None else place


def number(hash_key: str) -> int | None:
    """The number as Java's BigInteger reads it: perhaps a sign, then digits of any script; None if it is none."""
    if len(hash_key) <= _DIGITS and hash_key.isascii() and hash_key.isdigit():  # nearly every one there is
        return int(hash_key)
    digits = hash_key[1:] if hash_key.startswith(("+", "-")) else hash_key
    if not digits.isdecimal() or max(digits) > "\uffff":  # Java looks at one UTF-16 unit at a time
        return None
    if len(digits) > _DIGITS:
        digits = "".join(str(decimal(digit)) for digit in digits).lstrip("0") or "0"
    # More digits than any hash key has: all such numbers are alike, and reading one could take minutes.
    value = int(digits) if len(digits) <= _DIGITS else 1 << 128
    return -value if hash_key.startswith("-") else value
