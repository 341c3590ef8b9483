"""The recipe for a cluster, run from the blocks of the page itself, on a master and two workers of this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from pipeline_process import SPARK
from standins.spark import ON_CLUSTER, spark_cluster
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
"""As the page calls it."""


def block(kind: str, sign: str) -> str:
    """The one block of this kind on the page that has this in it."""
    tokens = MarkdownIt().parse((ROOT / "docs" / "spark.md").read_text(encoding="utf-8"))
    (found,) = [
        token.content for token in tokens if token.type == "fence" and token.info == kind and sign in token.content
    ]
    return found


@pytest.fixture
def orders(kinesis_client: KinesisClient, tmp_path: Path) -> Iterator[Path]:
    """The stream that the page reads, with five records, and a folder with its program."""
    kinesis_client.create_stream(StreamName=STREAM, ShardCount=2)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=STREAM, WaiterConfig=AT_ONCE)
    for number in range(5):
        kinesis_client.put_record(StreamName=STREAM, Data=f"book-{number}".encode(), PartitionKey=str(number))
    (tmp_path / "orders.py").write_text(block("python", "# orders.py\n"), encoding="utf-8")
    yield tmp_path
    kinesis_client.delete_stream(StreamName=STREAM)
    kinesis_client.get_waiter("stream_not_exists").wait(StreamName=STREAM, WaiterConfig=AT_ONCE)


def wheel(folder: Path) -> Path:
    """What an index would have of this project."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "LEASEHOLD_PURE": "1"}, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_an_environment_that_is_shipped_runs_the_query_of_the_page(
    orders: Path, environment: dict[str, str], kinesis_url: str, dynalite_url: str
) -> None:
    """Without this the first thing that a user of a cluster copies could end in the traceback of a task."""
    recipe = block("sh", "--archives").replace("'leasehold[aws]'", f"'{wheel(orders / 'dist')}[aws]'")
    python = environment.pop("PYSPARK_PYTHON")  # the recipe says which
    with spark_cluster({**environment, "PATH": os.environ["PATH"]}, cores=2) as master:
        recipe = recipe.replace("spark://master:7077", master)
        small = {
            name: ON_CLUSTER[name] for name in ("spark.executor.memory", "spark.executor.cores", "spark.cores.max")
        }
        folder = orders / "conf"
        folder.mkdir()
        lines = [f"{name} {value}" for name, value in {**small, "spark.driver.host": "127.0.0.1"}.items()]
        (folder / "spark-defaults.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        own = {
            "PATH": f"{SPARK / 'bin'}:{Path(python).parent}:{os.environ['PATH']}",
            "SPARK_CONF_DIR": str(folder),
            "AWS_ENDPOINT_URL_KINESIS": kinesis_url,
            "AWS_ENDPOINT_URL_DYNAMODB": dynalite_url,
        }
        done = _run(recipe, orders, {**environment, **own})
    assert done.returncode == 0, done.stderr[-4000:]
    assert [f"book-{number}" in done.stdout for number in range(5)] == [True] * 5, done.stdout
    assert (orders / "env.tar.gz").stat().st_size > 10_000_000


def _run(text: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-e", "-c", text],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
