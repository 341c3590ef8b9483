"""Checks the options of a worker, then opens and runs it, for `leasehold consume` and for the Python functions."""

import importlib
import itertools
import logging
import math
import os
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from attrs import evolve, fields_dict, frozen

from leasehold.adapters.consumer.dead_letters.sinks import dead_letters
from leasehold.adapters.consumer.executors import HandlerExecutor
from leasehold.adapters.consumer.exporting import exporting
from leasehold.adapters.consumer.handling import DeadLetter, Handler, Handling, by_key
from leasehold.adapters.consumer.reader_state import FAULT_WAITS
from leasehold.adapters.consumer.runner import Runner, stopping_on_signals
from leasehold.adapters.consumer.slices import Slice, SliceVerdict, run_slice
from leasehold.adapters.inputs import (
    SETTING_LIMITS,
    TIME_FORMATS,
    check_duration,
    check_time_ms,
    combine_settings,
    config_for_source,
    parse_initial_position,
    parse_time_ms,
)
from leasehold.adapters.lambda_handlers import BATCH_SIZE, LAMBDA_PREFIX, LambdaFunction, make_lambda_function
from leasehold.adapters.lambda_processes import ParallelFunction
from leasehold.adapters.options import MIB, Options, check_options, options_by_name
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.sources.urls import open_source, source_address
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import Position
from leasehold.errors import OutcomeUnknown
from leasehold.stores.printable import did_you_mean, error_summary, make_safe_logger
from leasehold.stores.protocol import Store
from leasehold.stores.swap import SwapStore, check_tables_differ, open_tables
from leasehold.stores.urls import display_name, open_store, split_store_url

if TYPE_CHECKING:  # boto3 is an optional dependency
    from boto3 import Session

log = make_safe_logger(logging.getLogger("leasehold.consume"))


@frozen
class Consumption:
    """The checked configuration of a worker that is not opened yet.

    Attributes:
        source: A URL, which `open_worker` opens and closes, or an object, which the caller closes.
        leases: A URL, which `open_worker` opens and closes, or an object, which the caller closes.
        me: The worker's id.
        config: The configuration of the rules.
        handling: The handler and its policy.
        time_slice: The slice to read; None to read without end.
        function: The Lambda function that handles the records, or None if the handler is not a Lambda function.
        options: All options by name, with defaults for those that were not given, and durations as seconds.
        sessions: The boto3 sessions with the credentials of source, leases and `to`; by default those of the URLs.
    """

    source: str | Source
    leases: str | Store
    me: str
    config: Config
    handling: Handling
    time_slice: Slice | None
    options: Mapping[str, Any]
    function: LambdaFunction | None = None
    sessions: "tuple[Session | None, Session | None, Session | None]" = (None, None, None)

    @contextmanager
    def open_worker(self, stop_requested: Event | None = None) -> Iterator[Worker]:
        """Open the store and the source if they are given as URLs, yield a worker, and close what was opened.

        Args:
            stop_requested: An event that the caller sets to end the wait for a store that does not respond.

        Raises:
            ValueError: A URL is wrong.
            StoreError: The lease table cannot be used.
            SourceError: The stream cannot be used.
        """
        with ExitStack() as stack:
            store, source = self.leases, self.source
            if isinstance(store, str):
                backoff, stop_event = Backoff(*FAULT_WAITS), stop_requested or Event()
                store_options: dict[str, Any] = {
                    "create": self.options["create"],
                    "request_seconds": self.config.lease_seconds / 3,
                }
                while isinstance(store, str):
                    try:
                        if (target_url := self.options["to"]) is None:
                            store = open_store(store, session=self.sessions[1], **store_options)
                        else:  # the leases may move to another table, so both tables are needed
                            tables = open_tables(store, target_url, sessions=self.sessions[1:], **store_options)
                            store = SwapStore(tables, display_name(target_url))
                    except OutcomeUnknown as fault:
                        # With `wait`, keep trying to open the store, as a running worker would keep trying to read.
                        if not self.options["wait"]:
                            raise
                        wait_seconds = backoff.next()
                        log.warning("the store does not respond yet; trying again in %.1f s: %s", wait_seconds, fault)
                        if stop_event.wait(wait_seconds):
                            raise
                stack.callback(store.close)
            if isinstance(source, str):
                source = open_source(source, session=self.sessions[0])
                stack.callback(source.close)
            if self.function is not None:
                self.function.use_source_arns(source)
                stack.callback(self.function.close)
            if self.time_slice is not None:
                store, source = self.time_slice.store(store), self.time_slice.source(source)
            if_recreated = self.options["if_recreated"]
            yield Worker(store=store, source=source, me=self.me, config=self.config, if_recreated=if_recreated)

    def run(
        self,
        worker: Worker,
        *,
        executor: HandlerExecutor | None = None,
        on_runner_started: Callable[[Runner], None] = lambda _runner: None,
    ) -> SliceVerdict | None:
        """Run the worker until it is stopped or its slice is read. In the main thread a signal also stops it.

        Args:
            worker: The worker, as `open_worker` yields it.
            executor: Calls the handlers, as for `Runner`.
            on_runner_started: Called with the runner before it runs.

        Returns:
            How much of the slice was read, or None without a slice.

        Raises:
            WorkerError: The worker cannot continue.
            StoreError: The lease table cannot be used.
            SourceError: The stream cannot be used.
        """
        if not self.options["wait"]:
            # Without `wait`, an error at the start must end the worker. Request the shards and the leases here, because
            # a running worker would retry these requests forever.
            worker.source.shards()
            worker.store.list()
        metrics = self.options["metrics"]
        with exporting(metrics) if metrics is None or isinstance(metrics, str) else nullcontext(metrics) as meter:
            runner_options: dict[str, Any] = {
                "drain_seconds": self.options["drain_seconds"],
                "memory_bytes": self.options["memory_mib"] * MIB,
                "readers": self.options["threads"],
            }
            if self.time_slice is not None:
                return run_slice(
                    worker,
                    self.handling,
                    meter=meter,
                    executor=executor,
                    on_runner_created=on_runner_started,
                    **runner_options,
                )
            runner = Runner(worker, self.handling, meter=meter, executor=executor, **runner_options)
            with stopping_on_signals(runner):
                on_runner_started(runner)
                runner.run()
            return None


