"""Judges the callables that a user hands in: once when they are given, and each of their answers.

Rule 1: a batch is done when its handler has returned None, or something to await that ended with None. Rule 2: any
other answer fails the batch, so no record is behind a checkpoint that its handler has not finished with.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import Attribute

from leasehold.stores.printable import said


class Unhandled(Exception):
    """A call that ended without saying that its batch is done."""


class Ending(Unhandled):
    """A call that raised SystemExit or KeyboardInterrupt: the worker ends."""


class NotAwaited(Unhandled):
    """A call whose answer could not be awaited here, for want of a thread or a descriptor: no fault of its records."""


def takes(*names: str) -> Callable[[Any, Any, Any], None]:
    """A check, for a field, that its callable can be called with so many arguments and is no generator.

    Raises ValueError, naming the field.
    """

    def check(_values: object, field: "Attribute[object]", given: object) -> None:
        if not callable(given):
            raise ValueError(f"{field.name}: {given!r} cannot be called")  # noqa: TRY004  bad usage
        if _generates(given):
            raise ValueError(
                f"{field.name}: a generator does nothing when it is called; write a plain or async function"
            )
        if misfit := _misfit(given, len(names)):
            raise ValueError(f"{field.name}: it is called with ({', '.join(names)}), and that does not fit: {misfit}")

    return check


def fault_of(answer: object) -> Unhandled | None:
    """The fault of an answer that cannot be awaited; None if it says that the batch is done."""
    if answer is None:
        return None
    if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        return Unhandled("it returned a generator, which has done nothing yet: use a plain or an async function")
    if inspect.iscoroutine(answer):
        answer.close()  # else Python would warn that nobody awaited it
    return Unhandled(
        f"it returned a value ({type(answer).__name__}): None says that the batch is done, nothing else does"
    )


def fault_from(error: BaseException) -> Exception:
    """An exception that the policy for failed batches can go by, whatever was raised."""
    if isinstance(error, Exception):
        return error
    kind = Ending if isinstance(error, SystemExit | KeyboardInterrupt) else Unhandled
    fault = kind(f"it raised {said(error)}")
    fault.__cause__ = error
    return fault


def _generates(given: Callable[..., object]) -> bool:
    while isinstance(given, partial):
        given = given.func
    return any(
        inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in (given, type(given).__call__)
    )


def _misfit(given: Callable[..., object], count: int) -> str:
    try:
        # A decorator may bring arguments of its own, so what it decorates is not looked at.
        signature = inspect.signature(given, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""  # some built-in functions have no signature
    try:
        signature.bind(*range(count))
    except TypeError as misfit:
        return str(misfit)
    return ""


def complaint(error: Exception, where: str) -> str:
    """A sentence on what went wrong with these records."""
    if isinstance(error, Unhandled):
        return f"its handler failed on {where}: {error}"
    return f"its handler raised {type(error).__name__} on {where}"


def raised(error: Exception) -> BaseException | None:
    """The exception whose traceback is worth logging: a fault found in an answer has none."""
    return error.__cause__ if isinstance(error, Unhandled) else error
