"""Runs a reader's Python session: blocks come in as JSON, one per line, and the output of each goes out.

A program that listens to SIGTERM keeps running until it is told to end, which happens once it has printed something.
"""

import contextlib
import io
import json
import os
import signal
import sys
from typing import Any


class Printed(io.StringIO):
    """The output of a block; its first text ends a program that is running."""

    def write(self, text: str) -> int:
        """Keep the text."""
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def main() -> None:
    """Run block after block, each with the names that earlier ones defined."""
    answers, names = os.fdopen(os.dup(1), "w"), dict[str, Any](__name__="__main__")
    os.dup2(2, 1)  # output of child processes must not mix with the responses
    for line in sys.stdin:
        page, text = json.loads(line)
        with contextlib.redirect_stdout(Printed()) as printed:
            exec(compile(text, page, "exec"), names)  # noqa: S102  the page is ours
        print(json.dumps(printed.getvalue()), file=answers, flush=True)


if __name__ == "__main__":
    main()
