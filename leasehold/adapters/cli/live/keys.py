"""Keys of a terminal, one at a time, without an echo; whatever happens, the terminal is left as it was."""

import codecs
import os
import re
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from attrs import define, field

ESCAPE_SECONDS = 0.05
"""An escape that no further character follows for so long is the key itself, and no beginning of another."""

NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page-up",
    "\x1b[6~": "page-down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
}
"""The sequences that terminals send for keys that are no characters."""

_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


def keys_in(text: str) -> tuple[str, ...]:
    """The keys that a terminal sent: names of those in NAMES, else characters; unknown sequences are dropped."""
    found = (NAMES.get(sent, sent) for sent in _KEY.findall(text))
    return tuple(key for key in found if key.isprintable())


def has_keys() -> bool:
    """Whether this Python can ask a terminal for single keys."""
    return find_spec("termios") is not None


@define
class TerminalKeys:
    """The keys of a terminal that is set to send each as it is pressed."""

    _fd: int
    _decoder: codecs.IncrementalDecoder = field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def pressed(self, seconds: float) -> tuple[str, ...]:
        """The keys pressed next, as soon as there are any; none after so many seconds. Raises EOFError at the end."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            text = self._sent(left)
            # The rest of a long sequence may come a little later.
            while text.endswith(("\x1b", "\x1b[", "\x1bO")) and (more := self._sent(ESCAPE_SECONDS)):
                text += more
            if found := keys_in(text):
                return found
        return ()

    def _sent(self, seconds: float) -> str:
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        data = os.read(self._fd, 1024)
        if not data:
            raise EOFError("the terminal is gone")
        return self._decoder.decode(data)


@contextmanager
def terminal_keys(fd: int) -> Iterator[TerminalKeys]:
    """The keys of this terminal until the block is left; Ctrl-C interrupts as ever, Ctrl-Z does not suspend."""
    import termios  # noqa: PLC0415  not every system has it: ask `has_keys`
    import tty  # noqa: PLC0415  likewise

    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        # Suspended, the process would leave its picture on the screen and the shell without an echo.
        now = termios.tcgetattr(fd)
        now[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, now)
        yield TerminalKeys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
