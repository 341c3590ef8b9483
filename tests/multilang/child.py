"""A child process that behaves as its argument says. It implements the protocol as another language's library would."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def send(message: dict[str, object]) -> None:
    """Write one message."""
    sys.stdout.write("\n" + json.dumps(message) + "\n")
    sys.stdout.flush()


def log(text: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def note(shard: str, message: dict[str, Any]) -> None:
    """Write a message's records to a file if CHILD_NOTES is set, because a killed daemon prints no more lines."""
    if folder := os.environ.get("CHILD_NOTES"):
        lines = "".join(
            f"{record['partitionKey']} {record['sequenceNumber']}\n" for record in message.get("records", ())
        )
        with Path(folder, f"{shard}.{os.getpid()}").open("a") as notes:
            notes.write(lines)


def main(behavior: str, misbehave_at: str) -> None:  # noqa: C901  one case per behavior
    """Respond to every message, and misbehave when the given action is requested."""
    shard = ""
    for line in sys.stdin:
        message = json.loads(line)
        action = message["action"]
        shard = message.get("shardId", shard)
        note(shard, message)
        if action == "checkpoint":
            log(f"INFO checkpoint {message['error']}")
            continue
        log(f"got {action} {len(message.get('records', []))}")
        if any(base64.b64decode(record["data"]) == behavior.encode() for record in message.get("records", [])):
            sys.exit(9)
        if behavior in {"faithful", "poison"} and action in {"processRecords", "shutdownRequested", "shardEnded"}:
            send({"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None})
        if behavior == "late" and action == misbehave_at:
            # The first child of a shard hangs here. The shard's later children do not.
            hung_file = Path(os.environ["CHILD_NOTES"], f"hung-{shard}")
            if not hung_file.exists():
                hung_file.touch()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            send({"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None})
        elif action == misbehave_at:
            match behavior:
                case "crash":
                    sys.exit(9)
                case "hang":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    time.sleep(600)
                case "long" | "endless":
                    sys.stderr.write("y" * 200_000 if behavior == "long" else "no line end")
                    sys.stderr.flush()
                case "babble":
                    for _ in range(3000):
                        sys.stdout.write("debug " + "x" * 100 + "\n")
                case "close":
                    os.close(1)
                    time.sleep(600)
                case "wrong":
                    send({"action": "status", "responseFor": "leaseLost"})
                case "orphan":
                    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                    log(f"has started {grandchild.pid}")
                    sys.exit(0)
                case "parent":
                    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                    Path(os.environ["CHILD_NOTES"], f"started.{os.getpid()}").write_text(str(grandchild.pid))
                case "checkpoint":
                    send({"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None})
                    send({"action": "checkpoint", "sequenceNumber": "7", "subSequenceNumber": None})
        send({"action": "status", "responseFor": action})


if __name__ == "__main__":
    main(*sys.argv[1:])
