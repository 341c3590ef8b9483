"""Runs an unchanged AWS Lambda function, written for an event source mapping, as a handler.

`LambdaFunction` builds the event and the context that the mapping would pass, calls the function, and treats the batch
as done or failed, depending on what the function returns or raises.

1. Without the option `report_batch_item_failures`, a batch is done when the function returns, whatever it returns.
2. With this option, the response names the failed records. The checkpoint moves to just before the first of them, and
   the batch fails, so it is repeated from that record. A response that cannot be parsed, or that names a record outside
   the batch, fails the whole batch.
3. An exception fails the whole batch. So does `SystemExit`, which on Lambda ends only the invocation.
4. A process makes one call at a time (`Handling.most_calls`), as an execution environment on Lambda does, because
   functions may keep state between calls. `leasehold.adapters.lambda_processes` makes concurrent calls, each in its own
   process.
"""

import asyncio
import inspect
import json
import os
import sys
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl
from uuid import uuid4

from attrs import define, field, frozen

from leasehold.adapters.consumer.handling import Delivery, Unhandled, accepts
from leasehold.adapters.sources.protocol import Record, Source, SourceWithArns
from leasehold.adapters.threads import read_boot_clock
from leasehold.stores.printable import did_you_mean

LAMBDA_PREFIX = "lambda:"
"""The prefix of the name of a handler that is a Lambda function."""

BATCH_SIZE = 100
"""The default number of records in a batch, the same as that of an event source mapping."""

INVOCATION_SECONDS_MAX = 900.0
"""Lambda's limit for one invocation.

If `handler_seconds` is infinite, the remaining time of a call is computed from this constant.
"""


class ReportedFailure(Unhandled):
    """The batch failed because the Lambda function reported a failure or exited."""


@frozen
class FunctionSettings:
    """A Lambda function and how to call it, as parsed from a string such as `lambda:app.handler?name=orders`.

    Attributes:
        target: The function as `module:function`.
        report_batch_item_failures: Whether the response names failed records, as with ReportBatchItemFailures.
        environment: Whether to set the environment variables of Lambda's runtime.
        name: The function's name.
        memory: The function's memory in MB, as the context reports it.
        role: The ARN in `invokeIdentityArn`.
    """

    target: str
    report_batch_item_failures: bool
    environment: bool
    name: str
    memory: str
    role: str

    @property
    def runtime_variables(self) -> Mapping[str, str]:
        """The environment variables of Lambda's runtime."""
        return {
            "AWS_EXECUTION_ENV": "AWS_Lambda_python",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": self.memory,
            "AWS_LAMBDA_FUNCTION_NAME": self.name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{self.name}",
            "AWS_LAMBDA_LOG_STREAM_NAME": self.name,
            "LAMBDA_TASK_ROOT": str(Path.cwd()),
            "_HANDLER": self.target.replace(":", "."),
        }


def parse_function_settings(text: str) -> FunctionSettings:
    """Parse the name of a Lambda function with its options. Raises ValueError if it is not valid."""
    target, _, query = text.removeprefix(LAMBDA_PREFIX).partition("?")
    module, _, function = target.replace("/", ".").rpartition(".")
    if ":" in target or not all((*module.split("."), function)):
        raise ValueError(
            f"{text!r} is not of the form lambda:file.function; lambda: names a Lambda function, so rename a module "
            "that is called lambda"
        )
    option_names = ("report_batch_item_failures", "environment", "name", "memory", "role")
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in option_names:
            raise ValueError(
                f"{text!r}: unknown option {name!r}; choose among "
                f"{', '.join(option_names)}{did_you_mean(name, option_names)}"
            )
        if not value or name in options:
            raise ValueError(f"{text!r}: option {name!r} must have one value")
        options[name] = value
    for name in option_names[:2]:
        if options.get(name, "false") not in {"true", "false"}:
            raise ValueError(f"{text!r}: option {name!r} must be true or false")
    if not options.get("memory", "128").isdecimal():
        raise ValueError(f"{text!r}: option 'memory' must be a number of MB")
    return FunctionSettings(
        target=f"{module}:{function}",
        report_batch_item_failures=options.get("report_batch_item_failures") == "true",
        environment=options.get("environment") == "true",
        name=options.get("name", module.rpartition(".")[2]),
        memory=options.get("memory", "128"),
        role=options.get("role", ""),
    )


