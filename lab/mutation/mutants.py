"""Plants small faults into named modules, one at a time, and reports the ones that no test notices: `make mutants`.

    python lab/mutation/mutants.py                                         all modules of modules.toml
    python lab/mutation/mutants.py --only leasehold/balancer/census.py     one of them
    python lab/mutation/mutants.py --write specs/mutants.md                write its table as a page
    python lab/mutation/mutants.py --only codecs --write specs/mutants.md  rewrite these rows of the page
    python lab/mutation/mutants.py --only codecs --last                    show the last run with today's excuses
    python lab/mutation/mutants.py --only codecs --again                   retry its survivors, and what changed

mutmut plants the faults in a copy under build/mutants, and stops a mutant's tests at the first failure. The script
exits with 1 if fewer than 95 % of a module's mutants are killed, or if equivalent.toml lists a mutant that no longer
survives.
"""

# ruff: noqa: T201  a script prints its findings

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, frozen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MUTMUT = Path(sys.executable).with_name("mutmut")
KILLED_SHARE_GOAL = 0.95
ALIVE = ("survived", "no tests")
"""The results of mutants that no test noticed. They include mutants in code that no test runs."""

SETTINGS = """
[tool.mutmut]
source_paths = ["leasehold"]
only_mutate = {modules}
also_copy = ["lab", "specs"]
# What conftest.py is for are services; these tests need none, and to import it takes longer than most of them.
pytest_add_cli_args = [
  "--noconftest", "-p", "no:leasehold", "--hypothesis-profile", "ci", "-m", "not (more or services or spark or slow)",
  "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception", "-o", "pythonpath=tests lab",
]
pytest_add_cli_args_test_selection = {tests}
# A message's words are for people: no test should repeat them.
do_not_mutate_patterns = ['raise \\w+\\(', 'log\\.\\w+\\(', '\\.warning\\(', 'TypeVar\\(']
# Generous, for a mutant that is only slow must not pass for a killed one.
timeout_constant = 5.0
timeout_multiplier = 6.0
track_dependencies = false
use_git_change_detection = false
# Each mutant meets what the tests' first run had left in no process: a store by name, a thread.
process_isolation = "forkserver"
"""

SHOW_DIFFS_PROGRAM = """
import json, sys
from mutmut.mutation.diff_apply import get_diff_for_mutant
print(json.dumps({name: get_diff_for_mutant(name, path=sys.argv[1]) for name in sys.argv[2:]}))
"""
"""A program that does what `mutmut show` does for many mutants at once, because mutmut takes seconds to start."""


@frozen
class Group:
    """Modules, and the tests that must kill their mutants.

    Attributes:
        parts: Digits. Only mutants whose numbers end with one of these digits are planted. If empty, all are planted.
    """

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    parts: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that select the group, which are its own name and the paths of its modules."""
        return (self.name, *self.modules)


@frozen
class Mutant:
    """A planted fault that no test noticed.

    Attributes:
        function: The function with the fault, as Class.method.
        was: The original lines, without their indentation.
        now: The changed lines, without their indentation.
    """

    name: str
    function: str
    was: str
    now: str


@frozen
class Excuse:
    """Explains why the mutants of a function with these changed lines behave exactly like the original."""

    module: str
    function: str
    was: str
    now: str
    why: str

    def matches_mutant(self, mutant: Mutant) -> bool:
        """Return whether this entry is about the mutant."""
        return (mutant.function, mutant.was, mutant.now) == (self.function, self.was.strip(), self.now.strip())


@frozen
class Tally:
    """The results for the mutants of one module.

    Attributes:
        late: The number of killed mutants whose tests exceeded their time limit.
    """

    module: str
    parts: str
    planted: int
    survivors: tuple[Mutant, ...]
    excused: int
    late: int
    idle: tuple[Excuse, ...]

    @property
    def killed_count(self) -> int:
        """The number of mutants at which a test failed or reached its time limit."""
        return self.planted - self.excused - len(self.survivors)

    @property
    def killed_share(self) -> float:
        """The number of killed mutants divided by the number of mutants that can be killed."""
        return self.killed_count / max(1, self.planted - self.excused)

    @property
    def is_good(self) -> bool:
        """Whether enough mutants are killed, and each excuse is still needed."""
        return self.killed_share >= KILLED_SHARE_GOAL and not self.idle

    @property
    def table_row(self) -> str:
        """The module's row of the table."""
        part_text = f" ({len(self.parts)} of 10)" if self.parts else ""
        last_columns = f"{self.excused} | {len(self.survivors)} | {self.killed_share:.1%}"
        return f"| `{self.module}` | {self.planted}{part_text} | {self.killed_count} | {self.late} | {last_columns} |"


