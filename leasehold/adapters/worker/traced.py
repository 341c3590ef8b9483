"""Makes OpenTelemetry spans for a worker's operations: look, plan, list, get, write, read and handle.

The span of a look has a child span for each of its writes, with the rule that required the write. A handler's span is
the current one while the handler runs, so the spans that the handler makes are its children.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from opentelemetry import context
from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    Tracer,
    get_tracer,
    get_tracer_provider,
    use_span,
)
from opentelemetry.util.types import AttributeValue

from leasehold.adapters.sources.protocol import Batch, ForwardingSource, Reader, Source
from leasehold.adapters.worker.spans import Acted, Handle, WorkerSpans
from leasehold.balancer.actions import Action
from leasehold.balancer.model import Lease, Position
from leasehold.errors import OutcomeUnknown
from leasehold.stores.printable import error_summary, make_safe_logger
from leasehold.stores.protocol import Done, Listing, Outcome, PassingStore, Store
from leasehold.stores.writes import Write

log = make_safe_logger(logging.getLogger("leasehold.spans"))

TRACER_NAME = "leasehold"
RULE_KEY = context.create_key("leasehold-rule")


def program_tracer() -> Tracer | None:
    """Return a tracer of the provider that the program has set, or None if it has set none."""
    # A provider without exporters would still create a span per call.
    provider_is_unset = isinstance(get_tracer_provider(), ProxyTracerProvider | NoOpTracerProvider)
    return None if provider_is_unset else get_tracer(TRACER_NAME)


class TracedSpans(WorkerSpans):
    """Makes the spans of one worker. Each span has the worker's id as an attribute."""

    def __init__(self, tracer: Tracer, worker: str) -> None:
        self._tracer, self._worker, self._failure_logged = tracer, worker, False

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        """Make a span, which is the current span inside the block. If the block raises, the span is marked as failed.

        If the tracer raises an exception, the span is lost, but the block still runs.
        """
        span = self._start_span(name, attributes)
        try:
            with use_span(span):
                yield span
        finally:
            self._end_span(span)

    def annotate_span(self, span: Span, attributes: Mapping[str, AttributeValue]) -> None:
        """Set attributes of a span, ignoring any exception."""
        try:
            span.set_attributes(attributes)
        except Exception as fault:  # noqa: BLE001  tracing must not make a call fail
            self._log_first_failure(fault)

    def _start_span(self, name: str, attributes: dict[str, Any]) -> Span:
        try:
            return self._tracer.start_span(f"leasehold.{name}", attributes=self._attributes(attributes))
        except Exception as fault:  # noqa: BLE001  a sampler or a processor may raise any exception
            self._log_first_failure(fault)
            return INVALID_SPAN

    def _end_span(self, span: Span) -> None:
        try:
            span.end()
        except Exception as fault:  # noqa: BLE001  a processor may raise any exception
            self._log_first_failure(fault)

    def _log_first_failure(self, fault: Exception) -> None:
        is_first, self._failure_logged = not self._failure_logged, True
        if is_first:
            log.error(
                "a span failed; logged only once, and the worker continues: %s", error_summary(fault), exc_info=fault
            )

    def _attributes(self, attributes: dict[str, Any]) -> dict[str, AttributeValue]:
        return {f"leasehold.{name}": value for name, value in {**attributes, "worker": self._worker}.items()}

    def span_around(self, name: str) -> AbstractContextManager[object]:
        return self.span(name)

    def acting(self, act: Callable[[Action], Acted]) -> Callable[[Action], Acted]:
        # Pass the current span on, because writes run in the threads of a pool, which do not inherit it.
        current_context = context.get_current()

        def wrapped(action: Action) -> Acted:
            token = context.attach(context.set_value(RULE_KEY, action.rule, current_context))
            try:
                return act(action)
            finally:
                context.detach(token)

        return wrapped

    def store(self, store: Store) -> Store:
        return TracedStore(store, self)

    def source(self, source: Source) -> Source:
        return TracedSource(source, self)

    def handler(self, handler: Handle) -> Handle:
        def handle(batch: Any, *arguments: object) -> object:  # noqa: ANN401  the callable's own arguments
            # Omit the epoch if it is None, because OpenTelemetry logs a warning about such an attribute.
            epoch_attribute = {} if batch.epoch is None else {"epoch": batch.epoch}
            attributes = {"lease": batch.lease, "records": len(batch.records), **epoch_attribute}
            span, returned_awaitable = self._start_span("handle", attributes), False
            try:
                with use_span(span):
                    result: Any = handler(batch, *arguments)
                returned_awaitable = inspect.isawaitable(result)
            finally:
                # If the call returned an awaitable, end the span only once the awaitable is done.
                if not returned_awaitable:
                    self._end_span(span)
            if not returned_awaitable:
                return result

            async def await_result() -> object:
                try:
                    with use_span(span):
                        return await result
                finally:
                    self._end_span(span)

            return await_result()

        return cast("Handle", handle)


class TracedStore(PassingStore):
    """A store that makes a span for each call to the service."""

    def __init__(self, store: Store, spans: TracedSpans) -> None:
        super().__init__(store)
        self._spans = spans

    def list(self) -> Listing:
        with self._spans.span("list") as span:
            listing = self._store.list()
            self._spans.annotate_span(span, {"leasehold.leases": len(listing.leases)})
        return listing

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        requested_keys = tuple(keys)
        with self._spans.span("get", leases=len(requested_keys)):
            return self._store.get(requested_keys, stale_ok=stale_ok)

    def write(self, write: Write) -> Outcome:
        """Apply the write in a span with its outcome and, if a plan required the write, with the action's rule."""
        rule = context.get_value(RULE_KEY)
        rule_attribute = {"rule": str(rule)} if rule else {}
        with self._spans.span("write", lease=write.lease.key, kind=type(write).__name__, **rule_attribute) as span:
            try:
                outcome = self._store.write(write)
            except OutcomeUnknown:
                self._spans.annotate_span(span, {"leasehold.outcome": "unknown"})
                raise
            self._spans.annotate_span(span, {"leasehold.outcome": "done" if isinstance(outcome, Done) else "refused"})
        return outcome


class TracedSource(ForwardingSource):
    """A source whose readers make a span for each read."""

    def __init__(self, source: Source, spans: TracedSpans) -> None:
        super().__init__(source)
        self._spans = spans

    def open(self, lease: Lease, start: Position) -> Reader:
        return TracedReader(super().open(lease, start), lease.key, self._spans)


class TracedReader:
    """A reader that makes a span for each read."""

    def __init__(self, reader: Reader, lease: str, spans: TracedSpans) -> None:
        self._reader, self._lease, self._spans = reader, lease, spans

    def read(self) -> Batch:
        with self._spans.span("read", lease=self._lease) as span:
            batch = self._reader.read()
            # If the lag is unknown, leave it out, because 0 would mean that the reader is at the tip.
            lag_attribute = {} if batch.behind_seconds is None else {"leasehold.behind_seconds": batch.behind_seconds}
            self._spans.annotate_span(
                span, {"leasehold.records": batch.count, "leasehold.bytes": batch.size, **lag_attribute}
            )
        return batch

    def close(self) -> None:
        self._reader.close()