@frozen
class LambdaContext:
    """The context of one call, with the attributes of Lambda's Python runtime."""

    function_name: str
    invoked_function_arn: str
    memory_limit_in_mb: str
    log_group_name: str
    log_stream_name: str
    _deadline: float
    _clock: Callable[[], float]
    function_version: str = "$LATEST"
    aws_request_id: str = field(factory=lambda: str(uuid4()))
    identity: Any = field(
        factory=lambda: SimpleNamespace(cognito_identity_id=None, cognito_identity_pool_id=None), eq=False
    )
    client_context: None = None
    tenant_id: None = None

    def get_remaining_time_in_millis(self) -> int:
        """Return how many milliseconds are left of `handler_seconds`, or of Lambda's 15 minutes if that is shorter."""
        return max(0, int((self._deadline - self._clock()) * 1000))

    def log(self, message: object) -> None:
        """Print the message to standard output."""
        sys.stdout.write(str(message))


@define(eq=False)
class LambdaFunction:
    """A handler that calls a Lambda function with the event of each batch.

    Attributes:
        function: The Lambda function, which is called with an event and a context.
        settings: The settings that the user wrote after the function's name.
        handler_seconds: The time limit of one call.
        clock: A monotonic clock, in seconds.
    """

    function: Callable[[Any, Any], object] = field(validator=accepts("event", "context"))
    settings: FunctionSettings
    handler_seconds: float
    clock: Callable[[], float] = read_boot_clock
    _source: SourceWithArns | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def __attrs_post_init__(self) -> None:
        if inspect.iscoroutinefunction(self.function):
            raise ValueError(
                "function: Lambda's Python runtime does not await an `async def`; call it from a plain function by "
                "asyncio.run"
            )

    def use_source_arns(self, source: Source) -> None:
        """Use this source's ARNs in events."""
        self._source = source if isinstance(source, SourceWithArns) else None

    def close(self) -> None:
        """Free the resources that calls need. Calls in this process need none."""

    def arn(self, delivery: Delivery) -> str:
        """Return the ARN of the batch's stream, or "" if it has none."""
        return "" if self._source is None else self._source.arn(delivery.stream)

    def __call__(self, delivery: Delivery) -> None:
        """Call the function. Raises the function's exception, or ReportedFailure if a record or the batch failed."""
        records = delivery.records
        failed_index = self.call_and_find_failure(delivery.shard, self.arn(delivery), records)
        if failed_index is not None:
            if failed_index:
                delivery.checkpoint(records[failed_index - 1])
            raise ReportedFailure(f"its response reports record {records[failed_index].sequence_number} as failed")

    def call_and_find_failure(self, shard: str, arn: str, records: Sequence[Record]) -> int | None:
        """Call the function with these records, and return the index of the first one that it reports as failed.

        Raises the function's exception, or ReportedFailure if the whole batch failed.
        """
        event = {"Records": make_lambda_events(records, shard=shard, arn=arn, role=self.settings.role)}
        self._set_event_loop()
        try:
            response = self.function(event, self._new_context(arn))
        except SystemExit as error:
            raise ReportedFailure("its function exited") from error
        if inspect.iscoroutine(response):
            response.close()
            raise ReportedFailure("its function returned a coroutine, which Lambda does not await")
        if not self.settings.report_batch_item_failures:
            return None
        return find_first_failed(response, [record.sequence_number for record in records])

    def _new_context(self, arn: str) -> LambdaContext:
        partition, _, region, account = ((arn or "arn:aws") + "::::").split(":")[1:5]
        settings, variables = self.settings, self.settings.runtime_variables
        return LambdaContext(
            function_name=settings.name,
            invoked_function_arn=f"arn:{partition}:lambda:{region}:{account}:function:{settings.name}",
            memory_limit_in_mb=settings.memory,
            log_group_name=variables["AWS_LAMBDA_LOG_GROUP_NAME"],
            log_stream_name=variables["AWS_LAMBDA_LOG_STREAM_NAME"],
            deadline=self.clock() + min(self.handler_seconds, INVOCATION_SECONDS_MAX),
            clock=self.clock,
        )

    def _set_event_loop(self) -> None:
        """Give the calling thread an event loop, because functions expect one, as in the main thread on Lambda.

        All calls share one loop.
        """
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close).atexit = False
        asyncio.set_event_loop(self._loop)


