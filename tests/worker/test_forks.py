"""Which signal handlers a forked child has, and how a forked copy of a program ends.

Each test forks in a separate process, because the process of the tests has threads.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from running import WAIT

HANDLERS = """
import os, signal, sys
from leasehold.adapters.signals import forget_loop_handler, note_loop_handler, replace_handler, restore_handler
NUMBER = signal.SIGUSR1
def program(*_): "The handler of the program"
def outer(*_): "A handler of ours"
def inner(*_): "A handler of ours that is set later"
def in_child(call):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        call()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
def show():
    handler = signal.getsignal(NUMBER)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    print(getattr(handler, "__name__", handler), *sorted(signal.Signals(number).name for number in blocked))
signal.signal(NUMBER, program)
"""


def output_of(program: str, options: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return the lines of output of this program, and its error output."""
    command, environment = [sys.executable, *options, "-c", program], os.environ | {"PYTHONUNBUFFERED": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True, env=environment)
    return result.stdout.splitlines(), result.stderr


SHOWN_IN_CHILD = {
    "replace_handler(NUMBER, outer)": "program",
    "replace_handler(NUMBER, outer); replace_handler(NUMBER, inner)": "program",
    "replace_handler(NUMBER, outer); restore_handler(NUMBER, replace_handler(NUMBER, inner))": "program",
    "restore_handler(NUMBER, replace_handler(NUMBER, outer)); signal.signal(NUMBER, inner)": "inner",
    "replace_handler(NUMBER, outer); note_loop_handler(NUMBER); forget_loop_handler(NUMBER)": "program",
    "note_loop_handler(NUMBER)": "0",
    "note_loop_handler(NUMBER); forget_loop_handler(NUMBER); signal.signal(NUMBER, inner)": "inner",
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}); replace_handler(NUMBER, outer)": "program SIGHUP",
}
"""The handler and the blocked signals of a child that is forked after these steps."""


def test_child_has_the_handlers_that_the_program_had_before() -> None:
    """The child neither ignores a signal nor leaves it blocked, and its parent keeps its own handlers."""
    program = f"""
def run(steps):
    exec(steps, globals())
    show()
    in_child(show)
    show()
for steps in {[*SHOWN_IN_CHILD]}:
    in_child(lambda: run(steps))
"""
    lines, _ = output_of(HANDLERS + program)
    assert dict(zip(SHOWN_IN_CHILD, lines[1::3], strict=True)) == SHOWN_IN_CHILD
    assert lines[0::3] == lines[2::3]


def test_child_sets_handlers_for_its_own_children() -> None:
    program = """
def child():
    signal.signal(NUMBER, inner)
    in_child(show)
replace_handler(NUMBER, outer)
in_child(child)
"""
    assert output_of(HANDLERS + program)[0] == ["inner"]


def test_child_does_not_wake_the_event_loop_of_its_parent() -> None:
    program = """
import socket
ours, theirs = socket.socketpair()
ours.setblocking(False)
signal.set_wakeup_fd(ours.fileno())
note_loop_handler(NUMBER)
in_child(lambda: print(signal.set_wakeup_fd(-1)))
print(signal.set_wakeup_fd(-1) == ours.fileno())
"""
    assert output_of(HANDLERS + program)[0] == ["-1", "True"]


def test_handler_in_c_is_the_default_action_in_a_child() -> None:
    """Python cannot set such a handler again, and an error would skip the handlers that follow."""
    program = """
previous = replace_handler(signal.SIGSEGV, outer)
replace_handler(NUMBER, outer)
in_child(lambda: (print(previous, signal.getsignal(signal.SIGSEGV)), show()))
"""
    assert output_of(HANDLERS + program, ["-X", "faulthandler"])[0] == ["None 0", "program"]


def test_forked_copy_ends_as_python_ends_a_program() -> None:
    """Its output is written, and only the original goes on."""
    program = """
import os, sys
from leasehold.adapters.processes import Origin
origin = Origin()
for fault in (None, SystemExit(), SystemExit(3), SystemExit(2**40 + 4), SystemExit("over"), LookupError("no book")):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        print("output", end=" ")
        origin.end_forked_copy(fault)
        os._exit(99)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
origin.end_forked_copy(LookupError())
print("original")
"""
    lines, error_lines = output_of(program)
    assert lines == [*(f"output {status}" for status in (0, 0, 3, 4, 1, 1)), "original"]
    assert ("over\n" in error_lines, error_lines.endswith("LookupError: no book\n")) == (True, True)


def test_forked_copy_ends_although_its_output_cannot_be_written() -> None:
    """Otherwise, it would go on and wait for threads that the fork did not copy."""
    program = """
import os, sys
from leasehold.adapters.processes import Origin
origin = Origin()
for name in ("stdout", "stderr"):
    pid = os.fork()
    if pid == 0:
        getattr(sys, name).close()
        try:
            origin.end_forked_copy(LookupError("no book"))
        except ValueError:
            os._exit(99)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    assert output_of(program)[0] == ["1", "1"]


def test_function_at_exit_is_called_only_in_its_own_process() -> None:
    """A child of `multiprocessing` calls its own functions, too."""
    program = """
import multiprocessing, os, sys
from leasehold.adapters.processes import call_at_exit
def register(name):
    call_at_exit(lambda: print(name, flush=True))
register("parent")
child = multiprocessing.get_context("fork").Process(target=register, args=("child",))
child.start()
child.join()
if os.fork() == 0:
    sys.exit()
os.wait()
"""
    assert output_of(program)[0] == ["child", "parent"]
