"""Storage by number: pages of consecutive numbers over flat arrays, one array per field.

    number ──► page = number // page_rows ──table──► physical page ──► slot = physical * page_rows + number % page_rows

Numbers (of rows, groups, segments) only grow, and the live ones are a window of them; so a physical page whose numbers
have all ended is reused, and memory follows the number of live ones.

Invariants: a live number keeps its one slot; two live numbers never share one; `in_order` returns slots in the order of
their numbers; arrays are allocated as untouched zeros, so unused parts take no memory."""

import numpy as np
from numpy.typing import DTypeLike

PAGE_ROWS = 4096
NONE = -1
"""No slot: the number is not alive"""


class Field:
    """One value per slot (or per physical page). Growth replaces `values`: index it, do not keep a reference."""

    def __init__(self, size: int, dtype: DTypeLike, trailing: tuple[int, ...] = ()) -> None:
        self.values = np.zeros((size, *trailing), dtype)

    def widen(self, largest: int) -> None:
        """Cast to the smallest unsigned integers that hold `largest`, if the present ones do not."""
        if largest > np.iinfo(self.values.dtype).max:
            self.values = self.values.astype(np.min_scalar_type(largest))

    def grow(self, size: int) -> None:
        grown = np.zeros((size, *self.values.shape[1:]), self.values.dtype)
        grown[: len(self.values)] = self.values
        self.values = grown


class Pages:
    """Live numbers and their slots. `page_rows`: numbers per page, a power of two."""

    def __init__(self, page_rows: int = PAGE_ROWS) -> None:
        assert page_rows > 0 and page_rows & (page_rows - 1) == 0, f"page_rows={page_rows}: expected a power of two"
        self.page_rows = page_rows
        self.count = 0
        """live numbers"""
        self._shift, self._low_bits = page_rows.bit_length() - 1, page_rows - 1
        self._first_page = 0
        self._physical = np.full(1, NONE, np.int64)
        """physical page of page _first_page + i"""
        self._free: list[int] = [0]
        self._pages = 1
        self._fields: list[Field] = []
        self._page_fields: list[Field] = []
        self.live = self.field(np.bool_)
        self._page = self.page_field(np.int64)
        self._live_in_page = self.page_field(np.int32)

    def field(self, dtype: DTypeLike, trailing: tuple[int, ...] = ()) -> Field:
        """Add a field of zeros, one value per slot. A reused slot keeps its old value: initialize it after `add`."""
        self._fields.append(Field(self._pages * self.page_rows, dtype, trailing))
        return self._fields[-1]

    def page_field(self, dtype: DTypeLike) -> Field:
        """Add a field of zeros, one value per physical page."""
        self._page_fields.append(Field(self._pages, dtype))
        return self._page_fields[-1]

    def forget(self, *fields: Field) -> None:
        self._fields = [field for field in self._fields if field not in fields]
        self._page_fields = [field for field in self._page_fields if field not in fields]

    def find(self, numbers: np.ndarray) -> np.ndarray:
        """Slot per number; NONE: not alive."""
        pages = (numbers >> self._shift) - self._first_page
        inside = (pages >= 0) & (pages < len(self._physical))
        physical = self._physical[np.where(inside, pages, 0)]
        slots = physical << self._shift | numbers & self._low_bits
        return np.where(inside & (physical != NONE) & self.live.values[slots], slots, NONE)

    def numbers(self, slots: np.ndarray) -> np.ndarray:
        return self._page.values[slots >> self._shift] << self._shift | slots & self._low_bits

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Add distinct numbers, none of which is alive. Return their slots."""
        if not len(numbers):
            return np.zeros(0, np.int64)
        pages = numbers >> self._shift
        self._reach(int(pages.min()), int(pages.max()))
        for page in set(pages[self._physical[pages - self._first_page] == NONE].tolist()):
            self._physical[page - self._first_page] = self._open(page)
        slots = self._physical[pages - self._first_page] << self._shift | numbers & self._low_bits
        assert not self.live.values[slots].any(), "a number was added twice"
        self.live.values[slots] = True
        self._live_in_page.values += self.per_page(slots)
        self.count += len(slots)
        return slots

    def remove(self, slots: np.ndarray) -> None:
        """End distinct live slots. Their fields can be read until the next `add`."""
        self.live.values[slots] = False
        ended = self.per_page(slots)
        self._live_in_page.values -= ended
        self.count -= len(slots)
        for physical in np.flatnonzero((ended > 0) & (self._live_in_page.values == 0)):
            self._physical[self._page.values[physical] - self._first_page] = NONE
            self._free.append(int(physical))

    def per_page(self, slots: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Count the slots in each physical page, or sum their (integer) weights."""
        return np.bincount(slots >> self._shift, weights, minlength=self._pages).astype(np.int32)

    def in_order(self) -> np.ndarray:
        """The physical pages in use, in the order of their numbers."""
        return self._physical[self._physical != NONE]

    def marked(self, flags: Field, physical: np.ndarray) -> np.ndarray:
        """The slots of these physical pages whose flag is set, page by page."""
        inside = np.flatnonzero(flags.values.reshape(-1, self.page_rows)[physical])
        return physical[inside >> self._shift] << self._shift | inside & self._low_bits

    def live_slots(self) -> np.ndarray:
        """All live slots, in the order of their numbers."""
        return self.marked(self.live, self.in_order())

    def _open(self, page: int) -> int:
        if not self._free:
            self._free.extend(range(2 * self._pages - 1, self._pages - 1, -1))
            self._pages *= 2
            for field in self._fields:
                field.grow(self._pages * self.page_rows)
            for field in self._page_fields:
                field.grow(self._pages)
        physical = self._free.pop()
        self._page.values[physical] = page
        return physical

    def _reach(self, low: int, high: int) -> None:
        """Extend the page table to span these pages; unused entries at its front are dropped when it grows."""
        if self._first_page <= low and high < self._first_page + len(self._physical):
            return
        used = np.flatnonzero(self._physical != NONE)
        if len(used):
            low, high = min(low, self._first_page + int(used[0])), max(high, self._first_page + int(used[-1]))
        physical = np.full(2 * (high - low + 1), NONE, np.int64)
        physical[used + self._first_page - low] = self._physical[used]
        self._first_page, self._physical = low, physical
