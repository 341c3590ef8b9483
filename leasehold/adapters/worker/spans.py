"""Where spans begin and end in a worker: nothing is there as long as nobody traces."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from leasehold.adapters.sources.protocol import Source
from leasehold.balancer.actions import Action
from leasehold.stores.protocol import Store

Handle = TypeVar("Handle", bound=Callable[..., object])
Acted = TypeVar("Acted")

NOTHING = nullcontext()


class WorkerSpans:
    """The spans of a worker that is not traced: none."""

    def over(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002  there is no span to name
        """A span over a block."""
        return NOTHING

    def acting(self, act: Callable[[Action], Acted]) -> Callable[[Action], Acted]:
        """The function with its writes under the present span and the action's rule, in any thread."""
        return act

    def store(self, store: Store) -> Store:
        """The store, with a span over each listing, reading of rows, and write."""
        return store

    def source(self, source: Source) -> Source:
        """The source, with a span over each reading of a shard."""
        return source

    def handler(self, handler: Handle) -> Handle:
        """A callable that is given batches, with a span over each call and whatever is awaited of it."""
        return handler