def check_consumption_options(
    source: str | Source,
    leases: str | Store,
    handler: Handler | Handling | str,
    options: Options,
    option_label: Callable[[str], str] = str,
) -> Consumption:
    """Check the options and return the worker that they describe.

    Args:
        source: The stream to read, as a URL or an object.
        leases: Where to keep the leases, as a URL or an object.
        handler: A function of one batch, its `module:function`, `lambda:file.function` for a function of AWS Lambda,
            or a `Handling`, whose fields the options may replace.
        options: The options.
        option_label: Returns an option's name as the user writes it, such as `--to`, for error messages.

    Raises:
        ValueError: An option is wrong; the message names it and says what to do.
        TypeError: There is no such option.
        DeadLetterError: The dead letter cannot be opened.
    """
    given_options, values = check_options(Options, options, option_label)
    _check_source_and_leases(source, leases, option_label)
    for split_address, url in ((source_address, source), (split_store_url, leases)):
        if isinstance(url, str) and split_address(url)[0] == "file":
            raise ValueError(
                f"{option_label('leases')}: file:// is a backup, on which no fleet works; copy it to a store"
            )
    if (target_url := values["to"]) is not None:
        if not isinstance(leases, str):
            raise ValueError(
                f"{option_label('to')}: it goes with leases that are a URL; give leasehold.stores.open_both(FROM, TO)"
            )
        check_tables_differ(leases, target_url, option_label("to"))
    lambda_handler = None
    if isinstance(handler, str) and handler.startswith(LAMBDA_PREFIX):
        lambda_handler = _make_lambda_handler(handler, given_options)
        handler = Handling(lambda_handler, max_records=BATCH_SIZE, most_calls=1)
        source = _with_whole_aggregates(source, option_label("handler"))
    elif isinstance(handler, str):
        handler = load_function(handler)
    handling = handler if isinstance(handler, Handling) else Handling(handler)
    if lambda_handler is None and (most_calls := values["concurrency"]) is not None:
        handling = evolve(handling, handler=by_key(handling.handler, most_calls))  # type: ignore[arg-type]  # by_key rejects others
    planner_settings = {
        "rules": values["rules"],
        "lease_seconds": values["lease_seconds"],
        **_parse_initial_position(values, option_label),
    }
    planner_options = combine_settings(planner_settings, values["set"] or (), option_label("set"))
    config = config_for_source(source if isinstance(source, str) else "", planner_options)
    for setting_name in combine_settings({}, values["set"] or (), option_label("set")).keys() & SETTING_LIMITS:
        seconds = getattr(config, setting_name, None) or getattr(config.rules, setting_name)
        if warning := check_duration(SETTING_LIMITS[setting_name], seconds, f"{option_label('set')} {setting_name}"):
            log.warning("%s", warning)
    dead_letter = values["dead_letter"]
    if isinstance(dead_letter, str):
        dead_letter = open_dead_letter(dead_letter, source, leases, option_label)
    # If a call takes too long, a `ParallelFunction` itself ends it and fails the batch. If `Handling` enforced the
    # limit, the shard would be given up instead, and a record at which the function hangs would go from worker to
    # worker and never to the dead letter.
    enforced_options = {"handler_seconds"} if isinstance(lambda_handler, ParallelFunction) else set[str]()
    handling_fields = {
        setting_name: given_options[setting_name]
        for setting_name in _HANDLING_OPTIONS & given_options.keys() - enforced_options
    }
    if dead_letter is not None:
        handling_fields["dead_letter"] = dead_letter
    elif "max_age_seconds" in handling_fields and handling.dead_letter is None:
        raise ValueError(
            f"{option_label('max_age_seconds')}: it goes with {option_label('dead_letter')}, to which old records go"
        )
    handling = evolve(handling, **handling_fields)
    time_slice = None
    if (until := values["until"]) is not None:
        try:
            until_ms = parse_time_ms(_time_as_text(until), time.time())
        except (ValueError, AttributeError):
            raise ValueError(f"{option_label('until')}: {until!r} is not {TIME_FORMATS}") from None
        time_slice = Slice(config.initial_position, until_ms)
    return Consumption(
        source=source,
        leases=leases,
        me=make_worker_id() if values["worker"] is None else values["worker"],  # the worker rejects an empty id
        config=config,
        handling=handling,
        time_slice=time_slice,
        options=values,
        function=lambda_handler,
    )


