"""Measures how often leasehold gives a lease to a KCL 3.5 worker that has already ended (rule M14).

`python benchmarks/gifts_in_vain.py` prints the result, which specs/minimal.md quotes. There are three KCL workers. The
first is the leader and owns leases. The second owned leases, and has ended. The third starts, and ends 5 to 100 s later
without ever having owned a lease. All of them report every 30 s, and leasehold reads the table every 3 s. The times of
reports, starts and ends are random.
"""

import random
from collections import Counter

from leasehold.balancer.model import Lease
from leasehold.balancer.watch import Reports, WorkerReports

DRAWS, LOOK_SECONDS, INTERVAL_SECONDS, END = 2000, 3.0, 30.0, 400.0
GONE_SECONDS = 4.0
"""The time after the end of a worker when its leases no longer have it as their owner."""

LEADERS, OTHERS = (Lease("s-1", owner="leader"),), (Lease("s-2", owner="ended"),)


def main() -> None:
    """Print how often the first gift went to the third worker while it was running, or after its end."""
    outcomes = Counter(_first_gift(random.Random(seed)) for seed in range(DRAWS))  # noqa: S311  a seed is the point
    for outcome, count in sorted(outcomes.items()):
        print(f"{outcome}: {count} of {DRAWS}")


def _first_gift(draw: random.Random) -> str:
    started = draw.uniform(20.0, 30.0)
    ended = started + draw.uniform(5.0, 100.0)
    lives = {
        "leader": (-draw.uniform(1000.0, 1030.0), END),
        "ended": (-draw.uniform(1000.0, 1030.0), 0.0),
        "third": (started, ended),
    }
    reports, now = WorkerReports(), -draw.uniform(40.0, 43.0)
    while now < END:
        stamps = tuple((name, _report_counter(life, now)) for name, life in lives.items() if now >= life[0])
        leases = LEADERS + (OTHERS if now < GONE_SECONDS else ())
        reports = reports.after(Reports("leader", stamps), leases, now)
        if any(worker == "third" and waited < END for worker, waited in reports.led(now)):
            return "given to a living worker" if now <= ended else "given in vain"
        now += LOOK_SECONDS
    return "ended before anything was given"


def _report_counter(life: tuple[float, float], now: float) -> str:
    started, ended = life
    return str(int((min(now, ended) - started) // INTERVAL_SECONDS))


if __name__ == "__main__":
    main()
