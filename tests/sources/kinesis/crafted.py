"""All crafted cases of Kinesis records that are aggregates or look like aggregates."""

from collections.abc import Iterator

from aggregates import LAST, MAGIC, group, hash_keys, hash_of, keys, md5, nested, number, record, sealed, sized, varint
from attrs import frozen


@frozen
class Case:
    """A Kinesis record and its shard's hash range, with the expected reason and number of dropped user records."""

    name: str
    data: bytes
    reason: str
    dropped: int = 0
    first: int = 0
    last: int = LAST


TWO = keys("a", "b") + record(0, b"one") + record(1, b"two")
ONE = record(0, b"one")


def cases() -> Iterator[Case]:
    yield from _not_aggregates()
    yield from _forms()
    yield from _unknown_fields()
    yield from _malformed()
    yield from _indices()
    yield from _texts()
    yield from _explicit_hash_keys()
    yield from _ranges()


def _not_aggregates() -> Iterator[Case]:
    aggregate = sealed(TWO)
    yield Case("no data at all", b"", "plain")
    yield Case("three bytes of magic", MAGIC[:3], "plain")
    yield Case("magic alone", MAGIC, "plain")
    yield Case("magic and an empty body's digest", sealed(b""), "plain")
    yield Case("another magic", b"\xf3\x89\x9a\xc3" + aggregate[4:], "plain")
    yield Case("text", b"RECORD 749 pjqrcfbxafzdndzmbgane", "plain")
    yield Case("wrong digest", aggregate[:-1] + bytes([aggregate[-1] ^ 1]), "bad-md5")
    yield Case("one byte after the digest", aggregate + b"\0", "bad-md5")
    yield Case("digest of magic and body", MAGIC + TWO + md5(MAGIC + TWO), "bad-md5")
    yield Case("cut short by one", aggregate[:-1], "bad-md5")
    yield Case("an aggregate inside an aggregate", sealed(keys("a") + record(0, aggregate)), "aggregated")


def _forms() -> Iterator[Case]:
    yield Case("two records", sealed(TWO), "aggregated")
    yield Case("one record", sealed(keys("a") + ONE), "aggregated")
    yield Case("empty data", sealed(keys("a") + record(0, b"")), "aggregated")
    yield Case("empty partition key", sealed(keys("") + ONE), "aggregated")
    yield Case("records before tables", sealed(ONE + record(1, b"two") + keys("a", "b")), "aggregated")
    yield Case("table between records", sealed(keys("a") + ONE + keys("b") + record(1, b"two")), "aggregated")
    yield Case("the same key twice in the table", sealed(keys("a", "a") + ONE + record(1, b"two")), "aggregated")
    yield Case("tables without records", sealed(keys("a") + hash_keys("1")), "empty")
    yield Case("data before the indices", sealed(keys("a") + sized(3, sized(3, b"x") + number(1, 0))), "aggregated")
    yield Case("last index wins", sealed(keys("a", "b") + record(0, b"x", extra_fields=number(1, 1))), "aggregated")
    yield Case("last data wins", sealed(keys("a") + record(0, b"x", extra_fields=sized(3, b"yy"))), "aggregated")
    yield Case(
        "last hash key index wins",
        sealed(keys("a") + hash_keys("1", "2") + record(0, b"x", 0, number(2, 1))),
        "aggregated",
    )
    yield Case("long forms of every number", sealed(_padded()), "aggregated")
    yield Case("data of 127 bytes", sealed(keys("a") + record(0, b"x" * 127)), "aggregated")
    yield Case("data of 128 bytes", sealed(keys("a") + record(0, b"x" * 128)), "aggregated")
    yield Case("data of 16384 bytes", sealed(keys("a") + record(0, b"x" * 16384)), "aggregated")
    yield Case(
        "200 keys",
        sealed(keys(*map(str, range(200))) + b"".join(record(i, b"%d" % i) for i in range(200))),
        "aggregated",
    )
    yield Case(
        "a tag",
        sealed(keys("a") + record(0, b"x", extra_fields=sized(4, sized(1, b"k") + sized(2, b"v")))),
        "aggregated",
    )
    yield Case(
        "a tag without value", sealed(keys("a") + record(0, b"x", extra_fields=sized(4, sized(1, b"k")))), "aggregated"
    )


def _padded() -> bytes:
    inner = (
        varint(1 << 3, padding=2) + varint(0, padding=8) + varint(3 << 3 | 2, padding=1) + varint(1, padding=3) + b"x"
    )
    key = varint(1 << 3 | 2, padding=4) + varint(1, padding=2) + b"a"
    return key + varint(3 << 3 | 2, padding=1) + varint(len(inner), padding=1) + inner


