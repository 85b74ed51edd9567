"""`torch.npu.mstx`: marks and ranges in a profile, here those of `torch.profiler`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function

_numbers = itertools.count(1)
_open: dict[int, record_function] = {}
_pushed: dict[str, list[int]] = {}


def _label(message: str, domain: str) -> str:
    return message if domain == "default" else f"{domain}: {message}"


class mstx:
    @staticmethod
    def mark(message: str, stream: Any = None, domain: str = "default") -> None:
        with record_function(_label(message, domain)):
            pass

    @staticmethod
    def range_start(message: str, stream: Any = None, domain: str = "default") -> int:
        number = next(_numbers)
        _open[number] = record_function(_label(message, domain))
        _open[number].__enter__()
        return number

    @staticmethod
    def range_end(range_id: int, domain: str = "default") -> None:
        if range_id in _open:
            _open.pop(range_id).__exit__(None, None, None)

    @staticmethod
    def range_push(message: str, stream: Any = None, domain: str = "default") -> int:
        """Open a range inside those of its domain and return their number before it."""
        pushed = _pushed.setdefault(domain, [])
        pushed.append(mstx.range_start(message, stream, domain))
        return len(pushed) - 1

    @staticmethod
    def range_pop(domain: str = "default") -> int:
        """Close the innermost range of a domain and return the number of those around it; -1: none was open."""
        pushed = _pushed.get(domain)
        if not pushed:
            return -1
        mstx.range_end(pushed.pop())
        return len(pushed)

    @staticmethod
    def mstx_range(message: str, stream: Any = None, domain: str = "default") -> Callable[[Any], Any]:
        return annotate(message, stream, domain)

    annotate: type


class annotate:
    """Context manager and decorator: a range."""

    def __init__(self, message: str = "", stream: Any = None, domain: str = "default") -> None:
        self.message, self.stream, self.domain = message, stream, domain

    def __enter__(self) -> annotate:
        self.range_id = mstx.range_start(self.message, self.stream, self.domain)
        return self

    def __exit__(self, *_: Any) -> None:
        mstx.range_end(self.range_id, self.domain)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        message = self.message or function.__name__

        @functools.wraps(function)
        def inside(*args: Any, **options: Any) -> Any:
            with annotate(message, self.stream, self.domain):
                return function(*args, **options)

        return inside


mstx.annotate = annotate
