"""Swaps lease tables, one swap per seed, while workers, tables and the command itself are killed.

    python lab/chaos/swaps.py 20

In each run, some thousands of records are put while the leases are moved to TO and back. At the end, all leases must be
in TO, and all records must have been handled in order. The seed determines the pair of tables.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from plain_workers import RunOutcome, RunRequest, print_to_stderr, run_chaos
from services import ServiceMissing

from leasehold_lab.demo.child import ENVIRONMENT, HIDDEN_VARIABLES

PAIRS = (
    ("dynamodb", "", "postgres", ""),
    ("dynamodb", "", "dynamodb", "sessions"),
    ("postgres", "sessions", "dynamodb", ""),
    ("azblob", "", "postgres", "sessions"),
    ("sqlite", "", "s3", ""),
    ("azblob", "", "gcs", ""),
    ("s3", "sessions", "azblob", "sessions"),
)
"""The tables FROM and TO of a swap, each with its layout."""


def create_request(seed: int, seconds: float) -> RunRequest:
    """Return the run that belongs to this seed."""
    store, layout, to_store, to_layout = PAIRS[seed % len(PAIRS)]
    return RunRequest(seed, seconds, "kinesis", store, layout=layout, to=to_store, to_layout=to_layout)


def main() -> int:
    """Run one seed after the other, and return 1 if the judge finds a fault in any of the runs."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("runs", type=int, nargs="?", default=20, help="how many (%(default)s)")
    options.add_argument("--first", type=int, default=1, help="the first seed (%(default)s)")
    options.add_argument("--seconds", type=float, default=45.0, help="for which faults are played (%(default)s)")
    arguments = options.parse_args()
    for name in HIDDEN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    outcomes: list[RunOutcome] = []
    for seed in range(arguments.first, arguments.first + arguments.runs):
        with tempfile.TemporaryDirectory(prefix="leasehold-swaps-") as folder:
            run_request = create_request(seed, arguments.seconds)
            try:
                outcomes.append(run_chaos(run_request, Path(folder), print_to_stderr))
            except ServiceMissing as exc:
                sys.stdout.write(f"{run_request.store} TO {run_request.to} IS NOT TRIED: {exc}\n\n")
                continue
        sys.stdout.write(f"{outcomes[-1]}\n\n")
        sys.stdout.flush()
    failed_seeds = [run_outcome.request.seed for run_outcome in outcomes if not run_outcome.verdict.ok]
    sent_count, lost_count = (
        sum(getattr(run_outcome.verdict, count_name) for run_outcome in outcomes) for count_name in ("produced", "lost")
    )
    sys.stdout.write(
        f"{len(outcomes)} swaps, {sent_count:,} records, {lost_count} lost; not good: {failed_seeds or 'none'}\n"
    )
    return 1 if failed_seeds else 0


if __name__ == "__main__":
    sys.exit(main())
