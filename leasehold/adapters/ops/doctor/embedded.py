"""Tries the rights of a worker on a SQLite file, and on a table in memory."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from leasehold.adapters.ops.doctor.attempts import Absent, RightAttempt, RightsTrial
from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.embedded import memory, sqlite
from leasehold.stores.protocol import Lost, Store
from leasehold.stores.writes import RenewLease


def sqlite_trial(location: str, options: Mapping[str, str]) -> RightsTrial:
    """Return the trial of the rights on this file. Raises ValueError for a wrong option, or StoreError."""
    if location and not Path(location).exists():

        def raise_absent() -> str:
            raise Absent(f"there is no file {location}; a worker creates it if it may write to the folder")

        return RightsTrial(f"SQLite file {location}", (RightAttempt("read", raise_absent),))
    store = sqlite.open_url(location, options, create=False, request_seconds=None)
    return _trial(f"SQLite file {location}", store, "it can be read")


def memory_trial(location: str, options: Mapping[str, str]) -> RightsTrial:
    """Return the trial of the rights on a table in this process's memory. Raises ValueError for a wrong option."""
    store = memory.open_url(location, options, create=True, request_seconds=None)
    return _trial(
        "table in memory", store, "it exists in one process: other processes have tables of their own under this name"
    )


def _trial(name: str, store: Store, remark: str) -> RightsTrial:
    def read() -> str:
        store.list()
        return remark

    def send_rejected_write() -> str:
        """Renew a lease that does not exist, which needs the right to write but changes nothing."""
        probe_key = f"leasehold-probe-{uuid4().hex}"
        if not isinstance(store.write(RenewLease(Lease(probe_key, owner=probe_key))), Lost):
            raise StoreError("a write was applied under a condition that did not hold")
        return "a write transaction can be started"

    attempts = (RightAttempt("read", read), RightAttempt("write", send_rejected_write, writes=True))
    return RightsTrial(name, attempts, None, send_rejected_write, store.close)
