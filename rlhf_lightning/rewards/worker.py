"""Calls code that may hang, from a thread that can be left behind."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch


class CallTimeout(Exception):
    """The call had not returned within its limit."""


class CallFailed(Exception):
    """The call raised ``error``: kept apart from what the caller's own thread is sent, Ctrl-C for one."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Worker:
    """One daemon thread that runs calls, one at a time.

    Why not ``signal.alarm``: it works in the main thread only, which is not always ours (a notebook, a test
    runner), and it raises wherever the main thread happens to be, inside a collective or a file being
    written. A thread is given up instead: the caller goes on at once, saves and closes, and a daemon does
    not hold up the exit. What a thread cannot do is stop C code that never lets go of the interpreter lock.
    The same thread serves all calls, so that connections that belong to the thread that opened them stay
    usable.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue]] | None = None

    def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """``function()``; CallFailed where it raises, CallTimeout where the seconds do not suffice."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            # A new thread starts on the first CUDA device, whatever the rank.
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            threading.Thread(target=_serve, args=(self._calls, device), name=self._name, daemon=True).start()
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._calls.put((function, answer))
        try:
            value, error = answer.get(timeout=timeout_s)
        except queue.Empty:
            self._calls = None  # that thread is stuck: the next call gets a new one
            raise CallTimeout from None
        if error is not None:
            raise CallFailed(error) from error
        return value


def _serve(calls: queue.SimpleQueue, device: int | None) -> None:
    with torch.cuda.device(device) if device is not None else contextlib.nullcontext(), torch.no_grad():
        while True:
            function, answer = calls.get()
            try:
                answer.put((function(), None))
            except BaseException as error:  # also SystemExit: nothing else would report it
                answer.put((None, error))
