"""The misbehaviour of a user's callables: they raise anything, answer anything, or hang."""

from collections.abc import Callable, Generator
from typing import Literal, assert_never

from attrs import frozen

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
