"""Fuzzes every parser for a given time: `python lab/fuzz/long_fuzz.py 600`, or with the names of some targets.

A value that breaks the law is added to the corpus, so that `make test` tries it from then on. With `--engine atheris`,
if it is installed, values are drawn from bytes that atheris mutates to reach more of leasehold's code, and each target
runs in a process of its own.
"""

# ruff: noqa: T201  a script prints its findings

import argparse
import importlib
import importlib.util
import io
import logging
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any, Never

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fuzzing import CpuTimeExceeded, FuzzTarget, is_accepted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROUND = 200  # examples per check of the clock


class FuzzTrial:
    """The values of one target, tried one after the other."""

    def __init__(self, target: FuzzTarget) -> None:
        self.target, self.began = target, time.monotonic()
        self.count, self.slowest = 0, 0.0
        # The last value that hypothesis tries is the smallest one that breaks the law.
        self.last_values: list[object] = []
        values = target.values

        @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def try_values(data: st.DataObject) -> None:
            value = data.draw(values)
            start_time = time.process_time()
            self.last_values[:] = [value]
            is_accepted(target, value)
            self.count, self.slowest = self.count + 1, max(self.slowest, time.process_time() - start_time)

        self.try_values: Any = try_values

    def replay(self) -> None:
        """Try every sample of the corpus. A sample that breaks the law is not added to the corpus again."""
        self.last_values.clear()
        for sample in self.target.replay():
            is_accepted(self.target, sample)

    def report(self, run_rounds: Callable[[], object]) -> bool:
        """Call `run_rounds`, and print and return whether the law was kept. Add a value that broke it to the corpus."""
        try:
            run_rounds()
        except (Exception, CpuTimeExceeded):  # noqa: BLE001  report any exception, and continue with the others
            print(f"{self.target.name}: BROKEN after {self.count} values, by {str(self.last_values)[:500]}")
            traceback.print_exc(limit=-4)
            if self.last_values:
                self.target.add_to_corpus(self.last_values[0])
            return False
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        slowest_text = f"slowest {self.slowest * 1000:.0f} ms"
        print(f"{self.target.name}: {self.count} values, {slowest_text}, at most {peak_mib} MiB", flush=True)
        return True


def fuzz(target: FuzzTarget, seconds: float) -> bool:
    """Fuzz one target for this many seconds, and return whether it kept its law."""
    trial = FuzzTrial(target)

    def run_rounds() -> None:
        trial.replay()
        while time.monotonic() - trial.began < seconds:
            trial.try_values()

    return trial.report(run_rounds)


def fuzz_with_atheris(target: FuzzTarget, seconds: float) -> Never:
    """Fuzz one target with atheris for this many seconds, then exit. The status is 1 if the law was broken."""
    atheris, trial = importlib.import_module("atheris"), FuzzTrial(target)

    def exit_after(rounds: Callable[[], object]) -> None:
        is_law_kept = trial.report(rounds)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if is_law_kept else 1)  # atheris does not return

    def try_input(drawn_bytes: bytes) -> None:
        if time.monotonic() - trial.began >= seconds:
            exit_after(trial.replay)
        try:
            trial.try_values.hypothesis.fuzz_one_input(drawn_bytes)
        except (Exception, CpuTimeExceeded) as exc:  # noqa: BLE001  any exception is a finding
            exit_after(partial(_raise_fault, exc))

    atheris.Setup([sys.argv[0], "-verbosity=0", "-max_len=4096", "-rss_limit_mb=4096"], try_input)
    atheris.Fuzz()
    raise AssertionError("atheris came back")


def _raise_fault(exc: BaseException) -> Never:
    raise exc


def list_targets(engine: str) -> tuple[FuzzTarget, ...]:
    """Return all targets. For atheris, leasehold's own code is instrumented for coverage."""
    if engine == "hypothesis":
        module = importlib.import_module("fuzz_targets")
    else:
        instrumented_imports = importlib.import_module("atheris").instrument_imports(include=["leasehold"])
        with redirect_stderr(io.StringIO()), instrumented_imports:  # atheris prints the name of each module
            module = importlib.import_module("fuzz_targets")
    all_targets: tuple[FuzzTarget, ...] = module.TARGETS
    return all_targets


def _fuzz_in_child(target: FuzzTarget, seconds: float) -> bool:
    """Fuzz one target with atheris in a process of its own, and return whether it kept its law."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        fuzz_with_atheris(target, seconds)
    _, status = os.waitpid(child, 0)
    return status == 0


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, help="for all targets together")
    parser.add_argument("targets", nargs="*", help="[all]")
    parser.add_argument("--engine", choices=("hypothesis", "atheris"), default="hypothesis", help="[%(default)s]")
    options = parser.parse_args()
    if options.engine == "atheris" and importlib.util.find_spec("atheris") is None:
        print("atheris is not installed here: hypothesis goes on alone")
        options.engine = "hypothesis"
    logging.disable()  # readers log every response that they cannot parse
    all_targets = list_targets(options.engine)
    chosen_targets = [target for target in all_targets if target.name in options.targets or not options.targets]
    engine = fuzz if options.engine == "hypothesis" else _fuzz_in_child
    broken_targets = [
        target.name for target in chosen_targets if not engine(target, options.seconds / len(chosen_targets))
    ]
    print(f"{len(chosen_targets)} parsers, {len(broken_targets)} broken", *broken_targets)
    return 1 if broken_targets else 0


if __name__ == "__main__":
    sys.exit(_main())
