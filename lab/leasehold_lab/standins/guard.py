"""Runs a command until it ends, or until the process that started the guard ends.

The parent process holds the other end of the guard's standard input, and closes it to stop the command. The operating
system also closes it if the parent dies. This file must not import any module of the project, because it is run as a
script by an interpreter with minimal startup, so that it starts quickly.
"""

import os
import subprocess
import sys
import threading

GRACE_SECONDS = 2.0
GRACE = "LEASEHOLD_GRACE_SECONDS"
"""The environment variable with the number of seconds that the command has to end after SIGTERM."""


def _stop_when_orphaned(command: "subprocess.Popen[bytes]") -> None:
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
    threading.Thread(target=_stop_when_orphaned, args=(command,), daemon=True).start()
    return command.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
