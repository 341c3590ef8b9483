"""Runs a command until it ends, or until the process that started the guard ends.

The starter holds the other end of standard input. Closing it is the only way to stop the command, and a starter that
dies, however suddenly, closes it too. No module of the project may be imported here: the guard is run as a file by a
bare interpreter, so that it costs next to nothing.
"""

import os
import subprocess
import sys
import threading

GRACE_SECONDS = 2.0
GRACE = "LEASEHOLD_GRACE_SECONDS"
"""The environment variable that gives a command more time to end in good order."""


def _stop_when_alone(command: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    command.terminate()
    try:
        command.wait(float(os.environ.get(GRACE, GRACE_SECONDS)))
    except subprocess.TimeoutExpired:
        command.kill()


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    command = subprocess.Popen(arguments, stdin=subprocess.DEVNULL)  # noqa: S603  running a command is the point
    threading.Thread(target=_stop_when_alone, args=(command,), daemon=True).start()
    return command.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
