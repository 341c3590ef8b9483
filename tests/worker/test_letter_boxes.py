"""Dead-letter sinks that are opened by URL: folders, buckets and streams, without a real service."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from attrs import define, evolve, field
from botocore.exceptions import ClientError, NoRegionError
from dead_letter_buckets import Bucket
from dead_letter_samples import FULL, RECORD, batch

from leasehold.adapters.consumer.dead_letters.dead_letter import dead_letter_from
from leasehold.adapters.consumer.dead_letters.objects import ObjectSink
from leasehold.adapters.consumer.dead_letters.sinks import (
    DeadLetterHandler,
    FolderSink,
    dead_letters,
    open_dead_letters,
    open_stream,
)
from leasehold.adapters.consumer.dead_letters.stream import StreamSink
from leasehold.errors import DeadLetterError

LETTERS = "leasehold.adapters.consumer.dead_letters"


def test_dead_letter_is_stored_with_its_time_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LETTERS}.sinks.time", SimpleNamespace(time=lambda: 0.008))
    stored_dead_letters, close_calls = list[object](), list[bool]()
    sink: Any = SimpleNamespace(put=stored_dead_letters.append, close=lambda: close_calls.append(True))
    handler = DeadLetterHandler(sink, stream="orders", table="t", source="kinesis://orders")
    handler(batch(""), ValueError("poison"))
    DeadLetterHandler(sink)(batch(""), ValueError("poison"))
    handler.close()
    expected_dead_letter = evolve(FULL, attempts=3, source="kinesis://orders")
    assert (stored_dead_letters, close_calls) == (
        [expected_dead_letter, evolve(expected_dead_letter, stream="", table="", source="")],
        [True],
    )


def test_dead_letter_in_a_folder_is_whole_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint then moves past the record, so its dead letter must survive a power failure."""
    synced_contents = list[tuple[int, bytes | None]]()

    def sync(descriptor: int) -> None:
        file = Path(f"/proc/self/fd/{descriptor}").resolve()
        synced_contents.append((os.fstat(descriptor).st_ino, None if file.is_dir() else file.read_bytes()))

    monkeypatch.setattr("os.fsync", sync)
    sink = FolderSink(tmp_path)
    sink.put(FULL)
    (file,) = tmp_path.iterdir()
    folder = (tmp_path.stat().st_ino, None)
    assert (file.name, file.read_bytes()) == (FULL.name, FULL.line)
    assert synced_contents == [(file.stat().st_ino, FULL.line), folder]
    sink.remove(FULL.name)
    assert synced_contents[2:] == [folder]
    sink.remove(FULL.name)
    sink.close()


