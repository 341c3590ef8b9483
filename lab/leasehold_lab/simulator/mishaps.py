"""The faults that one call of a worker may meet: of its store, its stream, or a callable of a user's.

A run numbers all its calls in the order in which they begin; a mishap befalls one of them, by its number.
A fault is steps joined by " + ", done one after the other; the call answers what the last "do" or lie answered:
  do            the call has its effect
  pause         a second passes, hang: HANG_SECONDS, late: LATE_SECONDS
  raise NAME    one of RAISED
  deny WHAT     one of DENIED: the call and whatever else the process asks of this kind for DENIED_SECONDS is refused
  freeze        the whole process stands still for FREEZE_SECONDS
  crash         the process dies; restart: and comes again
  send          of a write: its effect comes LATE_SECONDS later, whatever becomes of the process
  stale         a lie: the answer of a moment ago; untrue: somebody else's truth; answer, generate: a value where none
                is due

A `Misdeed` is the misbehaviour of a user's callable: it raises anything, answers anything, or hangs.
"""

from asyncio import CancelledError
from collections.abc import Callable, Generator, Mapping
from errno import EMFILE
from typing import Literal, assert_never

from attrs import frozen

from leasehold.adapters.sources.protocol import TransientRejection
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError, Trimmed

HANG_SECONDS = 15.0
"""Longer than a lease of ten seconds and the third by which a renewal under way may exceed it."""

FREEZE_SECONDS = 20.0
"""Long enough for others to take the lease, and to read on."""

LATE_SECONDS = 12.0
"""Longer than such a lease, and not so long that a renewal under way is given up."""


class Unheard(BaseException):
    """An exception of a user's own that is no Exception."""


RAISED: Mapping[str, Callable[[], BaseException]] = {
    "unanswered": lambda: OutcomeUnknown("nobody answered"),
    "refused": lambda: StoreError("no right to do this"),
    "unavailable": lambda: SourceUnavailable("the service asks to slow down"),
    "unreadable": lambda: SourceError("no right to read this"),
    "rejected": lambda: TransientRejection("not through this proxy"),
    "trimmed": lambda: Trimmed("the place is not there any more"),
    "value": lambda: ValueError("no number"),
    "key": lambda: KeyError("a field"),
    "os": lambda: OSError("a broken pipe"),
    "memory": lambda: MemoryError("no room"),
    "runtime": lambda: RuntimeError("can't start new thread"),
    "timeout": lambda: TimeoutError("too long"),
    "recursion": RecursionError,
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "stop": StopIteration,
    "cancelled": CancelledError,
    "generator": GeneratorExit,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "unheard": Unheard,
}
"""By name, what a call may raise."""

DENIED_SECONDS = 8.0

DENIED: Mapping[str, tuple[tuple[str, ...], Callable[[], BaseException]]] = {
    "descriptors": (("store.", "source.", "reader."), lambda: OSError(EMFILE, "Too many open files")),
    "disk": (("store.",), lambda: OutcomeUnknown("the disk is full")),
    "threads": (("task.",), lambda: RuntimeError("can't start new thread")),
    "memory": (("",), MemoryError),
}
"""Resources that the system may refuse for a while: the prefixes of the calls that want them, and what they raise."""

READINGS = ("store.list", "store.get")
"""The calls of a store that write nothing."""

DEATHS = ("crash", "do + crash", "do + restart")


@frozen
class Mishap:
    """A fault of one call, by the call's number in the whole run."""

    number: int
    fault: str


@frozen
class CallEvent:
    """A call that began: when, of which process, and what was called."""

    t: float
    process: str
    what: str


Whose = Literal["handler", "observer", "measure", "dead letter"]
Deviation = Literal["raise", "exit", "interrupt", "broken pipe", "hang", "answer", "generate", "poison"]

FAULTS: dict[str, type[BaseException]] = {
    "raise": ValueError,
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
    "broken pipe": BrokenPipeError,
}

HARMLESS: tuple[Deviation, ...] = ("raise", "exit", "interrupt", "broken pipe", "hang", "answer", "generate")
"""With all of these both laws hold."""


POISON = 5
"""Every fifth record of a shard is poison where a handler is poisoned."""


def poisonous(sequence_number: str) -> bool:
    """Whether a poisoned handler fails on this record."""
    return int(sequence_number) % POISON == 0


@frozen
class Misdeed:
    """A kind of callable of one worker that does this whenever it is called between these times.

    A handler that is poisoned raises on poisonous records alone, and has a dead letter.
    """

    worker: str
    whose: Whose
    what: Deviation
    at: float
    seconds: float

    def done(self, now: float, wait: Callable[[float], None]) -> object:
        """Do it; answers what the callable is to answer."""
        match self.what:
            case "raise" | "exit" | "interrupt" | "broken pipe":
                raise FAULTS[self.what]
            case "poison":
                raise ValueError
            case "hang":
                wait(self.at + self.seconds - now)
                return None
            case "answer":
                return False
            case "generate":
                return generated()
            case _:
                assert_never(self.what)


def generated() -> Generator[None]:
    """Answer a generator, which a callable has no use for."""
    yield
