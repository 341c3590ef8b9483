"""`leasehold pipeline` as its users start it: by itself, on a cluster of two workers, and against a Connect server."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pyspark
import pytest
from attrs import define
from types_boto3_kinesis import KinesisClient

from adapters.cli import pipeline
from adapters.local.java import java_home
from adapters.local.process import Command, ServiceError, free_port, serving
from stores.urls import open_store

pytestmark = [
    pytest.mark.spark,
    pytest.mark.services,
    pytest.mark.more,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(600),  # a busy machine is given time: some of these start five processes of Java
]

WAIT = 240
SHARDS = 2
SECRET = "hush-hush-hush"  # noqa: S105  of a stand-in that takes any
SPARK = Path(pyspark.__file__).parent

_names = count()


@pytest.fixture
def environment() -> dict[str, str]:
    """Java, and one Python for driver and executors."""
    try:
        home = java_home()
    except ServiceError as missing:
        pytest.skip(f"SPARK IS NOT TESTED: {missing}")
    return {
        "JAVA_HOME": str(home),
        "SPARK_HOME": str(SPARK),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


@define
class Application:
    """A pipeline in a process of its own, and what it has told so far."""

    process: "subprocess.Popen[str]"
    folder: Path
    client: KinesisClient
    stream: str
    sent: int = 0
    landed: int = 0

    def put(self, minutes: Sequence[int]) -> None:
        """One record for each, and one that cannot be read."""
        texts = [json.dumps({"at": f"2026-01-01T00:{minute:02}:00Z", "delay": minute}) for minute in minutes]
        for text in (*texts, "bad"):
            self.client.put_record(StreamName=self.stream, Data=text.encode(), PartitionKey=text)
        self.sent += len(texts) + 1

    def until_landed(self) -> None:
        """Read what it tells until everything has come."""
        lines = iter(self.process.stdout or ())
        while self.landed < self.sent:
            line = next(lines, None)
            assert line is not None, f"it ended: {self.words}"
            told = json.loads(line)
            self.landed += told["rows"] if told["query"] == "rows-main" else 0

    def end(self, number: signal.Signals) -> int:
        """What it ends with; as from a terminal, its whole group hears of it."""
        os.killpg(self.process.pid, number)
        return self.process.wait(WAIT)

    def owners(self) -> list[str | None]:
        """Who holds the leases."""
        return [lease.owner for lease in open_store(f"sqlite:///{self.folder}/leases.db").list().leases]

    @property
    def words(self) -> str:
        """What it said on standard error."""
        return (self.folder / "words").read_text()


@pytest.fixture
def place(kinesis_client: KinesisClient, tmp_path: Path) -> Iterator[tuple[KinesisClient, str, Path]]:
    """A stream, and a folder for everything else."""
    name = f"applications-{next(_names)}"
    kinesis_client.create_stream(StreamName=name, ShardCount=SHARDS)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig={"Delay": 1})
    yield kinesis_client, name, tmp_path
    kinesis_client.delete_stream(StreamName=name)


@contextmanager
def started(
    place: tuple[KinesisClient, str, Path], command: Sequence[str], environment: dict[str, str], url: str
) -> Iterator[Application]:
    """The pipeline, begun by this command; it does not outlive the block."""
    client, stream, folder = place
    sets = {"kinesis.streamName": stream, "kinesis.endpointUrl": url, "kinesis.region": "eu-west-1"}
    sets |= {"kinesis.startingPosition": "TRIM_HORIZON", "lease.store": f"sqlite:///{folder}/leases.db"}
    arguments = ["kinesis-leased", *(f"--set={name}={value}" for name, value in sets.items())]
    arguments += ["--folder", str(folder / "out"), "--schema", "at timestamp, delay int", "--time", "at"]
    with (folder / "words").open("w") as words:
        process = subprocess.Popen(
            [*command, *arguments, "--value", "delay", "--page", str(folder / "page.html")],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,
        )
    try:
        yield Application(process, folder, client, stream)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout:
            process.stdout.close()


def freed(application: Application) -> None:
    """Wait until nobody holds a lease, which is long before they would expire."""
    deadline = time.monotonic() + 8
    while any(application.owners()):
        assert time.monotonic() < deadline, (application.owners(), application.words)
        time.sleep(0.1)
    assert len(application.owners()) == SHARDS


def test_ctrl_c_ends_a_pipeline_and_releases_its_leases(
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str
) -> None:
    """Without it whoever stops a pipeline would see a traceback, and others wait for its shards."""
    command = [sys.executable, "-m", "adapters.cli.main", "pipeline"]
    with started(place, command, environment, kinesis_url) as application:
        application.put(range(30))
        application.until_landed()
        assert len(set(application.owners())) == 1
        application.put(range(30, 40))
        application.until_landed()
        assert application.end(signal.SIGINT) == 0
        freed(application)
        assert "Traceback" not in application.words
    page = (application.folder / "page.html").read_text()
    assert ("Query rows-main" in page, "It has ended." in page) == (True, True)


def spark_class(name: str, *arguments: str, environment: dict[str, str]) -> Command:
    """One of the programs in Spark's own package."""
    return Command((str(SPARK / "bin/spark-class"), name, *arguments), environment)


