"""Tests the list of modules and the counts of their mutants, on which `make mutants` relies."""

import importlib
from collections import Counter
from pathlib import Path

import pytest
from attrs import evolve
from mutants import ROOT, Excuse, Group, Mutant, Tally, format_page, read_excuses, read_groups, retest_survivors
from statements import SLOW_TEST_PREFIX, Fault, Verdicts, list_faults, plant_fault, read_rooms, read_unseen_faults


def test_every_listed_module_and_test_exists() -> None:
    groups = read_groups()
    paths = [path for group in groups for path in (*group.modules, *group.tests)]
    assert len(groups) > 1
    assert [path for path in paths if not (ROOT / path.removeprefix("slow:")).exists()] == []


def test_every_excuse_has_a_listed_module_and_a_reason() -> None:
    """Each excuse belongs to a listed module. An excuse for any other module would never be reported as unused."""
    modules = {module for item in read_groups() for module in item.modules}
    all_excuses = [item for module in modules for item in read_excuses(module)]
    assert [item for item in all_excuses if not item.why.strip()] == []
    assert len(all_excuses) == len(read_excuses(None))


def test_an_excuse_covers_only_its_own_change() -> None:
    """The excuse for one mutant does not hide another mutant of the same function that no test notices."""
    excuse = Excuse("m.py", "f", was="a = 1\n", now="a = 2\n", why="a is never read")
    assert excuse.matches_mutant(Mutant("m.x_f__mutmut_1", "f", was="a = 1", now="a = 2"))
    assert not excuse.matches_mutant(Mutant("m.x_f__mutmut_2", "f", was="a = 1", now="a = None"))
    assert not excuse.matches_mutant(Mutant("m.x_g__mutmut_1", "g", was="a = 1", now="a = 2"))


def test_equivalent_mutants_are_not_counted_and_unused_excuses_fail() -> None:
    survivor, excuse = Mutant("m.x_f__mutmut_1", "f", "a", "b"), Excuse("m.py", "f", "a", "c", "why")
    tally = Tally("m.py", "", planted=102, survivors=(survivor,) * 5, excused=2, late=0, idle=())
    assert (tally.killed_count, tally.killed_share, tally.is_good) == (95, 0.95, True)
    assert not evolve(tally, survivors=(survivor,) * 6).is_good
    assert not evolve(tally, idle=(excuse,)).is_good


def test_a_part_of_the_page_can_be_rewritten() -> None:
    first_module, second_module = (group.modules[0] for group in read_groups()[:2])
    survivor = Mutant("x", "f", "a", "b")
    tallies = [Tally(module, "", 10, (survivor,), 0, 0, ()) for module in (first_module, second_module)]
    page = format_page(tallies)
    assert format_page([], page) == page
    new_tally = evolve(tallies[1], planted=20, survivors=())
    assert format_page([new_tally], page) == format_page([tallies[0], new_tally])
    assert format_page([new_tally], page) != page


def test_a_module_of_two_groups_appears_once_on_the_page() -> None:
    (module, _), *_ = Counter(module for item in read_groups() for module in item.modules).most_common(1)
    lines = format_page([Tally(module, "", 10, (Mutant("x", "f", "a", "b"),), 0, 0, ())]).splitlines()
    assert [len([line for line in lines if line.startswith(f"{mark} `{module}`")]) for mark in ("|", "-")] == [
        1,
        1 + len({(item.function, item.why) for item in read_excuses(module)}),
    ]


def test_only_the_survivors_of_a_part_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = list[tuple[str, ...]]()
    monkeypatch.setattr("mutants._copy", lambda _place: None)
    monkeypatch.setattr("mutants._run", lambda _place, *names: commands.append(names))
    monkeypatch.setattr("mutants._read_results", lambda _place: {"a": "survived", "b": "not checked", "c": "killed"})
    for parts in ("5", ""):
        retest_survivors(Group("g", (), (), parts))
    assert commands == [("a",), (), ("a",)]


PLAIN = """
def f(self):
    if self.over:
        return None
    self.told = True
    self.tell(1)
    try:
        value = self.ask()
        self.say(value)
    finally:
        self.lock.close()
        self.tell(2)
    log.info("done")
    return value
"""


