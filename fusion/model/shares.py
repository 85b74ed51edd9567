"""Make local tensors of a rank from its shares of global ones: rows stacked, columns, or a whole tensor. Pure."""

from collections.abc import Iterable, Iterator

from fusion.model.local_param import LocalParam, Part

Span = tuple[int, int]
"""(start, stop) of rows or columns."""
Rows = tuple[str, Span]
"""A global tensor, and a range of its rows."""


def whole(name: str, hf_name: str, shape: tuple[int, ...]) -> LocalParam:
    """Return a local tensor that is a whole global one."""
    box = tuple((0, size) for size in shape)
    return LocalParam(name, shape, (Part(hf_name, box, box),))


def stacked(
    name: str, pieces: Iterable[Rows], width: int | None = None, *, expert: bool = False, tp_sharded: bool | None = None
) -> LocalParam:
    """Stack rows of matrices of ``width`` columns, or ranges of vectors (None). ``tp_sharded``: as of `LocalParam`;
    None: if it is of no expert."""
    parts, end, inner = [], 0, () if width is None else ((0, width),)
    for hf_name, (start, stop) in pieces:
        begin, end = end, end + stop - start
        parts.append(Part(hf_name, ((start, stop), *inner), ((begin, end), *inner)))
    shape = (end,) if width is None else (end, width)
    sharded = not expert if tp_sharded is None else tp_sharded
    return LocalParam(name, shape, tuple(parts), expert=expert, tp_sharded=sharded)


def columns(name: str, hf_name: str, height: int, share: Span, *, expert: bool = False) -> LocalParam:
    """Return columns of a matrix of ``height`` rows."""
    width = share[1] - share[0]
    part = Part(hf_name, ((0, height), share), ((0, height), (0, width)))
    return LocalParam(name, (height, width), (part,), expert=expert, tp_sharded=not expert)


def cut(size: int, index: int, count: int) -> Span:
    """Return the ``index``-th of ``count`` equal shares."""
    share = size // count
    return index * share, (index + 1) * share


def within(pieces: Iterable[Rows], share: Span) -> Iterator[Rows]:
    """Yield the rows of stacked ``pieces`` that are in a range of the stack."""
    offset, (first, last) = 0, share
    for hf_name, (start, stop) in pieces:
        begin, end = max(offset, first), min(offset + stop - start, last)
        if begin < end:
            yield hf_name, (start + begin - offset, start + end - offset)
        offset += stop - start
