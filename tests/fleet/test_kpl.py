"""Every record that Amazon's own producer (KPL) reports as delivered during a split and a merge is dispatched."""

import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, get_args

import boto3
import java_kcl
import pytest
from attrs import frozen
from waiters import AT_ONCE

from leasehold.adapters.sources.kinesis.aggregation.decode import Misplaced
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold_lab.standins.node import HOST, ensure_installed, find_free_port
from leasehold_lab.standins.services import CERTIFICATE, run_kinesis_local

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("java")]

STREAM = "kpl"
COUNT = 3000
TEN_MS = 40
WAIT = 60.0
WRITER = Path(__file__).parents[1] / "java" / "kpl" / "KplWriter.java"
IDENTITY = b"""<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>
<Arn>arn:aws:iam::000000000000:user/kpl</Arn><UserId>kpl</UserId><Account>000000000000</Account>
</GetCallerIdentityResult><ResponseMetadata><RequestId>1</RequestId></ResponseMetadata></GetCallerIdentityResponse>"""


@frozen
class Put:
    """A user record and its shard, either as the KPL acknowledged it or as our reader dispatched it."""

    shard: str
    number: str
    data: str


@contextmanager
def identities(folder: Path) -> Iterator[int]:
    """Run a TLS service that returns the caller's identity, which the daemon of the KPL requires. Yield its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Respond to any request with the identity."""
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/xml")
            self.send_header("content-length", str(len(IDENTITY)))
            self.end_headers()
            self.wfile.write(IDENTITY)

        def log_message(self, *_told: object) -> None:
            """Log nothing."""

    certificate = json.loads((ensure_installed("aws") / "kinesis-local" / CERTIFICATE).read_text())["server"]
    pem = folder / "server.pem"
    pem.write_text(f"{certificate['key']}\n{certificate['cert']}\n")
    server = ThreadingHTTPServer((HOST, 0), Answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server_thread = Thread(target=server.serve_forever)
    server_thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server_thread.join()
        server.server_close()


def acknowledged(client: "KinesisClient", ports: tuple[int, int], folder: Path) -> list[Put]:
    """Run the KPL while a shard is split and two are merged. Return the records with the shards that it reports."""
    classes = java_kcl.compiled(WRITER, "kpl")
    arguments = (*map(str, ports), STREAM, str(folder), str(COUNT), str(TEN_MS))
    command = (str(shutil.which("java")), *java_kcl.JVM, "-cp", f"{classes}:{classes}/jars/*", "KplWriter", *arguments)
    puts = list[Put]()
    with (
        (folder / "kpl.log").open("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as writer,
    ):
        try:
            assert writer.stdout is not None
            for line in writer.stdout:
                puts.append(Put(*line.rstrip("\n").split(",")))
                if len(puts) == COUNT // 4:
                    split(client)
                elif len(puts) == COUNT // 2:
                    merge(client)
            writer.wait(WAIT)
        finally:
            writer.kill()
        log.seek(0)
        assert (len(puts), writer.returncode) == (COUNT, 0), log.read()[-3000:]
    return puts


def split(client: "KinesisClient") -> None:
    """Split the first open shard in two."""
    shard = next(
        shard_row for shard_row in shards(client) if "EndingSequenceNumber" not in shard_row["SequenceNumberRange"]
    )
    first, last = (int(shard["HashKeyRange"][end]) for end in ("StartingHashKey", "EndingHashKey"))
    middle = str((first + last) // 2)
    client.split_shard(StreamName=STREAM, ShardToSplit=shard["ShardId"], NewStartingHashKey=middle)
    client.get_waiter("stream_exists").wait(StreamName=STREAM, WaiterConfig=AT_ONCE)


def merge(client: "KinesisClient") -> None:
    """Merge the two open shards with the highest hash keys."""
    open_shards = [
        shard_row for shard_row in shards(client) if "EndingSequenceNumber" not in shard_row["SequenceNumberRange"]
    ]
    lower_shard, upper_shard = sorted(
        open_shards, key=lambda shard_row: int(shard_row["HashKeyRange"]["StartingHashKey"])
    )[-2:]
    client.merge_shards(
        StreamName=STREAM, ShardToMerge=lower_shard["ShardId"], AdjacentShardToMerge=upper_shard["ShardId"]
    )
    client.get_waiter("stream_exists").wait(StreamName=STREAM, WaiterConfig=AT_ONCE)


def shards(client: "KinesisClient") -> list[Any]:
    return list(client.list_shards(StreamName=STREAM)["Shards"])


def dispatched_records(endpoint: str, misplaced: Misplaced) -> list[Put]:
    """Return all records that our readers return for each shard, from its start to its tip."""
    source = open_source(f"kinesis://{STREAM}?region=eu-west-1&endpoint={endpoint}&misplaced={misplaced}")
    puts = list[Put]()
    for shard in source.shards():
        reader = source.open(Lease(shard.id, hash_range=shard.hash_range), TRIM_HORIZON)
        is_finished = False
        while not is_finished:
            batch = reader.read()
            puts += [Put(shard.id, record.sequence_number, record.data.decode()) for record in batch.records]
            is_finished = batch.ended or batch.behind_seconds == 0.0
        reader.close()
    source.close()
    return puts


@pytest.mark.timeout(300)
def test_every_record_delivered_by_the_kpl_is_dispatched(tmp_path: Path) -> None:
    if missing_tools := java_kcl.missing():
        pytest.skip(f"THE KPL IS NOT RUN: no {missing_tools}")
    tls_port = find_free_port()
    with run_kinesis_local(tls_port=tls_port) as kinesis, identities(tmp_path) as sts:
        client = boto3.client("kinesis", endpoint_url=kinesis.url)
        client.create_stream(StreamName=STREAM, ShardCount=3)
        client.get_waiter("stream_exists").wait(StreamName=STREAM, WaiterConfig=AT_ONCE)
        acknowledged_puts = acknowledged(client, (tls_port, sts), tmp_path)
        by_setting = {item: dispatched_records(kinesis.url, item) for item in get_args(Misplaced)}
    delivered_puts = {item for item in acknowledged_puts if item.shard != "failed"}
    lost_counts = {
        misplaced: len(delivered_puts - {*dispatched_puts}) for misplaced, dispatched_puts in by_setting.items()
    }
    repeated_counts = {
        misplaced: len(dispatched_puts) - len({item.data for item in dispatched_puts})
        for misplaced, dispatched_puts in by_setting.items()
    }
    print(f"of {len(delivered_puts)} acknowledged records lost: {lost_counts}; twice: {repeated_counts}")  # noqa: T201  the figures show what dropping costs
    assert lost_counts["keep"] == 0
