"""Requests to one child, over the output of a scripted process."""

import asyncio
from asyncio import StreamReader
from asyncio.subprocess import Process
from collections import deque
from typing import cast

import pytest
from waiters import Clock

from leasehold.adapters.multilang import children as module
from leasehold.adapters.multilang.children import ChildProcess
from leasehold.adapters.multilang.protocol import CheckpointError, Conversation
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import TRIM_HORIZON, Position

INITIALIZED = '{"action": "status", "responseFor": "initialize"}'


async def _never(_position: Position) -> CheckpointError | None:
    raise AssertionError("no checkpoint is asked for")


class ScriptedProcess:
    """A process without input, which writes its next line whenever its exit status is read."""

    stdin, pid = None, 2**30

    def __init__(self, status: int | None, *lines: str) -> None:
        self._status, self._lines = status, deque(lines)
        self.stdout, self.stderr = StreamReader(), StreamReader()
        self.stderr.feed_eof()

    @property
    def returncode(self) -> int | None:
        if self._lines and (line := self._lines.popleft()):
            self.stdout.feed_data(line.encode() + b"\n")
        return self._status


def test_response_of_a_child_that_exits_at_once_counts() -> None:
    """The exit of a child may be noticed before its last line is read."""

    async def main() -> None:
        process, conversation = ScriptedProcess(0, INITIALIZED), Conversation("s", TRIM_HORIZON)
        child = ChildProcess(cast("Process", process), conversation, _never, None)
        await child.request(conversation.send_initialize)
        assert conversation.pending_action is None

    asyncio.run(main())


def test_time_to_store_a_checkpoint_does_not_count_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that waits for a slow store has as much time afterwards as any other."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.0)
    stored_positions = list[Position]()

    async def main() -> None:
        clock = Clock()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)

        async def store_slowly(position: Position) -> CheckpointError | None:
            clock.now += 100.0
            stored_positions.append(position)
            return None

        lines = (INITIALIZED, '{"action": "checkpoint"}', "", INITIALIZED.replace("initialize", "processRecords"))
        process, conversation = ScriptedProcess(None, *lines), Conversation("s", TRIM_HORIZON)
        child = ChildProcess(cast("Process", process), conversation, store_slowly, 5.0)
        await child.request(conversation.send_initialize)
        await child.request(lambda: conversation.send_records([Record(b"x", "5", 0, "k")], None))

    asyncio.run(main())
    assert stored_positions == [Position("5")]
