"""Runs a reader's Python session. Reads code blocks as lines of JSON, and prints the output of each block as JSON.

A program that handles SIGTERM would keep running, so it gets this signal as soon as it has printed something.
"""

import contextlib
import io
import json
import os
import signal
import sys
from typing import Any


class BlockOutput(io.StringIO):
    """Collects the output of a block. The first output makes a running program end."""

    def write(self, text: str) -> int:
        """Keep the text, and send SIGTERM to this process if the block handles that signal."""
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def main() -> None:
    """Run each block with the names that earlier blocks defined."""
    responses, namespace = os.fdopen(os.dup(1), "w"), dict[str, Any](__name__="__main__")
    os.dup2(2, 1)  # output of child processes must not mix with the responses
    for line in sys.stdin:
        page, text = json.loads(line)
        with contextlib.redirect_stdout(BlockOutput()) as output:
            exec(compile(text, page, "exec"), namespace)  # noqa: S102  the page is ours
        print(json.dumps(output.getvalue()), file=responses, flush=True)


if __name__ == "__main__":
    main()
