"""Checks that reading mutated aggregated records causes no crash, hang or excessive memory use.

`python tests/sources/kinesis/fuzz_aggregation.py 1000000` reads a million of them;
with `--jar`, the KCL's jar reads them too and every result is compared.
"""

# ruff: noqa: T201  a script prints its results

import argparse
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator

import kcl_jar
from aggregates import LAST, MAGIC, group, number, sealed, sized, varint
from crafted import Case, cases

from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate

Chance = random.Random
_NUMBERS = (0, 1, 127, 128, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1)
_LARGEST_SEED = 4096


def _flip(body: bytes, chance: Chance) -> bytes:
    index = chance.randrange(len(body) + 1)
    return body[:index] + bytes([chance.randrange(256)]) + body[index + 1 :]


def _cut(body: bytes, chance: Chance) -> bytes:
    return body[: chance.randrange(len(body) + 1)]


def _remove(body: bytes, chance: Chance) -> bytes:
    index = chance.randrange(len(body) + 1)
    return body[:index] + body[index + chance.randrange(1, 9) :]


def _insert(body: bytes, chance: Chance) -> bytes:
    index = chance.randrange(len(body) + 1)
    value = chance.choice(_NUMBERS)
    field = chance.randrange(1, 6)
    insertions = (
        varint(value),
        number(field, value),
        sized(field, chance.randbytes(3)),
        group(field, b""),
        varint(field << 3 | 3),
    )
    return body[:index] + chance.choice(insertions) + body[index:]


def _repeat(body: bytes, chance: Chance) -> bytes:
    begin = chance.randrange(len(body) + 1)
    end = min(len(body), begin + chance.randrange(1, 40))
    return body[:end] + body[begin:end] * chance.randrange(1, 4) + body[end:]


_MUTATIONS: tuple[Callable[[bytes, Chance], bytes], ...] = (_flip, _cut, _remove, _insert, _repeat)


def mutated(count: int, seed: int) -> Iterator[Case]:
    """Yield crafted cases with random changes. Nine in ten get a valid digest, so that they are parsed."""
    chance = random.Random(seed)  # noqa: S311  the seed makes it reproducible
    seed_cases = [case for case in cases() if len(case.data) <= _LARGEST_SEED]
    for _ in range(count):
        seed_case = chance.choice(seed_cases)
        body = seed_case.data[len(MAGIC) : -16]
        for _ in range(chance.randrange(1, 4)):
            body = chance.choice(_MUTATIONS)(body, chance)
        data = sealed(body) if chance.random() < 0.9 else _flip(seed_case.data, chance)
        yield Case(seed_case.name, data, "", first=seed_case.first, last=seed_case.last)


def deaggregate_case(case: Case) -> tuple[str, tuple[kcl_jar.KclRecord, ...]]:
    """Return the reason and the records that we keep of a case if misplaced records are dropped as by the KCL."""
    user_records = deaggregate(case.data, "outer", None, (case.first, case.last), misplaced="drop")
    kept_records = tuple(
        (
            user_record.partition_key or "",
            user_record.explicit_hash_key,
            user_record.data,
            user_record.sub_sequence_number,
            user_records.aggregated,
        )
        for user_record in user_records
    )
    return user_records.reason, kept_records


def differences(buffers: tuple[Case, ...]) -> list[Case]:
    """Return the cases for which the result of the KCL's jar differs from ours."""
    kcl_results = kcl_jar.kcl_records((case.data, case.first, case.last) for case in buffers)
    return [
        case
        for case, kept_records in zip(buffers, kcl_results, strict=True)
        if deaggregate_case(case)[1] != kept_records
    ]


def oversized_cases() -> Iterator[Case]:
    """Yield records of up to 10 MiB, which a slow or wasteful reader could not handle."""
    yield Case("a length of 2**40", sealed(b"\x1a" + varint(2**40) + b"x"), "bad-proto")
    yield Case(
        "a million keys",
        sealed(sized(1, b"k") * 1_000_000 + sized(3, number(1, 999_999) + sized(3, b""))),
        "aggregated",
    )
    yield Case(
        "a million empty records",
        sealed(sized(1, b"k") + sized(3, number(1, 0) + sized(3, b"")) * 1_000_000),
        "aggregated",
    )
    yield Case("five million groups", sealed(varint(9 << 3 | 3) * 5_000_000), "bad-proto")
    yield Case(
        "a hash key of 5 MiB, used 100000 times",
        sealed(
            sized(1, b"k")
            + sized(2, b"0" * (5 << 20))
            + sized(3, number(1, 0) + number(2, 0) + sized(3, b"")) * 100_000
        ),
        "aggregated",
    )
    yield Case(
        "a hash key of 5 MiB, negative, used 100000 times",
        sealed(
            sized(1, b"k")
            + sized(2, b"-" + b"9" * (5 << 20))
            + sized(3, number(1, 0) + number(2, 0) + sized(3, b"")) * 100_000
        ),
        "out-of-range",
        100_000,
    )
    yield Case(
        "a key of 5 MiB that is no text",
        sealed(sized(1, b"\xed\xa0\x80" * (5 << 18)) + sized(3, number(1, 0) + sized(3, b"")) * 1000),
        "aggregated",
        last=LAST,
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jar", action="store_true")
    options = parser.parse_args()
    if options.jar:
        buffers = tuple(mutated(options.count, options.seed))
        different_cases = differences(buffers)
        print(f"{len(buffers)} buffers, {len(different_cases)} read otherwise by KCL", *different_cases[:5], sep="\n")
        return
    reasons: Counter[str] = Counter()
    slowest = 0.0
    for case in mutated(options.count, options.seed):
        started_at = time.perf_counter()
        reasons[deaggregate_case(case)[0]] += 1
        slowest = max(slowest, time.perf_counter() - started_at)
    for case in oversized_cases():
        started_at = time.perf_counter()
        user_records = deaggregate(case.data, "outer", None, (case.first, case.last))
        print(f"{case.name}: {user_records.reason}, {time.perf_counter() - started_at:.2f} s")
    print(
        f"{options.count} buffers, {dict(reasons)}, slowest {slowest * 1000:.2f} ms, "
        f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB"
    )


if __name__ == "__main__":
    _main()