def _unknown_fields() -> Iterator[Case]:
    for container, body_with in (
        ("message", lambda field: TWO + field),
        ("record", lambda field: keys("a") + record(0, b"x", extra_fields=field)),
    ):
        yield Case(f"unknown varint in a {container}", sealed(body_with(number(9, 2**63))), "aggregated")
        yield Case(f"unknown bytes in a {container}", sealed(body_with(sized(9, b"\xff" * 9))), "aggregated")
        yield Case(f"unknown 4 bytes in a {container}", sealed(body_with(varint(9 << 3 | 5) + b"1234")), "aggregated")
        yield Case(
            f"unknown 8 bytes in a {container}", sealed(body_with(varint(9 << 3 | 1) + b"12345678")), "aggregated"
        )
        yield Case(
            f"unknown group in a {container}", sealed(body_with(group(9, number(1, 5) + sized(3, b"z")))), "aggregated"
        )
        yield Case(f"half of 4 bytes in a {container}", sealed(body_with(varint(9 << 3 | 5) + b"12")), "bad-proto")
        yield Case(f"half of 8 bytes in a {container}", sealed(body_with(varint(9 << 3 | 1) + b"1234")), "bad-proto")
        yield Case(
            f"group left open in a {container}", sealed(body_with(varint(9 << 3 | 3) + number(1, 5))), "bad-proto"
        )
        yield Case(
            f"group closed as another in a {container}",
            sealed(body_with(varint(9 << 3 | 3) + varint(10 << 3 | 4))),
            "bad-proto",
        )
        yield Case(f"end of no group in a {container}", sealed(body_with(varint(9 << 3 | 4))), "bad-proto")
        yield Case(f"wire type 6 in a {container}", sealed(body_with(varint(9 << 3 | 6) + b"1")), "bad-proto")
        yield Case(f"wire type 7 in a {container}", sealed(body_with(varint(9 << 3 | 7) + b"1")), "bad-proto")
        yield Case(f"field number 0 in a {container}", sealed(body_with(number(0, 1))), "bad-proto")
        yield Case(f"greatest field number in a {container}", sealed(body_with(number(2**29 - 1, 1))), "aggregated")
        yield Case(
            f"tag beyond 32 bits in a {container}",
            sealed(body_with(varint(2**32 + (9 << 3)) + varint(1))),
            "aggregated",
        )
        yield Case(
            f"tag of 11 bytes in a {container}", sealed(body_with(varint(9 << 3, padding=10) + varint(1))), "bad-proto"
        )
        yield Case(
            f"number of 11 bytes in a {container}",
            sealed(body_with(varint(9 << 3) + varint(1, padding=10))),
            "bad-proto",
        )
    yield Case(
        "99 nested groups in a record", sealed(keys("a") + record(0, b"x", extra_fields=nested(99))), "aggregated"
    )
    yield Case(
        "100 nested groups in a record", sealed(keys("a") + record(0, b"x", extra_fields=nested(100))), "bad-proto"
    )
    yield Case("100 nested groups in the message", sealed(TWO + nested(100)), "aggregated")
    yield Case("101 nested groups in the message", sealed(TWO + nested(101)), "bad-proto")
    yield Case("98 nested groups in a tag", _tagged(98), "aggregated")
    yield Case("99 nested groups in a tag", _tagged(99), "bad-proto")
    yield Case("5000 nested groups", sealed(TWO + nested(5000)), "bad-proto")
    yield Case("key table of varints", sealed(number(1, 7) + TWO), "aggregated")
    yield Case("records of varints", sealed(TWO + number(3, 7)), "aggregated")
    yield Case("index of bytes", sealed(keys("a") + sized(3, sized(1, b"\0") + sized(3, b"x"))), "bad-proto")
    yield Case("data of varint", sealed(keys("a") + sized(3, number(1, 0) + number(3, 1))), "bad-proto")
    yield Case("tag of varint", sealed(keys("a") + record(0, b"x", extra_fields=number(4, 1))), "aggregated")


def _tagged(depth: int) -> bytes:
    return sealed(keys("a") + record(0, b"x", extra_fields=sized(4, sized(1, b"k") + nested(depth))))


