"""A read-only HTTP server for the page, its events, its lag chart, explanations, metrics and health checks.

`prometheus_text` returns the metrics of the watched tables in the text format of Prometheus.
"""

import asyncio
import json
import sys
from asyncio import TimerHandle, Transport
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from h11 import CLOSED, DONE, ERROR, MUST_CLOSE
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from leasehold.adapters.ops.serving.watcher import SORT_KEYS, TableWatcher, ViewRequest
from leasehold.stores.fields import parse_decimal

METRIC_HELP = {
    "leasehold_up": "Whether the table was read recently.",
    "leasehold_status": "The group's status: 0 OK, 3 not known, 4 behind, 5 stalled, 6 hung, 7 unread, 8 orphan.",
    "leasehold_lease_status": "A lease's status, by the same numbers.",
    "leasehold_leases": "Unfinished leases.",
    "leasehold_unowned_leases": "Unfinished leases without an owner.",
    "leasehold_workers": "Workers that hold a lease.",
    "leasehold_malformed_rows": "Rows that cannot be read as leases.",
    "leasehold_contradictions": "Contradictions between stream and table that workers found.",
    "leasehold_lag_max_seconds": "How far the lease that is furthest behind is behind.",
    "leasehold_lag_sum_seconds": "How far all leases together are behind.",
    "leasehold_lag_is_lower_bound": "1 if the lag of a lease is a lower bound: its stream is silent.",
    "leasehold_owner_changes_total": "Changes of owner seen since the server started.",
    "leasehold_swap_leases": "Leases of a table that is swapped, by place: in FROM, on their way, in TO.",
    "leasehold_worker_leases": "Unfinished leases of a worker.",
    "leasehold_worker_target": "Leases that a worker should hold.",
    "leasehold_lease_lag_seconds": "How far a lease is behind.",
    "leasehold_lease_lag_is_lower_bound": "1 if this lease's lag is a lower bound.",
    "leasehold_lease_idle_seconds": "For how long a lease has not been renewed.",
    "leasehold_lease_kilobytes_per_second": "The throughput of a lease.",
    "leasehold_lease_switches_total": "How often a lease passed between workers, as far as leasehold workers saw.",
}


LABEL_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def prometheus_text(states: Sequence[tuple[dict[str, Any], bool]]) -> str:
    """Return the metrics of these tables in the Prometheus text format.

    Args:
        states: The state of each table, and whether it is fresh. For a stale table only `up` and `status` are written.
    """
    samples_by_metric: dict[str, list[str]] = {metric_name: [] for metric_name in METRIC_HELP}

    def add_samples(values: Mapping[str, float | None], **labels: str) -> None:
        """Add samples. Values that are None are omitted, so that alarms don't mistake them for zeros."""
        for metric_name, value in values.items():
            if value is not None:
                # Escape names and URLs, because a quote or newline in them would end the label or the sample.
                escaped_labels = {label: label_value.translate(LABEL_ESCAPES) for label, label_value in labels.items()}
                label_text = ",".join(f'{label}="{label_value}"' for label, label_value in escaped_labels.items())
                samples_by_metric[f"leasehold_{metric_name}"].append(
                    f"leasehold_{metric_name}{{{label_text}}} {float(value):g}"
                )

    for state, is_fresh in states:
        store = state["store"]
        add_samples({"up": is_fresh, "status": state["number"]}, store=store)
        if not is_fresh:
            continue
        totals = state["total"]
        total_values = {
            "leases": totals["leases"],
            "unowned_leases": totals["unowned"],
            "workers": totals["workers"],
            "malformed_rows": len(state["malformed"]),
            "contradictions": len(state["contradictions"]),
            "lag_max_seconds": totals["lag_max"],
            "lag_sum_seconds": totals["lag_sum"],
            # If the lag is unknown, it is also unknown whether it is a lower bound.
            "lag_is_lower_bound": None if totals["lag_max"] is None else totals["lag_at_least"],
            "owner_changes_total": totals["moves"],
        }
        add_samples(total_values, store=store)
        if (swap := state.get("swap")) is not None:
            for place_label, metric_name in (("FROM", "there"), ("on their way", "moving"), ("TO", "gone")):
                add_samples({"swap_leases": swap[metric_name]}, store=store, place=place_label)
        for worker in state["workers"]:
            counts = {"worker_leases": worker["leases"], "worker_target": worker["target"]}
            add_samples(counts, store=store, worker=worker["worker"])
        for lease in state["leases"]:
            if not lease["ended"]:
                lag_seconds = lease["lag"].get("seconds")
                lease_values = {
                    "lease_lag_seconds": lag_seconds,
                    "lease_lag_is_lower_bound": None if lag_seconds is None else lease["lag"].get("at_least", False),
                    "lease_status": lease["number"],
                    "lease_idle_seconds": lease["idle"],
                    "lease_kilobytes_per_second": lease["kbps"],
                    "lease_switches_total": lease["lag"].get("moves"),
                }
                add_samples(lease_values, store=store, lease=lease["key"])
    lines = []
    for metric_name, samples in samples_by_metric.items():
        if samples:
            metric_type = "counter" if metric_name.endswith("_total") else "gauge"
            lines += [
                f"# HELP {metric_name} {METRIC_HELP[metric_name]}",
                f"# TYPE {metric_name} {metric_type}",
                *samples,
            ]
    return "\n".join(lines) + "\n"


