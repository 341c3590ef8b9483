"""Compares reading and writing of aggregated records with aws_kinesis_agg, and with the MD5 digest that is unavoidable.

Each figure is a median of processor time in one thread over several rounds, in which the contenders take turns, so
other load on the machine affects all of them. Such load slows memory accesses, and therefore Arrow, more than MD5, so
the load is printed, too. The results of all contenders are compared first. `make harness` runs this benchmark. The exit
status is 1 if a limit is not met.
"""

import argparse
import hashlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from types import ModuleType
from typing import Any

from attrs import frozen
from aws_kinesis_agg.aggregator import AggRecord  # type: ignore[import-untyped]
from aws_kinesis_agg.deaggregator import iter_deaggregate_records  # type: ignore[import-untyped]
from compiled import plain_and_compiled
from rich.console import Console
from rich.table import Table

MAGIC, DIGEST = 4, 16
ARROW_RECORDS = 16  # the number of Kinesis records per batch
SHARD = (0, 2**128 - 2)  # all hash keys except one, so each key must be hashed, but no record is dropped
Rows = list[tuple[str, str | None, bytes]]


@frozen
class Shape:
    """An aggregate: `count` records of `size` bytes with `keys` different keys and, if `hashed`, explicit hash keys."""

    name: str
    count: int
    size: int
    keys: int
    hashed: bool = False

    def rows(self) -> Rows:
        """Return the user records."""
        data = hashlib.sha256(self.name.encode()).digest() * (self.size // 32 + 1)
        hash_keys = [f"{index * 7919 + 1:039d}".lstrip("0") if self.hashed else None for index in range(self.count)]
        return [(f"key-{i % self.keys:06d}", hash_keys[i], data[: self.size]) for i in range(self.count)]


SHAPES = (
    Shape("500 x 100 B", 500, 100, 500),
    Shape("500 x 100 B, 10 keys", 500, 100, 10),
    Shape("500 x 100 B, 500 hash keys", 500, 100, 500, hashed=True),
    Shape("50 x 1 KB", 50, 1024, 50),
)


@frozen
class Bar:
    """A limit: the minimum speed of a contender for one shape, relative to the contender `of`."""

    shape: str
    contender: str
    least: float
    of: str = "peer"


READ_BARS = (
    Bar("500 x 100 B", "compiled", 4.0),
    Bar("500 x 100 B", "compiled", 0.55, of="ceiling"),
    Bar("50 x 1 KB", "compiled", 2.2),
    Bar("50 x 1 KB", "compiled", 0.75, of="ceiling"),
    Bar("500 x 100 B", "compiled, KCL's filter", 2.0),
    Bar("50 x 1 KB", "compiled, KCL's filter", 2.0),
    Bar("500 x 100 B", "plain", 1.4),
    Bar("50 x 1 KB", "plain", 1.4),
    Bar("500 x 100 B", "compiled, Arrow", 0.8, of="ceiling"),
    Bar("50 x 1 KB", "compiled, Arrow", 0.8, of="ceiling"),
)
WRITE_BARS = (Bar("500 x 100 B", "compiled", 2.5), Bar("50 x 1 KB", "compiled", 1.8))


def _pack(encode: ModuleType, rows: Rows) -> bytes:
    aggregate = encode.Aggregate(1 << 20)
    for key, hash_key, data in rows:
        aggregate.add(data, key, hash_key)
    encoded: bytes = aggregate.encode()
    return encoded


def _pack_with_peer(rows: Rows) -> bytes:
    aggregate = AggRecord()
    for key, hash_key, data in rows:
        aggregate.add_user_record(key, data, hash_key)
    packed: bytes = aggregate.get_contents()[2]
    return packed


def _read_with_peer(data: bytes) -> int:
    record = {
        "Data": data,
        "PartitionKey": "a",
        "SequenceNumber": "1",
        "ApproximateArrivalTimestamp": datetime.now(UTC),
    }
    count = 0
    for _ in iter_deaggregate_records([record], data_format="Boto3"):
        count += 1
    return count


def _read_typed(read: Callable[[bytes], Iterable[object]], data: bytes) -> list[object]:
    return list(read(data))


def readers(data: bytes, forms: dict[str, dict[str, ModuleType]]) -> dict[str, Callable[[], Any]]:
    """Return the functions that read an aggregate, by contender."""
    body = data[MAGIC:-DIGEST]
    contenders: dict[str, Callable[[], Any]] = {
        "peer": lambda: _read_with_peer(data),
        "ceiling": lambda: hashlib.md5(body, usedforsecurity=False).digest() == data[-DIGEST:],
    }
    for name, form in forms.items():
        read, arrow = form["decode"].deaggregate, form["arrow"].deaggregate_to_arrow
        contenders[name] = partial(read, data)
        contenders[f"{name}, typed view"] = partial(_read_typed, read, data)
        contenders[f"{name}, KCL's filter"] = partial(read, data, hash_range=SHARD)
        contenders[f"{name}, Arrow"] = partial(arrow, [data] * ARROW_RECORDS)
    return contenders


def writers(rows: Rows, forms: dict[str, dict[str, ModuleType]]) -> dict[str, Callable[[], Any]]:
    """Return the functions that write an aggregate, by contender."""
    contenders: dict[str, Callable[[], Any]] = {"peer": lambda: _pack_with_peer(rows)}
    for name, form in forms.items():
        contenders[name] = partial(_pack, form["encode"], rows)
    return contenders


def medians(contenders: dict[str, Callable[[], Any]], rounds: int, repeat: int) -> dict[str, float]:
    """Run all contenders in turn, and return the median processor time of each in microseconds."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            at_once = ARROW_RECORDS if name.endswith("Arrow") else 1
            began = time.process_time()
            for _ in range(repeat):
                contender()
            seconds[name].append((time.process_time() - began) / repeat / at_once)
    return {name: statistics.median(samples) * 1e6 for name, samples in seconds.items()}


def lines(shape: Shape, figures: dict[str, float], bars: Iterable[Bar]) -> Iterator[tuple[str, ...]]:
    """Yield a line of the table for each contender. The last cell is the verdict."""
    for name, micros in figures.items():
        shape_bars = [bar for bar in bars if (bar.shape, bar.contender) == (shape.name, name)]
        meets_limits = all(figures[bar.of] / micros >= bar.least for bar in shape_bars)
        ceiling = f"{figures['ceiling'] / micros:.0%}" if "ceiling" in figures else ""
        limits = ", ".join(f"{bar.least:.0%}" if bar.of == "ceiling" else f"{bar.least} x" for bar in shape_bars)
        verdict = ("pass" if meets_limits else "FAIL") if shape_bars else ""
        rate, ratio = f"{shape.count / micros:.2f}", f"{figures['peer'] / micros:.2f} x"
        yield name, f"{micros:.1f}", rate, ratio, ceiling, limits, verdict


def empty_table(rounds: int) -> Table:
    """Return a table with only its header."""
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    table = Table(title=f"{machine}, load {os.getloadavg()[0]:.1f}; medians of {rounds} rounds")
    table.add_column("aggregate, contender")
    for name in ("us", "M records/s", "of peer", "of ceiling", "at least", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def main() -> None:
    """Compare the results of all contenders, and then their times. The exit status is 1 if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    table, verdicts = empty_table(options.rounds), list[str]()
    with plain_and_compiled() as forms:
        for shape in SHAPES:
            rows = shape.rows()
            packs = writers(rows, forms)
            data = packs["plain"]()
            assert {pack() for pack in packs.values()} == {data}, "the writers disagree"
            for form in forms.values():
                assert list(form["decode"].deaggregate(data, hash_range=SHARD).rows) == rows
            for title, contenders, bars in (
                ("read", readers(data, forms), READ_BARS),
                ("write", packs, WRITE_BARS),
            ):
                table.add_section()
                table.add_row(f"[bold]{title} {shape.name}")
                for line in lines(shape, medians(contenders, options.rounds, options.repeat), bars):
                    table.add_row(*line)
                    verdicts.append(line[-1])
    Console(width=100).print(table)
    sys.exit("FAIL" in verdicts)


if __name__ == "__main__":
    main()
