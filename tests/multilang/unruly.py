"""A child that misbehaves at random: it crashes, hangs, prints noise, and checkpoints late or wrongly.

    unruly.py FOLDER SEED WORKER

Before a child misbehaves, it counts the fault in a file of its shard, because the children of a shard share a limited
number of faults. Another file of the shard lists the messages that its children read, in order, with their workers.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

DEEDS = ("crash", "hang", "close", "wrong", "babble", "null", "surplus", "stderr")
MOST_FAULTS = 6
CHANCE = 0.2


def send(message: dict[str, Any]) -> None:
    """Write one message."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def checkpoint(number: str | None) -> str | None:
    """Request a checkpoint, and return the daemon's error or None."""
    send({"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": None})
    error: str | None = json.loads(sys.stdin.readline())["error"]
    return error


def misbehave(fault: str, draw: random.Random) -> None:
    """Misbehave in the given way. After some faults, the child does not respond any more."""
    match fault:
        case "crash":
            os.kill(os.getpid(), draw.choice([signal.SIGKILL, signal.SIGSEGV]))
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        case "close":
            os.close(1)
            time.sleep(600)
        case "wrong":
            send({"action": "status", "responseFor": "nothing"})
        case "babble":
            sys.stdout.write("debug\n\n\x00\xff {" * 5000 + "\n")
        case "null":
            sys.stdout.write("null\n" + "x" * 100_000 + "\n")
        case "fork":
            # The forked process keeps its parent's pipes open, and is not notified when its parent ends.
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
                os._exit(0)
            os._exit(0)
        case "surplus":
            checkpoint(str(10**60))
            checkpoint("-1")
        case _:
            sys.stderr.write("no line end" * 1000)


def main(folder: Path, seed: str, worker: str) -> None:
    """Respond to every message, unless a fault prevents it."""
    shard, random_source = "", random.Random()  # noqa: S311  random faults
    for line in sys.stdin:
        message = json.loads(line)
        action = message["action"]
        if action == "initialize":
            shard = message["shardId"]
            earlier_child_count = len(list(folder.glob(f"{shard}.*")))
            random_source = random.Random(f"{seed} {shard} {earlier_child_count}")  # noqa: S311  likewise
        with (folder / f"asked-{shard}").open("a") as log:
            log.write(f"{worker} {os.getpid()} {action}\n")
        own_file = folder / f"{shard}.{os.getpid()}"
        own_file.touch()
        numbers = [record["sequenceNumber"] for record in message.get("records", ())]
        processed_count = random_source.randint(0, len(numbers)) if random_source.random() < CHANCE else len(numbers)
        with own_file.open("a") as notes:
            notes.write("".join(f"{number}\n" for number in numbers[:processed_count]))
        fault_count_file = folder / f"misdeeds-{shard}"
        count = int(fault_count_file.read_text()) if fault_count_file.exists() else 0
        if count < MOST_FAULTS and random_source.random() < CHANCE:
            fault_count_file.write_text(str(count + 1))
            misbehave(random_source.choice(DEEDS), random_source)
        with own_file.open("a") as notes:
            notes.write("".join(f"{number}\n" for number in numbers[processed_count:]))
        if action in {"shutdownRequested", "shardEnded"} or (numbers and random_source.random() < 0.5):
            # Without a number, the checkpoint is at the last record that was delivered.
            checkpoint(
                None if action != "processRecords" or random_source.random() < 0.5 else random_source.choice(numbers)
            )
        send({"action": "status", "responseFor": action})


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
