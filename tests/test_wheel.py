"""What is installed is what was written: the wheel, with nothing beside it but the one library it needs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import attr
import attrs
import pytest

ROOT = Path(__file__).parents[1]
PLAN = """
import balancer
took = balancer.plan([balancer.Lease("s-1")], None, balancer.Me("w-1"), balancer.Config())
print([type(action).__name__ for action in took])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, and attrs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "LEASEHOLD_PURE": "1"}, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    here = folder / "installed"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(here)
    for package in (attr, attrs):
        (here / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return here


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with nothing else on its path."""
    return subprocess.run(
        [sys.executable, "-S", *words],
        cwd=installed,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_holds_the_packages_and_nothing_else(installed: Path) -> None:
    """Tests would be installed beside other libraries' tests; without the marker no type is seen."""
    names = {path.name.partition("-")[0] for path in installed.iterdir()}
    assert names == {"balancer", "stores", "adapters", "leasehold", "attr", "attrs"}
    for package in ("balancer", "stores", "adapters"):
        missing = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")} - {
            path.relative_to(installed) for path in (installed / package).rglob("*.py")
        }
        assert not missing
        assert (installed / package / "py.typed").exists()


def test_planning_needs_nothing_but_attrs(installed: Path) -> None:
    """Whoever embeds the planner would have to install the clients of two clouds."""
    told = run(installed, "-c", PLAN)
    assert (told.stdout, told.stderr) == ("['Claim']\n", "")


def test_the_command_says_what_is_missing(installed: Path) -> None:
    """A traceback is no answer to who installed the library alone."""
    told = run(installed, "-c", "from adapters.cli import run; run()")
    assert told.returncode == 2
    assert told.stderr == "leasehold: typer is not installed; try: pip install 'leasehold[all]'\n"
