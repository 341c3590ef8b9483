"""Tries the rights of a worker on a lease table in PostgreSQL, and checks whether a failover could lose commits."""

from collections.abc import Mapping

from psycopg import errors

from leasehold.adapters.ops.doctor.attempts import REQUEST_SECONDS, Absent, NotTried, RightAttempt, RightsTrial
from leasehold.errors import StoreError
from leasehold.stores.postgres import TIMEOUTS, PostgresStore, parse_location


def trial(location: str, options: Mapping[str, str]) -> RightsTrial:
    """Return the trial of the rights on this table. Each attempt is a transaction that is rolled back.

    Raises:
        ValueError: The URL is not valid.
        StoreError: The database cannot be used.
    """
    table = parse_location(location, options)
    try:
        store = PostgresStore(table, create=False, timeouts=TIMEOUTS.within(REQUEST_SECONDS))
    except StoreError as error:
        if not isinstance(error.__cause__, errors.UndefinedTable):
            raise
        message = f"there is no {table.name}; a worker creates it if it has the right (CREATE on the schema, not tried)"

        def raise_absent() -> str:
            raise Absent(message)

        return RightsTrial(table.name, (RightAttempt("SELECT", raise_absent),))
    attempts = (
        RightAttempt("SELECT", lambda: f"it has {len(store.list().leases)} leases"),
        RightAttempt("INSERT", lambda: store.probe("INSERT"), writes=True),
        RightAttempt("UPDATE", lambda: store.probe("UPDATE"), writes=True),
        RightAttempt("DELETE", lambda: store.probe("DELETE"), writes=True),
        RightAttempt("standbys", lambda: _describe_standbys(store)),
    )
    return RightsTrial(table.name, attempts, None, store.prove, store.close)


def _describe_standbys(store: PostgresStore) -> str:
    """Return a sentence about whether commits wait for standbys.

    Raises NotTried if there are standbys but commits wait for none of them. A standby that takes over may then lack the
    last commits.
    """
    standby_count, awaited_count = store.standbys()
    if not standby_count:
        return "no standby follows it; if you add one that may take over, let commits wait for it"
    if awaited_count:
        return f"{standby_count} standbys follow it, and commits wait for {awaited_count}"
    raise NotTried(
        f"{standby_count} standbys follow it, and commits wait for none: if one takes over, the last checkpoints "
        "that were "
        "answered may be lost with their leases' owners; set synchronous_standby_names, unless none ever does"
    )
