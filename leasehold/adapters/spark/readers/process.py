"""A reader as a process on the planner's machine. It reads its spec from standard input, and ends with the planner."""

import os
import signal
import sys

from pyspark import cloudpickle

from leasehold.adapters.spark.processes import speak
from leasehold.adapters.spark.readers.reader import ShardReader


def main() -> None:
    """Run the reader until the planner is gone."""
    # Ctrl-C signals all processes of a terminal, but this one must outlive the planner.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    speak()
    # Unpickle only from this pipe, which is the planner's, and nothing that arrives over a network.
    spec = cloudpickle.loads(sys.stdin.buffer.read())
    try:
        ShardReader(spec).run()
    finally:
        os._exit(0)  # do not wait for threads that wait for a response of the service


if __name__ == "__main__":
    main()
