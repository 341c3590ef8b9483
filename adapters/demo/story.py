"""What happens in the demo, in which order, and what a newcomer is told about it."""

from collections.abc import Callable
from itertools import pairwise

from adapters.demo.child import Child
from adapters.demo.names import shard_names, short
from adapters.demo.producer import sent_of
from adapters.demo.stage import Stage, StageError
from adapters.demo.tail import Tail
from adapters.history.judge import Verdict
from adapters.history.told import Sent

SETTLE_SECONDS = 25.0
STEADY_SECONDS = 1.5
ARRIVE_SECONDS = 30.0

Say = Callable[[str], None]


class Story:
    """One showing.

    say   tells the audience what happens and why
    rate  records put per second
    """

    def __init__(self, stage: Stage, endpoint: str, say: Say, rate: int) -> None:
        self.sent: list[Sent] = []
        self.chapter = "Setting up"
        self._stage, self._say = stage, say
        command = ("-m", "adapters.demo.producer", endpoint, stage.stream.name, str(rate))
        self._producer = Child("producer", command, stage.folder)
        self._produced = Tail(self._producer.out, sent_of)

    def run(self) -> Verdict:
        """All of it; the verdict. Raises StageError if something that should run does not."""
        try:
            self._join_three()
            self._kill()
            self._replace()
            self._reshape()
            self._finish()
        finally:
            self._producer.kill()
        return self._stage.verdict(self.sent)

    def look(self) -> None:
        """Take in what the producer has written since."""
        self.sent += self._produced.more()

    def _join_three(self) -> None:
        stage = self._stage
        self._begin("A worker starts alone", f"worker-1 starts. {stage.open_shards} shards are free: it takes them all.")
        stage.join("worker-1")
        self._settled()
        self._begin("Two more join", "worker-2 and worker-3 start. Nobody directs them: each reads the table and asks")
        self._say("for what it lacks; an owner finishes its batch, writes how far it came, and hands over.")
        stage.join("worker-2")
        self._settled()
        stage.join("worker-3")
        self._settled()

    def _kill(self) -> None:
        stage = self._stage
        held = shard_names(lease.shard for lease in stage.leases if lease.owner == "worker-2")
        stage.kill("worker-2")
        self._begin("A worker is killed", f"worker-2 is killed (SIGKILL) while it reads {held}. It says goodbye to nobody;")
        self._say("its leases stop being renewed, and after 3 s the others may take them, where it last checkpointed.")
        self._settled()
        last = stage.deeds[-1].t
        waits = [(tenure.begin - last) / 1000 for tenure in stage.reading.tenures if tenure.begin > last]
        if waits:
            self._say(f"Read again {max(waits):.1f} s after the kill.")

    def _replace(self) -> None:
        self._begin("A worker is added", "worker-4 starts. Only as many leases move as must, each in an orderly hand-over.")
        self._stage.join("worker-4")
        self._settled()

    def _reshape(self) -> None:
        stage = self._stage
        shard = stage.split()
        self._begin("A shard is split", f"Shard {short(shard)} is split in two. It is read to its end first,")
        self._say("then its children get leases, so that no key's records overtake each other.")
        self._settled()
        left, right = stage.merge()
        self._begin("Two shards are merged", f"Shards {short(left)} and {short(right)} are merged into one,")
        self._say("which is read only when both are finished.")
        self._settled()

    def _finish(self) -> None:
        stage = self._stage
        self._begin("The end", "The producer stops; what is on its way arrives; the workers release their leases.")
        self._producer.ask_to_end()
        status = self._producer.wait()
        if status:
            raise StageError(f"the producer ended with status {status}; its last words:\n{self._producer.said}")
        self.look()
        stage.until(lambda: len(stage.distinct) >= len(self.sent), ARRIVE_SECONDS)
        stage.end()

    def _begin(self, chapter: str, what: str) -> None:
        self.chapter = chapter
        self._say(what)

    def _settled(self) -> None:
        stage = self._stage
        before = len(stage.reading.tenures)
        if not stage.until(stage.balanced, SETTLE_SECONDS):
            self._say(f"Not balanced after {SETTLE_SECONDS:g} s.")
            return
        stage.pause(STEADY_SECONDS)
        counts = ", ".join(f"{worker} {count}" for worker, count in sorted(stage.held().items()))
        moved = _moves_since(stage, before)
        self._say(f"Balanced: {counts}" + (f" ({moved} moved)." if moved else "."))


def _moves_since(stage: Stage, before: int) -> int:
    """Shards that a new reader took over from a living one."""
    fresh = {id(tenure) for tenure in stage.reading.tenures[before:]}
    shards = {tenure.shard for tenure in stage.reading.tenures[before:]}
    readers = ([tenure for tenure in stage.reading.tenures if tenure.shard == shard] for shard in shards)
    return sum(
        id(after) in fresh and earlier.how not in {"cut", "shard-ended"} for each in readers for earlier, after in pairwise(each)
    )
