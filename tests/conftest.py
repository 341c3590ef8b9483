"""Fixtures with local services, one of each per test process, and their clients. Also orders the tests."""

import gc
import logging
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import botocore.session
import pytest
from hypothesis import HealthCheck, settings
from standins.dynamodb_local import OPT_IN, dynamodb_local, opted_in
from standins.fake_gcs import fake_gcs
from standins.ferrokinesis import ferrokinesis
from standins.spark import SOON, spark_session
from standins.versitygw import versitygw
from types_boto3_dynamodb import DynamoDBClient
from types_boto3_kinesis import KinesisClient

from leasehold.adapters.toolchain import ServiceError, fill_once
from leasehold_lab.demo import pytest_plugin
from leasehold_lab.standins.node import Service, install_packages
from leasehold_lab.standins.postgres import run_postgres
from leasehold_lab.standins.services import azurite_connection_string, run_moto

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOT_QUICK = ("more", "services", "spark", "slow")
NOT_QUICK_MARK = re.compile(rf"^pytestmark = .*\bmark\.({'|'.join(NOT_QUICK)})\b", re.MULTILINE)

SHARED = {
    "installed": "wheel",
    "site": "site",
    "forms": "compiled",
    "aws": "rights",
    "running_hubs": "fleets",
    "hubs": "hubs",
    "azurite_service": "azurite",
    "leasehold_azurite": "azurite",
    "moto_url": "moto",
    "postgres_service": "postgres",
    "dynamodb_local_url": "dynamodb-local",
}
"""Fixtures that take seconds of CPU time. Tests that use one of them are put into the group with this name."""
LONGEST = ("rolling", "java", "spark", "fleets", "runs", "docs")
"""Groups that take minutes. `runs` are fleets, too, in a group of their own that runs next to `fleets`."""
LONG = ("status_from_outside", "swapped_day", "sleepers", "digests", "flights", "recipes", "compiled", "producer")
"""Modules (without `test_`) with single tests that take more than a minute. They start before the short ones."""

# Slow examples on a busy machine are no failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Tests that decide about a change draw the same examples each time. A plain `pytest` draws new ones.
settings.register_profile("repeatable", settings.get_profile("busy"), derandomize=True, max_examples=50)
# Quick runs during development try fewer examples, except in tests that set their own number.
settings.register_profile("quick", settings.get_profile("busy"), max_examples=25)
settings.load_profile("busy")

# No test may find real credentials or query a machine's metadata service. Child processes inherit these variables.
os.environ.update(
    AWS_ACCESS_KEY_ID="testing",
    AWS_SECRET_ACCESS_KEY="testing",  # noqa: S106  stand-ins take any
    AWS_DEFAULT_REGION="eu-west-1",
    AWS_EC2_METADATA_DISABLED="true",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
)
for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION"):
    os.environ.pop(variable, None)


# Tests create hundreds of AWS sessions, each of which would take 0.1 s to load service descriptions.
botocore.session.create_loader = cache(botocore.session.create_loader)

