"""Defines the hooks by which the calls of a worker get spans. The class here is for workers that are not traced."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from leasehold.adapters.sources.protocol import Source
from leasehold.balancer.actions import Action
from leasehold.stores.protocol import Store

Handle = TypeVar("Handle", bound=Callable[..., object])
Acted = TypeVar("Acted")

NO_SPAN = nullcontext()


class WorkerSpans:
    """The hooks of a worker that is not traced, which make no spans.

    Each method returns its argument unchanged, or a context manager that does nothing.
    """

    def span_around(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002  there is no span to name
        """Return a context manager that makes a span for its block."""
        return NO_SPAN

    def acting(self, act: Callable[[Action], Acted]) -> Callable[[Action], Acted]:
        """Wrap the function so that its writes, in any thread, get the current span and the action's rule."""
        return act

    def store(self, store: Store) -> Store:
        """Wrap the store so that a span is made for each listing, each read of rows, and each write."""
        return store

    def source(self, source: Source) -> Source:
        """Wrap the source so that a span is made for each read of a shard."""
        return source

    def handler(self, handler: Handle) -> Handle:
        """Wrap a handler of batches so that a span is made for each call.

        The span of a call of an async handler ends once the handler is done.
        """
        return handler