def _malformed() -> Iterator[Case]:
    yield Case("no key index", sealed(keys("a") + record(None, b"x")), "bad-proto")
    yield Case("no data field", sealed(keys("a") + record(0, None)), "bad-proto")
    yield Case("empty record", sealed(keys("a") + record(None, None)), "bad-proto")
    yield Case("a sound record, then one without data", sealed(TWO + record(0, None)), "bad-proto")
    yield Case(
        "a tag without key", sealed(keys("a") + record(0, b"x", extra_fields=sized(4, sized(2, b"v")))), "bad-proto"
    )
    yield Case("an empty tag", sealed(keys("a") + record(0, b"x", extra_fields=sized(4, b""))), "bad-proto")
    yield Case("a tag cut short", sealed(keys("a") + record(0, b"x", extra_fields=sized(4, b"\x0a\x05k"))), "bad-proto")
    yield Case("message cut inside a record", sealed(TWO[:-2]), "bad-proto")
    yield Case("message cut inside a key", sealed(keys("abc")[:-1]), "bad-proto")
    yield Case("message cut after a tag", sealed(TWO + b"\x1a"), "bad-proto")
    yield Case("message cut inside a number", sealed(TWO + b"\x1a\x80"), "bad-proto")
    yield Case(
        "record's data longer than the record",
        sealed(keys("a") + b"\x1a\x05\x08\x00\x1a\x02x" + b"y" * 20),
        "bad-proto",
    )
    yield Case("record's number crosses its end", sealed(keys("a") + b"\x1a\x02\x08\x80" + ONE), "bad-proto")
    yield Case(
        "record's index crosses its end", sealed(keys("a") + b"\x1a\x06\x1a\x02xx\x08\x80\x00" + ONE), "bad-proto"
    )
    yield Case("length of 2**40", sealed(keys("a") + b"\x1a" + varint(2**40)), "bad-proto")
    yield Case("key length of 2**40", sealed(b"\x0a" + varint(2**40) + keys("b") + ONE), "aggregated")
    yield Case("length of 2**31", sealed(b"\x0a" + varint(2**31) + keys("b") + ONE), "bad-proto")
    yield Case("length of 2**32 + 1", sealed(b"\x0a" + varint(2**32 + 1) + b"a" + ONE), "aggregated")
    yield Case("length of -1", sealed(b"\x0a" + b"\xff" * 9 + b"\x01" + ONE), "bad-proto")
    yield Case(
        "data length of 2**40", sealed(keys("a") + sized(3, number(1, 0) + b"\x1a" + varint(2**40))), "aggregated"
    )
    yield Case("zero bytes", sealed(bytes(40)), "bad-proto")


def _indices() -> Iterator[Case]:
    yield Case("key index in no table", sealed(TWO + record(2, b"x") + ONE), "bad-index", 2)
    yield Case("first key index in no table", sealed(keys("a") + record(1, b"x") + ONE), "bad-index", 2)
    yield Case("no table at all", sealed(ONE), "bad-index", 1)
    yield Case("key index of 2**32", sealed(keys("a") + record(2**32, b"x")), "aggregated")
    yield Case("key index of 2**31", sealed(keys("a") + record(2**31, b"x")), "bad-index", 1)
    yield Case("key index of -1", sealed(keys("a") + record(2**64 - 1, b"x")), "bad-index", 1)
    yield Case(
        "hash key index in no table", sealed(keys("a") + hash_keys("1") + ONE + record(0, b"x", 1)), "bad-index", 1
    )
    yield Case("hash key index without a table", sealed(keys("a") + record(0, b"x", 0)), "bad-index", 1)
    yield Case("hash key index of 2**32", sealed(keys("a") + hash_keys("1") + record(0, b"x", 2**32)), "aggregated")
    yield Case("hash key index of -1", sealed(keys("a") + hash_keys("1") + record(0, b"x", 2**64 - 1)), "bad-index", 1)
    yield Case(
        "bad index after a record out of range", sealed(TWO + record(2, b"x")), "out-of-range", 3, last=hash_of("a")
    )
    yield Case(
        "bad index before a record out of range",
        sealed(keys("a", "b") + record(0, b"1") + record(2, b"2") + record(1, b"3")),
        "bad-index",
        2,
        first=hash_of("a"),
    )
    yield Case("malformed after a bad index", sealed(keys("a") + record(5, b"x") + record(0, None)), "bad-proto")


