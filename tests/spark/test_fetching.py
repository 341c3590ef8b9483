"""Tasks fetch exactly their rows from the process that reads, and no other client can fetch any."""

import io
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
import pytest
from attrs import evolve
from fake_stream import Place, Stream
from row_servers import serving_bytes

from leasehold.adapters.spark import fetching
from leasehold.adapters.spark.fetching import (
    COMPLETE_BYTE,
    FOUND_BYTE,
    FetchedRows,
    RowServer,
    RowTransport,
    TaskRows,
    read_task_rows,
    spread_over_tasks,
)
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.row_buffer import UNMERGED_BATCH_BYTES, concatenate_batches

ADDRESS, PLENTY = Address("127.0.0.1", "127.0.0.1"), 1 << 30


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"data": [b"%d" % number for number in numbers]})


def fetched_rows(part: FetchedRows) -> list[int]:
    """Return the rows that a task reads from its partition."""
    return [int(value) for batch in read_task_rows(part) for value in batch["data"].to_pylist()]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RowServer]:
    """Yield a server that keeps all rows in memory."""
    row_server = RowServer(ADDRESS, PLENTY, str(tmp_path))
    yield row_server
    row_server.close()


@pytest.mark.parametrize("limit", [PLENTY, 0, 20], ids=["in memory", "on the disk", "in both"])
def test_each_task_gets_its_own_rows_at_every_request(tmp_path: Path, limit: int) -> None:
    server = RowServer(ADDRESS, limit, str(tmp_path))
    parts = [server.keep_rows(3, 0, [rows(1, 2), rows(3)]), server.keep_rows(3, 1, [rows(4)])]
    assert [fetched_rows(parts[0]), fetched_rows(parts[1]), fetched_rows(parts[0])] == [[1, 2, 3], [4], [1, 2, 3]]
    assert list(tmp_path.iterdir()) == []
    server.close()


def test_memory_of_a_fetch_is_bounded(tmp_path: Path) -> None:
    """The driver does not hold a large batch in memory twice: once while it waits, and once while it is planned."""
    part = rows(*range(10))
    server = RowServer(ADDRESS, 3 * part.nbytes, str(tmp_path))
    for index in range(8):
        server.keep_rows(1, index, [part])
    assert server.memory_bytes == 3 * part.nbytes
    server.discard_batch(1)
    server.keep_rows(2, 0, [part])
    assert server.memory_bytes == part.nbytes
    server.close()
    assert server.memory_bytes == 0


def test_no_rows_are_served_without_the_token(server: RowServer) -> None:
    part = server.keep_rows(1, 0, [rows(1)])
    with pytest.raises(RuntimeError, match="closed the connection without a response"):
        fetched_rows(evolve(part, token=bytes(len(part.token))))
    assert part.token.hex() not in repr(part)
    assert repr(part.token) not in repr(part)
    assert fetched_rows(part) == [1]


def test_finished_batch_is_not_sent(server: RowServer) -> None:
    """A task that is left over from an earlier attempt gets an error.

    The task neither hangs nor takes an empty response for all of its rows.
    """
    parts = [server.keep_rows(number, 0, [rows(number)]) for number in (1, 2)]
    server.discard_batch(1)
    with pytest.raises(RuntimeError, match=r"batch 1 is done"):
        fetched_rows(parts[0])
    assert fetched_rows(parts[1]) == [2]


def accepted_by_arrow(ipc_bytes: bytes) -> bool:
    """Return whether Arrow alone accepts these bytes as the complete rows."""
    try:
        return bool(pa.ipc.open_stream(pa.py_buffer(ipc_bytes)).read_all())
    except (OSError, pa.ArrowInvalid):
        return False


