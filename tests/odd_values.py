"""Values that no codec expects, and leases that every codec must preserve, for tests of encoding and decoding."""

import json

from attrs import evolve
from hypothesis import strategies as st

from leasehold.balancer.model import (
    HASH_KEYS,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    WEIGHT_MAX,
    Annotations,
    Lease,
    Position,
    at_timestamp,
)
from leasehold.stores.protocol import Malformed

DEEP = "[" * 20_000
"""A nested list for which Python's JSON parser raises RecursionError."""

LONG = "9" * 5_000
"""A number with more digits than Python's `int()` accepts."""

ODD_TEXTS = (
    "",
    " ",
    "-1",
    "1.5",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "-0.5",
    "²",
    "1_0",
    "%FF",
    "\ud800",
    "\x1b[2J",
    "1" * 130,
    LONG,
    str(2**63),
    str(2**128),
    DEEP,
    "[" + LONG + "]",
    '["\\ud800"]',
    '{"a": "\\ud800"}',
    '{"a": ["b", 1e999]}',
    '{"a": ["b", true]}',
    '{"a": [["b"], 1]}',
    '{"a": ["\\udfff", 1]}',
    json.dumps({"a": ["b", 2**70]}),
    '{"a": null}',
    "[null]",
    "null",
    "{}",
    "[]",
    "41",
    "SHARD_END",
    "AT_TIMESTAMP -5",
    f"41 {LONG}",
    "@latest",
)

texts = st.text(max_size=8)
"""Strings that can be encoded as UTF-8."""

odd_texts = st.sampled_from(ODD_TEXTS) | st.text(st.characters(), max_size=6)

names = st.text("abz09-:/%é", min_size=1, max_size=6)
counts = st.integers(0, 10**18 - 1)
numbers = st.integers(0, 10**128).map(str)
start_positions = st.sampled_from((TRIM_HORIZON, LATEST, SHARD_END, at_timestamp(1_700_000_000_000)))
positions = start_positions | st.builds(Position, numbers, counts, texts)
hash_keys = st.integers(*HASH_KEYS)
ranges = st.none() | st.tuples(hash_keys, hash_keys).map(lambda ends: (min(ends), max(ends)))
weights = st.none() | st.integers(0, 10**9)
"""In KB/s, with no more digits behind the point than every layout keeps."""


def _notes(pairs: dict[str, str]) -> Annotations:
    return tuple(sorted(pairs.items()))


leases = st.builds(
    Lease,
    key=names,
    stream=st.just("") | names,
    parents=st.sets(names, max_size=2).map(lambda parents: tuple(sorted(parents))),
    checkpoint=positions,
    hash_range=ranges,
    weight=weights,
    epoch=counts,
    annotations=st.dictionaries(texts, texts, max_size=2).map(_notes),
)
"""Leases without an owner, with any values that a worker may have to store."""


def assert_said(read: object) -> None:
    """Assert that this is None, a lease that can be encoded, or an error with a short, printable message."""
    assert read is None or isinstance(read, Lease | Malformed)
    if isinstance(read, Malformed):
        assert len(read.why) < 200
        f"{read.key} {read.field} {read.why}".encode()
    if isinstance(read, Lease):
        json.dumps([read.key, read.owner, read.next_owner, read.annotations], ensure_ascii=False).encode()
        assert read.epoch >= 0
        assert read.checkpoint.sub >= 0
        assert read.weight is None or 0 <= read.weight <= WEIGHT_MAX


def token_of(lease: Lease) -> tuple[Lease, str]:
    """Return the lease with its token, which the comparison of leases ignores."""
    return lease, lease.checkpoint.token


def unowned(lease: Lease) -> Lease:
    """Return the lease without an owner and without a hand-off, as a new row stores it."""
    return evolve(lease, owner=None, next_owner=None, yields=False, leaving=False)


def _endless(error: BaseException) -> str:
    return _endless(error)


def _raises_exit(error: BaseException) -> str:
    raise SystemExit(type(error).__name__)


def _raises_value(_error: BaseException) -> str:
    raise ValueError("no text")


SHOWN_BY = {
    "raising": _raises_value,
    "exiting": _raises_exit,
    "endless": _endless,
    "no text": lambda _error: 7,
    "huge": lambda _error: "x" * 10**7,
    "half a character": lambda _error: "\ud800\n",
}


def unsayable(method: str, base: type[BaseException] = Exception) -> BaseException:
    """Return an exception whose `__str__` and `__repr__` misbehave in the way with this name."""
    kind: type[BaseException] = type("Unsayable", (base,), {"__str__": SHOWN_BY[method], "__repr__": SHOWN_BY[method]})
    return kind()
