"""A Kinesis client whose PutRecords requests are throttled, partly rejected or left unanswered at random."""

import random
from collections import Counter
from itertools import cycle
from typing import Any

from botocore.exceptions import ClientError, ReadTimeoutError
from types_boto3_kinesis import KinesisClient

Rows = list[dict[str, Any]]


class Faulty:
    """A client that injects faults into PutRecords, and passes all other calls on unchanged.

    rate      the share of requests that get a fault
    happened  the number of faults by name
    doubtful  user payloads of requests whose result was hidden
    """

    def __init__(self, client: KinesisClient, rate: float, seed: int = 1) -> None:
        self._client, self._rate = client, rate
        self._chance = random.Random(seed)  # noqa: S311  the seed makes it reproducible
        self._faults = cycle(("throttled", "partly refused", "lost", "lost but written"))
        self.happened: Counter[str] = Counter()
        self.doubtful: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  any attribute
        return getattr(self._client, name)

    def put_records(self, *, StreamName: str, Records: Rows) -> Any:  # noqa: ANN401, N803  the client's signature
        """Pass the request on, or inject one of the faults that the service may have."""
        fault = next(self._faults) if self._chance.random() < self._rate else "none"
        self.happened[fault] += 1
        if fault == "throttled":
            error = {"Error": {"Code": "ProvisionedThroughputExceededException", "Message": "slow down"}}
            raise ClientError(error | {"ResponseMetadata": {"HTTPStatusCode": 400}}, "PutRecords")  # type: ignore[arg-type]  # enough
        if fault == "partly refused":
            return self._partly(StreamName, Records)
        if fault == "none":
            return self._client.put_records(StreamName=StreamName, Records=Records)  # type: ignore[arg-type]  # given on
        self.doubtful += Records
        if fault == "lost but written":
            self._client.put_records(StreamName=StreamName, Records=Records)  # type: ignore[arg-type]  # likewise
        raise ReadTimeoutError(endpoint_url="injected")

    def _partly(self, stream: str, records: Rows) -> Any:  # noqa: ANN401  the client's signature
        is_accepted = [self._chance.random() < 0.5 for _ in records]
        accepted = [row for row, accept in zip(records, is_accepted, strict=True) if accept]
        results = self._client.put_records(StreamName=stream, Records=accepted)["Records"] if accepted else []  # type: ignore[arg-type]  # likewise
        results_left = iter(results)
        rejection = {"ErrorCode": "InternalFailure", "ErrorMessage": "injected"}
        return {
            "FailedRecordCount": is_accepted.count(False),
            "Records": [next(results_left) if accept else rejection for accept in is_accepted],
        }
