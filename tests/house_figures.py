"""How finely the house is cut, in figures: `python tests/house_figures.py` prints them beside what they are to reach.

They show where to look; they are no aim: a helper without its underscore is the same helper. Below a figure that is not
reached stands what it is made of, counted as well; CONTRIBUTING.md ("How large it is") draws the conclusions.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from statistics import median

from attrs import frozen

ROOT = Path(__file__).parents[1]
GENERATED = "_pb2.py"
ROOMS = ("worker", "reading", "spark")
SUBJECTS = {
    "balancer": "what to do, and when to look",
    "stores": "lease tables: every store, both layouts, swaps, the contract",
    "adapters/worker adapters/reading adapters/threads.py": "one worker: turns, leases held, records handed over",
    "adapters/sources": "Kinesis, read and written, aggregates, Event Hubs, streams of tables",
    "adapters/spark": "Spark",
    "adapters/multilang": "programs of other languages",
    "adapters/proving adapters/history": "the simulator, the checker, the laws, the judge",
    "adapters/local adapters/demo": "services on this machine, and the demo",
}
REST = "commands, explanations, pages, what a program calls"
"""All that is under none of the folders above."""


@frozen
class Figure:
    """One figure, and what it is to reach."""

    name: str
    now: str
    goal: str
    made_of: tuple[str, ...] = ()


def modules(folder: Path) -> list[Path]:
    """The files of Python below a folder that somebody has written."""
    return sorted(path for path in folder.rglob("*.py") if not path.name.endswith(GENERATED))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def private(text: str) -> list[tuple[str, int, bool]]:
    """Each private function of a file: its name, the lines of its body, and whether one place alone calls it."""
    found = []
    for node in _functions(ast.parse(text)):
        if node.name.startswith("_") and not node.name.startswith("__"):
            first = node.body[0]
            said = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            body = (node.end_lineno or 0) - ((first.end_lineno or 0) if said else node.lineno)
            found.append((node.name, body, len(re.findall(rf"\b{node.name}\b", text)) == 2))
    return found


def comments(text: str) -> tuple[int, int]:
    """The lines with a comment, and the lines of code: those that have a token which is no comment or docstring."""
    told, code = set[int](), set[int]()
    said = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    empty = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            told.add(token.start[0])
        elif token.type not in empty:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(told), len(code - said)


def within_tests(text: str) -> int:
    """The lines of a file that stand in test functions, their decorators included; rules of state machines count."""
    lines = set[int]()
    for node in _functions(ast.parse(text)):
        ruled = any("rule" in ast.unparse(each) or "invariant" in ast.unparse(each) for each in node.decorator_list)
        if node.name.startswith("test_") or ruled:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines |= set(range(first, (node.end_lineno or first) + 1))
    return len(lines)


def answering(page: Path) -> set[Path]:
    """The files that the page of the architecture names beside its ten questions, and the page."""
    _, _, after = page.read_text(encoding="utf-8").partition("## Ten questions")
    named = re.findall(r"`([\w./-]+\.(?:py|md))`", after.partition("\n| question")[2].partition("\n## ")[0])
    roots = (ROOT / "leasehold", ROOT / "leasehold" / "adapters", ROOT)
    return {page, *(next(root / name for root in roots if (root / name).is_file()) for name in named)}


def by_subject(lengths: Mapping[str, int]) -> Iterator[str]:
    """The lines of each subject, the most first; `lengths` of files by their paths below the package."""
    counted = Counter[str]()
    for path, lines in lengths.items():
        homes = ((home, told) for homes, told in SUBJECTS.items() for home in homes.split())
        counted[next((told for home, told in homes if path.startswith(home)), REST)] += lines
    return (f"{lines:,} {told}" for told, lines in counted.most_common())


def kinds_of_lines(texts: Iterable[str]) -> str:
    """How many lines have code, only a comment, a docstring, or nothing."""
    told, code, every = 0, 0, 0
    for text in texts:
        alone = sum(line.lstrip().startswith("#") for line in text.splitlines())
        told, code, every = told + alone, code + comments(text)[1], every + text.count("\n")
    return f"{code:,} of code, {told:,} of comments, {every - told - code:,} of docstrings or empty"


def figures() -> Iterable[Figure]:
    """All of them, as the tree is now."""
    texts = {path: path.read_text(encoding="utf-8") for path in modules(ROOT / "leasehold")}
    lengths = [text.count("\n") for text in texts.values()]
    helpers = list(chain.from_iterable(map(private, texts.values())))
    lonely = [lines for _, lines, once in helpers if once]
    package = ROOT / "leasehold"
    subjects = by_subject({str(path.relative_to(package)): lines for path, lines in zip(texts, lengths, strict=True)})
    made_of = (kinds_of_lines(texts.values()), *subjects)
    yield Figure("source lines", f"{sum(lengths):,}", "at most 32,000", made_of)
    yield Figure("files, and their median lines", f"{len(lengths)}, {median(lengths):.0f}", "at most 200, 150 or more")
    yield Figure("private functions in 1,000 lines", f"{1000 * len(helpers) / sum(lengths):.0f}", "at most 12")
    named = sum(
        once and text.count(f"{name}(") == 1 for text in texts.values() for name, _, once in private(text)
    )  # its own definition only
    share = f"{100 * len(lonely) / len(helpers):.0f} % ({sum(lines <= 3 for lines in lonely)} of at most 3 lines)"
    yield Figure("of these, called from one place", share, "at most 40 %")
    yield Figure("of those, named and not called", f"{named}: callbacks, parts of tables, properties", "no goal")
    for room in ROOMS:
        pairs = [comments(text) for path, text in texts.items() if room in path.parts]
        told, code = (sum(column) for column in zip(*pairs, strict=True))
        yield Figure(f"comment lines for a line of code in {room}", f"{told / code:.2f}", "0.10 or more")
    read = answering(ROOT / "docs" / "architecture.md")
    told = sum(path.read_text(encoding="utf-8").count("\n") for path in read)
    yield Figure("lines that answer ten questions, in files", f"{told:,} in {len(read)}", "at most 4,500")
    tests = {path: path.read_text(encoding="utf-8") for path in modules(ROOT / "tests")}
    of_tests = [text for path, text in tests.items() if path.name.startswith("test_")]
    lines, in_files = (sum(text.count("\n") for text in some) for some in (tests.values(), of_tests))
    within = sum(map(within_tests, tests.values()))
    inside = (
        f"{in_files:,} in files of tests, of which {100 * within / in_files:.0f} % are in test functions",
        f"{lines - in_files:,} in drivers of chaos, fleets, Spark and fuzzing, stand-ins for services, and doubles",
    )
    share = f"{lines:,}, {100 * within / lines:.0f} %"
    yield Figure("lines of tests, in test functions", share, "at most 42,000, 60 % or more", inside)


if __name__ == "__main__":
    for figure in figures():
        print(f"{figure.name:42}  {figure.now:28}  {figure.goal}")  # noqa: T201
        for each in figure.made_of:
            print(f"    {each}")  # noqa: T201
