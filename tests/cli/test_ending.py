"""Signals that come while a command sets its handlers, or puts back those of before."""

import signal
from collections.abc import Iterator

import pytest

from leasehold.adapters.cli.common.ending import ENDING, Ended, unwinding

SET = signal.signal


@pytest.fixture
def before() -> Iterator[dict[signal.Signals, object]]:
    """The handlers of before, which are back afterwards whatever a test has left."""
    found = {each: signal.getsignal(each) for each in ENDING}
    yield dict(found)
    for each, handler in found.items():
        SET(each, handler)


def interrupted(monkeypatch: pytest.MonkeyPatch, call: int, sent: signal.Signals) -> None:
    """Have this signal come right after that call that sets a handler."""
    calls = iter(range(100))

    def set_and_send(number: signal.Signals, handler: signal.Handlers) -> object:
        was = SET(number, handler)
        if next(calls) == call:
            signal.raise_signal(sent)
        return was

    monkeypatch.setattr(signal, "signal", set_and_send)


def test_signal_while_handlers_are_put_back_leaves_them_as_before(
    before: dict[signal.Signals, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a program that goes on after a command would ignore Ctrl-C for good."""
    with unwinding():
        interrupted(monkeypatch, len(ENDING), ENDING[-1])  # before that, each is told to be ignored
    assert {each: signal.getsignal(each) for each in ENDING} == before


def test_signal_while_handlers_are_set_ends_the_command_with_those_of_before(
    before: dict[signal.Signals, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all of them would be ignored from then on: nothing had begun that would put them back."""
    interrupted(monkeypatch, 0, ENDING[0])
    with pytest.raises(Ended), unwinding():
        raise AssertionError
    assert {each: signal.getsignal(each) for each in ENDING} == before