def _make_lambda_handler(handler: str, given_options: Mapping[str, Any]) -> LambdaFunction:
    function = make_lambda_function(handler, _import_function, given_options.get("handler_seconds", math.inf))
    if (concurrency := given_options.get("concurrency")) is None:
        return function
    return ParallelFunction(function.function, function.settings, function.handler_seconds, concurrency=concurrency)


def _with_whole_aggregates(source: str | Source, option: str) -> str | Source:
    """Return the source with de-aggregation turned off, because Lambda's event source mappings pass on aggregates, too.

    Raises ValueError for a source that no mapping can read.
    """
    if not isinstance(source, str):
        return source
    scheme, _, options = source_address(source)
    if scheme == "eventhubs":
        raise ValueError(f"{option}: lambda: goes with kinesis:// and dynamodb-streams://, the streams of AWS")
    if scheme != "kinesis" or "aggregates" in options:
        return source
    return f"{source}{'&' if '?' in source else '?'}aggregates=whole"


def _check_source_and_leases(source: object, leases: object, option_label: Callable[[str], str]) -> None:
    for name, value, methods in (("source", source, ("shards", "open")), ("leases", leases, ("list", "write"))):
        if not isinstance(value, str) and not all(callable(getattr(value, method, None)) for method in methods):
            message = f"{type(value).__name__} is neither a URL nor an object with {' and '.join(methods)}"
            raise ValueError(f"{option_label(name)}: {message}")


_WORKER_NUMBERS = itertools.count(1)


def make_worker_id() -> str:
    """Return a default worker id. Each worker of a process gets a different one."""
    number = next(_WORKER_NUMBERS)
    return f"{socket.gethostname()}-{os.getpid()}" + (f"-{number}" if number > 1 else "")


# The options that the table of options alone cannot check


_HANDLING_OPTIONS = options_by_name(Options).keys() & fields_dict(Handling).keys() - {"dead_letter"}
"""The options whose values replace the fields of `Handling` that have the same names."""


def _parse_initial_position(values: Mapping[str, Any], option_label: Callable[[str], str]) -> dict[str, Any]:
    initial_position, option = values["initial_position"], option_label("initial_position")
    if not isinstance(initial_position, Position):
        if not isinstance(initial_position, str | datetime):
            raise ValueError(f"{option}: {initial_position!r} is no position, and not {TIME_FORMATS}")  # noqa: TRY004  bad usage
        initial_position = parse_initial_position(_time_as_text(initial_position), time.time(), option)
    elif initial_position.sequence == "AT_TIMESTAMP":
        check_time_ms(initial_position.sub, option)
    return {"initial_position": initial_position.sequence, "timestamp_ms": initial_position.sub or None}


def _time_as_text(time_: object) -> Any:  # noqa: ANN401  the parsers of times reject other types
    return time_.isoformat() if isinstance(time_, datetime) else time_


_IDENTIFYING_OPTIONS = ("region", "endpoint", "prefix", "eventhub", "group", "table")