def make_lambda_function(
    text: str, import_function: Callable[[str], Callable[..., object]], handler_seconds: float
) -> LambdaFunction:
    """Return the handler for the Lambda function named in `text`. Raises ValueError if `text` is not valid.

    Args:
        text: The function, as `lambda:file.function` with options.
        import_function: Imports `module:function`.
        handler_seconds: The time limit of one call.
    """
    settings = parse_function_settings(text)
    if settings.environment:
        os.environ.update(
            settings.runtime_variables
        )  # must come before the import, because libraries read them during the import
    return LambdaFunction(import_function(settings.target), settings, handler_seconds)


# Events


def make_lambda_events(records: Iterable[Record], *, shard: str, arn: str, role: str = "") -> list[dict[str, Any]]:
    """Return the `Records` of the event for these records of a shard.

    Args:
        records: The records.
        shard: The shard's id.
        arn: The stream's ARN, which shows whether it is a stream of Kinesis or of DynamoDB.
        role: The ARN of the function's role.
    """
    region = (arn + ":::").split(":")[3]
    if arn.split(":")[2:3] == ["dynamodb"]:
        return [_make_change_event(record, arn) for record in records]
    return [
        {
            "kinesis": {
                "kinesisSchemaVersion": "1.0",
                "partitionKey": record.partition_key,
                "sequenceNumber": record.sequence_number,
                "data": b64encode(record.data).decode(),
                "approximateArrivalTimestamp": record.arrived,
            },
            "eventSource": "aws:kinesis",
            "eventVersion": "1.0",
            "eventID": f"{shard}:{record.sequence_number}",
            "eventName": "aws:kinesis:record",
            "invokeIdentityArn": role,
            "awsRegion": region,
            "eventSourceARN": arn,
        }
        for record in records
    ]


def _make_change_event(record: Record, arn: str) -> dict[str, Any]:
    """Return the event of a change.

    The event contains the API's fields and the stream's ARN. The field names in `userIdentity` begin with a lower-case
    letter.
    """
    event: dict[str, Any] = json.loads(record.data)
    if (identity := event.pop("userIdentity", None)) is not None:
        event["userIdentity"] = {name[:1].lower() + name[1:]: value for name, value in identity.items()}
    return event | {"eventSourceARN": arn}


# Responses


def find_first_failed(response: object, sequence_numbers: Sequence[str]) -> int | None:
    """Return the index of the first record that the response reports as failed, or None if no record failed.

    Args:
        response: The value that the function returned.
        sequence_numbers: The sequence numbers of the batch, in order.

    Raises:
        ReportedFailure: The whole batch failed, because the response cannot be parsed or names another record.
    """
    if response is None or (isinstance(response, str | list | tuple) and not response):
        return None  # for the service, "" and [] also mean success
    if not isinstance(response, Mapping):
        raise ReportedFailure(f"its response is {type(response).__name__}, and no object with batchItemFailures")
    failures = response.get("batchItemFailures")
    if failures is None:
        return None
    if not isinstance(failures, list | tuple):
        raise ReportedFailure("its response has batchItemFailures that is not a list")
    index_by_number: dict[object, int] = {}
    for index, sequence_number in enumerate(sequence_numbers):
        index_by_number.setdefault(sequence_number, index)  # the user records of an aggregate share a sequence number
    failed_indexes: list[int] = []
    for failure in failures:
        identifier = failure.get("itemIdentifier") if isinstance(failure, Mapping) else None
        if not isinstance(identifier, str) or identifier not in index_by_number:
            raise ReportedFailure("its response names no record of the batch in an itemIdentifier")
        failed_indexes.append(index_by_number[identifier])
    return min(failed_indexes, default=None)