@contextmanager
def a_cluster(environment: dict[str, str]) -> Iterator[str]:
    """A master and two workers of one core each, every one with a temporary folder of its own; its address."""
    with ExitStack() as stack:

        def apart() -> dict[str, str]:
            return {**environment, "TMPDIR": stack.enter_context(tempfile.TemporaryDirectory())}

        def master(port: int) -> Command:
            place = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port())]
            return spark_class("org.apache.spark.deploy.master.Master", *place, environment=apart())

        found = stack.enter_context(serving("spark-master", master, WAIT))
        url = f"spark://127.0.0.1:{found.port}"

        def worker(port: int) -> Command:
            env = apart()
            place = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port())]
            place += ["--cores", "1", "--memory", "600m", "--work-dir", env["TMPDIR"]]
            return spark_class("org.apache.spark.deploy.worker.Worker", *place, url, environment=env)

        for number in range(2):
            stack.enter_context(serving(f"spark-worker-{number}", worker, WAIT))
        yield url


def test_a_cluster_is_handed_rows_by_its_driver_and_shows_no_secret(
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str
) -> None:
    """Without it tasks on other machines would look for files of the driver's, or a web page show who reads."""
    with a_cluster(environment) as master, tempfile.TemporaryDirectory() as own:
        port = free_port()
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.port": str(port),
        }
        confs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command = [str(SPARK / "bin/spark-submit"), "--master", master, *confs, pipeline.__file__]
        with started(place, command, {**environment, "TMPDIR": own}, kinesis_url) as application:
            application.put(range(30))
            application.until_landed()
            pages = "".join(shown(port))
            assert ("rows-main" in pages, SECRET in pages) == (True, False)
            assert list(Path(own).glob("leasehold-spool-*")) == []
            application.end(signal.SIGINT)
            freed(application)
    kept = [path.read_bytes() for path in application.folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in kept)


def shown(port: int) -> Iterator[str]:
    """What the application's web pages say."""
    root = f"http://127.0.0.1:{port}"

    def page(path: str) -> str:
        with urllib.request.urlopen(root + path) as answer:  # noqa: S310  loopback
            return str(answer.read().decode())

    (application, *_) = json.loads(page("/api/v1/applications"))
    yield page("/StreamingQuery/")
    for path in ("sql?details=true&planDescription=true&length=100", "environment", "jobs", "stages?details=true"):
        yield page(f"/api/v1/applications/{application['id']}/{path}")


def test_a_thin_client_runs_a_pipeline_on_a_connect_server(
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str
) -> None:
    """Without it whoever has a server and no Java of their own would have no pipeline."""

    def server(port: int) -> Command:
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
        }
        confs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        name = "org.apache.spark.sql.connect.service.SparkConnectServer"
        submit = ["org.apache.spark.deploy.SparkSubmit", "--master", "local[2]", *confs, "--class", name]
        return spark_class(*submit, "spark-internal", environment=environment)

    with serving("spark-connect", server, WAIT) as service:
        command = [sys.executable, pipeline.__file__]
        client = {"SPARK_REMOTE": f"sc://127.0.0.1:{service.port}", "JAVA_HOME": "", "PATH": "/nowhere"}
        with started(place, command, environment | client, kinesis_url) as application:
            application.put(range(30))
            application.until_landed()
            assert application.end(signal.SIGTERM) == 0
            freed(application)
            assert "Traceback" not in application.words
