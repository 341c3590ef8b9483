"""A session of Python as a reader has one: blocks come in as JSON, one a line; what each printed goes out.

A program that listens to SIGTERM stays until it is told to end, and is told so once it has printed something.
"""

import contextlib
import io
import json
import os
import signal
import sys
from typing import Any


class Printed(io.StringIO):
    """What a block prints; the first of it ends what is at work."""

    def write(self, text: str) -> int:
        """Keep it."""
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def main() -> None:
    """Run block after block, each knowing what those before it defined."""
    answers, names = os.fdopen(os.dup(1), "w"), dict[str, Any](__name__="__main__")
    os.dup2(2, 1)  # children that write there are not answers
    for line in sys.stdin:
        page, text = json.loads(line)
        with contextlib.redirect_stdout(Printed()) as printed:
            exec(compile(text, page, "exec"), names)  # noqa: S102  the page is ours
        print(json.dumps(printed.getvalue()), file=answers, flush=True)


if __name__ == "__main__":
    main()
