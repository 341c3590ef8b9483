"""`leasehold demo`: runs a fleet on this machine, shows its progress, and checks that no record was lost."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from leasehold.adapters.cli.common.ending import EndSignal, exit_on_failure, raise_on_signal
from leasehold.adapters.toolchain import ServiceError
from leasehold_lab.demo.screen import Screen, render_verdict
from leasehold_lab.demo.stage import StageError, open_stage, run_services
from leasehold_lab.demo.story import Story

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

SETTINGS = (
    *("--lease-seconds", "3", "--set", "cycle_seconds=1", "--initial-position", "TRIM_HORIZON"),
    *("--checkpoint-seconds", "1"),
)

MORE = """
A stream with six shards and a lease table are created in local stand-ins for Kinesis and DynamoDB. A producer puts
records continuously, and up to four worker processes (`leasehold consume`) share the shards. One worker is killed, one
is added, a shard is split, and two shards are merged. At the end, the records that the workers dispatched are compared
with those that were sent.

Exit status: 0 if no record was lost and the order was kept, otherwise 1; 130 after Ctrl-C (SIGTERM 143, SIGHUP 129).
In all cases, no processes or folders are left behind.
"""


@app.command(help="Watch a fleet on this machine lose a worker and nothing else.", epilog=MORE)
def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON, the story on stderr.")] = False,
    rate: Annotated[int, typer.Option(help="Put this many records per second.", min=5, max=2000)] = 200,
) -> None:
    """Run the demo, and print the verdict."""
    console = Console(stderr=as_json)
    try:
        with (
            exit_on_failure("demo", ServiceError, StageError, misuse=()),
            raise_on_signal(),
            _open_story(console, rate, live=console.is_terminal and not as_json) as story,
        ):
            verdict = story.run()
    except EndSignal as end_signal:
        print("leasehold demo: stopped; nothing is left running", file=sys.stderr)
        raise typer.Exit(end_signal.status) from None
    if as_json:
        print(json.dumps(verdict.as_json()))
    else:
        console.print(render_verdict(verdict))
    raise typer.Exit(0 if verdict.ok else 1)


@contextmanager
def _open_story(console: Console, rate: int, *, live: bool) -> Iterator[Story]:
    console.print("Starting stand-ins for Kinesis and DynamoDB ...")
    with run_services() as (kinesis, dynamodb), open_stage(kinesis, dynamodb, shards=6, settings=SETTINGS) as stage:
        story = Story(stage, kinesis, rate)
        if not live:
            story.on_sentence = lambda seconds, sentence: console.print(
                f"{seconds:5.1f} s  {sentence}", highlight=False, soft_wrap=True
            )
            yield story
            return
        screen = Screen(stage, story, encoding=console.encoding)
        # The thread that reads the table also draws the screen, so nothing changes while the screen is drawn.
        with Live(screen, console=console, auto_refresh=False) as live_screen:

            def refresh_display() -> None:
                screen.record_counts()
                live_screen.refresh()

            story.on_update = refresh_display
            yield story
