"""The recipe for a cluster works: the code blocks of the page run on a master and two workers on this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import boto3
import pyspark
import pytest
from botocore.exceptions import ClientError
from markdown_it import MarkdownIt
from pipeline_process import SPARK
from standins.spark import LATE, ON_CLUSTER
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE

pytestmark = [
    pytest.mark.spark,
    pytest.mark.services,
    pytest.mark.more,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(1200),
]

ROOT = Path(__file__).parents[2]
STREAM = "orders"
TABLE = "spark-app"
"""The page uses these names. The stream is recreated for each test, and a lease table belongs to one stream."""
Recipe = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs the text of a recipe with additional environment variables."""


def block(kind: str, text: str) -> str:
    """Return the code block of this kind in which `text` occurs. There must be exactly one such block on the pages."""
    pages = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("spark.md", "spark-cluster.md"))
    tokens = MarkdownIt().parse(pages)
    (code,) = [
        token.content for token in tokens if token.type == "fence" and token.info == kind and text in token.content
    ]
    return code


@pytest.fixture
def orders(kinesis_client: KinesisClient, tmp_path: Path) -> Iterator[Path]:
    """Create the stream that the page reads, with five records. Yield a folder that contains the page's program."""
    kinesis_client.create_stream(StreamName=STREAM, ShardCount=2)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=STREAM, WaiterConfig=AT_ONCE)
    for number in range(5):
        kinesis_client.put_record(StreamName=STREAM, Data=f"book-{number}".encode(), PartitionKey=str(number))
    (tmp_path / "orders.py").write_text(block("python", "# orders.py\n"), encoding="utf-8")
    yield tmp_path
    kinesis_client.delete_stream(StreamName=STREAM)
    kinesis_client.get_waiter("stream_not_exists").wait(StreamName=STREAM, WaiterConfig=AT_ONCE)


def wheel(folder: Path) -> Path:
    """Build the wheel of this project, as a package index would have it, and return its path."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "LEASEHOLD_PURE": "1"}, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def cluster(
    orders: Path, environment: dict[str, str], kinesis_url: str, dynalite_url: str, master: str
) -> Iterator[Recipe]:
    """Yield a function that runs recipes of the page in the folder of the program, on a master and two workers."""
    python = environment.pop("PYSPARK_PYTHON")  # the recipe sets it
    names = ("spark.executor.memory", "spark.executor.cores", "spark.cores.max")
    spark_settings = {name: ON_CLUSTER[name] for name in names} | {"spark.driver.host": "127.0.0.1"}
    (orders / "conf").mkdir()
    lines = "".join(f"{name} {value}\n" for name, value in spark_settings.items())
    (orders / "conf" / "spark-defaults.conf").write_text(lines, encoding="utf-8")
    cluster_environment = {
        "PATH": f"{SPARK / 'bin'}:{Path(python).parent}:{os.environ['PATH']}",
        "SPARK_CONF_DIR": str(orders / "conf"),
        "AWS_ENDPOINT_URL_KINESIS": kinesis_url,
        "AWS_ENDPOINT_URL_DYNAMODB": dynalite_url,
    }

    def run(recipe: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        for _ in range(3):
            completed = subprocess.run(
                ["bash", "-e", "-c", recipe.replace("spark://master:7077", master)],
                cwd=orders,
                env={**os.environ, **environment, **cluster_environment, **variables},
                capture_output=True,
                text=True,
                check=False,
                timeout=900,
            )
            if LATE not in completed.stderr:  # on a busy machine, the recipe is not at fault
                break
        return completed

    yield run
    with suppress(ClientError):  # if nothing ran, there is no table
        boto3.client("dynamodb", endpoint_url=dynalite_url).delete_table(TableName=TABLE)


def reasons(log: str) -> str:
    """Return the errors in a log of Spark, without Java stack frames and lines of level INFO."""
    return "\n".join(line for line in log.splitlines() if not line.lstrip().startswith("at ") and " INFO " not in line)


def create_empty_venv(folder: Path) -> str:
    """Create an environment with this version of Python and no packages. Return the path of its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin/python")


def test_shipped_environment_runs_the_query_of_the_page(orders: Path, cluster: Recipe) -> None:
    completed = cluster(block("sh", "--archives").replace("'leasehold[", f"'{wheel(orders / 'dist')}["))
    assert completed.returncode == 0, reasons(completed.stderr)
    assert [f"book-{number}" in completed.stdout for number in range(5)] == [True] * 5, completed.stdout
    assert (orders / "env.tar.gz").stat().st_size > 10_000_000


@pytest.fixture
def beside(orders: Path) -> str:
    """Return a Python that has this project's dependencies, but not the project itself."""
    python = create_empty_venv(orders / "beside")
    (site_packages,) = (orders / "beside").glob("lib/python*/site-packages")
    installed_packages = Path(pyspark.__file__).parents[
        1
    ]  # .pth files in a folder that is added in this way are ignored
    (site_packages / "installed.pth").write_text(f"{installed_packages}\n", encoding="utf-8")
    command = [python, "-c", "import attrs, pyarrow, boto3; import leasehold"]
    stderr = subprocess.run(command, cwd=orders, capture_output=True, text=True, check=False).stderr
    assert stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'leasehold'"
    return python


def test_package_shipped_alone_runs_or_names_what_is_missing(orders: Path, cluster: Recipe, beside: str) -> None:
    source, recipe = wheel(orders / "dist"), block("sh", "--py-files")
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(source.parent)}
    page = (ROOT / "docs" / "spark-cluster.md").read_text(encoding="utf-8").replace("\n", " ")
    assert 'ends, and says so: "leasehold is here without what it needs"' in page
    completed = cluster(recipe, PYSPARK_PYTHON=create_empty_venv(orders / "none"), **settings)
    assert completed.returncode != 0
    (*_, last_line) = filter(
        None, completed.stdout.splitlines()
    )  # spark-submit forwards what the program prints to stdout.
    assert "leasehold is here without what it needs" in last_line
    assert last_line.endswith("(venv-pack and --archives, see docs/spark-cluster.md), or install it everywhere")
    completed = cluster(recipe, PYSPARK_PYTHON=beside, **settings)
    assert completed.returncode == 0, reasons(completed.stderr)
    assert [f"book-{number}" in completed.stdout for number in range(5)] == [True] * 5, completed.stdout
