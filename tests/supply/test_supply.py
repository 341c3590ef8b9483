"""Tests that the audit finds packages that differ from their lock, were changed, or have an unknown license."""

from importlib.metadata import distribution
from pathlib import Path

import pytest
from supply import LOCKS, ROOT, changed, licences, locked, strangers, unpinned

LOCK = """# made by a tool
attrs==25.1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via leasehold
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:cc
"""


def test_every_locked_package_has_one_version_and_digests() -> None:
    faults = [fault for lock in LOCKS for fault in unpinned(locked((ROOT / lock).read_text(encoding="utf-8")))]
    assert faults == []
    unpinned_packages = locked("attrs>=25 --hash=sha256:aa\nrich==14.0\n")
    assert [fault.partition(":")[0] for fault in unpinned(unpinned_packages)] == ["attrs", "rich"]


def test_a_version_other_than_the_locked_one_is_found() -> None:
    packages = locked(LOCK)
    assert [package.digests for package in packages] == [("sha256:aa", "sha256:bb"), ("sha256:cc",)]
    assert list(strangers(packages, {"attrs": "25.1.0"})) == []
    assert list(strangers(packages, {"attrs": "25.2"})) == ["attrs: 25.2 is installed where ==25.1.0 is locked"]
    assert list(strangers(packages, {})) == ["attrs: nothing is installed where ==25.1.0 is locked"]


def test_a_changed_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = distribution("iniconfig")
    assert list(changed(package)) == []
    (tmp_path / "other.py").write_text("import os", encoding="utf-8")
    monkeypatch.setattr("importlib.metadata.PackagePath.locate", lambda _file: tmp_path / "other.py")
    assert list(changed(package)) != []


def test_an_unknown_license_is_reported() -> None:
    assert list(licences({"a": "MIT", "b": "License :: Other/Proprietary License", "c": ""})) == [
        "b: its licence, 'License :: Other/Proprietary License', is none of those known here",
        "c: its licence, '', is none of those known here",
    ]
