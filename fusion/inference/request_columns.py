"""Encode requests as columns of plain data, to send them: what several requests share is sent once.

    requests ─ to_columns ─► {"id": [one of each], "prompt": [[distinct ones], [index of each]], …} ─ from_columns ─►

Invariant (property-tested): the requests that are decoded, also if they were sent as JSON, equal those that were
encoded; where these shared a prompt, response, group or parameters (one object), those do, too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from fusion.inference.request import Request, SamplingParams

SHARED = ("prompt", "response", "params", "group", "last_rewards")
"""Fields that siblings of a group share"""

FIELDS = tuple(field.name for field in fields(Request))
OWN = tuple(name for name in FIELDS if name not in SHARED)


class Requests(Sequence[Request]):
    """Requests that are held and pickled as columns, as `to_columns` returns them. A request is created only where they
    are read: unpickled, they are a list of requests."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns

    def __getitem__(self, index: Any) -> Any:
        return from_columns(self._columns)[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(from_columns(self._columns))

    def __len__(self) -> int:
        return len(self._columns["id"])

    def __reduce__(self) -> tuple[Any, ...]:
        return from_columns, (self._columns,)


def to_columns(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the requests by field: lists of plain data, which JSON can encode."""
    columns: dict[str, Any] = {name: [getattr(request, name) for request in requests] for name in OWN}
    for name in SHARED:
        columns[name] = _distinct([getattr(request, name) for request in requests])
    params, indices = columns["params"]
    return columns | {"params": ([asdict(param) for param in params], indices)}


def from_columns(columns: Mapping[str, Any]) -> list[Request]:
    """Return the requests that `to_columns` has encoded."""
    decode: dict[str, Callable[[Any], Any]] = {
        "prompt": tuple,
        "response": tuple,
        "params": _params,
        "group": str,
        "last_rewards": _last_rewards,
    }
    values = {name: columns[name] for name in OWN}
    for name in SHARED:
        distinct, indices = columns[name]
        decoded = [decode[name](value) for value in distinct]
        values[name] = [decoded[index] for index in indices]
    return [Request(*row) for row in zip(*(values[name] for name in FIELDS), strict=True)]


def _distinct(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct objects, and the index of each value among them."""
    index_by_object: dict[int, int] = {}
    indices = [index_by_object.setdefault(id(value), len(index_by_object)) for value in values]
    return list({id(value): value for value in values}.values()), indices


def _last_rewards(values: Sequence[Any]) -> tuple[str, tuple[float | None, ...]]:
    group, rewards = values
    return group, tuple(rewards)


def _params(values: Mapping[str, Any]) -> SamplingParams:
    stops = values["stop_token_ids"]
    return SamplingParams(**{**values, "stop_token_ids": None if stops is None else tuple(stops)})