def test_task_whose_connection_ends_early_fails() -> None:
    """Arrow alone treats a connection that ends between two batches as the end of the rows."""
    with io.BytesIO() as buffer:
        TaskRows.from_batches([rows(1, 2), rows(3)]).write(buffer)
        stream = buffer.getvalue()
    accepted_cuts = [cut for cut in range(len(stream) + 1) if accepted_by_arrow(stream[:cut])]
    assert len(accepted_cuts) > 2
    for cut in (0, 1, len(stream) // 2, *accepted_cuts):
        with (
            serving_bytes(FOUND_BYTE + stream[:cut]) as part,
            pytest.raises(RuntimeError, match="rows cannot be fetched"),
        ):
            fetched_rows(part)
    with serving_bytes(FOUND_BYTE + stream + COMPLETE_BYTE) as part:
        assert fetched_rows(part) == [1, 2, 3]


def test_unreachable_driver_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    expected = rf"from the driver at 127\.0\.0\.1, port {port} .*lease\.fetchPort.*lease\.transport to embedded"
    with pytest.raises(RuntimeError, match=expected):
        fetched_rows(FetchedRows("127.0.0.1", port, bytes(32), 1, 0))


def test_queries_of_one_driver_take_successive_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = RowServer(evolve(ADDRESS, port=port), PLENTY, "")
        assert port < server.port < port + fetching.PORT_ATTEMPTS
        server.close()


def test_unavailable_port_is_one_sentence() -> None:
    with pytest.raises(
        OSError,
        match=r"^tasks cannot fetch rows, because no port could be opened .* lease\.fetchPort to another",
    ):
        RowServer(evolve(ADDRESS, bind="203.0.113.1"), PLENTY, "")


def test_no_port_is_opened_until_rows_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    openings: list[Any] = []
    original_init = RowServer.__init__

    def record_and_init(self: RowServer, *arguments: Any) -> None:  # noqa: ANN401  as the server is made
        openings.append(arguments)
        original_init(self, *arguments)

    monkeypatch.setattr(RowServer, "__init__", record_and_init)
    embedded, fetched = RowTransport(None), RowTransport(ADDRESS, PLENTY)
    assert embedded.make_partitions(1, [[rows(1)]]) == embedded.make_partitions(1, [[rows(1)]])
    assert fetched.make_partitions(1, []) == []
    assert openings == []
    (part,) = fetched.make_partitions(2, [[rows(7)]])
    assert isinstance(part, FetchedRows)
    assert (fetched_rows(part), len(openings)) == ([7], 1)
    fetched.close()
    with pytest.raises(RuntimeError):
        fetched_rows(part)


def test_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch, server: RowServer) -> None:
    monkeypatch.setattr(fetching, "REQUEST_SECONDS", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), 60.0) as silent_connection:
        silent_connection.sendall(bytes(5))
        assert silent_connection.recv(1) == b""


def test_task_may_pause_between_two_rows(monkeypatch: pytest.MonkeyPatch, server: RowServer) -> None:
    """A sink may block for longer than a peer may take to send its request."""
    monkeypatch.setattr(fetching, "REQUEST_SECONDS", 0.05)
    part = server.keep_rows(1, 0, [pa.record_batch({"data": [bytes(fetching.SLICE_BYTES)] * 8})])
    batches = read_task_rows(part)
    assert next(batches).num_rows == 1
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), 60.0) as silent_connection:
            assert silent_connection.recv(1) == b"", "the time for a request is over"
    assert sum(batch.num_rows for batch in batches) == 7


def test_memory_is_freed_with_each_batch() -> None:
    part = rows(*range(10))
    server = RowServer(ADDRESS, 2 * part.nbytes, "/not/here")
    for number in range(5):
        for index in range(2):
            partition = server.keep_rows(number, index, [part])
        with pytest.raises(FileNotFoundError):
            server.keep_rows(number, 2, [part])
        assert fetched_rows(partition) == list(range(10))
        server.discard_batch(number)
    server.close()


def test_large_rows_arrive_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that a task needs does not grow with the size of its part of the batch."""
    monkeypatch.setattr(fetching, "SLICE_BYTES", 2_000)
    batch = pa.record_batch({"data": [bytes(100)] * 1000})
    parts = TaskRows.from_batches([batch]).batches
    assert pa.Table.from_batches(parts).combine_chunks() == pa.Table.from_batches([batch])
    assert max(part.nbytes for part in parts) <= 2_000


def test_query_keeps_the_rows_of_one_batch_for_its_tasks(tmp_path: Path) -> None:
    query_place = Place(Stream({"a": [f"a{number}" for number in range(60)]}), tmp_path / "leases.db")
    query = query_place.query(maxRowsPerTrigger="5")
    most_batches = 0
    while len(query.rows) < 60:
        query.batch()
        server = query.reader._run._transport._server  # type: ignore[union-attr]  # noqa: SLF001  what it holds
        most_batches = max(most_batches, len({number for number, _ in server._server.task_rows}))  # type: ignore[union-attr]  # noqa: SLF001
    query_place.close()
    assert most_batches == 1


def test_large_batches_are_sent_without_a_copy() -> None:
    """Only small batches are merged before they are sent, because merging copies them."""
    large_batches = [pa.record_batch({"data": [b"x" * UNMERGED_BATCH_BYTES, b"%d" % number]}) for number in range(2)]
    (task,) = spread_over_tasks(
        {"a": concatenate_batches(large_batches), "b": concatenate_batches([rows(1), rows(2)])}, 1
    )
    assert [batch.to_pydict() for batch in task] == [batch.to_pydict() for batch in (*large_batches, rows(1, 2))]
    addresses = [batch["data"].buffers()[2].address for batch in task[:2]]
    assert addresses == [batch["data"].buffers()[2].address for batch in large_batches]


def test_dead_planner_is_not_reported_as_a_firewall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RuntimeError, match=r"the process that had them is gone, perhaps killed for lack of memory"):
        list(fetching.fetch_rows(fetching.FetchedRows("127.0.0.1", port, bytes(fetching.TOKEN_BYTES), 1, 0)))
