"""Who lives by its reports, reading by reading (M14)."""

from balancer.model import SHARD_END, Lease
from balancer.reports import Reports, Roll

J, K = Lease("s-1", owner="j"), Lease("s-2", owner="k")


def reported(**stamps: str) -> Reports:
    """Reports of j, who leads, and others."""
    return Reports("j", tuple(sorted(stamps.items())))


def test_who_is_new_lives_and_who_was_there_lives_from_its_next_report_on() -> None:
    """A dead worker's last report would keep leases unread, or a new worker go without for a report's interval."""
    roll = Roll().after(reported(j="1"), (), ended=1)
    assert roll.led(began=5) == ()
    roll = roll.after(reported(j="2", k="1"), (), ended=10)
    assert roll.led(began=14) == (("j", 4), ("k", 4))


def test_whose_leases_went_lives_from_its_next_report_on() -> None:
    """Killed a moment after its report, it would be waited for, and its leases stay unread."""
    roll = Roll().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    roll = roll.after(reported(j="1", k="2"), (J,), ended=9)
    assert roll.led(began=10) == (("j", 9),)
    roll = roll.after(reported(j="1", k="3"), (J,), ended=20)
    assert roll.led(began=21) == (("j", 20), ("k", 1))


def test_waiting_begins_anew_with_each_lease_that_is_given() -> None:
    """Workers would be given up while their leader is giving."""
    roll = Roll().after(reported(), (), ended=0).after(reported(j="1"), (), ended=1)
    roll = roll.after(reported(j="1"), (J,), ended=9)
    assert roll.led(began=10) == (("j", 1),)
    roll = roll.after(reported(j="1"), (J, Lease("s-2")), ended=12)
    assert roll.led(began=13) == (("j", 4),)


def test_nobody_is_led_once_the_leader_is_silent_or_gone() -> None:
    """What is let go for them would be given to nobody."""
    roll = Roll().after(reported(), (), ended=0).after(reported(j="1", k="1"), (), ended=1)
    assert roll.after(Reports(None, (("k", "2"),)), (), ended=9).led(began=10) == ()
    roll = roll.after(reported(j="1", k="2"), (), ended=50)
    assert roll.led(began=61) == (("j", 60), ("k", 60))
    assert roll.led(began=62) == ()


def test_finished_leases_do_not_count() -> None:
    """A worker with nothing but finished leases would never come to need a lease."""
    over = Lease("s-1", owner="j", checkpoint=SHARD_END)
    roll = Roll().after(reported(), (), ended=0).after(reported(j="1"), (J,), ended=1)
    assert roll.after(reported(j="1"), (over,), ended=9).led(began=10) == ()
