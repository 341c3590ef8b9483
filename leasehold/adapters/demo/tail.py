"""Follows a file that another process still writes, one whole line at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class Tail(Generic[T]):
    """The lines added to a file since the last look.

    A last line without its end is left: whoever wrote it is still at it, or was killed in the middle.
    """

    def __init__(self, path: Path, read: Callable[[bytes], T]) -> None:
        self._path, self._read = path, read
        self._place = 0

    def more(self) -> list[T]:
        """The lines that have become whole."""
        with self._path.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        return [self._read(line) for line in whole.splitlines()]
