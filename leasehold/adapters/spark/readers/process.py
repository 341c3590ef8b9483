"""A reader as a process of the planner's machine: it is told all on its standard input, and ends with the planner."""

import os
import signal
import sys

from pyspark import cloudpickle

from leasehold.adapters.spark.processes import speak
from leasehold.adapters.spark.readers.reader import ShardReader


def main() -> None:
    """Read until the planner is gone."""
    # Ctrl-C goes to all processes of a terminal: this one ends once the planner has.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    speak()
    # From the pipe alone, which is the planner's: nothing that comes over a network is ever unpickled.
    spec = cloudpickle.loads(sys.stdin.buffer.read())
    try:
        ShardReader(spec).run()
    finally:
        os._exit(0)  # threads that wait for an answer of the service are not waited for


if __name__ == "__main__":
    main()
