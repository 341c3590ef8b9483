"""What is said of a callable that a user hands in, and of each answer of it."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps

import pytest
from attrs import define, fields
from reading_bench import ReaderHarness

from leasehold.adapters.consumer.attempts import Attempts
from leasehold.adapters.consumer.handling import Ending, Handling, Unhandled, fault_from, fault_of, takes
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.stores.printable import said


@define
class Given:
    """A callable with a name for it."""

    handler: object


def judge(given: object, *names: str) -> None:
    """Check it as what is called with so many arguments, `batch` alone if left out."""
    takes(*names or ("batch",))(None, fields(Given).handler, given)


def plain(_batch: object) -> None:
    """Fits."""


async def later(_batch: object) -> None:
    """Fits, too."""


def generator(_batch: object) -> Iterator[None]:
    """Does nothing when it is called."""
    yield


async def async_generator(_batch: object) -> AsyncIterator[None]:
    """Does nothing when it is called, either."""
    yield


class GeneratorObject:
    """Calls that do nothing."""

    def __call__(self, _batch: object) -> Iterator[None]:
        yield


def decorated(function: Callable[..., object]) -> Callable[[object], object]:
    """A decorator that brings one argument more."""

    @wraps(function)
    def call(batch: object) -> object:
        return function(batch, 1)

    return call


@decorated
def of_two(_batch: object, _number: int) -> None:
    """Is called with one argument."""


FITTING = [plain, later, of_two, lambda *_all: None, partial(lambda _more, _batch: None, 1), getattr, print]


@pytest.mark.parametrize("given", FITTING)
def test_a_callable_of_one_batch_is_taken(given: Callable[..., object]) -> None:
    """A decorated, async, partial or built-in function could not be a handler."""
    judge(given)


GENERATORS = [
    generator,
    async_generator,
    GeneratorObject(),
    partial(generator),
    partial(partial(async_generator)),
    partial(GeneratorObject()),
]


@pytest.mark.parametrize("given", GENERATORS)
def test_a_generator_is_refused(given: Callable[..., object]) -> None:
    """Every batch would fail, after the worker has begun."""
    with pytest.raises(ValueError, match=r"^handler: a generator does nothing when it is called"):
        judge(given)


def test_a_callable_that_does_not_fit_is_refused_with_the_names_of_its_arguments() -> None:
    """Every call would fail, after the worker has begun."""
    with pytest.raises(ValueError, match=r"^handler: 7 cannot be called$"):
        judge(7)
    with pytest.raises(ValueError, match=r"^handler: it is called with \(batch\), and .*: too many positional"):
        judge(lambda: None)
    with pytest.raises(ValueError, match=r"^handler: it is called with \(happening, holding\), and .*: missing a"):
        judge(lambda _one, _two, _three: None, "happening", "holding")
    with pytest.raises(ValueError, match=r"^handler: .*: too many positional arguments$"):
        judge(lambda _one: None, "happening", "holding")
    judge(lambda _one, _two: None, "happening", "holding")


def test_a_coroutine_that_nobody_awaits_is_closed() -> None:
    """Python would warn of it wherever it is collected."""
    left = later(None)
    assert str(fault_of(left)).startswith("it returned a value (coroutine): ")
    assert inspect.getcoroutinestate(left) == inspect.CORO_CLOSED


@pytest.mark.parametrize(
    ("error", "kind"), [(SystemExit(3), Ending), (KeyboardInterrupt(), Ending), (GeneratorExit(), Unhandled)], ids=repr
)
def test_a_base_exception_becomes_an_exception_with_its_cause(error: BaseException, kind: type[Unhandled]) -> None:
    """The policy for failed batches would not see it, or a call that asks for the end would be tried again."""
    fault = fault_from(error)
    assert (type(fault), str(fault), fault.__cause__) == (kind, f"it raised {said(error)}", error)


def test_a_log_line_says_what_failed_and_where_with_the_traceback_of_what_was_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody would know which records to look for; or the log tell a user's text twice, or the worker's own lines."""
    batch, odd, plain = Batch((Record(b"", "7"), Record(b"", "8")), None, 0.0, 0.0), GeneratorExit(), ValueError("text")
    attempts = Attempts(Handling(lambda _batch: None), ReaderHarness().holding, lambda least, _most: least)
    for fault in (plain, Unhandled("it is odd"), fault_from(odd)):
        attempts.failed(attempts.piece(batch), fault)
    assert caplog.messages == [
        "shard s-0: its handler raised ValueError on records 7 to 8, attempt 1 of 5",
        "shard s-0: its handler failed on records 7 to 8, attempt 2 of 5: it is odd",
        "shard s-0: its handler failed on records 7 to 8, attempt 3 of 5: it raised GeneratorExit",
    ]
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [plain, None, odd]