def test_each_kind_of_fault_is_planted() -> None:
    """Each kind of fault is planted somewhere. A kind that is never planted would look as if tests noticed it."""
    sources = {(fault.kind, fault.line): fault.source for fault in list_faults(PLAIN)}
    assert set(sources) == {("guard", 4), ("reset", 5), ("swap", 5), ("finally", 11), ("reset", 11), ("swap", 11)}
    assert sources["guard", 4] == PLAIN.replace("return None", "if 0: return None")
    assert sources["reset", 5] == PLAIN.replace("self.told = True", "if 0: self.told = True")
    assert sources["swap", 5] == PLAIN.replace(
        "    self.told = True\n    self.tell(1)\n", "    self.tell(1)\n    self.told = True\n"
    )
    assert sources["finally", 11] == PLAIN.replace("        self.lock.close()\n        self.tell(2)", "        pass")


def test_faults_do_not_break_assignments_or_constructors() -> None:
    """Faults that make every call fail immediately are not planted, because any test would notice them."""
    assert list(list_faults("def f():\n    a = 1\n    g(a)\n")) == []
    assert list(list_faults("class C:\n    def __init__(self):\n        self.a = 0\n        self.g()\n")) == []
    assert list(list_faults("def f(self):\n    self.a, self.b = self.g(), 1\n    self.c = self.h()\n")) == []


def test_every_module_and_test_of_a_group_of_faults_exists() -> None:
    listed_paths = [
        path for room in read_rooms().values() for module, tests in room.items() for path in (module, *tests)
    ]
    paths = [path.removeprefix(SLOW_TEST_PREFIX) for path in listed_paths] + [
        fault["module"] for fault in read_unseen_faults()
    ]
    assert paths
    assert [path for path in paths if not (ROOT / path.removeprefix("slow:")).exists()] == []


def test_every_excused_fault_quotes_a_line_of_its_module() -> None:
    """If a line is gone, its excuse must go, too, or it would hide a fault in a later line with the same text."""
    excuses = [(fault["module"], fault["line"]) for fault in read_unseen_faults()]
    assert [(module, line) for module, line in excuses if line not in (ROOT / module).read_text("utf-8")] == []


PLANTED = """
class Base:
    def close(self):
        self.open = False

class Some(Base):
    @property
    def name(self):
        if self.open:
            return "open"
        return "closed"

    def close(self):
        super().close()
"""


def test_a_fault_is_planted_into_already_imported_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("planted")
    instance = module.Some()
    instance.open = True
    fault_by_kind = {fault.kind: fault for fault in list_faults(PLANTED)}  # of the two resets, this keeps the later one
    plant_fault(str(tmp_path / "planted.py"), fault_by_kind["reset"])
    instance.close()
    assert (instance.open, instance.name) == (True, "open")
    plant_fault(str(tmp_path / "planted.py"), fault_by_kind["guard"])
    assert instance.name == "closed"


def test_a_mutant_is_retried_only_after_its_function_or_tests_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run can be stopped and continued. A missed fault is tried again when its tests have changed."""
    monkeypatch.setattr("statements.BUILD", tmp_path)
    text_by_test = {"a": "as it was"}
    monkeypatch.setattr("statements._read_test_text", text_by_test.__getitem__)
    (guard_fault,) = list_faults("def f(self):\n    if self.over:\n        return\n    g()\n")
    (moved_fault,) = list_faults("x = 1\ndef f(self):\n    if self.over:\n        return\n    g()\n")
    (changed_fault,) = list_faults("def f(self):\n    if self.over:\n        return\n    h()\n")

    def verdicts_of(*tried_faults: Fault) -> list[bool | None]:
        return [Verdicts(0.0, ignore_earlier=False).get("m", fault, ["a"]) for fault in tried_faults]

    Verdicts(0.0, ignore_earlier=False).add("m", guard_fault, ["a"], is_seen=False)
    assert verdicts_of(guard_fault, moved_fault, changed_fault) == [False, False, None]
    text_by_test["a"] = "with another test"
    assert verdicts_of(guard_fault) == [None]
    Verdicts(0.0, ignore_earlier=False).add("m", guard_fault, ["a"], is_seen=True)
    text_by_test["a"] = "with one more"
    assert verdicts_of(guard_fault, moved_fault, changed_fault) == [True, True, None]
    assert Verdicts(0.0, ignore_earlier=True).get("m", guard_fault, ["a"]) is None
