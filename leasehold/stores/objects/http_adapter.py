"""Limits the time that a whole response may take, for clients based on requests."""

from typing import Any

from requests.adapters import HTTPAdapter

from leasehold.stores.deadlines import pools_with_deadlines


class DeadlineAdapter(HTTPAdapter):
    """An adapter that reads every response under a deadline, even through a proxy."""

    def init_poolmanager(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  as requests has it
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = pools_with_deadlines(self.poolmanager.pool_classes_by_scheme)

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  as requests has it
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = pools_with_deadlines(manager.pool_classes_by_scheme)
        return manager
