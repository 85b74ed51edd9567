"""Hold the samples of a step as columns. Pure.

A step visits its samples some twenty times: to claim them, for their advantages, to split them over replicas, for its
metrics. Each visit of the objects would cost several cache misses a sample, so they are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import compress
from operator import add, attrgetter

from stalesync.samples import Sample

_read = attrgetter(
    "id",
    "prompt.id",
    "prompt_tokens",
    "response_tokens",
    "oldest",
    "newest",
    "outcome.reward",
    "outcome.error",
)
"""The columns of a sample, in the order of the fields of `SampleColumns`"""


@dataclass(frozen=True, eq=False)
class SampleColumns:
    """Scored samples as columns with one value of each; not changed after they were created."""

    samples: Sequence[Sample]
    ids: Sequence[str]
    groups: Sequence[str]
    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    oldest: Sequence[int]
    newest: Sequence[int]
    rewards: Sequence[float | None]
    errors: Sequence[str | None]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleColumns:
        """Reads the columns of samples, in their order."""
        if not samples:
            return cls(*[()] * len(fields(cls)))
        return cls(samples, *zip(*map(_read, samples), strict=True))

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of the prompt and the response of each sample."""
        return list(map(add, self.prompt_tokens, self.response_tokens))

    @cached_property
    def without_errors(self) -> SampleColumns:
        """The samples whose reward did not fail."""
        return self.where([error is None for error in self.errors])

    def where(self, kept: Sequence[bool]) -> SampleColumns:
        """Returns the samples for which ``kept`` is true; itself if it is for all."""
        if all(kept):
            return self
        columns = (getattr(self, field.name) for field in fields(self))
        return SampleColumns(*[tuple(compress(column, kept)) for column in columns])
