"""Faults that can be injected into single calls of a worker to its store, its stream or a function of the user.

A run numbers all calls in the order in which they begin, and a `CallFault` selects one of them by its number. A fault
is a sequence of steps, separated by " + ". The call returns the result of the last step that has one. The steps are:

  do            make the call
  pause         wait for one second; "hang" waits for HANG_SECONDS, and "late" for LATE_SECONDS
  raise NAME    raise one of the exceptions in RAISED
  deny WHAT     for DENIED_SECONDS, fail this call and all calls of the process that need this resource; see DENIED
  freeze        pause the whole process for FREEZE_SECONDS
  crash         kill the process; "restart" also starts it again
  send          only for a write: apply it after LATE_SECONDS, whatever happens to the process
  stale         return an outdated result; "untrue" returns a wrong result; "answer" and "generate" return a
                value from a function that should return None

A `CallableFault` makes a user's function raise an exception, return a wrong value or hang for some time.
"""

from asyncio import CancelledError
from collections.abc import Callable, Generator, Mapping
from errno import EMFILE
from typing import Literal, assert_never

from attrs import frozen

from leasehold.adapters.sources.protocol import TransientRejection
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError, Trimmed

HANG_SECONDS = 15.0
"""How long a hanging call waits, in seconds.

A renewal in progress times out sooner, because that takes one and a third leases of ten seconds.
"""

FREEZE_SECONDS = 20.0
"""How long a process is frozen, in seconds. In this time, another worker can take its leases and continue reading."""

LATE_SECONDS = 12.0
"""How long a late call or write is delayed, in seconds.

This is longer than a lease of ten seconds, but a renewal in progress does not time out yet.
"""


class ForeignBaseException(BaseException):
    """A user-defined exception that derives directly from BaseException."""


RAISED: Mapping[str, Callable[[], BaseException]] = {
    "unanswered": lambda: OutcomeUnknown("there was no response"),
    "refused": lambda: StoreError("not authorized to do this"),
    "unavailable": lambda: SourceUnavailable("the service throttles requests"),
    "unreadable": lambda: SourceError("not authorized to read this"),
    "rejected": lambda: TransientRejection("rejected by a proxy"),
    "trimmed": lambda: Trimmed("the position was trimmed"),
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
"""Resources that may be unavailable for a while.

Each has the prefixes of the names of calls that need it, and the exception that these calls then raise.
"""

READ_CALLS = ("store.list", "store.get")
"""The store calls that only read."""

DEATHS = ("crash", "do + crash", "do + restart")


@frozen
class CallFault:
    """A fault of one call, which is selected by its number in the whole run."""

    number: int
    fault: str


@frozen
class CallEvent:
    """Records when a call began, which process made it, and the name of the operation."""

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
"""Faults of users' functions that workers must tolerate: no record is lost, and no shard is held without being read."""


POISON = 5
"""A poisoned handler fails on every fifth record of a shard."""


def is_poisonous(sequence_number: str) -> bool:
    """Return whether a poisoned handler fails on this record."""
    return int(sequence_number) % POISON == 0


@frozen
class CallableFault:
    """A fault of a handler or of another function that the user passed to a worker.

    The fault starts at `at` and lasts for `seconds`.

    With the fault "poison", the handler fails only on poisonous records, and the worker has a dead-letter sink.
    """

    worker: str
    whose: CallableKind
    what: Deviation
    at: float
    seconds: float

    def apply(self, now: float, wait: Callable[[float], None]) -> object:
        """Apply the fault: raise an exception, hang, or return the value that the user's function must return."""
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
                return create_generator()
            case _:
                assert_never(self.what)


def create_generator() -> Generator[None]:
    """Return a generator, which no caller of a user's function expects as a result."""
    yield
