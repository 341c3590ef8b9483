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
from leasehold_lab.simulator.scenario import name_group_workers
from leasehold_lab.simulator.world.tasks import TaskScheduler

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
    available: float = field(init=False)
    at: float = 0.0

    @available.default
    def _full(self) -> float:
        return self.per_second

    def accept(self, now: float) -> bool:
        """Count a request, and return whether it is within the quota."""
        self.available = min(self.per_second, self.available + (now - self.at) * self.per_second)
        self.at = now
        accepted = self.available >= 1
        self.available -= accepted
        return accepted


@define
class Service:
    """The simulated Kinesis of an account, with its numbers of requests and rejections."""

    tasks: TaskScheduler
    draw: random.Random
    shards: int
    quotas: dict[str, Quota] = field(
        factory=lambda: {"DescribeStreamSummary": Quota(SUMMARIES), "ListShards": Quota(LISTINGS)}
    )
    requests: Counter[str] = field(factory=Counter)
    rejections: Counter[str] = field(factory=Counter)

    def describe_stream_summary(self, **_question: object) -> Any:  # noqa: ANN401  as boto3's
        """Return the summary of the stream."""
        self._serve("DescribeStreamSummary")
        return SUMMARY

    def list_shards(self, **request: object) -> Any:  # noqa: ANN401  likewise
        """Return a page of a listing. It contains no shards, because only the number of requests matters."""
        self._serve("ListShards")
        page = int(str(request.get("NextToken", 0))) + 1
        next_page = {"NextToken": str(page)} if page * PAGE_SIZE < self.shards else {}
        return {"Shards": [], "ResponseMetadata": {"HTTPHeaders": {}}, **next_page}

    def _serve(self, operation: str) -> None:
        for may_retry in (True, False):
            self.tasks.sleep(ANSWER_SECONDS)
            self.requests[operation] += 1
            if self.quotas[operation].accept(self.tasks.now):
                return
            self.rejections[operation] += 1
            if may_retry:
                self.tasks.sleep(self.draw.random())  # botocore's standard mode: up to a second before the second try
        raise ClientError({"Error": {"Code": "LimitExceededException", "Message": "slow down"}}, operation)


def worker(tasks: TaskScheduler, service: Service, name: str, shard_count: int, opened: list[float]) -> None:
    """Simulate a worker that lists the shards, identifies the stream, and opens its shards.

    The time when each shard was opened is added to `opened`.
    """
    tasks.sleep(start_seconds(name, Config()))
    source = KinesisSource(service, "orders", clock=lambda: tasks.now)  # type: ignore[arg-type]  # it stands in for one
    try:
        source.shards()
        source.incarnation()
    except SourceUnavailable:
        pass  # the worker retries at its next listing, and meanwhile takes its leases and opens their shards
    for number in range(shard_count):
        tasks.start(partial(_open_shard, tasks, service, source, Lease(f"{name}-{number}"), opened))


def _open_shard(
    tasks: TaskScheduler, service: Service, source: KinesisSource, lease: Lease, opened: list[float]
) -> None:
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
    arguments = options.parse_args()
    logging.disable(logging.CRITICAL)
    for size in map(int, arguments.workers.split(",")):
        random.seed(arguments.seed)  # the source draws its waits from there
        tasks, opened = TaskScheduler(), list[float]()
        service = Service(tasks, random.Random(arguments.seed), size * arguments.each)  # noqa: S311  a seed is the point
        for name in name_group_workers(0, size):
            tasks.start(partial(worker, tasks, service, name, arguments.each, opened))
        tasks.run(600.0)
        tasks.close()
        assert len(opened) == size * arguments.each, "some shard was not opened"
        requests = ", ".join(
            f"{service.requests[operation]} {operation} ({service.rejections[operation]} refused)"
            for operation in service.quotas
        )
        opened.sort()
        print(
            f"{size} workers, {arguments.each} shards each: half of the shards are open after "
            f"{opened[len(opened) // 2]:.1f} s, all after {opened[-1]:.1f} s; {requests}"
        )


if __name__ == "__main__":
    main()