# A shell that starts the tests in the background may have set these signals to be ignored, but tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for quick and for shuffled runs."""
    parser.addoption("--quick", action="store_true", help="only what needs no service and little of a processor")
    parser.addoption("--shuffle", metavar="SEED", help="in another order for each seed, file by file")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick`, ignore modules without quick tests, because their imports take longer than most tests."""
    if not config.option.quick or not collection_path.name.startswith("test_"):
        return None
    return bool(NOT_QUICK_MARK.search(collection_path.read_text("utf-8"))) or None


def pytest_configure(config: pytest.Config) -> None:
    """Load the pytest plugin that users get through its entry point.

    An older editable installation does not have that entry point.
    """
    if config.option.quick:
        config.option.markexpr = f"not ({' or '.join(NOT_QUICK)})"
    if not config.pluginmanager.has_plugin("leasehold"):
        config.pluginmanager.register(pytest_plugin, "leasehold")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt all imported and collected objects from garbage collection, because scanning them takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups after this
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run all tests that use a costly service in one process, and start the longest groups first.

    With `--shuffle`, tests run in random order, so that none relies on what an earlier test in its file left, such as a
    log or a client that already knows its service.
    """
    _sample(items)
    if config.option.shuffle:
        draw = random.Random(config.option.shuffle)  # noqa: S311  an order, not a secret
        turns = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        draw.shuffle(items)
        items.sort(key=lambda item: turns[item.path])  # keep the tests of a file together, because they share its setup
    if not config.getoption("loadgroup", default=False):
        return
    for item in items:
        used_groups = [group for name, group in SHARED.items() if name in getattr(item, "fixturenames", ())]
        if used_groups and not _group(item):
            item.add_marker(pytest.mark.xdist_group(used_groups[0]))
    items.sort(key=_turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Restore signal handlers after each test.

    A leftover handler would break a later test that sends a signal, or end all tests.
    """
    try:
        return (yield)
    finally:
        # A command that ran in this process may have set log levels, but the next test must see all log lines.
        logging.getLogger("leasehold").setLevel(logging.NOTSET)
        wakeup_fd, handler = signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert wakeup_fd == -1, f"{item.nodeid} left a descriptor that is told of signals"
        assert handler is signal.default_int_handler, f"{item.nodeid} left a handler of SIGINT: {handler!r}"


def _sample(items: list[pytest.Item]) -> None:
    """Mark the cases of tests with `sampled(step)` as `more`, except for the first of every `step` cases.

    If `step` divides the length of no column of a table, the sample has every value of every column.
    """
    case_counts = Counter[tuple[str, int]]()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not item.get_closest_marker("more"):
            parametrized_test = (item.parent.nodeid if item.parent else "", id(mark))
            if case_counts[parametrized_test] % mark.args[0]:
                item.add_marker(pytest.mark.more)
            case_counts[parametrized_test] += 1


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark else ""


def _turn(item: pytest.Item) -> int:
    """Return a sort key: groups that take minutes come first, then long tests, then other groups, then the rest."""
    group = _group(item)
    if group in LONGEST:
        return LONGEST.index(group)
    return len(LONGEST) + (0 if item.path.stem.removeprefix("test_") in LONG else 1 if group else 2)


@pytest.fixture(scope="session")
def amqp_engine() -> None:
    """Skip the test if the engine of the local event hubs, which is built from C, is not installed."""
    if find_spec("cproton_ffi") is None:
        pytest.skip("python-qpid-proton was not built: no C compiler when .venv was set up")


@pytest.fixture(scope="session")
def dynalite_url(leasehold_dynamodb: Service) -> str:
    """Return the URL of dynalite. It has reliable conditional writes, but no transactions."""
    return leasehold_dynamodb.url


@pytest.fixture(scope="session")
def kinesis_url(leasehold_kinesis: Service) -> str:
    """Return the URL of kinesis-local, whose shards split, merge and end."""
    return leasehold_kinesis.url


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of the browser from Debian's package `chromium`."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("NO BROWSER: the page was not looked at; apt-get install chromium")
    return path


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the source of axe-core, which checks whether a page is accessible."""
    tree = Path(__file__).parent / "javascript" / "axe"
    lock = (tree / "package-lock.json").read_bytes()
    folder = fill_once(f"node/axe-{sha256(lock).hexdigest()[:12]}", partial(install_packages, tree))
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def ferrokinesis_url() -> Iterator[str]:
    """Run streams with fan-out for tests marked `more`. Subscriptions last 6 s, and an event has at most 50 records."""
    try:
        with ferrokinesis(subscription_seconds=6.0, event_records=50) as service:
            yield service.url
    except ServiceError as missing:
        pytest.skip(f"FAN-OUT IS NOT TESTED WITH A SERVICE: {missing}")


@pytest.fixture(scope="session")
def versitygw_url() -> Iterator[str]:
    """Run an S3 service that checks conditions correctly under concurrency, for tests marked `more`."""
    try:
        with versitygw() as service:
            yield service.url
    except ServiceError as missing:
        pytest.skip(f"S3 IS NOT TESTED IN RACES: {missing}")


@pytest.fixture(scope="session")
def gcs_url() -> Iterator[str]:
    """Run a Google Cloud Storage that checks conditions correctly under concurrency, for tests marked `more`."""
    try:
        with fake_gcs() as service:
            yield service.url
    except ServiceError as missing:
        pytest.skip(f"GOOGLE CLOUD STORAGE IS NOT TESTED WITH A SERVICE: {missing}")


@pytest.fixture(scope="session")
def azurite_service(leasehold_azurite: Service) -> Service:
    """Return azurite, the local service for blob containers."""
    return leasehold_azurite


@pytest.fixture(scope="session")
def azurite_connection(azurite_service: Service) -> str:
    """Return the connection string of the blob service, with its key."""
    return azurite_connection_string(azurite_service)


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """Run moto, which simulates many services of AWS, but does not decide races correctly."""
    with run_moto() as service:
        yield service.url


@pytest.fixture(scope="session")
def postgres_service() -> Iterator[Service]:
    """Run a PostgreSQL server, which decides races correctly."""
    try:
        with run_postgres() as service:
            yield service
    except ServiceError as missing:
        pytest.skip(f"POSTGRESQL IS NOT TESTED: {missing}")


@pytest.fixture(scope="session")
def dynamodb_local_url() -> Iterator[str]:
    """Run Amazon's DynamoDB Local, for tests marked `more`."""
    if not opted_in():
        pytest.skip(f"DynamoDB Local is opt-in: {OPT_IN}=1 accepts its licence and fetches it")
    with dynamodb_local() as service:
        yield service.url


@pytest.fixture(scope="session")
def dynalite_client(dynalite_url: str) -> DynamoDBClient:
    """Return a DynamoDB client for dynalite."""
    return boto3.client("dynamodb", endpoint_url=dynalite_url)


@pytest.fixture(scope="session")
def kinesis_client(kinesis_url: str) -> KinesisClient:
    """Return a Kinesis client for kinesis-local."""
    return boto3.client("kinesis", endpoint_url=kinesis_url)


@pytest.fixture(scope="session")
def dynamodb_local_client(dynamodb_local_url: str) -> DynamoDBClient:
    """Return a DynamoDB client for DynamoDB Local."""
    return boto3.client("dynamodb", endpoint_url=dynamodb_local_url)


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """Return the one Spark session of this process, for tests marked `spark` in the xdist group of that name."""
    try:
        with spark_session(java=SOON) as session:
            yield session
    except ServiceError as missing:
        pytest.skip(f"SPARK IS NOT TESTED: {missing}")
