"""Tests that the installed wheel contains exactly our packages, and needs only one library."""

import os
import re
import signal
import site
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attr
import attrs
import pytest
from children import child
from waiters import AT_ONCE

from leasehold.adapters.toolchain import cache_folder
from leasehold.testing import laws

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

ROOT = Path(__file__).parents[1]
Wheels = tuple[Path, ...]
LOCKED_TREES = ("aws", "azure")
PLAN = """
from leasehold import Config, Lease, Me, plan
took = plan([Lease("s-1")], None, Me("w-1"), Config())
print([type(action).__name__ for action in took])
"""

PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("testing.md", "test-handler.md"))
FEW = "from hypothesis import settings; settings.register_profile('few', max_examples=20, deadline=None)"

APPLICATION = {
    "stores/__init__.py": "PRICES = {'apple': 3}",
    "balancer/__init__.py": "def weigh(price): return 2 * price",
    "adapters/__init__.py": "",
    "adapters/orders.py": """
from balancer import weigh
from leasehold import Config, Lease, Me, plan
from leasehold.adapters import Worker
from leasehold.stores import open_store
from stores import PRICES

def handle(batch):
    claims = plan([Lease("s-1")], None, Me("w-1"), Config())
    for record in batch.records:
        print(record.data.decode(), weigh(PRICES["apple"]), *(type(claim).__name__ for claim in claims), flush=True)
""",
}
"""An application with a hexagonal layout, whose packages have the same names as ours."""