def test_dead_letter_whose_name_fails_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / FULL.name).mkdir()
    with pytest.raises(DeadLetterError, match=r"^the dead letter could not be written: "):
        FolderSink(tmp_path).put(FULL)
    assert [path.name for path in tmp_path.iterdir()] == [FULL.name]
    with pytest.raises(DeadLetterError, match=r"^a dead letter could not be read: "):
        FolderSink(tmp_path).get(FULL.name)
    with pytest.raises(DeadLetterError, match=r"^a dead letter could not be removed: "):
        FolderSink(tmp_path).remove(FULL.name)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_folder_without_hard_links_takes_dead_letters(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems report in different ways that they have no hard links."""
    monkeypatch.setattr(Path, "hardlink_to", raising(OSError(number, "no links")))
    FolderSink(tmp_path).put(FULL)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [FULL.line]


def test_failed_write_keeps_the_existing_dead_letter_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FolderSink(tmp_path)
    sink.put(FULL)
    open_descriptors = len([*Path("/proc/self/fd").iterdir()])
    for target, name in ((Path, "hardlink_to"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, raising(OSError(errno.EIO, "Input/output error")))
            with pytest.raises(DeadLetterError, match=r"^the dead letter could not be written: Input/output error$"):
                sink.put(evolve(FULL, worker="w-2"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raising(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(DeadLetterError, match=r"^a dead letter could not be removed: "):
            sink.remove("x")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [FULL.line]
    assert len([*Path("/proc/self/fd").iterdir()]) == open_descriptors


def raising(fault: Exception) -> Any:  # noqa: ANN401  it takes the place of any function
    """Return a function that raises this exception."""

    def raise_fault(*_arguments: object, **_options: object) -> None:
        raise fault

    return raise_fault


def test_missing_folder_is_a_dead_letter_error(tmp_path: Path) -> None:
    """The error type is the one that a replay reports without a traceback."""
    missing_folder = FolderSink(tmp_path / "gone")
    with pytest.raises(DeadLetterError, match=r"^the dead letter could not be written: "):
        missing_folder.put(FULL)
    with pytest.raises(DeadLetterError, match=r"^the dead letters could not be listed: "):
        missing_folder.names()
    with pytest.raises(DeadLetterError, match=r"^a dead letter could not be removed: "):
        missing_folder.remove("x")
    assert missing_folder.get("x") is None


def test_unfinished_dead_letters_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".half.unfinished").touch()
    (tmp_path / "a.json").touch()
    assert FolderSink(tmp_path).names() == ("a.json",)


def test_folder_is_created_for_writing_dead_letters_and_not_for_reading(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(DeadLetterError, match=r"^there is no folder "):
        open_dead_letters(f"file://{folder}")
    for _ in range(2):
        dead_letters(f"file://{folder}", stream="orders", table="t")(batch(""), ValueError("poison"))
    sink = open_dead_letters(f"file://{folder}")
    (name,) = sink.names()
    assert name == FULL.name
    assert evolve(dead_letter_from(sink.get(name) or b""), time_ms=8) == evolve(FULL, attempts=3)
    (tmp_path / "file").touch()
    with pytest.raises(DeadLetterError, match=r"^dead letters cannot be stored there: "):
        dead_letters(f"file://{tmp_path}/file")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Returns an empty bucket that replaces all buckets."""
    memory_bucket = Bucket()
    monkeypatch.setattr(f"{LETTERS}.objects.S3Objects", memory_bucket)
    return memory_bucket


@pytest.mark.parametrize(
    ("place", "prefix"),
    [
        ("b", ""),
        ("b/", ""),
        ("b//", ""),
        ("b/p", "p/"),
        ("b/p//", "p/"),
        ("b//p/q", "/p/q/"),
        ("b/X", "X/"),
        ("b/pX/", "pX/"),
    ],
)
def test_dead_letters_are_stored_directly_under_the_prefix(bucket: Bucket, place: str, prefix: str) -> None:
    bucket.there = {f"{prefix}deep/x": b"", prefix: b"", f"x{prefix}y/z": b""}
    unrelated_objects = dict(bucket.there)
    sink = open_dead_letters(f"s3://{place}?region=eu-west-1&endpoint=http://h:1")
    sink.put(FULL)
    assert bucket.there == {**unrelated_objects, f"{prefix}{FULL.name}": FULL.line}
    assert (sink.names(), sink.get(FULL.name), sink.get("x")) == ((FULL.name,), FULL.line, None)
    sink.remove(FULL.name)
    assert bucket.there == unrelated_objects
    dead_letters(f"s3://{place}")(batch(""), ValueError("poison"))
    (dead_letter,) = (dead_letter_from(body) for name, body in bucket.there.items() if name not in unrelated_objects)
    assert (dead_letter.stream, dead_letter.table) == ("", "")
    sink.close()
    with pytest.raises(DeadLetterError, match=r"^the bucket is closed$"):
        sink.names()
    assert bucket.opened == [("b", "eu-west-1", "http://h:1"), ("b", None, None)]
    assert isinstance(sink, ObjectSink)


def test_missing_bucket_is_reported_at_start(bucket: Bucket) -> None:
    bucket.absent = True
    with pytest.raises(DeadLetterError, match=r"^there is no bucket 'b'$"):
        dead_letters("s3://b/p")
    assert bucket.opened == [("b", None, None)]
    with pytest.raises(ValueError, match=r"^letters URL: s3:// wants bucket/prefix$"):
        dead_letters("s3:///p")


@define
class Kinesis:
    """A replacement for the Kinesis client of boto3."""

    opened: list[tuple[tuple[str, ...], dict[str, Any]]] = field(factory=list)
    puts: list[dict[str, object]] = field(factory=list)
    requests: list[str] = field(factory=list)
    code: str = ""
    closed: bool = False

    def __call__(self, *names: str, **options: object) -> "Kinesis":
        if self.code == "NoRegion":
            raise NoRegionError
        self.opened.append((names, options))
        return self

    def _answer(self, operation: str) -> None:
        if self.code:
            raise ClientError({"Error": {"Code": self.code, "Message": "odd"}}, operation)

    def describe_stream_summary(self, *, StreamName: str) -> None:  # noqa: N803  the SDK's spelling
        self.requests.append(StreamName)
        self._answer("DescribeStreamSummary")

    def put_record(self, **record: object) -> dict[str, str]:
        self._answer("PutRecord")
        self.puts.append(record)
        return {"ShardId": "s-0", "SequenceNumber": "1"}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kinesis(monkeypatch: pytest.MonkeyPatch) -> Kinesis:
    """Replace every client of boto3 by a Kinesis client without a service, and return it."""
    client = Kinesis()
    monkeypatch.setattr("boto3.client", client)
    return client


def test_dead_letters_and_records_keep_their_partition_keys(kinesis: Kinesis) -> None:
    """A dead letter keeps the partition key of its record, so that a replay puts the record into its original shard."""
    sink = open_stream("kinesis://orders?region=eu-west-1&endpoint=http://h:1")
    dead_letter_without_key = evolve(FULL, record=RECORD._replace(partition_key=None, explicit_hash_key=None))
    for entry in (FULL, dead_letter_without_key):
        sink.put(entry)
        sink.put_back(entry)
    stream_name = {"StreamName": "orders"}
    assert kinesis.puts == [
        {**stream_name, "Data": FULL.line, "PartitionKey": "k"},
        {**stream_name, "Data": b"d", "PartitionKey": "k", "ExplicitHashKey": "9"},
        {**stream_name, "Data": dead_letter_without_key.line, "PartitionKey": "l-0"},
        {**stream_name, "Data": b"d", "PartitionKey": "l-0"},
    ]
    sink.close()
    ((names, options),) = kinesis.opened
    config = options.pop("config")
    assert (names, options) == (("kinesis",), {"region_name": "eu-west-1", "endpoint_url": "http://h:1"})
    assert (config.connect_timeout, config.read_timeout) == (5, 30)
    assert config.retries == {"mode": "standard", "total_max_attempts": 5}
    assert (kinesis.closed, kinesis.requests, isinstance(sink, StreamSink)) == (True, ["orders"], True)


def test_stream_that_rejects_a_dead_letter_is_a_dead_letter_error(kinesis: Kinesis) -> None:
    handler = dead_letters("kinesis://orders")
    kinesis.code = "ProvisionedThroughputExceededException"
    with pytest.raises(
        DeadLetterError, match=r"^kinesis://orders: Kinesis throttled a request for stream 'orders': Prov"
    ):
        handler(batch(), ValueError())


def test_missing_stream_is_reported_and_one_without_describe_permission_accepted(kinesis: Kinesis) -> None:
    """The check must not require any permissions other than those for writing."""
    kinesis.code = "ResourceNotFoundException"
    with pytest.raises(DeadLetterError, match=r"^there is no stream 'orders'$"):
        dead_letters("kinesis://orders")
    kinesis.code = "AccessDeniedException"
    assert open_stream("kinesis://orders").missing() is False
    kinesis.code = "NoRegion"
    with pytest.raises(DeadLetterError, match=r"^no region for stream 'orders': "):
        open_stream("kinesis://orders")


def test_write_that_the_stream_does_not_confirm_is_a_dead_letter_error(
    kinesis: Kinesis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may respond in place of the service. The checkpoint must not pass the record then."""
    handler = dead_letters("kinesis://orders")
    assert kinesis.requests == ["orders"]
    for response in ({"SequenceNumber": ""}, {}):
        monkeypatch.setattr(Kinesis, "put_record", lambda _client, response=response, **_record: response)
        with pytest.raises(DeadLetterError, match=r"^kinesis://orders: "):
            handler(batch(), ValueError())


@pytest.mark.parametrize("scheme", ["s3", "kinesis"])
def test_dead_letters_are_written_with_the_given_session(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of the options, such as `role_arn`, is made from the given one."""
    sessions, session = list[object](), boto3.Session("k", "s", region_name="eu-west-1")
    given_session = boto3.Session("k", "s", region_name="eu-west-1")

    def create_session(_options: object, _origin: str, given: object) -> boto3.Session:
        assert given is given_session
        return session

    module = "objects" if scheme == "s3" else "stream"
    monkeypatch.setattr(f"{LETTERS}.{module}.create_boto3_session", create_session)

    if scheme == "s3":

        def open_bucket(_bucket: str, *, session: object, **_options: object) -> Any:  # noqa: ANN401  a bucket
            return SimpleNamespace(missing=lambda: sessions.append(session))

        monkeypatch.setattr(f"{LETTERS}.objects.S3Objects", open_bucket)
    else:

        def open_client(*_names: str, **_options: object) -> Kinesis:
            sessions.append(session)
            return Kinesis()

        monkeypatch.setattr(session, "client", open_client)
    dead_letters(f"{scheme}://orders", session=given_session)
    assert sessions == [session]


def test_stream_that_is_named_by_its_arn_is_opened_in_its_region(
    kinesis: Kinesis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests name the stream by its ARN, because it may belong to another account."""
    arns = list[tuple[object, str]]()
    monkeypatch.setattr(f"{LETTERS}.stream.name_stream_by_arn", lambda client, arn: arns.append((client, arn)))
    arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
    open_stream(f"kinesis://{arn}")
    ((_, options),) = kinesis.opened
    assert (options["region_name"], arns, kinesis.requests) == ("eu-west-1", [(kinesis, arn)], ["orders"])


@pytest.mark.parametrize("name", ["", "a,b", "a/b"])
def test_dead_letter_stream_url_must_name_one_stream(kinesis: Kinesis, name: str) -> None:
    with pytest.raises(ValueError, match=r"^letters URL: kinesis:// wants the name of one stream$"):
        open_stream(f"kinesis://{name}")
    assert kinesis.opened == []


def test_sink_that_cannot_be_opened_is_named_by_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^letters URL: dead letters in a stream need --store"):
        open_dead_letters("kinesis://orders?endpoint=http://h:1")
    with pytest.raises(ValueError, match=r"^stream URL: records can be put back into kinesis://STREAM$"):
        open_stream("file://x")
    with pytest.raises(ValueError, match=r"^letters URL: it names no folder"):
        open_dead_letters("file://")
    bad_option = "endpoint=nothing"
    with pytest.raises(ValueError, match=r"^dead letter URL: option 'endpoint' must be"):
        dead_letters(f"s3://b?{bad_option}")
    with pytest.raises(ValueError, match=r"^letters URL: option 'endpoint' must be"):
        open_dead_letters(f"s3://b?{bad_option}")
    with pytest.raises(ValueError, match=r"^stream URL: option 'endpoint' must be"):
        open_stream(f"kinesis://b?{bad_option}")
    with pytest.raises(ValueError, match=r"^dead letter URL: unknown scheme 'x'"):
        dead_letters("x://y")

    def raise_module_not_found(_name: str) -> None:
        raise ModuleNotFoundError("no boto3", name="boto3")

    monkeypatch.setattr("leasehold.stores.urls.import_module", raise_module_not_found)
    with pytest.raises(DeadLetterError, match=r"^this dead letter needs boto3; install leasehold\[aws\]$"):
        dead_letters("s3://b")
