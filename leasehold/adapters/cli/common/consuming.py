"""Opens, runs and supervises the workers of `leasehold consume`."""

import logging
import sys
import time
from contextlib import closing
from typing import Any, Literal, TextIO

import typer

from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.cli.common.supervisor import Supervisor, at_end_of_supervisor
from leasehold.adapters.cli.common.times import MOMENT, moment
from leasehold.adapters.reading.events import CLOSED_STATUS
from leasehold.adapters.reading.exporting import exporting
from leasehold.adapters.reading.handlers.handling import Handling
from leasehold.adapters.reading.member import FAULT_WAITS
from leasehold.adapters.reading.run import endings, stopping_on_signals
from leasehold.adapters.reading.runner import Runner
from leasehold.adapters.reading.slices.running import SliceVerdict, run_slice
from leasehold.adapters.reading.slices.slice import Slice
from leasehold.adapters.sources.backoff import Backoff
from leasehold.adapters.sources.protocol import SourceError
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.holdings import WorkerError
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import OutcomeUnknown, Store, StoreError
from leasehold.stores.urls import open_store, store_address

log = escaped(logging.getLogger("leasehold.consume"))


def joined_worker(
    source: str,
    store: str,
    me: str,
    config: Config,
    until: str | None,
    *,
    wait: bool,
    create: bool,
    if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None,
) -> Worker:
    """Make the worker, of a slice if `until` says so. Raises ValueError, StoreError and SourceError."""
    cut = None if until is None else Slice(config.initial_position, _until(until))
    opened = _opened(store, config, wait=wait, create=create)
    read = open_source(source)
    if cut is None:
        return Worker(store=opened, source=read, me=me, config=config, if_recreated=if_recreated)
    return Worker(store=cut.store(opened), source=cut.source(read), me=me, config=config, if_recreated=if_recreated)


def _opened(url: str, config: Config, *, wait: bool, create: bool) -> Store:
    """Open the store; with `wait` ask again and again while nothing answers."""
    backoff = Backoff(*FAULT_WAITS)
    while True:
        try:
            return open_store(url, create=create, request_seconds=config.lease_seconds / 3)
        except OutcomeUnknown as fault:
            if not wait:
                raise
            seconds = backoff.next()
            log.warning("the store does not answer yet; trying again in %.1f s: %s", seconds, fault)
            time.sleep(seconds)


def run_worker(
    worker: Worker, handling: Handling, metrics: str | None, limits: dict[str, Any], *, told: TextIO | None, wait: bool
) -> None:
    """Run the worker until a signal ends it, or its slice is read; `told` takes the verdict of a slice.

    Raises typer.Exit, with what is wrong on standard error.
    """
    with ending("consume", WorkerError, StoreError, SourceError), closing(worker.store), closing(worker.source):
        if not wait:
            # A worker at work asks again and again; here the first refusal is the answer.
            worker.source.shards()
            worker.store.list()
        with exporting(metrics) as meter:
            if told is not None:
                raise _told(run_slice(worker, handling, meter=meter, **limits), told)
            runner = Runner(worker, handling, meter=meter, **limits)
            with stopping_on_signals(runner):
                at_end_of_supervisor(runner.stop)
                runner.run()


def _told(verdict: SliceVerdict, out: TextIO) -> typer.Exit:
    done = f"handled here: {verdict.records} records, and {verdict.shards} of its shards to their end"
    letters = f", {verdict.letters} went to the dead letter" if verdict.letters else ""
    state = "the slice is read" if verdict.finished else "the slice is not read to its end: start again to go on"
    print(f"{state}; {done}{letters}", file=out)
    return typer.Exit(0 if verdict.finished else 1)


def supervise(me: str, store: str, processes: int, drain_seconds: float, *, sliced: bool, wait: bool) -> int:
    """Run this command as several processes; the exit status. Raises ValueError where they cannot share the leases."""
    if store_address(store)[0] == "memory":
        raise ValueError("--processes: they cannot share memory://, which is of one process; sqlite:// would do")
    if sliced:
        raise ValueError("--processes: a slice ends by itself, and they would be started again; start several commands")
    given = sys.argv[1:]  # the last of two equal options counts
    options = given.index("--") if "--" in given else len(given)
    commands = {}
    for name in (f"{me}-{number}" for number in range(processes)):
        words = (*given[:options], "--worker", name, "--processes", "1", *given[options:])
        commands[name] = (sys.executable, "-P", "-c", "from leasehold.adapters.cli import run; run()", *words)
    final = {2, CLOSED_STATUS} | (set() if wait else {1})
    return Supervisor(commands, drain_seconds, final).run(endings())


def _until(text: str) -> int:
    try:
        return moment(text, time.time())
    except ValueError:
        raise ValueError(f"--until: {text!r} is not {MOMENT}") from None
