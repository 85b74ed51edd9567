"""`torch.npu.mstx`: marks and ranges in a profile, here those of `torch.profiler`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd.profiler import record_function

_F = TypeVar("_F", bound=Callable[..., Any])

_numbers = itertools.count(1)
_open: dict[int, record_function] = {}
_pushed: dict[str, list[int]] = {}


class annotate(record_function):
    """Context manager and decorator: a range, by default named as the decorated function."""

    def __init__(self, message: str = "", stream: Any = None, domain: str = "default") -> None:
        super().__init__(message if domain == "default" else f"{domain}: {message}")
        self.message, self.stream, self.domain = message, stream, domain

    def __call__(self, func: _F) -> _F:
        return record_function.__call__(annotate(self.message or func.__name__, domain=self.domain), func)


class mstx:
    annotate = annotate
    mstx_range = annotate

    @staticmethod
    def mark(message: str, stream: Any = None, domain: str = "default") -> None:
        with annotate(message, stream, domain):
            pass

    @staticmethod
    def range_start(message: str, stream: Any = None, domain: str = "default") -> int:
        number = next(_numbers)
        _open[number] = annotate(message, stream, domain).__enter__()
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
