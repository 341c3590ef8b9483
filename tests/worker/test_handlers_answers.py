"""Checks of the callables that users pass, and of what these return or raise."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps

import pytest
from attrs import define, fields
from reader_harness import ReaderHarness

from leasehold.adapters.consumer.attempts import Attempts
from leasehold.adapters.consumer.handling import Ending, Handling, Unhandled, accepts, as_exception, fault_in_result
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.stores.printable import error_summary


@define
class CallableHolder:
    """A class whose attribute `handler` is checked."""

    handler: object


def judge(user_callable: object, *names: str) -> None:
    """Check a callable that will be called with arguments of these names (by default, only `batch`)."""
    accepts(*names or ("batch",))(None, fields(CallableHolder).handler, user_callable)


def plain(_batch: object) -> None:
    """A valid handler."""


async def later(_batch: object) -> None:
    """A valid async handler."""


def generator(_batch: object) -> Iterator[None]:
    """A generator function. Calling it runs none of its code."""
    yield


async def async_generator(_batch: object) -> AsyncIterator[None]:
    """An async generator function. Calling it runs none of its code."""
    yield


class GeneratorObject:
    """A callable object whose calls return generators."""

    def __call__(self, _batch: object) -> Iterator[None]:
        yield


def decorated(function: Callable[..., object]) -> Callable[[object], object]:
    """A decorator that passes an additional argument."""

    @wraps(function)
    def call(batch: object) -> object:
        return function(batch, 1)

    return call


@decorated
def handler_with_supplied_argument(_batch: object, _number: int) -> None:
    """A handler with two arguments, one of which the decorator supplies."""


VALID_HANDLERS = [
    plain,
    later,
    handler_with_supplied_argument,
    lambda *_all: None,
    partial(lambda _more, _batch: None, 1),
    getattr,
    print,
]


@pytest.mark.parametrize("given", VALID_HANDLERS)
def test_callable_of_one_batch_is_accepted(given: Callable[..., object]) -> None:
    """Decorated, async, partial and built-in functions are accepted as well."""
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
def test_generator_function_is_rejected(given: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"^handler: a generator does nothing when it is called"):
        judge(given)


def test_callable_with_wrong_arguments_is_rejected_by_name() -> None:
    """The callable is rejected when it is configured, before any batch fails."""
    with pytest.raises(ValueError, match=r"^handler: 7 cannot be called$"):
        judge(7)
    with pytest.raises(ValueError, match=r"^handler: it is called with \(batch\), and .*: too many positional"):
        judge(lambda: None)
    with pytest.raises(ValueError, match=r"^handler: it is called with \(happening, holding\), and .*: missing a"):
        judge(lambda _one, _two, _three: None, "happening", "holding")
    with pytest.raises(ValueError, match=r"^handler: .*: too many positional arguments$"):
        judge(lambda _one: None, "happening", "holding")
    judge(lambda _one, _two: None, "happening", "holding")


def test_unawaited_coroutine_is_closed() -> None:
    coroutine = later(None)
    assert str(fault_in_result(coroutine)).startswith("it returned a value (coroutine): ")
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


@pytest.mark.parametrize(
    ("error", "kind"), [(SystemExit(3), Ending), (KeyboardInterrupt(), Ending), (GeneratorExit(), Unhandled)], ids=repr
)
def test_base_exception_becomes_the_cause_of_an_exception(error: BaseException, kind: type[Unhandled]) -> None:
    fault = as_exception(error)
    assert (type(fault), str(fault), fault.__cause__) == (kind, f"it raised {error_summary(error)}", error)


def test_log_line_names_failed_records_and_keeps_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log line names the failed records. It omits the message of the user's exception and our own stack frames."""
    batch, generator_exit, value_error = (
        Batch((Record(b"", "7"), Record(b"", "8")), None, 0.0, 0.0),
        GeneratorExit(),
        ValueError("text"),
    )
    attempts = Attempts(Handling(lambda _batch: None), ReaderHarness().holding, lambda min_wait, _most: min_wait)
    for fault in (value_error, Unhandled("it is odd"), as_exception(generator_exit)):
        attempts.after_failure(attempts.next_piece(batch), fault)
    assert caplog.messages == [
        "shard s-0: its handler raised ValueError on records 7 to 8, attempt 1 of 5",
        "shard s-0: its handler failed on records 7 to 8, attempt 2 of 5: it is odd",
        "shard s-0: its handler failed on records 7 to 8, attempt 3 of 5: it raised GeneratorExit",
    ]
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [value_error, None, generator_exit]
