"""`leasehold pipeline` works as users start it: alone, on a cluster of two workers, and against a Connect server."""

import json
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_process import SECRET, SPARK, WAIT, freed, started
from standins.spark import spark_class
from types_boto3_kinesis import KinesisClient

from leasehold.adapters.cli import pipeline
from leasehold_lab.standins.node import ServiceCommand, find_free_port, run_service

pytestmark = [
    pytest.mark.spark,
    pytest.mark.services,
    pytest.mark.more,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(600),  # allow for a busy machine: some tests start five Java processes
]


def test_ctrl_c_ends_a_pipeline_and_releases_its_leases(
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str
) -> None:
    command = [sys.executable, "-m", "leasehold.adapters.cli.main", "pipeline"]
    with started(place, command, environment, kinesis_url) as application:
        application.put(range(30))
        application.wait_until_landed()
        assert len(set(application.owners())) == 1
        application.put(range(30, 40))
        application.wait_until_landed()
        assert application.end(signal.SIGINT) == 0
        freed(application)
        assert "Traceback" not in application.words


def test_cluster_tasks_fetch_rows_from_the_driver_and_show_no_secret(
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str, master: str
) -> None:
    """Tasks on other machines need no files from the driver, and Spark's web pages show no secret."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        port = find_free_port()
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.port": str(port),
        }
        conf_arguments = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command = [str(SPARK / "bin/spark-submit"), "--master", master, *conf_arguments, pipeline.__file__]
        with started(place, command, {**environment, "TMPDIR": temporary_folder}, kinesis_url) as application:
            application.put(range(30))
            application.wait_until_landed()
            pages = "".join(read_pages(port))
            assert ("main" in pages, SECRET in pages) == (True, False)
            assert "tasks fetch rows from 127.0.0.1, port " in application.words
            application.end(signal.SIGINT)
            freed(application)
    contents = [path.read_bytes() for path in application.folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in contents)


def read_pages(port: int) -> Iterator[str]:
    """Yield the contents of the application's web pages."""
    root = f"http://127.0.0.1:{port}"

    def read_page(path: str) -> str:
        with urllib.request.urlopen(root + path) as response:  # noqa: S310  loopback
            return str(response.read().decode())

    (application, *_) = json.loads(read_page("/api/v1/applications"))
    yield read_page("/StreamingQuery/")
    for path in ("sql?details=true&planDescription=true&length=100", "environment", "jobs", "stages?details=true"):
        yield read_page(f"/api/v1/applications/{application['id']}/{path}")


def test_thin_client_runs_a_pipeline_on_a_connect_server(
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str
) -> None:
    def server_command(port: int) -> ServiceCommand:
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
        }
        conf_arguments = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        name = "org.apache.spark.sql.connect.service.SparkConnectServer"
        submit_arguments = [
            "org.apache.spark.deploy.SparkSubmit",
            "--master",
            "local[2]",
            *conf_arguments,
            "--class",
            name,
        ]
        return spark_class(*submit_arguments, "spark-internal", environment=environment)

    with run_service("spark-connect", server_command, WAIT) as service:
        command = [sys.executable, pipeline.__file__]
        client_environment = {"SPARK_REMOTE": f"sc://127.0.0.1:{service.port}", "JAVA_HOME": "", "PATH": "/nowhere"}
        with started(place, command, environment | client_environment, kinesis_url) as application:
            application.put(range(30))
            application.wait_until_landed()
            assert application.end(signal.SIGTERM) == 0
            freed(application)
            assert "Traceback" not in application.words
