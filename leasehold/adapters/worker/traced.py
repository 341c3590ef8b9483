"""Spans by OpenTelemetry: look, plan, list, get and write; read; handle.

The writes of a look are under it, with the rule that asked for each. A handler's span is current while it is at work,
so spans of its own are under that.
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

from leasehold.adapters.sources.protocol import Batch, PassingSource, Reader, Source
from leasehold.adapters.worker.spans import Acted, Handle, WorkerSpans
from leasehold.balancer.actions import Action
from leasehold.balancer.model import Lease, Position
from leasehold.errors import OutcomeUnknown
from leasehold.stores.printable import escaped, said
from leasehold.stores.protocol import Done, Listing, Outcome, PassingStore, Store
from leasehold.stores.writes import Write

log = escaped(logging.getLogger("leasehold.spans"))

SCOPE = "leasehold"
RULE = context.create_key("leasehold-rule")


def own_tracer() -> Tracer | None:
    """A tracer of the provider that the program has set; None if it has set none."""
    # A provider that tells nobody would still cost a span for each call.
    unset = isinstance(get_tracer_provider(), ProxyTracerProvider | NoOpTracerProvider)
    return None if unset else get_tracer(SCOPE)


class TracedSpans(WorkerSpans):
    """The spans of one worker; each carries its id."""

    def __init__(self, tracer: Tracer, worker: str) -> None:
        self._tracer, self._worker, self._said = tracer, worker, False

    @contextmanager
    def span(self, name: str, **told: AttributeValue) -> Iterator[Span]:
        """A span over a block, current within it; an exception that leaves the block makes it a failed one.

        A tracer that raises costs the span: the block runs all the same, and its result counts.
        """
        span = self._started(name, told)
        try:
            with use_span(span):
                yield span
        finally:
            self._end(span)

    def note(self, span: Span, attributes: Mapping[str, AttributeValue]) -> None:
        """Set attributes of a span, whatever it raises."""
        try:
            span.set_attributes(attributes)
        except Exception as fault:  # noqa: BLE001  what only tells of a call must not fail it
            self._failed(fault)

    def _started(self, name: str, told: dict[str, Any]) -> Span:
        try:
            return self._tracer.start_span(f"leasehold.{name}", attributes=self._told(told))
        except Exception as fault:  # noqa: BLE001  likewise: a sampler or a processor may raise anything
            self._failed(fault)
            return INVALID_SPAN

    def _end(self, span: Span) -> None:
        try:
            span.end()
        except Exception as fault:  # noqa: BLE001  likewise
            self._failed(fault)

    def _failed(self, fault: Exception) -> None:
        first, self._said = not self._said, True
        if first:
            log.error("a span failed; this is said once, and work goes on: %s", said(fault), exc_info=fault)

    def _told(self, told: dict[str, Any]) -> dict[str, AttributeValue]:
        return {f"leasehold.{name}": value for name, value in {**told, "worker": self._worker}.items()}

    def over(self, name: str) -> AbstractContextManager[object]:
        """A span over a block."""
        return self.span(name)

    def acting(self, act: Callable[[Action], Acted]) -> Callable[[Action], Acted]:
        """The function with its writes under the present span and the action's rule, in any thread."""
        # Writes run in threads of a pool, which know nothing of the span that asked for them.
        present = context.get_current()

        def acted(action: Action) -> Acted:
            token = context.attach(context.set_value(RULE, action.rule, present))
            try:
                return act(action)
            finally:
                context.detach(token)

        return acted

    def store(self, store: Store) -> Store:
        """The store, with a span over each listing, reading of rows, and write."""
        return TracedStore(store, self)

    def source(self, source: Source) -> Source:
        """The source, with a span over each reading of a shard."""
        return TracedSource(source, self)

    def handler(self, handler: Handle) -> Handle:
        """A callable that is given batches, with a span over each call and whatever is awaited of it."""

        def handle(batch: Any, *more: object) -> object:  # noqa: ANN401  whatever the callable takes
            # An attribute of no value is refused, and logged, by OpenTelemetry.
            fence = {} if batch.epoch is None else {"epoch": batch.epoch}
            told = {"lease": batch.lease, "records": len(batch.records), **fence}
            span, awaiting = self._started("handle", told), False
            try:
                with use_span(span):
                    answer: Any = handler(batch, *more)
                awaiting = inspect.isawaitable(answer)
            finally:
                # Else it has only begun: the span ends with what is awaited.
                if not awaiting:
                    self._end(span)
            if not awaiting:
                return answer

            async def awaited() -> object:
                try:
                    with use_span(span):
                        return await answer
                finally:
                    self._end(span)

            return awaited()

        return cast("Handle", handle)


class TracedStore(PassingStore):
    """A store with a span over each call that asks the service."""

    def __init__(self, store: Store, spans: TracedSpans) -> None:
        super().__init__(store)
        self._spans = spans

    def list(self) -> Listing:
        """Every lease."""
        with self._spans.span("list") as span:
            listing = self._store.list()
            self._spans.note(span, {"leasehold.leases": len(listing.leases)})
        return listing

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Get these leases by key."""
        wanted = tuple(keys)
        with self._spans.span("get", leases=len(wanted)):
            return self._store.get(wanted, stale_ok=stale_ok)

    def write(self, write: Write) -> Outcome:
        """Apply the write or refuse it; the span says which, and by what rule where an action asked for it."""
        rule = context.get_value(RULE)
        asked = {"rule": str(rule)} if rule else {}
        with self._spans.span("write", lease=write.lease.key, kind=type(write).__name__, **asked) as span:
            try:
                outcome = self._store.write(write)
            except OutcomeUnknown:
                self._spans.note(span, {"leasehold.outcome": "unknown"})
                raise
            self._spans.note(span, {"leasehold.outcome": "done" if isinstance(outcome, Done) else "refused"})
        return outcome


class TracedSource(PassingSource):
    """A source whose readers tell spans."""

    def __init__(self, source: Source, spans: TracedSpans) -> None:
        super().__init__(source)
        self._spans = spans

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader that starts just after `start`."""
        return TracedReader(super().open(lease, start), lease.key, self._spans)


class TracedReader:
    """A reader with a span over each reading."""

    def __init__(self, reader: Reader, lease: str, spans: TracedSpans) -> None:
        self._reader, self._lease, self._spans = reader, lease, spans

    def read(self) -> Batch:
        """Read once."""
        with self._spans.span("read", lease=self._lease) as span:
            batch = self._reader.read()
            # A reading that knows no lag must not stand next to others with a lag of 0.
            lag = {} if batch.behind_seconds is None else {"leasehold.behind_seconds": batch.behind_seconds}
            self._spans.note(span, {"leasehold.records": batch.count, "leasehold.bytes": batch.size, **lag})
        return batch

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