HEAD = """| module | mutants | killed | of these by time | equivalent | survived | killed of those that can be |
|---|--:|--:|--:|--:|--:|--:|"""


def read_groups(only: str | None = None) -> tuple[Group, ...]:
    """Return all groups of modules.toml, or those with this name or module. Raises SystemExit if there is none."""
    entries = tomllib.loads((HERE / "modules.toml").read_text())
    all_groups = (
        Group(name, tuple(entry["modules"]), tuple(entry["tests"]), entry.get("parts", ""))
        for name, entry in entries.items()
    )
    if only is None:
        return tuple(all_groups)
    selected_groups = tuple(
        group if only == group.name else evolve(group, modules=(only,)) for group in all_groups if only in group.names
    )
    return selected_groups or sys.exit(f"{only}: modules.toml does not list it")


def read_excuses(module: str | None) -> tuple[Excuse, ...]:
    """Return the equivalent mutants that equivalent.toml lists, either of this module or of all modules."""
    entries = tomllib.loads((HERE / "equivalent.toml").read_text()).get("mutant", [])
    return tuple(Excuse(**entry) for entry in entries if module in (None, entry["module"]))


def copy_tree(group: Group) -> Path:
    """Copy the modules, their tests and mutmut's settings to a folder, so that the working tree is not changed."""
    folder = ROOT / "build" / "mutants" / group.name
    shutil.rmtree(folder, ignore_errors=True)
    _copy(folder)
    settings = SETTINGS.format(modules=json.dumps(group.modules), tests=json.dumps(group.tests))
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)
    return folder


