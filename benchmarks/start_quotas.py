"""How long a fleet that starts at one moment waits for Kinesis's quotas, before it reads its shards.

    python benchmarks/start_quotas.py [--workers 10,100,1000] [--each 10] [--seed 1]

Virtual time, so that the figures are the same on each machine. The source is the real one, with the waits of a worker
(C15), of a reading that fails, and of botocore's one repetition. The service refuses what exceeds
its quotas: 20 requests a second of DescribeStreamSummary for an account, 1,000 of ListShards for a stream.
"""

import argparse
import logging
import random
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from typing import Any

from attrs import define, field
from botocore.exceptions import ClientError

from leasehold.adapters.consumer.reader_state import FAULT_WAITS
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.kinesis.source import PAGE_SIZE, KinesisSource
from leasehold.balancer.config import Config
from leasehold.balancer.lookout import start_seconds
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import SourceUnavailable
from leasehold_lab.simulator.scenario import group_of
from leasehold_lab.simulator.world.tasks import Tasks

SUMMARIES, LISTINGS = 20, 1000
ANSWER_SECONDS = 0.02
SUMMARY = {
    "StreamDescriptionSummary": {
        "StreamARN": "arn:aws:kinesis:eu-west-1:123456789012:stream/orders",
        "StreamCreationTimestamp": datetime.fromtimestamp(1, UTC),
    }
}


@define
class Quota:
    """So many requests a second, and at one moment no more than that."""

    per_second: float
    left: float = field(init=False)
    at: float = 0.0

    @left.default
    def _full(self) -> float:
        return self.per_second

    def takes(self, now: float) -> bool:
        """Whether one more is served."""
        self.left = min(self.per_second, self.left + (now - self.at) * self.per_second)
        self.at = now
        served = self.left >= 1
        self.left -= served
        return served


@define
class Service:
    """The account's Kinesis: what it was asked, and what it refused."""

    tasks: Tasks
    draw: random.Random
    shards: int
    quotas: dict[str, Quota] = field(
        factory=lambda: {"DescribeStreamSummary": Quota(SUMMARIES), "ListShards": Quota(LISTINGS)}
    )
    asked: Counter[str] = field(factory=Counter)
    refused: Counter[str] = field(factory=Counter)

    def describe_stream_summary(self, **_question: object) -> Any:  # noqa: ANN401  as boto3's
        """The summary."""
        self._served("DescribeStreamSummary")
        return SUMMARY

    def list_shards(self, **question: object) -> Any:  # noqa: ANN401  likewise
        """A page of a listing of no shards: only its requests count."""
        self._served("ListShards")
        page = int(str(question.get("NextToken", 0))) + 1
        more = {"NextToken": str(page)} if page * PAGE_SIZE < self.shards else {}
        return {"Shards": [], "ResponseMetadata": {"HTTPHeaders": {}}, **more}

    def _served(self, operation: str) -> None:
        for again in (True, False):
            self.tasks.sleep(ANSWER_SECONDS)
            self.asked[operation] += 1
            if self.quotas[operation].takes(self.tasks.now):
                return
            self.refused[operation] += 1
            if again:
                self.tasks.sleep(self.draw.random())  # botocore's standard mode: up to a second before the second try
        raise ClientError({"Error": {"Code": "LimitExceededException", "Message": "slow down"}}, operation)


def worker(tasks: Tasks, service: Service, name: str, each: int, opened: list[float]) -> None:
    """One worker: it lists, says which stream it is, and opens its shards; `opened` gets the time of each."""
    tasks.sleep(start_seconds(name, Config()))
    source = KinesisSource(service, "orders", clock=lambda: tasks.now)  # type: ignore[arg-type]  # it stands in for one
    try:
        source.shards()
        source.incarnation()
    except SourceUnavailable:
        pass  # asked again at its next listing; its leases are taken, and opened, meanwhile
    for number in range(each):
        tasks.start(partial(_opens, tasks, service, source, Lease(f"{name}-{number}"), opened))


def _opens(tasks: Tasks, service: Service, source: KinesisSource, lease: Lease, opened: list[float]) -> None:
    waits = Backoff(*FAULT_WAITS, service.draw.uniform)
    while True:
        try:
            source.open(lease, TRIM_HORIZON)
        except SourceUnavailable:
            tasks.sleep(waits.next())
        else:
            opened.append(tasks.now)
            return


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--workers", default="10,100,1000", help="sizes of the fleet, with commas between them")
    options.add_argument("--each", type=int, default=10, help="shards of a worker")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    logging.disable(logging.CRITICAL)
    for size in map(int, given.workers.split(",")):
        random.seed(given.seed)  # the source draws its waits from there
        tasks, opened = Tasks(), list[float]()
        service = Service(tasks, random.Random(given.seed), size * given.each)  # noqa: S311  a seed is the point
        for name in group_of(0, size):
            tasks.start(partial(worker, tasks, service, name, given.each, opened))
        tasks.run(600.0)
        tasks.close()
        assert len(opened) == size * given.each, "some shard was not opened"
        requests = ", ".join(
            f"{service.asked[each]} {each} ({service.refused[each]} refused)" for each in service.quotas
        )
        opened.sort()
        print(
            f"{size} workers, {given.each} shards each: half of the shards are open after "
            f"{opened[len(opened) // 2]:.1f} s, all after {opened[-1]:.1f} s; {requests}"
        )


if __name__ == "__main__":
    main()
