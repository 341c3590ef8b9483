"""Defines a fuzz target: a parser, a corpus of inputs for it, and generated values that resemble these inputs.

Samples are in `corpus/NAME.jsonl`, one per line. Bytes are written as `{"base64": "…"}`.
"""

import base64
import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Never

from attrs import frozen
from hypothesis import strategies as st
from odd_values import LONG, ODD_TEXTS, odd_texts

CORPUS = Path(__file__).parent / "corpus"

CPU_SECONDS = 5.0
"""The CPU time in seconds that parsing a value of some kilobytes may take. Usually it takes a thousandth of this."""

Accepted = Callable[[Any], object]


@frozen
class FuzzTarget:
    """A parser, which must return a result or raise one of its documented errors for any input.

    Attributes:
        name: The name of the corpus.
        covers: The modules (below leasehold/) whose parsing this target reaches.
        parse: Parses a value like the samples, or its bytes if `pack` is given. The function also asserts facts about
        the result.
        refuses: The documented errors. A ValueError must be of exactly that class, because Python's own functions raise
            subclasses of ValueError whose messages name no field.
        says: Prefixes separated by "|". The message of an error must start with one of them, so that it names the
            field.
        pack: Encodes a sample as bytes.
    """

    name: str
    covers: tuple[str, ...]
    parse: Accepted
    refuses: tuple[type[Exception], ...] = ()
    says: str = ""
    pack: Callable[[Any], bytes] | None = None

    @property
    def samples(self) -> list[Any]:
        return _read_corpus(self.corpus)

    @property
    def corpus(self) -> Path:
        return CORPUS / f"{self.name}.jsonl"

    @property
    def values(self) -> st.SearchStrategy[Any]:
        """Draws samples that are changed in a few places.

        If the target has `pack`, some values are packed after the change, and others are changed after packing,
        including their
        digests.
        """
        changed_values = near(self.samples)
        if self.pack is None:
            return changed_values
        packed_values = changed_values.map(self._pack_or_none).filter(lambda body: body is not None)
        return packed_values | near([self._pack(sample) for sample in self.samples])

    def replay(self) -> Iterator[Any]:
        """Return an iterator over all samples, unchanged."""
        return iter([sample if self.pack is None else self._pack(sample) for sample in self.samples])

    def add_to_corpus(self, value: Any) -> None:  # noqa: ANN401  of any kind
        """Add a value that broke the law to the corpus, so that every later run tries it."""
        with self.corpus.open("a", encoding="utf-8") as corpus:
            corpus.write(json.dumps(value, default=_encode_bytes) + "\n")

    def _pack_or_none(self, value: Any) -> bytes | None:  # noqa: ANN401  of any kind
        """Return the packed value, or None if the format cannot express it, such as lone surrogates in CBOR."""
        with suppress(ArithmeticError, TypeError, ValueError):
            return self._pack(value)
        return None

    def _pack(self, value: Any) -> bytes:  # noqa: ANN401  of any kind
        # A value that was changed after packing is in the corpus as bytes, and must not be packed again.
        assert self.pack is not None
        return value if isinstance(value, bytes) and not isinstance(self.samples[0], bytes) else self.pack(value)


def is_accepted(target: FuzzTarget, value: Any) -> bool:  # noqa: ANN401  of any kind
    """Parse the value, and return whether it was accepted. Raises any exception that the target does not document."""
    try:
        with limit_cpu_seconds(CPU_SECONDS):
            target.parse(value)
    except Exception as exc:
        if not _is_documented(exc, target.refuses):
            raise
        message = str(exc)
        message.encode()  # a message must be encodable
        assert message.startswith(tuple(target.says.split("|"))), f"it names no field: {message[:200]!r}"
        return False
    return True


def _is_documented(exc: Exception, refuses: tuple[type[Exception], ...]) -> bool:
    return type(exc) in refuses or (isinstance(exc, refuses) and not isinstance(exc, ValueError))


@contextmanager
def forbid_repeating(secret: str) -> Iterator[None]:
    """Raise AssertionError if an error message contains the secret."""
    try:
        yield
    except ValueError as exc:
        if secret in str(exc):
            raise AssertionError("the refusal repeats a secret") from exc
        raise


class CpuTimeExceeded(BaseException):
    """A value used more CPU time than the limit."""