def open_dead_letter(
    text: str, source: str | Source, leases: str | Store, option_label: Callable[[str], str] = str
) -> DeadLetter:
    """Return the dead letter that this URL or `module:function` names.

    Raises ValueError if the name is wrong, and DeadLetterError if the dead letters cannot be stored there.
    """
    if "://" not in text:
        return load_function(text)
    if not isinstance(source, str) or not isinstance(leases, str):
        option_name = option_label("dead_letter")
        raise ValueError(  # noqa: TRY004  bad usage
            f"{option_name}: a URL goes with a source and leases that are URLs; give "
            "leasehold.adapters.dead_letters(URL, stream=…, table=…), which says whose letters they are"
        )
    scheme, location, options = source_address(source)
    stream_name = location.rpartition(":stream/")[2]  # the name, if `location` is an ARN
    dead_letter_target = text.partition("?")[0].removeprefix(f"{scheme}://")
    # A stream's name may be given without an account. Treat it as equal to an ARN with that name in any account.
    is_same_name = dead_letter_target.rpartition(":stream/")[2] == stream_name and stream_name in {
        location,
        dead_letter_target,
    }
    if text.startswith(f"{scheme}://") and (dead_letter_target == location or is_same_name):
        raise ValueError(
            f"{option_label('dead_letter')}: it is the stream that is read, so its dead letters would be read again, "
            "forever"
        )
    table = _identifying_url(*split_store_url(leases))
    return dead_letters(text, stream=stream_name, table=table, source=_identifying_url(scheme, location, options))


def _identifying_url(scheme: str, location: str, options: Mapping[str, str]) -> str:
    """Return the URL with only its identifying options, in a fixed order. None of these options is a secret.

    A file is identified by its full path, because two groups may each have a file called `leases.db`.
    """
    if scheme == "sqlite" and (folder := _working_folder()) is not None:
        location = str(folder / location)
    identifying_options = urlencode(
        {name: options[name] for name in _IDENTIFYING_OPTIONS if name in options}, safe="/:$"
    )
    return f"{scheme}://{location}" + (f"?{identifying_options}" if identifying_options else "")


IMPORT_SYSTEM_PATHS = (__file__, importlib.__file__, "<frozen importlib")
"""Path prefixes of Python's import system, whose frames come before the user's file in a traceback."""

LIBRARY_PATHS = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Path prefixes of libraries, whose frames come after the user's file in a traceback."""


def load_function(text: str) -> Callable[..., Any]:
    """Import and return the function that `module:function` names.

    Raises:
        ValueError: The module or function is missing, or importing it fails. The message names the file and the line.
    """
    if text.startswith(LAMBDA_PREFIX):
        raise ValueError(
            f"{text!r}: lambda: names a Lambda function, which is the handler of `consume` and `run` alone; rename a "
            "module that is called lambda"
        )
    return _import_function(text)


def _import_function(text: str) -> Callable[..., Any]:
    """Import and return the function, whatever its module is called."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"{text!r} is not of the form module:function")
    folder = _working_folder()
    folder_name = str(folder)
    if folder is not None and folder_name not in sys.path:
        # Unlike `python -m`, a command does not import from the working folder. Add it last, so that a file in it
        # cannot shadow a library of the same name.
        sys.path.append(folder_name)
    try:
        imported_object = getattr(importlib.import_module(module), name, None)
    except SyntaxError as error:
        raise ValueError(f"{text!r}: {error.filename}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not _error_location(error):
            hint = did_you_mean(str(error.name), [file.stem for file in folder.glob("*.py")] if folder else [])
            raise ValueError(f"{text!r}: there is no module {error.name!r} here{hint}") from error
        raise ValueError(f"{text!r}: {_error_location(error)}: {error_summary(error)}") from error
    if not callable(imported_object):
        functions = [callable_name for callable_name, value in vars(sys.modules[module]).items() if callable(value)]
        hint = did_you_mean(name, functions)
        raise ValueError(f"{text!r}: module {module!r} has no function {name!r}{hint}")  # noqa: TRY004  bad usage
    function: Callable[..., Any] = imported_object
    return function


def _working_folder() -> Path | None:
    """Return the working folder, or None if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _error_location(error: Exception) -> str:
    """Return the user's file and line that raised the exception, or "" if no file had been run yet."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(IMPORT_SYSTEM_PATHS)
    ]
    user_frames = [frame for frame in frames if not frame.filename.startswith(LIBRARY_PATHS)] or frames
    return f"{user_frames[-1].filename}, line {user_frames[-1].lineno}" if user_frames else ""
