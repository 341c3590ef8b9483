"""Sets a run up and takes it down: services, a stream, a table, a folder; no process is left behind."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from uuid import uuid4

from leasehold.adapters.demo.child import ENVIRONMENT, isolate
from leasehold.adapters.demo.stage import Stage
from leasehold.adapters.demo.stream import Stream
from leasehold.adapters.local.services import dynalite, kinesis_local
from leasehold.stores.urls import open_store


@contextmanager
def staged(kinesis: str, dynamodb: str, *, shards: int, settings: tuple[str, ...]) -> Iterator[Stage]:
    """A stream and a table of their own at two services that are running; `settings` go to every worker."""
    name = f"demo-{uuid4().hex[:8]}"
    table = f"dynamodb://{name}?region={ENVIRONMENT['AWS_DEFAULT_REGION']}&endpoint={dynamodb}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-demo-")))
        stream = stack.enter_context(closing(Stream(kinesis, name, shards)))
        stage = Stage(folder, stream, stack.enter_context(closing(open_store(table))), table, settings)
        stack.callback(stage.abandon)
        yield stage


@contextmanager
def services() -> Iterator[tuple[str, str]]:
    """The addresses of a stand-in for Kinesis and one for DynamoDB; this process forgets its own credentials."""
    isolate()
    with kinesis_local() as kinesis, dynalite() as dynamodb:
        yield kinesis.url, dynamodb.url
