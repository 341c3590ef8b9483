"""Tests that a store URL opens the right store, or raises an error that names the invalid part."""

import builtins
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores import urls
from leasehold.stores.urls import display_name, open_store
from leasehold.stores.writes import CreateLease
from leasehold_lab.contract.actors import expect_applied


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://h/db", r"unknown scheme 'postgresql'; choose one of .*dynamodb, .*; did you mean 'postgres'\?"),
        ("leases.db", r"unknown scheme ''"),
        ("http://[", r"it is not a valid URL"),
        ("memory://x?size=3", r"unknown option 'size'; choose among layout"),
        (
            "dynamodb://t?regoin=x",
            r"unknown option 'regoin'; choose among endpoint, external_id, layout, prefix, profile, protect, region, ",
        ),
        ("dynamodb://t?region=", r"option 'region' must have one value"),
        ("dynamodb://t?region=a&region=b", r"option 'region' must have one value"),
        (
            "azblob://a/c?eventhub=n/h&group=",
            r"option 'group' must have one value; in a shell, put single quotes around a URL with \$Default",
        ),
        ("dynamodb://?region=eu-west-1", r"dynamodb:// needs a table name"),
        ("dynamodb://a/b", r"'a/b' is not a table name"),
        (f"dynamodb://leases?prefix={'x' * 256}", r"option 'prefix' must be at most 255 characters"),
        ("dynamodb://leases?prefix=a%00", r"option 'prefix' must be at most 255 characters"),
        ("dynamodb://leases?protect=off", r"option 'protect' must be on"),
        ("file://", r"file:// wants the path of a file"),
        ("sqlite://", r"sqlite:// wants the path of a file"),
    ],
)
def test_an_invalid_url_names_its_wrong_part(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"store URL: {says}"):
        open_store(url)


def test_credentials_in_a_url_are_rejected_and_not_shown() -> None:
    with pytest.raises(ValueError, match="credentials do not belong") as exc_info:
        open_store("dynamodb://AKIAX:hunter2@table")
    assert "hunter2" not in str(exc_info.value)


def test_a_memory_url_names_a_shared_table() -> None:
    row = expect_applied(open_store("memory://by-url").write(CreateLease(Lease("s-0"))))
    assert open_store("memory://by-url").list().leases == (row,)


def test_a_sqlite_url_is_relative_after_two_slashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = expect_applied(open_store("sqlite://the%20leases.db").write(CreateLease(Lease("s-0"))))
    assert open_store(f"sqlite://{tmp_path}/the%20leases.db", create=False).list().leases == (row,)


def test_a_memory_table_of_another_process_is_rejected() -> None:
    with pytest.raises(ValueError, match="memory://elsewhere exists only in the process that created it"):
        open_store("memory://elsewhere", create=False)


def test_an_absolute_sqlite_path_gets_a_hint_about_relative_ones(tmp_path: Path) -> None:
    """SQLAlchemy treats three slashes as a relative path, so its users would look for the file in the wrong place."""
    with pytest.raises(StoreError, match=r"absolute: the file of this folder is sqlite://leasehold-none\.db"):
        open_store("sqlite:///leasehold-none.db", create=False)
    with pytest.raises(StoreError, match=r"check the name$"):
        open_store(f"sqlite://{tmp_path}/none.db", create=False)


def test_a_missing_library_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_boto3(name: str, *rest: Any) -> ModuleType:  # noqa: ANN401  whatever import takes
        if name.startswith("boto"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *rest)

    for name in [name for name in sys.modules if name.startswith(("boto", "leasehold.stores.dynamodb.store"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_boto3)
    with pytest.raises(StoreError, match=r"needs boto\w+; install leasehold\[aws\]"):
        open_store("dynamodb://leases")


@pytest.mark.parametrize("option", ["eventhub=ns/orders", "group=billing"])
def test_the_name_of_a_container_contains_all_that_distinguishes_its_tables(option: str) -> None:
    """Two hubs or consumer groups that share a container have tables with different names."""
    url = f"azblob://account/leases?{option}"
    assert display_name(f"{url}&endpoint=http://127.0.0.1:9") == url


def test_the_name_of_a_table_contains_its_prefix_or_its_table() -> None:
    assert display_name("dynamodb://leases?region=eu-west-1&prefix=orders/") == "dynamodb://leases?prefix=orders/"
    assert display_name("postgres://host/db?table=orders&user=ann") == "postgres://host/db?table=orders"


@pytest.mark.parametrize("fails", ["layout", "probe"])
@pytest.mark.parametrize("scheme", ["dynamodb", "azblob", "s3", "gcs", "postgres"])
def test_a_store_of_a_service_is_probed_and_closed_if_it_cannot_be_used(
    scheme: str, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that decides conditions in a service is used for writing only if its service honors them."""
    calls: list[str] = []

    def act(name: str) -> None:
        calls.append(name)
        if name == fails:
            raise KeyboardInterrupt

    def open_in_layout(opened: object, _layout: object) -> object:
        act("layout")
        return opened

    store = SimpleNamespace(prove=lambda: act("probe"), close=lambda: act("close"))
    modules = {
        "store": SimpleNamespace(open_url=lambda *_arguments, **_named: store),
        "layout": SimpleNamespace(open_in_layout=open_in_layout),
    }
    monkeypatch.setattr(urls.Scheme, "load", lambda _scheme, kind, _error_class: modules[kind])
    with pytest.raises(KeyboardInterrupt):
        open_store(f"{scheme}://place/name")
    assert calls == (["layout", "close"] if fails == "layout" else ["layout", "probe", "close"])
    calls.clear()
    if fails == "probe":
        open_store(f"{scheme}://place/name", write=False)
        assert calls == ["layout"]


@pytest.mark.parametrize("place", ["AKIA:sec/ret@leases", "AKIA:sec@leases", "AKIA@leases", ":sec@leases"])
def test_each_form_of_credentials_in_a_url_is_rejected(place: str) -> None:
    """An AWS secret key may contain a slash."""
    with pytest.raises(ValueError, match="credentials do not belong in it"):
        open_store(f"dynamodb://{place}")
