"""Event processors for other languages: only files with known digests are run, and missing tools are named."""

import hashlib
from pathlib import Path

import pytest
from official import MAKES, check_digests

from leasehold.adapters.toolchain import ServiceError

LISTED = "".join(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}.jar\n" for name in ("one", "two"))


@pytest.mark.parametrize(
    ("jars", "wrong"),
    [
        ({"one": "one", "two": "another"}, "two.jar"),
        ({"one": "one"}, "two.jar"),
        ({"one": "one", "two": "two", "three": "three"}, "three.jar"),
    ],
)
def test_unlisted_jars_are_rejected(jars: dict[str, str], wrong: str, tmp_path: Path) -> None:
    for name, content in jars.items():
        (tmp_path / f"{name}.jar").write_text(content)
    with pytest.raises(ServiceError, match=f"not what was tested: {wrong}$"):
        check_digests(tmp_path, LISTED)


def test_listed_jars_are_accepted(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jar").write_text(name)
    check_digests(tmp_path, LISTED)


@pytest.mark.parametrize(
    ("language", "tools"), [("java", "no java, no javac, no mvn on the PATH"), ("go", "no go on the PATH")]
)
def test_a_missing_tool_is_reported(language: str, tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceError, match=tools):
        MAKES[language].start()


def test_an_old_go_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ServiceError, match=r"Go 1\.24 or later is needed, and this is go version go1\.19\.8"):
        MAKES["go"].start()
