"""An available-now query waits for rows only for a limited time, on a clock that the test advances."""

import pytest

from leasehold.adapters.spark.lease_loop import STALL_SECONDS, Watchdog

LEFT = {"a": "nobody owns it", "b": "its end is not reached"}


def test_wait_ends_once_nothing_has_changed_for_too_long() -> None:
    now = [0.0]
    watchdog = Watchdog(10.0, lambda: now[0])
    for awaited_shards, answered_reads in ((LEFT, 0), (LEFT, 1), ({"a": "nobody owns it"}, 1)):
        watchdog.check_progress(awaited_shards, answered_reads)
        now[0] += STALL_SECONDS
        watchdog.check_progress(awaited_shards, answered_reads)
    now[0] += 1
    with pytest.raises(TimeoutError, match=r"^availableNow: nothing was read for 300 s of a \(nobody owns it\); "):
        watchdog.check_progress({"a": "nobody owns it"}, 1)


def test_wait_is_longer_if_leases_take_long_to_expire() -> None:
    """The query waits until it can take the shards of a dead worker."""
    now = [0.0]
    watchdog = Watchdog(120.0, lambda: now[0])
    watchdog.check_progress(LEFT, 0)
    now[0] = 360.0
    watchdog.check_progress(LEFT, 0)
    now[0] = 361.0
    with pytest.raises(TimeoutError, match=r"360 s of a .*, b \("):
        watchdog.check_progress(LEFT, 0)


def test_wait_ends_if_the_jvm_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog(10.0)
    monkeypatch.setattr("os.getppid", lambda: 1)
    with pytest.raises(ProcessLookupError, match="no query waits for these shards"):
        watchdog.check_progress(LEFT, 0)
