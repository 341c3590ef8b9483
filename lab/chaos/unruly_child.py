"""A child process of `leasehold multilang` that records its messages, and misbehaves on orders from a file.

This is a separate program, like a record processor in another language. It writes event lines for the judge. The line
of
a record is written before anything else is done with the record. CHAOS_EVENTS is the path of the event file of the
daemon's process, and CHAOS_ORDERS the path of the order file of the worker.
"""

import base64
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests" / "multilang"))

from unruly import checkpoint, misbehave, send

TRUE_CLOCK = 5
"""Linux's CLOCK_REALTIME_COARSE, which chaos does not step."""
SLOW_SECONDS = 2.0
GONE_SECONDS = 10.0
CHANCE = 0.3
CHECKPOINT_PROBABILITY = 0.3
"""The probability that a checkpoint follows a message."""


class EventFile:
    """The event file of one daemon's process, for one shard."""

    def __init__(self, path: Path, shard: str) -> None:
        self._to, self._shard = path, shard
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, records: list[dict[str, Any]] | None = None) -> None:
        """Write one event, or one event per record. A single write keeps the lines of several children from mixing."""
        event_lines = [{"event": event}] if records is None else [_build_record_fields(record) for record in records]
        common_fields = {"t": round(time.clock_gettime(TRUE_CLOCK) * 1000), "worker": "", "shard": self._shard}
        os.write(self._file, "".join(json.dumps(common_fields | line) + "\n" for line in event_lines).encode())

    def begin(self) -> None:
        """Record that this child starts to read its shard.

        It is a fault if another child of the same daemon is still reading the shard.
        """
        pid_file = self._to.with_suffix(f".{self._shard}")
        former_pid = int(pid_file.read_text()) if pid_file.exists() else 0
        pid_file.write_text(str(os.getpid()))
        deadline = time.monotonic() + GONE_SECONDS
        while former_pid and _is_running(former_pid) and time.monotonic() < deadline:
            time.sleep(0.05)  # it may still be exiting, but no longer reads
        if former_pid and _is_running(former_pid):
            self._to.with_suffix(".faults").open("a").write(f"{self._shard} has two children, {former_pid} being one\n")
        self.write("initialize")


def _build_record_fields(message_record: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha1(base64.b64decode(message_record["data"]), usedforsecurity=False).hexdigest()
    number_fields = {
        "sequence_number": message_record["sequenceNumber"],
        "sub_sequence_number": message_record["subSequenceNumber"],
    }
    return {"event": "record", "partition_key": message_record["partitionKey"], "sha1": digest, **number_fields}


def _is_running(group: int) -> bool:
    """Return whether a process of this group is running. Zombies do not count."""
    for process_folder in Path("/proc").iterdir():
        try:
            process_state, _, process_group = (process_folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(process_group) == group and process_state not in "ZX":
            return True
    return False


def main(event_path: Path, orders: Path) -> None:
    """Respond to every message, but misbehave at random if the order file requests it."""
    rng = random.Random()  # noqa: S311  when to misbehave
    event_file, outcome, last_sequence_number = None, "", None
    for line in sys.stdin:
        message = json.loads(line)
        action = message["action"]
        if action == "initialize":
            event_file = EventFile(event_path, message["shardId"])
            event_file.begin()
        assert event_file is not None
        current_order = orders.read_text()
        misbehavior = (
            current_order.removeprefix("child ") if current_order.startswith("child ") and rng.random() < CHANCE else ""
        )
        records = message.get("records", [])
        split_index = rng.randint(0, len(records)) if misbehavior else len(records)
        if records[:split_index]:
            event_file.write("record", records[:split_index])
            last_sequence_number = records[split_index - 1]["sequenceNumber"]
        if misbehavior == "slow":
            time.sleep(SLOW_SECONDS)
        elif misbehavior and misbehavior != "forget":
            # Misbehave before the remaining records are written to the event file. If the daemon then treats the
            # message as handled, the judge reports those records as lost.
            misbehave(misbehavior, rng)
        if records[split_index:]:
            event_file.write("record", records[split_index:])
            last_sequence_number = records[-1]["sequenceNumber"]
        if misbehavior != "forget" and (
            action in {"shutdownRequested", "shardEnded"} or (records and rng.random() < CHECKPOINT_PROBABILITY)
        ):
            outcome = try_checkpoint(
                last_sequence_number if records or action == "shutdownRequested" else None, at_end=not records
            )
        if action == "leaseLost" or (action == "shardEnded" and outcome == "stored"):
            event_file.write("lease-lost" if action == "leaseLost" else "shard-ended")
        send({"action": "status", "responseFor": action})


def try_checkpoint(number: str | None, *, at_end: bool) -> str:
    """Checkpoint at `number`, or at the end of the shard if that is None. Return "stored" on success, otherwise "".

    With `at_end`, retry if the store throttles or does not respond, because this is the last chance to checkpoint.
    """
    for _ in range(5 if at_end else 1):
        error = checkpoint(number)
        if error in {None, "ShutdownException"}:
            return "stored" if error is None else ""
        time.sleep(0.3)
    return ""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(Path(os.environ["CHAOS_EVENTS"]), Path(os.environ["CHAOS_ORDERS"]))
