"""Sets signal handlers that a forked child does not inherit.

Our handlers drain the worker of this process or end a wait. A child created by `multiprocessing` or `os.fork` lacks the
threads that do this. If the child kept our handlers, it would ignore `Process.terminate()`, and `with Pool()` would
wait forever. If it kept the wakeup descriptor of an event loop, it would also report its signals to its parent's loop.
A child therefore gets the handlers that the program had before.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SignalHandler = Callable[[int, FrameType | None], Any] | int | None

_previous_handlers: dict[int, SignalHandler] = {}
_saved_masks = threading.local()


def replace_handler(number: int, handler: SignalHandler) -> SignalHandler:
    """Set this handler and return the one it replaces. Call this in the main thread."""
    previous = signal.signal(number, handler)
    _previous_handlers.setdefault(number, previous)
    return previous


def restore_handler(number: int, handler: SignalHandler) -> None:
    """Set the previous handler of a signal again, as `replace_handler` returned it."""
    signal.signal(number, handler)
    if number in _previous_handlers and _previous_handlers[number] == handler:
        del _previous_handlers[number]


def note_loop_handler(number: int) -> None:
    """Record that an event loop now handles this signal, so that a forked child restores the default action."""
    _previous_handlers.setdefault(number, signal.SIG_DFL)


def forget_loop_handler(number: int) -> None:
    """Record that the event loop no longer handles this signal."""
    if _previous_handlers.get(number) == signal.SIG_DFL:
        del _previous_handlers[number]


def _block_handled_signals() -> None:
    # Block these signals during the fork. Otherwise, a signal that arrives in the child before its handlers are
    # restored would be lost.
    _saved_masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _previous_handlers) if _previous_handlers else None


def _unblock_signals() -> None:
    if (mask := getattr(_saved_masks, "before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _restore_handlers_in_child() -> None:
    if _previous_handlers:
        signal.set_wakeup_fd(-1)  # the descriptor belongs to the parent's event loop
    for number, handler in _previous_handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    _previous_handlers.clear()
    _unblock_signals()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(
        before=_block_handled_signals, after_in_parent=_unblock_signals, after_in_child=_restore_handlers_in_child
    )
