"""Defines the places in a worker where spans begin and end. The class here is for workers that are not traced."""

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
    """The spans of a worker that is not traced.

    Each method returns its argument, or a context manager without effect.
    """

    def span_around(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002  there is no span to name
        """Return a context manager that makes a span of its block."""
        return NO_SPAN

    def acting(self, act: Callable[[Action], Acted]) -> Callable[[Action], Acted]:
        """Wrap the function so that its writes, in any thread, get the current span and the action's rule."""
        return act

    def store(self, store: Store) -> Store:
        """Wrap the store so that each listing, read of rows and write is a span."""
        return store

    def source(self, source: Source) -> Source:
        """Wrap the source so that each read of a shard is a span."""
        return source

    def handler(self, handler: Handle) -> Handle:
        """Wrap a handler of batches so that each call, including what it awaits, is a span."""
        return handler
