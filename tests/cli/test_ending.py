"""Tests of signals that arrive while a command sets its signal handlers, or restores the previous ones."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from leasehold.adapters.cli.common.ending import END_SIGNALS, EndSignal, raise_on_signal

ORIGINAL_SIGNAL_FUNCTION = signal.signal


@pytest.fixture
def before() -> Iterator[dict[signal.Signals, object]]:
    """Return the current signal handlers, and restore them after the test."""
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    yield dict(handlers)
    for number, handler in handlers.items():
        ORIGINAL_SIGNAL_FUNCTION(number, handler)


def raise_signal_at_call(monkeypatch: pytest.MonkeyPatch, call_number: int, raised_signal: signal.Signals) -> None:
    """Raise this signal right after the call of `signal.signal` with this number, counted from 0."""
    call_numbers = iter(range(100))

    def set_and_send(number: signal.Signals, handler: signal.Handlers) -> object:
        previous_handler = ORIGINAL_SIGNAL_FUNCTION(number, handler)
        if next(call_numbers) == call_number:
            signal.raise_signal(raised_signal)
        return previous_handler

    monkeypatch.setattr(signal, "signal", set_and_send)


def test_a_signal_while_handlers_are_restored_leaves_them_restored(
    before: dict[signal.Signals, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C still works in a program that continues after a command."""
    with raise_on_signal():
        raise_signal_at_call(monkeypatch, len(END_SIGNALS), END_SIGNALS[-1])  # earlier calls make each signal ignored
    assert {number: signal.getsignal(number) for number in END_SIGNALS} == before


def test_a_signal_while_handlers_are_set_restores_the_previous_ones(
    before: dict[signal.Signals, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handlers are restored even if the signal arrives before the `with` block has begun."""
    raise_signal_at_call(monkeypatch, 0, END_SIGNALS[0])
    with pytest.raises(EndSignal), raise_on_signal():
        raise AssertionError
    assert {number: signal.getsignal(number) for number in END_SIGNALS} == before


@pytest.mark.parametrize("first", END_SIGNALS)
def test_no_later_signal_interrupts_the_cleanup(before: dict[signal.Signals, object], first: signal.Signals) -> None:
    cleaned_after: list[signal.Signals] = []

    @contextmanager
    def clean_up() -> Iterator[None]:
        try:
            yield
        finally:
            for number in END_SIGNALS:
                signal.raise_signal(number)
                cleaned_after.append(number)

    with pytest.raises(EndSignal, match=first.name) as exc_info, raise_on_signal(), clean_up():
        signal.raise_signal(first)
    assert (cleaned_after, exc_info.value.status) == ([*END_SIGNALS], 128 + first)
    assert {number: signal.getsignal(number) for number in END_SIGNALS} == before


def test_an_ignored_signal_stays_ignored(before: dict[signal.Signals, object]) -> None:
    """A command under nohup does not end when its terminal is closed."""
    ignored_signal = END_SIGNALS[-1]
    assert ignored_signal in before
    ORIGINAL_SIGNAL_FUNCTION(ignored_signal, signal.SIG_IGN)
    with raise_on_signal():
        signal.raise_signal(ignored_signal)
        assert signal.getsignal(ignored_signal) == signal.SIG_IGN
    assert signal.getsignal(ignored_signal) == signal.SIG_IGN
