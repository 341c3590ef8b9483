"""The faults that a single call of a worker may meet: of its store, its stream, or a callable that a user supplied.

A run numbers all its calls in the order in which they begin, and a `CallFault` hits one of them, by its number. A fault
is a series of steps, joined by " + " and taken one after the other. The call returns the result of the last "do", or of
the last step that makes up a result. The steps are:

  do            the call takes effect
  pause         wait for one second; "hang" waits for HANG_SECONDS, "late" for LATE_SECONDS
  raise NAME    raise one of RAISED
  deny WHAT     reject the call, and all calls of the process that need this resource, for DENIED_SECONDS; see DENIED
  freeze        the whole process stands still for FREEZE_SECONDS
  crash         the process dies; "restart" also starts it again
  send          only for a write: it takes effect LATE_SECONDS later, whatever happens to the process
  stale         return the result of a moment ago; "untrue" returns one that is wrong; "answer" and "generate" return a
                value where none is due

A `CallableFault` is the misbehavior of a user's callable, which raises an exception, returns a wrong value, or hangs.
"""

from asyncio import CancelledError
from collections.abc import Callable, Generator, Mapping
from errno import EMFILE
from typing import Literal, assert_never

from attrs import frozen

from leasehold.adapters.sources.protocol import TransientRejection
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError, Trimmed

HANG_SECONDS = 15.0
"""Longer than a lease of ten seconds, plus the third by which a renewal in progress may exceed it."""

FREEZE_SECONDS = 20.0
"""Long enough for others to take the lease, and to continue reading."""

LATE_SECONDS = 12.0
"""Longer than such a lease, but not so long that a renewal in progress is given up."""


class ForeignBaseException(BaseException):
    """A user-defined exception that is not a subclass of Exception."""


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
    "unheard": ForeignBaseException,
}
"""The exceptions that a call may raise, by name."""

DENIED_SECONDS = 8.0

DENIED: Mapping[str, tuple[tuple[str, ...], Callable[[], BaseException]]] = {
    "descriptors": (("store.", "source.", "reader."), lambda: OSError(EMFILE, "Too many open files")),
    "disk": (("store.",), lambda: OutcomeUnknown("the disk is full")),
    "threads": (("task.",), lambda: RuntimeError("can't start new thread")),
    "memory": (("",), MemoryError),
}
"""Resources that the system may refuse for a while: the prefixes of the calls that need them, and the exception."""

READ_CALLS = ("store.list", "store.get")
"""The calls of a store that only read."""

DEATHS = ("crash", "do + crash", "do + restart")


@frozen
class CallFault:
    """A fault of one call, identified by the call's number in the whole run."""

    number: int
    fault: str


@frozen
class CallEvent:
    """The start of a call: when, by which process, and of what."""

    t: float
    process: str
    what: str


CallableKind = Literal["handler", "observer", "measure", "dead letter"]
Deviation = Literal["raise", "exit", "interrupt", "broken pipe", "hang", "answer", "generate", "poison"]

FAULTS: dict[str, type[BaseException]] = {
    "raise": ValueError,
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
    "broken pipe": BrokenPipeError,
}

HARMLESS: tuple[Deviation, ...] = ("raise", "exit", "interrupt", "broken pipe", "hang", "answer", "generate")
"""Deviations under which both laws hold."""


POISON = 5
"""Every fifth record of a shard is poison for a poisoned handler."""


def poisonous(sequence_number: str) -> bool:
    """Return whether a poisoned handler fails on this record."""
    return int(sequence_number) % POISON == 0


@frozen
class CallableFault:
    """A fault in all calls of one kind of callable of one worker, during `seconds` from `at` on.

    A poisoned handler raises only for poisonous records, and has a dead-letter sink.
    """

    worker: str
    whose: CallableKind
    what: Deviation
    at: float
    seconds: float

    def done(self, now: float, wait: Callable[[float], None]) -> object:
        """Misbehave, and return what the callable is to return."""
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
    """Return a generator, which is of no use as the result of a callable."""
    yield
