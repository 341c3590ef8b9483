"""Tests that keys are read one by one from a terminal, whose settings are restored afterwards."""

import os
import pty
import termios
from collections.abc import Iterator

import pytest

from leasehold.adapters.cli.live import open_terminal_keys, parse_keys


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("ab", ("a", "b")),
        ("\x1b[A\x1bOB\x1b[5~", ("up", "down", "page-up")),
        ("\x1b", ("escape",)),
        ("\x1bq", ("escape", "q")),
        ("\r\n\x7f", ("enter", "enter", "backspace")),
        ("\x1b[1;5C\x1b[Z\x01é", ("é",)),
    ],
)
def test_every_terminal_sequence_is_read_as_its_key(sent: str, keys: tuple[str, ...]) -> None:
    assert parse_keys(sent) == keys


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Return the file descriptors of both ends of a terminal: the user's end and the program's end."""
    user_end, program_end = pty.openpty()
    yield user_end, program_end
    os.close(user_end)
    os.close(program_end)


def test_keys_are_read_one_by_one(terminal: tuple[int, int]) -> None:
    """A key is read without waiting for Enter, and a character of several bytes is not split."""
    user_end, program_end = terminal
    with open_terminal_keys(program_end) as keys:
        os.write(user_end, b"s")
        assert keys.read_pressed_keys(30.0) == ("s",)
        first_byte, rest_of_bytes = "é".encode()[:1], "é".encode()[1:]
        os.write(user_end, first_byte)
        assert keys.read_pressed_keys(0.01) == ()
        os.write(user_end, rest_of_bytes)
        assert keys.read_pressed_keys(30.0) == ("é",)


def raise_while_reading_keys(program: int) -> None:
    """Fail while keys are read. The error contains the terminal's settings for echo, line input and Ctrl-C."""
    with open_terminal_keys(program):
        local_flags = termios.tcgetattr(program)[3]
        raise RuntimeError([bool(local_flags & flag) for flag in (termios.ECHO, termios.ICANON, termios.ISIG)])


def test_a_terminal_is_restored_after_any_exit(terminal: tuple[int, int]) -> None:
    settings_before = termios.tcgetattr(terminal[1])
    with pytest.raises(RuntimeError, match=r"\[False, False, True\]"):
        raise_while_reading_keys(terminal[1])
    assert termios.tcgetattr(terminal[1]) == settings_before