def _copy(folder: Path) -> None:
    ignore_unneeded = shutil.ignore_patterns("__pycache__", "node_modules", ".hypothesis", "*.so")
    for name in ("leasehold", "lab", "tests", "specs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore_unneeded, dirs_exist_ok=True)


def _run_mutmut(folder: Path, *arguments: str) -> str:
    command = [str(MUTMUT), *arguments]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed in {folder}:\n{process.stdout[-4000:]}\n{process.stderr[-4000:]}")
    return process.stdout


def plant_and_test(group: Group) -> Path:
    """Plant the mutants of these modules, and run the tests against each."""
    folder = copy_tree(group)
    _run(folder, *(f"*__mutmut_*{digit}" for digit in group.parts))
    return folder


def _run(folder: Path, *names: str) -> None:
    _run_mutmut(folder, "run", "--max-children", str(os.cpu_count() or 1), *names)


def retest_survivors(group: Group) -> Path:
    """Test the survivors of the last run again. mutmut plants new mutants only in code that has changed since then."""
    folder = ROOT / "build" / "mutants" / group.name
    _copy(folder)
    if not group.parts:  # otherwise mutmut would also plant mutants outside these parts
        _run(folder)
    survivors = [name for name, result in _read_results(folder).items() if result in ALIVE]
    if survivors:
        _run(folder, *survivors)
    return folder


def last_run_folder(group: Group) -> Path:
    """Return the folder with the mutants of the last run. Raises SystemExit if the modules have changed since then."""
    folder = ROOT / "build" / "mutants" / group.name
    for module in group.modules:
        module_copy = folder / module
        if not module_copy.exists() or module_copy.read_bytes() != (ROOT / module).read_bytes():
            sys.exit(f"{module} has changed since its mutants were planted, or they never were")
    return folder


def count_results(group: Group, folder: Path) -> list[Tally]:
    """Count the results of the planted mutants by module."""
    results = {name: result for name, result in _read_results(folder).items() if result != "not checked"}
    return [_count_module_results(folder, group, module, results) for module in group.modules]


def _read_results(folder: Path) -> dict[str, str]:
    lines = _run_mutmut(folder, "results", "--all", "true").splitlines()
    return dict(line.strip().rsplit(": ", 1) for line in lines if "__mutmut_" in line)


def _count_module_results(folder: Path, group: Group, module: str, results: Mapping[str, str]) -> Tally:
    dotted_module = module.removesuffix(".py").replace("/", ".")
    module_results = {name: result for name, result in results.items() if name.rpartition(".")[0] == dotted_module}
    unnoticed_mutants = _list_mutants(
        folder, module, [name for name, result in module_results.items() if result in ALIVE]
    )
    module_excuses = read_excuses(module)
    survivors = tuple(
        mutant for mutant in unnoticed_mutants if not any(excuse.matches_mutant(mutant) for excuse in module_excuses)
    )
    # If only some of the mutants are planted, the excused ones may not be among them.
    unneeded_excuses = (
        ()
        if group.parts
        else tuple(excuse for excuse in module_excuses if not any(map(excuse.matches_mutant, unnoticed_mutants)))
    )
    timeout_count = sum(result == "timeout" for result in module_results.values())
    return Tally(
        module,
        group.parts,
        len(module_results),
        survivors,
        len(unnoticed_mutants) - len(survivors),
        timeout_count,
        unneeded_excuses,
    )


def _list_mutants(folder: Path, module: str, names: list[str]) -> list[Mutant]:
    command = [sys.executable, "-c", SHOW_DIFFS_PROGRAM, module, *names]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    diffs = json.loads(process.stdout)
    return [
        Mutant(name, _function(name), _list_changed_lines(diffs[name], "-"), _list_changed_lines(diffs[name], "+"))
        for name in names
    ]


def _function(name: str) -> str:
    # mutmut spells `method` of Class as xǁClassǁmethod, and `function` as x_function.
    return name.rsplit(".", 1)[1].partition("__mutmut_")[0].removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")


def _list_changed_lines(diff: str, sign: str) -> str:
    lines = diff.splitlines()
    return "\n".join(line[1:].strip() for line in lines if line.startswith(sign) and not line.startswith(sign * 3))


def print_tally(tally: Tally) -> None:
    """Print the survivors, and the excuses that are no longer needed."""
    print(tally.table_row, flush=True)
    for mutant in tally.survivors:
        print(
            f"\n  {mutant.function} ({mutant.name})\n    - {mutant.was}\n    + {mutant.now}".replace("\n    - \n", "\n")
        )
    for excuse in tally.idle:
        print(
            f"\n  equivalent.toml names what is no survivor: {excuse.function}\n    - {excuse.was}\n    + {excuse.now}"
        )


def format_page(new_tallies: list[Tally], former_page: str = "") -> str:
    """Return the page with the table, the equivalent mutants and their reasons, and the survivors.

    Modules that were not run keep their entries from `former_page`.
    """
    table, _, survivor_section = former_page.partition("## Survived")
    table_rows = {**_group_by_module(table, "| `"), **{tally.module: [tally.table_row] for tally in new_tallies}}
    survivor_lines = _group_by_module(survivor_section, "- `") | {
        tally.module: [_survivor_line(tally, mutant) for mutant in tally.survivors] for tally in new_tallies
    }
    # A module may be in two groups whose tests kill different mutants of it, so list each module once.
    modules = [
        module
        for module in dict.fromkeys(module_name for tally in read_groups() for module_name in tally.modules)
        if module in table_rows
    ]
    equivalent_lines = [
        f"- `{tally.module}`, `{tally.function}`: {tally.why}" for module in modules for tally in read_excuses(module)
    ]
    return PAGE.format(
        table="\n".join([HEAD, *(row for module in modules for row in table_rows[module])]),
        equivalent="\n".join(dict.fromkeys(equivalent_lines)) or "None.",
        alive="\n".join(line for module in modules for line in survivor_lines.get(module, [])) or "None.",
    )


def _survivor_line(tally: Tally, mutant: Mutant) -> str:
    return f"- `{tally.module}`, `{mutant.function}`: `{mutant.was}` → `{mutant.now}`".replace("\n", " ")


def _group_by_module(text: str, opening: str) -> dict[str, list[str]]:
    """Group the lines that start with `opening` by the module that each line names first."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(opening):
            lines.setdefault(line.split("`")[1], []).append(line)
    return lines


PAGE = """# Mutants

Small faults planted into the code, and how many of them the tests see. `make mutants` plants them with mutmut and runs
against each the tests that `lab/mutation/modules.toml` names, in-process ones that need no service. Functions with a
decorator (properties among them) are not mutated by mutmut, nor is what stands outside of functions, nor the words of
messages. Where "of 10" stands behind a number, that many tenths of the mutants were planted, chosen by their number.

{table}

## Equivalent

These behave like the original, for the reason given; `lab/mutation/equivalent.toml` has their lines.

{equivalent}

## Survived

{alive}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one module by its path, or one group by its name")
    parser.add_argument("--write", type=Path, help="the page to write, or to renew in part")
    parser.add_argument("--last", action="store_true", help="count what the last run found, and plant nothing")
    parser.add_argument("--again", action="store_true", help="try what survived the last run, and what changed since")
    options = parser.parse_args()
    print(HEAD, flush=True)
    results: list[Tally] = []
    make_folder = last_run_folder if options.last else retest_survivors if options.again else plant_and_test
    for group in read_groups(options.only):
        for tally in count_results(group, make_folder(group)):
            print_tally(tally)
            results.append(tally)
    if options.write:
        former_page = options.write.read_text() if options.only and options.write.exists() else ""
        options.write.write_text(format_page(results, former_page))
    return 0 if all(tally.is_good for tally in results) else 1


if __name__ == "__main__":
    sys.exit(main())
