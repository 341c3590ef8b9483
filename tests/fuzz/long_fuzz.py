"""Fuzz every parser for as long as one likes: `python tests/fuzz/long_fuzz.py 600`, or with the names of some targets.

What breaks the law is added to the corpus, so that `make test` tries it ever after.
"""

# ruff: noqa: T201  a script says what it found

import argparse
import logging
import resource
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz_targets import TARGETS
from fuzzing import FuzzTarget, TooSlow, obeys
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROUND = 200  # examples between two looks at the clock


def fuzzed(target: FuzzTarget, seconds: float) -> bool:
    """Fuzz one target for so long; whether it kept its law."""
    began, count, slowest = time.monotonic(), 0, 0.0
    smallest: list[object] = []
    values = target.values

    @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def some(data: st.DataObject) -> None:
        nonlocal count, slowest
        value = data.draw(values)
        spent = time.process_time()
        smallest[:] = [value]  # the last one that hypothesis tries is the smallest that breaks the law
        obeys(target, value)
        count, slowest = count + 1, max(slowest, time.process_time() - spent)

    try:
        for sample in target.replay():
            obeys(target, sample)
        while time.monotonic() - began < seconds:
            some()
    except (Exception, TooSlow):  # noqa: BLE001  whatever it is, it is told, and the others go on
        print(f"{target.name}: BROKEN after {count} values, by {str(smallest)[:500]}")
        traceback.print_exc(limit=-4)
        if smallest:
            target.keep(smallest[0])
        return False
    kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{target.name}: {count} values, slowest {slowest * 1000:.0f} ms, at most {kept} MiB", flush=True)
    return True


def _main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("seconds", type=float, help="for all targets together")
    asked.add_argument("targets", nargs="*", help="[all]")
    options = asked.parse_args()
    logging.disable()  # what readers say of each answer that they cannot read
    chosen = [target for target in TARGETS if target.name in options.targets or not options.targets]
    broken = [target.name for target in chosen if not fuzzed(target, options.seconds / len(chosen))]
    print(f"{len(chosen)} parsers, {len(broken)} broken", *broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(_main())
