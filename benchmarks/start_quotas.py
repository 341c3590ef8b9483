"""Measures how long a fleet whose workers all start at the same time is delayed by the quotas of Kinesis.

    python benchmarks/start_quotas.py [--workers 10,100,1000] [--each 10] [--seed 1]

The benchmark runs under virtual time, so its results are the same on all machines. The source is the real one. Workers
wait as rule C15 requires, and after failed reads, and botocore retries each request once. The simulated service rejects
requests above its quotas, which are 20 requests per second for DescribeStreamSummary per account, and 1,000 requests
per second for ListShards per stream.
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
    """A quota of requests per second, which is also the largest possible burst."""

    per_second: float
    left: float = field(init=False)
    at: float = 0.0

    @left.default
    def _full(self) -> float:
        return self.per_second

    def takes(self, now: float) -> bool:
        """Count a request, and return whether it is within the quota."""
        self.left = min(self.per_second, self.left + (now - self.at) * self.per_second)
        self.at = now
        served = self.left >= 1
        self.left -= served
        return served


@define
class Service:
    """The simulated Kinesis of an account, with its numbers of requests and rejections."""

    tasks: Tasks
    draw: random.Random
    shards: int
    quotas: dict[str, Quota] = field(
        factory=lambda: {"DescribeStreamSummary": Quota(SUMMARIES), "ListShards": Quota(LISTINGS)}
    )
    asked: Counter[str] = field(factory=Counter)
    refused: Counter[str] = field(factory=Counter)

    def describe_stream_summary(self, **_question: object) -> Any:  # noqa: ANN401  as boto3's
        """Return the summary of the stream."""
        self._served("DescribeStreamSummary")
        return SUMMARY

    def list_shards(self, **question: object) -> Any:  # noqa: ANN401  likewise
        """Return a page of a listing. It contains no shards, because only the number of requests matters."""
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
    """Simulate a worker that lists the shards, identifies the stream, and opens its shards.

    The time when each shard was opened is added to `opened`.
    """
    tasks.sleep(start_seconds(name, Config()))
    source = KinesisSource(service, "orders", clock=lambda: tasks.now)  # type: ignore[arg-type]  # it stands in for one
    try:
        source.shards()
        source.incarnation()
    except SourceUnavailable:
        pass  # retried at its next listing; meanwhile it takes its leases and opens their shards
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
    """Measure, and print a line for each size of the fleet."""
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