@contextmanager
def limit_cpu_seconds(seconds: float) -> Iterator[None]:
    """Raise CpuTimeExceeded if the block uses more than `seconds` of CPU time. This works in the main thread only."""
    former_handler = signal.signal(signal.SIGVTALRM, _raise_too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former_handler)


def _raise_too_slow(_signal: int, _frame: FrameType | None) -> Never:
    raise CpuTimeExceeded(f"more than {CPU_SECONDS:g} s of the processor")


def encode_as_json(document: object) -> bytes:
    """Return the value as JSON in which bytes are in base64, as services and users write them."""
    return json.dumps(document, default=lambda data: base64.b64encode(data).decode()).encode()


@cache
def _read_corpus(corpus: Path) -> list[Any]:
    return [json.loads(line, object_hook=_decode_bytes) for line in corpus.read_text(encoding="utf-8").splitlines()]


def _decode_bytes(pairs: dict[str, Any]) -> Any:  # noqa: ANN401  bytes, or the object
    return base64.b64decode(pairs["base64"]) if pairs.keys() == {"base64"} else pairs


def _encode_bytes(value: object) -> dict[str, str]:
    assert isinstance(value, bytes)
    return {"base64": base64.b64encode(value).decode()}


# Values near samples

_NUMBERS = (0, 1, -1, 127, 128, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**128, 10**30, -(2**63))
_TOKENS = (b"\0", b"\xff" * 9, b"\x80" * 10, b"[" * 40, b'{"', b"\xed\xa0\x80", b"1e999", b"NaN", b"-", LONG.encode())

_odd_values: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.integers(),
    st.sampled_from((0.0, -0.5, 1e400, -math.inf, math.nan, 1e18)) | st.floats(),
    odd_texts,
    st.binary(max_size=8),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[], {}]),
)


def near(samples: list[Any]) -> st.SearchStrategy[Any]:
    """Draw values like these, with parts cut, repeated, replaced or inserted."""
    if isinstance(samples[0], bytes):
        return st.binary(max_size=40) | _draw_mutated(
            samples, st.sampled_from(_TOKENS) | st.binary(min_size=1, max_size=4)
        )
    if isinstance(samples[0], str):
        return odd_texts | _draw_mutated(samples, st.sampled_from(ODD_TEXTS) | st.text(min_size=1, max_size=3))
    return _changed_documents(samples)


@st.composite
def _draw_mutated(draw: st.DrawFn, samples: list[Any], fragments: st.SearchStrategy[Any]) -> Any:  # noqa: ANN401  bytes or text
    body = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(body)))
        end = min(len(body), begin + draw(st.integers(0, 16)))
        match draw(st.sampled_from(("put in", "replace", "remove", "repeat", "cut"))):
            case "put in":
                body = body[:begin] + draw(fragments) + body[begin:]
            case "replace":
                body = body[:begin] + draw(fragments) + body[end:]
            case "remove":
                body = body[:begin] + body[end:]
            case "repeat":
                body = body[:end] + body[begin:end] * draw(st.integers(1, 3)) + body[end:]
            case "cut":
                body = body[:begin]
    return body


@st.composite
def _changed_documents(draw: st.DrawFn, samples: list[Any]) -> Any:  # noqa: ANN401  of any kind
    value = deepcopy(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(1, 3))):
        value = _change_one_place(draw, value)
    return value


def _change_one_place(draw: st.DrawFn, value: Any) -> Any:  # noqa: ANN401  of any kind
    """Return the value with one change, mostly deep inside."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or draw(st.integers(0, 9)) == 0:
        return draw(_text_near(value) | _odd_values if isinstance(value, str) else _odd_values)
    key = draw(st.sampled_from(keys))
    match draw(st.sampled_from(("go on", "go on", "go on", "remove", "repeat", "wrap"))):
        case "remove":
            del value[key]
        case "repeat" if isinstance(value, list):
            value.insert(key, deepcopy(value[key]))
        case "repeat":
            value[draw(odd_texts)] = deepcopy(value[key])
        case "wrap":
            value[key] = [value[key]]
        case _:
            value[key] = _change_one_place(draw, value[key])
    return value


def _text_near(value: str) -> st.SearchStrategy[str]:
    return _draw_mutated([value], st.sampled_from(ODD_TEXTS) | st.text(min_size=1, max_size=3))
