"""Runs the events of the demo in order, and explains each event to the user in a sentence."""

import time
from collections.abc import Callable

from leasehold_lab.demo.child import Child
from leasehold_lab.demo.producer import parse_sent_record
from leasehold_lab.demo.stage import Stage, StageError, Tail, format_shard_names, shorten_shard_id
from leasehold_lab.judge.events import SentRecord
from leasehold_lab.judge.explanations import RunVerdict

SETTLE_SECONDS = 25.0
STEADY_SECONDS = 2.0
ARRIVE_SECONDS = 30.0


class Story:
    """One run of the demo, with its events and their explanations.

    Attributes:
        sent: The records that the stream acknowledged.
        chapter: The heading of the current event.
        sentences: The sentences so far, each with its time in seconds since the start.
        on_sentence: Called with the time and the text of each new sentence.
        on_update: Called whenever the display should be updated.
    """

    def __init__(self, stage: Stage, endpoint: str, rate: int) -> None:
        self.sent: list[SentRecord] = []
        self.chapter = ""
        self.sentences: list[tuple[float, str]] = []
        self.on_sentence: Callable[[float, str], None] = lambda _seconds, _what: None
        self.on_update: Callable[[], None] = lambda: None
        self._stage, self._began = stage, time.monotonic()
        stage.watched = self._update_progress
        command = ("-m", "leasehold_lab.demo.producer", endpoint, stage.stream.name, str(rate))
        self._producer = Child("producer", command, stage.folder)
        self._sent_tail = Tail(self._producer.out, parse_sent_record)

    @property
    def elapsed_seconds(self) -> float:
        """The number of seconds since the start of the run."""
        return time.monotonic() - self._began

    def run(self) -> RunVerdict:
        """Run the demo, and return the verdict. Raises StageError if a process ends unexpectedly."""
        try:
            self._start_chapter(
                "A worker starts alone",
                f"worker-1 starts. All {self._stage.open_shards} shards of the stream are free, and it takes them.",
            )
            self._start_worker("worker-1")
            self._start_chapter(
                "Two workers join",
                "worker-2 starts. There is no coordinator: it reads the lease table and requests its share of leases. "
                "An owner finishes its batch, writes a checkpoint, and hands the lease off.",
            )
            self._start_worker("worker-2")
            self._add_sentence("worker-3 starts, and gets a third of the leases from both.")
            self._start_worker("worker-3")
            self._kill_worker()
            self._start_chapter(
                "A worker is added", "worker-4 starts. As few leases as possible move, each by a hand-off."
            )
            self._start_worker("worker-4")
            self.chapter = "A shard is split"
            self._add_sentence(
                f"Shard {shorten_shard_id(self._stage.split())} is split in two. It is read to its end "
                "first; then its children get leases, so that no record overtakes an earlier one of its key."
            )
            self._wait_until_balanced()
            self.chapter = "Two shards are merged"
            first_shard, second_shard = map(shorten_shard_id, self._stage.merge())
            self._add_sentence(
                f"Shards {first_shard} and {second_shard} are merged. Their child is read once both are finished."
            )
            self._wait_until_balanced()
            self._finish_run()
        finally:
            self._producer.kill()
        return self._stage.verdict(self.sent)

    def _update_progress(self, _stage: Stage) -> None:
        self.sent += self._sent_tail.read_new_items()
        self.on_update()

    def _add_sentence(self, sentence: str) -> None:
        self.sentences.append((self.elapsed_seconds, sentence))
        self.on_sentence(*self.sentences[-1])
        self.on_update()

    def _kill_worker(self) -> None:
        stage = self._stage
        shards = format_shard_names(
            lease.shard for lease in stage.leases if lease.owner == "worker-2" and not lease.ended
        )
        self.chapter = "A worker is killed"
        stage.kill("worker-2")
        self._add_sentence(
            f"worker-2 is killed (SIGKILL) while it reads {shards}. No one is notified. Its leases are no longer "
            "renewed, and after 3 s other workers may take them and continue from its last checkpoint. Records after "
            "that checkpoint are dispatched again."
        )
        self._wait_until_balanced()
        kill_time = stage.history.incidents[-1].t
        wait_times = [tenure.begin - kill_time for tenure in stage.reading.tenures if tenure.begin > kill_time]
        self._add_sentence(f"All its shards are read again {max(wait_times, default=0.0):.1f} s after the kill.")

    def _finish_run(self) -> None:
        stage = self._stage
        self._start_chapter(
            "The end", "The producer stops, the last records arrive, and the workers release their leases."
        )
        self._producer.ask_to_end()
        exit_status = self._producer.wait()
        if exit_status:
            raise StageError(
                f"the producer ended with status {exit_status}; its last words:\n{self._producer.last_output}"
            )
        stage.tick()
        stage.until(lambda: len(stage.distinct_records) >= len(self.sent), ARRIVE_SECONDS)
        stage.end()

    def _start_worker(self, worker: str) -> None:
        self._stage.join(worker)
        self._wait_until_balanced()

    def _start_chapter(self, chapter: str, sentence: str) -> None:
        self.chapter = chapter
        self._add_sentence(sentence)

    def _wait_until_balanced(self) -> None:
        stage = self._stage
        tenure_count_before = len(stage.reading.tenures)
        if not stage.until(stage.is_balanced, SETTLE_SECONDS):
            self._add_sentence(f"Not balanced after {SETTLE_SECONDS:g} s.")
            return
        stage.pause(STEADY_SECONDS)
        lease_counts = ", ".join(
            f"{worker} {count}" for worker, count in sorted(stage.count_leases_of_workers().items())
        )
        # Count the shards that have moved since the last event. A shard has moved if a living reader was replaced
        # before it
        # reached the end of the shard.
        tenures = stage.reading.tenures
        earlier_tenures = {tenure.shard: tenure for tenure in tenures[:tenure_count_before]}
        moved_count = 0
        for tenure in tenures[tenure_count_before:]:
            previous_tenure = earlier_tenures.get(tenure.shard)
            moved_count += previous_tenure is not None and previous_tenure.how not in {"cut", "shard-ended"}
            earlier_tenures[tenure.shard] = tenure
        self._add_sentence(f"Balanced: {lease_counts}" + (f" ({moved_count} moved)." if moved_count else "."))