LOOK_SECONDS = 0.25
"""The number of seconds between two checks whether the table was read again. A new state is sent to the open pages."""

REQUEST_SECONDS = 10.0
"""The number of seconds after which a connection without a complete request is closed."""

ROWS_MAX = 20_000
"""The maximum number of leases that a page may request."""

CONNECTIONS_MAX = 200
"""The maximum number of open connections. Each connection takes a file descriptor, and a process can usually have
1,024 of them."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

NOT_FOUND = {"error": "there is no such lease or worker, or the table has not been read yet"}
NO_TABLE = {"error": "table: there is none with this number"}
NO_VIEW = {"error": f"most: rows, up to {ROWS_MAX}; sort: one of {', '.join(SORT_KEYS)}"}
EMPTY_SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'

PAGES = {
    "/": ("ops.serving", "page.html", "text/html"),
    "/page.css": ("ops", "page.css", "text/css"),
    "/page.js": ("ops.serving", "page.js", "text/javascript"),
}
"""The static files by URL path: folder, file name and media type."""


def server(watchers: Sequence[TableWatcher], hosts: Sequence[str]) -> Starlette:
    """Return the application that serves these tables. It rejects requests whose Host header is not in `hosts`.

    The check prevents DNS rebinding. Without it, another site could point a host name at this machine and read the page
    through a visitor's browser.
    """

    async def events(request: Request) -> Response:
        return _stream(request, watchers, lambda: [watcher.state() for watcher in watchers])

    async def view(request: Request) -> Response:
        watcher, query = _requested_watcher(request, watchers), request.query_params
        sort_key, row_limit = query.get("sort", "status"), parse_decimal(query.get("most", "25"), ROWS_MAX)
        if watcher is None or row_limit is None or sort_key not in SORT_KEYS:
            return _json(NO_TABLE if watcher is None else NO_VIEW, 404)
        view_request = ViewRequest(sort_key, "down" in query, query.get("text", "").lower(), row_limit)
        return _stream(request, watchers, lambda: _group_statuses(watchers) | watcher.view(view_request))

    async def leases(_request: Request) -> Response:
        return _json([watcher.state() for watcher in watchers])

    async def lag(request: Request) -> Response:
        if (watcher := _requested_watcher(request, watchers)) is None:
            return _json(NO_TABLE, 404)
        # The SVG contains no name of a table, lease or worker, so it cannot contain a script.
        curve = await asyncio.to_thread(watcher.lag_chart, request.query_params.get("lease"))
        return Response(curve or EMPTY_SVG, media_type="image/svg+xml", headers=HEADERS)

    async def explain(request: Request) -> Response:
        if (watcher := _requested_watcher(request, watchers)) is None:
            return _json(NO_TABLE, 404)
        worker, key = (request.query_params.get(name) for name in ("worker", "lease"))
        explanation = await asyncio.to_thread(watcher.explain, worker, key)
        return _json(NOT_FOUND, 404) if explanation is None else _json(explanation)

    async def metrics(_request: Request) -> Response:
        body = prometheus_text([(watcher.state(), watcher.is_fresh) for watcher in watchers])
        return Response(body, headers=HEADERS, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def healthz(_request: Request) -> Response:
        is_healthy = all(watcher.status.ok for watcher in watchers)
        return _json({"ok": is_healthy} | _group_statuses(watchers), 200 if is_healthy else 503)

    async def readyz(_request: Request) -> Response:
        stale_names = [watcher.name for watcher in watchers if not watcher.is_fresh]
        return _json({"ok": not stale_names, "stale": stale_names}, 503 if stale_names else 200)

    routes = [Route(path, _static_page(*page)) for path, page in PAGES.items()]
    routes += [
        Route("/events", events),
        Route("/view", view),
        Route("/leases.json", leases),
        Route("/lag.svg", lag),
        Route("/explain", explain),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
    ]
    host_check = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    return Starlette(routes=routes, middleware=[host_check])


EXPLAINED_MAX = 500
"""The maximum number of leases that are explained in a saved page. Those with the worst status are chosen."""


def saved_page(watchers: Sequence[TableWatcher]) -> str:
    """Return the page as one file that needs no server, with the state of the tables when they were last read."""
    tables = [_saved_table(watcher) for watcher in watchers]
    # Escape "<", because a name in the data must not end the script element that contains the data.
    data = json.dumps(_group_statuses(watchers) | {"tables": tables}).replace("<", "\\u003c")
    page, style, script = (_file(folder, name).decode() for folder, name, _ in PAGES.values())
    return page.replace('<link rel="stylesheet" href="page.css">', f"<style>\n{style}</style>").replace(
        '<script src="page.js"></script>',
        f'<script type="application/json" id="saved">{data}</script>\n<script>\n{script}</script>',
    )


def _saved_table(watcher: TableWatcher) -> dict[str, Any]:
    view = watcher.view(ViewRequest(most=sys.maxsize))
    explanations = watcher.explain_all([row["key"] for row in view["rows"][:EXPLAINED_MAX]])
    return {"view": view, "lag": watcher.lag_chart() or EMPTY_SVG, **explanations}


def _requested_watcher(request: Request, watchers: Sequence[TableWatcher]) -> TableWatcher | None:
    index = parse_decimal(request.query_params.get("table", "0"), len(watchers) - 1)
    return None if index is None else watchers[index]


def _group_statuses(watchers: Sequence[TableWatcher]) -> dict[str, Any]:
    return {"groups": [{"store": watcher.name} | watcher.status.as_json() for watcher in watchers]}


class BoundedConnection(H11Protocol):
    """An HTTP connection that is closed if no complete request arrives within REQUEST_SECONDS.

    Uvicorn itself would wait forever. A new connection is closed immediately if CONNECTIONS_MAX are already open.
    """

    _deadline: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as in the base
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
        else:
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        # Stop the timer once the request is complete, because the timeout does not apply to responses.
        super().data_received(data)
        is_complete = self.conn.their_state in {DONE, CLOSED, MUST_CLOSE, ERROR}
        if self._deadline is not None and is_complete:
            self._deadline.cancel()
            self._deadline = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deadline is None and not self.transport.is_closing():
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        def time_out() -> None:
            self._deadline = None
            self.transport.abort()

        self._deadline = self.loop.call_later(REQUEST_SECONDS, time_out)


def _file(folder: str, name: str) -> bytes:
    return files(f"leasehold.adapters.{folder}").joinpath(name).read_bytes()


def _static_page(folder: str, name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    body = _file(folder, name)

    async def page(_request: Request) -> Response:
        return Response(body, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    return page


def _json(content: object, status: int = 200) -> Response:
    return JSONResponse(content, status, headers=HEADERS)


def _stream(request: Request, watchers: Sequence[TableWatcher], compute: Callable[[], object]) -> Response:
    """Send the value of `compute` as a server-sent event now, and again after each read until the page is closed."""

    async def events() -> AsyncIterator[str]:
        sent_reads: list[tuple[float, str]] = []
        while not await request.is_disconnected():
            current_reads = [
                (watcher.last_state.at, watcher.last_state.trouble or watcher.last_state.history_fault)
                for watcher in watchers
            ]
            if current_reads != sent_reads:
                sent_reads = current_reads
                yield f"data: {json.dumps(await asyncio.to_thread(compute), separators=(',', ':'))}\n\n"
            await asyncio.sleep(LOOK_SECONDS)

    return StreamingResponse(events(), media_type="text/event-stream", headers=HEADERS)
