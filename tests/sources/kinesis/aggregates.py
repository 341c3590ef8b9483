"""Builds valid and invalid aggregated records field by field."""

import base64
import hashlib

MAGIC = b"\xf3\x89\x9a\xc2"
LAST = 2**128 - 1


def md5(data: bytes) -> bytes:
    """Return the MD5 digest, which both the aggregate format and hash keys use."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def varint(number: int, *, padding: int = 0) -> bytes:
    """Return the number as a varint with `padding` redundant bytes."""
    parts = [number & 0x7F]
    while number := number >> 7:
        parts.append(number & 0x7F)
    parts += [0] * padding
    return bytes([part | 0x80 for part in parts[:-1]] + parts[-1:])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def sized(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def group(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 3) + content + varint(field << 3 | 4)


def nested(depth: int) -> bytes:
    return varint(9 << 3 | 3) * depth + varint(9 << 3 | 4) * depth


def keys(*names: str | bytes) -> bytes:
    """Return entries of the partition key table."""
    return b"".join(sized(1, name.encode() if isinstance(name, str) else name) for name in names)


def hash_keys(*names: str | bytes) -> bytes:
    """Return entries of the explicit hash key table."""
    return b"".join(sized(2, name.encode() if isinstance(name, str) else name) for name in names)


def record(key: int | None, data: bytes | None, hash_key: int | None = None, extra_fields: bytes = b"") -> bytes:
    """Return a user record. A field that is None is omitted."""
    inner = number(1, key) if key is not None else b""
    inner += number(2, hash_key) if hash_key is not None else b""
    inner += sized(3, data) if data is not None else b""
    return sized(3, inner + extra_fields)


def sealed(body: bytes) -> bytes:
    """Return an aggregated record: the magic bytes, the body, and the digest of the body."""
    return MAGIC + body + md5(body)


def hash_of(key: str) -> int:
    return int.from_bytes(md5(key.encode()))


def text(raw: bytes) -> str:
    """Return the bytes as base64, for a JSON line."""
    return base64.b64encode(raw).decode()