def _texts() -> Iterator[Case]:
    malformed = {
        "latin-1 key": b"caf\xe9",
        "overlong key": b"\xc0\x80\xe0\x80\x80\xf0\x80\x80\x80",
        "surrogate key": b"x\xed\xa0\x80y",
        "surrogate key, cut": b"\xed\xbf",
        "surrogate key, broken": b"\xed\xa0A",
        "key beyond Unicode": b"\xf4\x90\x80\x80\xf5\xff",
        "key cut in a sequence": b"ab\xe2\x82",
        "key cut in a long sequence": b"\xf0\x9f\x98",
        "key of continuations": b"\x80\xbf\x80",
    }
    for name, key in malformed.items():
        yield Case(name, sealed(keys(key) + ONE), "aggregated")
    yield Case("key of four bytes a character", sealed(keys("😀é한") + ONE), "aggregated")
    yield Case("key with zero bytes", sealed(keys("a\0b") + ONE), "aggregated")
    key = b"caf\xe9"
    decoded_key = key.decode("utf-8", "replace")
    yield Case(
        "latin-1 key, its hash in range",
        sealed(keys(key) + ONE),
        "aggregated",
        first=hash_of(decoded_key),
        last=hash_of(decoded_key),
    )


def _explicit_hash_keys() -> Iterator[Case]:
    yield Case("hash key table, no indices", sealed(keys("a") + hash_keys("0") + ONE), "aggregated")
    yield Case(
        "some with hash key, some without",
        sealed(keys("a") + hash_keys("5") + ONE + record(0, b"two", 0)),
        "aggregated",
    )
    valid = [
        "0",
        "340282366920938463463374607431768211455",
        "+17",
        "-0",
        "00000000000000000000000000000000000000000000000001",
        "٣٤",
        "\uff11\uff12",
        "0" * 5000,
    ]
    invalid = ["", "-", "+", "abc", "1_000", " 1", "1 ", "1.0", "0x10", "--1", "+-1", "1-", "12345678+9"]
    invalid += ["\U0001d7ce", "½", "²"]
    out_of_range = ["-1", "340282366920938463463374607431768211456", "9" * 5000, "-" + "9" * 5000]
    for names, reason, dropped_count in (
        (valid, "aggregated", 0),
        (invalid, "bad-hash-key", 1),
        (out_of_range, "out-of-range", 2),
    ):
        for name in names:
            body = keys("a") + hash_keys(name) + ONE + record(0, b"two", 0)
            yield Case(f"hash key {name[:60]!r} of {len(name)} characters", sealed(body), reason, dropped_count)
    yield Case("hash key that is no number, not used", sealed(keys("a") + hash_keys("abc") + ONE), "aggregated")
    yield Case(
        "bad hash key before one out of range",
        sealed(keys("a") + hash_keys("x", "-1") + ONE + record(0, b"2", 0) + record(0, b"3", 1)),
        "bad-hash-key",
        2,
    )
    yield Case(
        "bad hash key after one out of range",
        sealed(keys("a") + hash_keys("x", "-1") + ONE + record(0, b"2", 1) + record(0, b"3", 0)),
        "out-of-range",
        3,
    )


def _ranges() -> Iterator[Case]:
    low, high = sorted(("a", "b"), key=hash_of)
    yield Case("both keys on the borders", sealed(TWO), "aggregated", first=hash_of(low), last=hash_of(high))
    yield Case("below by one", sealed(TWO), "out-of-range", 2, first=hash_of(low) + 1)
    yield Case("above by one", sealed(TWO), "out-of-range", 2, last=hash_of(high) - 1)
    yield Case("a key out of range, not used", sealed(keys(low, high) + ONE), "aggregated", last=hash_of(low))
    yield Case(
        "a hash key out of range, not used", sealed(keys("a") + hash_keys("7") + ONE), "aggregated", first=hash_of("a")
    )
    yield Case(
        "key out of range, hash key inside",
        sealed(keys("a") + hash_keys("7") + record(0, b"x", 0)),
        "aggregated",
        last=9,
    )
    yield Case(
        "key inside, hash key out of range",
        sealed(keys("a") + hash_keys("7") + record(0, b"x", 0)),
        "out-of-range",
        1,
        first=8,
    )
    yield Case(
        "hash key on the first", sealed(keys("a") + hash_keys("7") + record(0, b"x", 0)), "aggregated", first=7, last=7
    )
    yield Case(
        "range of the first hash key",
        sealed(keys("a") + hash_keys("0") + record(0, b"x", 0)),
        "aggregated",
        first=0,
        last=0,
    )
    yield Case("plain record in a range it is outside of", b"plain", "plain", first=0, last=0)
    yield Case("malformed record in a range it is outside of", sealed(ONE[:-1]), "bad-proto", first=0, last=0)