def unpacked(project: Path, folder: Path) -> Path:
    """Build the wheel of a project and return a folder with its contents."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=project, env={**os.environ, "LEASEHOLD_PURE": "1"}, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the contents of leasehold's wheel, and with attrs."""
    wheel_folder = unpacked(ROOT, tmp_path_factory.mktemp("wheel"))
    for package in (attr, attrs):
        (wheel_folder / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return wheel_folder


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the contents of leasehold-lab's wheel."""
    return unpacked(ROOT / "lab", tmp_path_factory.mktemp("lab"))


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with only this folder on its path."""
    return subprocess.run(
        [sys.executable, "-S", *words],
        cwd=installed,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_wheel_contains_exactly_the_packages(installed: Path) -> None:
    """Without the `py.typed` marker, type checkers ignore the package. Tests must not be installed."""
    names = {path.name.partition("-")[0] for path in installed.iterdir()}
    assert names == {"leasehold", "attr", "attrs"}
    missing_files = {path.relative_to(ROOT) for path in (ROOT / "leasehold").rglob("*.py")} - {
        path.relative_to(installed) for path in (installed / "leasehold").rglob("*.py")
    }
    assert not missing_files
    assert (installed / "leasehold" / "py.typed").exists()


def test_wheel_contains_nothing_of_the_laboratory(installed: Path, laboratory: Path) -> None:
    product = [path for path in (installed / "leasehold").rglob("*") if path.is_file()]
    assert [path.name for path in product if "lock" in path.name or path.suffix in {".cjs", ".c"}] == []
    rooms = {path.name for path in laboratory.joinpath("leasehold_lab").iterdir() if path.is_dir()}
    assert rooms >= {"checker", "commands", "contract", "demo", "judge", "properties", "simulator", "standins"}
    assert {path.name for path in installed.rglob("*") if path.is_dir()} & (rooms - {"commands"}) == set()
    everything = {path.relative_to(ROOT / "lab") for path in (ROOT / "lab" / "leasehold_lab").rglob("*.py")}
    assert {path.relative_to(laboratory) for path in laboratory.rglob("*.py")} == everything
    assert len(list(laboratory.rglob("package-lock.json"))) == len(LOCKED_TREES)


def test_planning_needs_only_attrs(installed: Path) -> None:
    result = run(installed, "-c", PLAN)
    assert (result.stdout, result.stderr) == ("['Claim']\n", "")


def test_command_names_the_missing_extra(installed: Path) -> None:
    result = run(installed, "-c", "from leasehold.adapters.cli import run; run()")
    assert result.returncode == 2
    assert result.stderr == "leasehold: typer is not installed; try: pip install 'leasehold[cli]'\n"


def test_testing_module_names_the_missing_extra(installed: Path) -> None:
    """`leasehold.testing` can be imported without its extra. The use of a name raises an error that names the extra."""
    result = run(installed, "-c", "import leasehold.testing as t; print(len(t.__all__) > 9); t.leases")
    assert (result.returncode, result.stdout) == (1, "True\n")
    assert result.stderr.splitlines()[-2:] == [
        "ModuleNotFoundError: No module named 'leasehold_lab'",
        "leasehold.testing needs it: pip install 'leasehold[testing]'",
    ]


@pytest.fixture
def wheels(installed: Path, laboratory: Path) -> Wheels:
    """Return the folders of both wheels, which `leasehold[testing]` installs."""
    return installed, laboratory


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with a user's project, which contains only the files that the page shows."""
    for code in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", PAGE, re.DOTALL):
        (tmp_path / code[1]).write_text(code[0])
    return tmp_path


def in_project(wheels: Wheels, project: Path, files: Sequence[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the installed wheels, whose entry point loads the plugin. Only a few examples are drawn."""
    few = wheels[0].parent / "few"
    few.mkdir(exist_ok=True)
    (few / "few.py").write_text(FEW)
    return subprocess.run(
        [sys.executable, "-S", "-m", "pytest", *files, "-p", "few", "--hypothesis-profile", "few", *words],
        cwd=project,
        # Packages next to the wheel, but not this checkout, which only an editable install puts on the path.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((*map(str, wheels), str(few), *site.getsitepackages())),
            "LEASEHOLD_CACHE": str(cache_folder()),
        },
        capture_output=True,
        text=True,
        check=False,
    )


SOUND = ["test_evenly.py", "test_regression.py", "test_moves.py", "test_fleet.py", "test_store.py"]
SOUND += ["test_handler.py", "test_record.py"]
PLANTED = ["test_greedy.py", "test_careless.py"]


@pytest.mark.more
@pytest.mark.slow
def test_testing_page_example_works(wheels: Wheels, project: Path) -> None:
    result = in_project(wheels, project, SOUND, "-q")
    assert result.returncode == 0, result.stdout + result.stderr
    services = {"test_worker.py"}
    assert {path.name for path in project.glob("test_*.py")} == {*SOUND, *PLANTED, *services}
    for law in laws.LAWS:
        assert f"| `{law}` | {law.says} |" in PAGE


@pytest.mark.more
@pytest.mark.slow
def test_planted_fault_fails_as_the_page_shows(wheels: Wheels, project: Path) -> None:
    result = in_project(wheels, project, PLANTED, "--hypothesis-seed=0")
    assert result.returncode == 1, result.stdout + result.stderr
    lines = [line.removeprefix("E").strip() for line in result.stdout.splitlines()]
    for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL):
        remaining_lines = iter(lines)
        missing_lines = [
            line
            for line in block.splitlines()
            if not any(line.strip() in output_line for output_line in remaining_lines)
        ]
        assert missing_lines == [], result.stdout


@pytest.mark.more
@pytest.mark.services
def test_testing_page_fixtures_provide_a_stream_and_a_table(wheels: Wheels, project: Path) -> None:
    """The wheel's entry point loads the plugin, so the project needs no conftest.py."""
    result = in_project(wheels, project, ["test_worker.py"], "-q")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.more
@pytest.mark.services
def test_application_may_use_our_package_names(
    installed: Path, kinesis_url: str, kinesis_client: "KinesisClient", tmp_path: Path
) -> None:
    """A user whose project has its own `adapters` package can import our worker, and a handler from that package."""
    for name, text in APPLICATION.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    kinesis_client.create_stream(StreamName="hexagon", ShardCount=1)
    kinesis_client.get_waiter("stream_exists").wait(StreamName="hexagon", WaiterConfig=AT_ONCE)
    kinesis_client.put_record(StreamName="hexagon", Data=b"order-1", PartitionKey="k")
    words = (
        "consume",
        f"kinesis://hexagon?region=eu-west-1&endpoint={kinesis_url}",
        "--store",
        f"sqlite:///{tmp_path}/leases.db",
    )
    command = [
        *(sys.executable, "-S", "-c", "from leasehold.adapters.cli import run; run()", *words),
        *("--initial-position", "TRIM_HORIZON", "--handler", "adapters.orders:handle"),
    ]
    # Packages next to the wheel, but not this checkout, which only an editable install puts on the path.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(installed), *site.getsitepackages()))}
    with child(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        worker.send_signal(signal.SIGTERM)
        assert (line, worker.wait(60)) == ("order-1 6 Claim\n", 0)
