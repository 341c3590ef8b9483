"""Starts the stand-ins for a developer: streams and hubs by name, sample data at a rate, and what to paste."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial, reduce
from pathlib import Path

from botocore.exceptions import ClientError

from leasehold.adapters.demo.child import ENVIRONMENT
from leasehold.adapters.demo.dev_hubs import hub_services
from leasehold.adapters.demo.dev_streams import DevServices, DevStream, WantedStream
from leasehold.adapters.demo.sample import sampled
from leasehold.adapters.demo.stream import Stream, StreamError, client, put
from leasehold.adapters.local.services import dynalite, kinesis_local

REGION = ENVIRONMENT["AWS_DEFAULT_REGION"]


@contextmanager
def dev_services(streams: Sequence[WantedStream], folder: Path | None, rate: int) -> Iterator[DevServices]:
    """The stand-ins with these streams and hubs, and `rate` records a second put into each.

    folder  where Kinesis streams and tables are kept; a stream that it has is taken as it is
    Only what is asked for is started. Raises ValueError for hubs in a folder, ServiceError where a stand-in cannot be
    had.
    """
    hubs = [each for each in streams if each.kind == "eventhubs"]
    others = [each for each in streams if each.kind == "kinesis"]
    if hubs and folder is not None:
        raise ValueError("--folder: event hubs are kept in memory; leave it out, or run them by themselves")
    with ExitStack() as stack:
        running = [stack.enter_context(hub_services(hubs, rate))] if hubs else []
        running += [stack.enter_context(_kinesis_services(others, folder, rate))] if others else []
        yield reduce(DevServices.beside, running).first(streams[0].name)


@contextmanager
def _kinesis_services(streams: Sequence[WantedStream], folder: Path | None, rate: int) -> Iterator[DevServices]:
    places = _places(folder)
    with ExitStack() as stack:
        kinesis = stack.enter_context(kinesis_local(places.get("kinesis")))
        dynamodb = stack.enter_context(dynalite(places.get("dynamodb")))
        for each in streams:
            _made(kinesis.url, each)
        for each in streams:
            to = stack.enter_context(closing(client(kinesis.url)))
            stack.enter_context(sampled(each.name, rate, partial(put, to, each.name)))
        yield DevServices(
            ("Kinesis", "DynamoDB"),
            {each.name: _told(each.name, kinesis.url, dynamodb.url) for each in streams},
            {
                **{name: ENVIRONMENT[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")},
                "AWS_DEFAULT_REGION": REGION,
                "AWS_ENDPOINT_URL_KINESIS": kinesis.url,
                "AWS_ENDPOINT_URL_DYNAMODB": dynamodb.url,
            },
        )


def _told(name: str, kinesis: str, dynamodb: str) -> DevStream:
    return DevStream(
        f"kinesis://{name}?region={REGION}&endpoint={kinesis}",
        f"dynamodb://{name}-app?region={REGION}&endpoint={dynamodb}",
        f"kinesis://{name}",
        f"dynamodb://{name}-app",
    )


def _places(folder: Path | None) -> dict[str, Path]:
    if folder is None:
        return {}
    places = {name: folder.absolute() / name for name in ("kinesis", "dynamodb")}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    return places


def _made(endpoint: str, stream: WantedStream) -> None:
    try:
        with closing(Stream(endpoint, stream.name, stream.shards)):
            pass
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") != "ResourceInUseException":
            raise StreamError(f"stream {stream.name} could not be made: {error}") from error
