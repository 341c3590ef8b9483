"""Prepares the standard streams of a command, and turns a failure of standard output into a message and an exit status.

In a shell, `>&-` closes a stream. Python then sets the stream to None, so `print` writes nothing. If standard error is
closed, `print` even writes errors to standard output. The next file that the process opens gets the free descriptor, so
a child process would write its output to that file.
"""

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIPE_STATUS = 141
"""The exit status that a shell reports for a program that was killed by SIGPIPE."""

ASCII_REPLACEMENTS = {"≥": ">=", "…": "..."}
"""ASCII replacements for characters that the locale cannot encode. Otherwise a lag of `≥75.0` would be printed as
`?75.0`."""

REPLACE_HANDLER, ESCAPE_HANDLER = "leasehold-replaced", "leasehold-escaped"
"""The names under which our handlers of encoding errors are registered in `codecs`."""


def _make_ascii_error_handler(fallback: Callable[[str], str]) -> Callable[[UnicodeError], tuple[str, int]]:
    def replace_characters(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        characters = error.object[error.start : error.end]
        return "".join(ASCII_REPLACEMENTS.get(character) or fallback(character) for character in characters), error.end

    return replace_characters


codecs.register_error(REPLACE_HANDLER, _make_ascii_error_handler(lambda _sign: "?"))
codecs.register_error(
    ESCAPE_HANDLER, _make_ascii_error_handler(lambda sign: sign.encode("ascii", "backslashreplace").decode())
)


class _FaultRecordingOutput(io.FileIO):
    """A stream on standard output that remembers the error with which a write failed.

    Args:
        open_at_start: Whether standard output was open when the process started.
    """

    def __init__(self, *, open_at_start: bool) -> None:
        super().__init__(1, "w", closefd=False)
        self.open_at_start, self.fault = open_at_start, cast("OSError | None", None)

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            if not self.open_at_start:
                # End the command in the same way as if the reader of a pipe had gone.
                raise BrokenPipeError(errno.EPIPE, "standard output is closed")
            written_count = super().write(data)
            self.fault = None
        except OSError as fault:
            self.fault = fault
            raise
        return written_count


class _ClosedInput(io.RawIOBase):
    """Standard input of a process that was started without standard input."""

    def readable(self) -> bool:
        return True

    def readinto(self, _buffer: object) -> NoReturn:
        raise OSError("standard input is closed")


def prepare_standard_streams() -> None:
    """Replace closed streams, and make output replace characters that the locale cannot encode."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null_device = os.open(os.devnull, os.O_RDWR)
            if null_device != descriptor:
                os.dup2(null_device, descriptor)
                os.close(null_device)
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or TextIOWrapper(io.BufferedReader(_ClosedInput()))
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    original_stdout, raw_stdout = sys.stdout, _FaultRecordingOutput(open_at_start=sys.stdout is not None)
    is_unbuffered = isinstance(getattr(original_stdout, "buffer", None), io.RawIOBase)  # PYTHONUNBUFFERED
    sys.stdout = TextIOWrapper(
        cast("io.BufferedWriter", raw_stdout) if is_unbuffered else io.BufferedWriter(raw_stdout),
        encoding=getattr(original_stdout, "encoding", None),
        line_buffering=original_stdout is not None and original_stdout.isatty(),
        write_through=is_unbuffered,
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # help texts are not ASCII
            stream.reconfigure(errors=ESCAPE_HANDLER if stream is sys.stderr else REPLACE_HANDLER)


def discard_if_output_closed() -> None:
    """If standard output is closed, discard the output of the user's code, as Python does."""
    output = _find_own_output()
    if output is not None:
        output.open_at_start = True  # descriptor 1 now belongs to the null device


def find_output_fault() -> OSError | None:
    """Return the error of the last write to standard output, or None if it succeeded."""
    output = _find_own_output()
    return None if output is None else output.fault


def run_and_check_output(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit with its status, or with status 1 and a message if its output could not be written.

    If the reader of the pipe has exited, no message is printed and the status is 141, as after SIGPIPE. If the command
    fails with a status above 1, that status is kept.
    """
    exit_request = SystemExit(0)
    try:
        command()
    except SystemExit as command_exit:
        exit_request = command_exit
    except OSError:
        if find_output_fault() is None:
            raise
    with suppress(OSError):
        sys.stdout.flush()
    output = _find_own_output()
    if output is not None and output.fault is not None:
        was_open_at_start = output.open_at_start
        if not was_open_at_start:
            print("leasehold: standard output is closed", file=sys.stderr)
        elif not isinstance(output.fault, BrokenPipeError):
            print(f"leasehold: standard output cannot be written: {output.fault.strerror}", file=sys.stderr)
        # Redirect standard output to the null device. Otherwise Python would try to write the buffered output again at
        # exit, and fail.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, 1)
        os.close(null_device)
        output.open_at_start = True
        is_broken_pipe = isinstance(output.fault, BrokenPipeError) and was_open_at_start
        # Click itself exits with status 1 on a broken pipe.
        exit_request = SystemExit(PIPE_STATUS) if is_broken_pipe and exit_request.code in {None, 0, 1} else exit_request
        exit_request = exit_request if exit_request.code else SystemExit(1)
    raise exit_request


def _find_own_output() -> _FaultRecordingOutput | None:
    """Return the raw file that we put under standard output, or None if a test or a caller has replaced that stream."""
    raw_file = getattr(sys.stdout, "buffer", None)
    raw_file = getattr(raw_file, "raw", raw_file)
    return raw_file if isinstance(raw_file, _FaultRecordingOutput) else None
