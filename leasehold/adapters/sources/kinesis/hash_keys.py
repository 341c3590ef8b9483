"""Computes the hash keys of records (0 to 2**128 - 1), which determine their shards."""

import hashlib
from functools import partial
from unicodedata import decimal

try:
    from _md5 import md5  # type: ignore[import-not-found]  # takes half as long as OpenSSL for a short key
except ImportError:
    md5 = partial(hashlib.md5, usedforsecurity=False)

_MAX_DIGITS = 39  # the number of digits in 2**128 - 1


def digest_partition_key(partition_key: bytes) -> bytes:
    """Return the hash key of a partition key in UTF-8. It has 16 bytes, which sort in the order of the numbers."""
    digest: bytes = md5(partition_key).digest()
    return digest


def hash_partition_key(partition_key: str) -> int:
    """Return the hash key of a partition key."""
    return int.from_bytes(digest_partition_key(partition_key.encode()))


def find_hash_key(partition_key: str | None, hash_key: str | None) -> int:
    """Return the explicit hash key if it is valid, and otherwise the hash key of the partition key."""
    explicit_hash_key = parse_hash_key(hash_key) if hash_key is not None else None
    return hash_partition_key(partition_key or "") if explicit_hash_key is None else explicit_hash_key


def parse_hash_key(hash_key: str) -> int | None:
    """Parse a hash key as Java's BigInteger does: an optional sign, then digits of any script.

    Return None if the hash key is not valid.
    """
    if len(hash_key) <= _MAX_DIGITS and hash_key.isascii() and hash_key.isdigit():  # the common case
        return int(hash_key)
    digits = hash_key[1:] if hash_key.startswith(("+", "-")) else hash_key
    if not digits.isdecimal() or max(digits) > "\uffff":  # Java examines one UTF-16 unit at a time
        return None
    if len(digits) > _MAX_DIGITS:
        digits = "".join(str(decimal(digit)) for digit in digits).lstrip("0") or "0"
    # A number with more digits than a hash key is out of range, and parsing it could take minutes.
    hash_key_number = int(digits) if len(digits) <= _MAX_DIGITS else 1 << 128
    return -hash_key_number if hash_key.startswith("-") else hash_key_number
