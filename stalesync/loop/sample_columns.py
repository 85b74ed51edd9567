"""Hold the samples of a step as columns. Pure.

A step visits its samples some twenty times: to claim them, for their advantages, to split them over replicas, for its
metrics. Each visit of the objects would cost several cache misses a sample, so they are read once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import compress
from operator import add, sub

from fusion.model.prefixes import links
from fusion.training import split_over_ranks
from stalesync.scoring.samples import Sample, by_id


@dataclass(frozen=True, eq=False)
class SampleColumns:
    """Scored samples as columns with one value of each; not changed after they were created."""

    samples: Sequence[Sample]
    ids: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    response_tokens: list[int] = field(default_factory=list)
    sampled_tokens: list[int] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "SampleColumns":
        columns = cls(samples)
        for sample in samples:  # one pass, as the next would find each sample out of the cache again
            columns.ids.append(sample.id)
            columns.groups.append(sample.prompt.id)
            columns.prompt_tokens.append(sample.prompt_tokens)
            columns.response_tokens.append(sample.response_tokens)
            columns.sampled_tokens.append(sample.sampled_tokens)
            columns.oldest.append(sample.oldest)
            columns.newest.append(sample.newest)
            columns.cut.append(sample.cut)
            columns.rewards.append(sample.outcome.reward)
            columns.errors.append(sample.outcome.error)
        return columns

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def tokens(self) -> list[int]:
        if len(self.rows) > len(self):
            return [sample.tokens for sample in self.samples]
        return list(map(add, self.prompt_tokens, self.response_tokens))

    @cached_property
    def num_rows(self) -> list[int]:
        """Number of rows of each sample in the queue: of branches of a conversation."""
        return [len(sample.row_tokens) or 1 for sample in self.samples]

    @cached_property
    def rows(self) -> list[str]:
        if sum(self.num_rows) == len(self):
            return self.ids
        return [row for sample in self.samples for row in sample.rows]

    @cached_property
    def row_tokens(self) -> list[int]:
        """Tokens of the prompt and the response in each of `rows`."""
        if self.rows is self.ids:
            return self.tokens
        return [tokens for sample in self.samples for tokens in sample.row_tokens or (sample.tokens,)]

    @cached_property
    def row_prefixes(self) -> list[int]:
        """Tokens of each of `rows` that the one before has too: the prompt of a group, where both begin with it."""
        prefixes, before = list[int](), ""
        for sample, group, prompt_tokens in zip(self.samples, self.groups, self.prompt_tokens, strict=True):
            for tokens in sample.row_tokens or (sample.tokens,):
                prefixes.append(min(prompt_tokens, tokens) if group == before else 0)
                before = group
        return prefixes

    @cached_property
    def observed_tokens(self) -> list[int]:
        """Tokens of each response that an environment has said."""
        return list(map(sub, self.response_tokens, self.sampled_tokens))

    @property
    def without_errors(self) -> "SampleColumns":
        """The samples whose reward did not fail; itself if none did. Not cached: it would refer to itself, and its
        samples would live until garbage is collected."""
        return self if self.errors.count(None) == len(self) else self.where([error is None for error in self.errors])

    def merged(self, others: "SampleColumns") -> "SampleColumns":
        """Return these samples and ``others``, in order of ids."""
        return SampleColumns.of(sorted([*self.samples, *others.samples], key=by_id)) if len(others) else self

    def split(self, num_replicas: int, share_prefixes: str) -> list[list[str]]:
        """Split the ids of the rows over data-parallel replicas, balanced by the rows that they compute: those that
        share a prefix (``share_prefixes``: as the key) go to one replica where that is no slower."""
        rows, lengths = self.rows, self.row_tokens
        shared = links(lengths, self.row_prefixes, share_prefixes) if num_replicas > 1 else None
        return [[rows[index] for index in share] for share in split_over_ranks(lengths, num_replicas, shared)]

    def where(self, kept: Sequence[bool]) -> "SampleColumns":
        """Return the samples for which ``kept`` is true; itself if it is for all."""
        if all(kept):
            return self
        columns = (getattr(self, one.name) for one in fields(self))
        return SampleColumns(*[list(compress(column, kept)) for column in columns])
