"""Pack sequences, and divide them over micro-batches.

    samples ─ `division` ─► one data-parallel rank ─ plan_micro_batches ─► micro-batches of ≤ token_budget tokens
    | prompt 0 | response 0 | prompt 1 | response 1 | …      tokens_N; every other column is aligned with the token it
    | 0 0 0 0 0 1 1 1 1 1 1 | 0 0 0 0 0 0 | 1 1 1 1 | …      belongs to, so a sample's columns stay aligned

Invariants of `plan_micro_batches`: every sequence is in exactly one micro-batch; a micro-batch computes at most the
budget, or a single sequence that exceeds it; no two micro-batches would fit into one; lengths ascend inside a
micro-batch (equal lengths share one attention call); the number of micro-batches is at most 3/2 of the minimum
(best-fit decreasing; Simchi-Levi 1994). Where sequences share rows, this holds of their runs (`prefixes`): each has the
length that it takes of the budget, and stays whole and in order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from fusion.model.prefixes import runs
from fusion.model.shared_rows import SharedRows
from fusion.training.segments import owners

UNREAD = -1
"""Placeholder for a token that this rank does not read."""

NOT_COLUMNS = ("lengths", "version", "updated", "kept_ids", "shared")


class KeptIds(NamedTuple):
    """Ids over which the distribution of each of n tokens is renormalised: ``counts`` int64 [n], 0 where it is not;
    ``ids`` int64, those of one token behind those of the other."""

    counts: torch.Tensor
    ids: torch.Tensor

    def split(self, size: int) -> list[KeptIds]:
        """Split into those of ``size`` tokens each, or fewer for the last."""
        counts = self.counts.split(size)
        return list(map(KeptIds, counts, self.ids.split([int(chunk.sum()) for chunk in counts])))


@dataclass(frozen=True)
class Sequences:
    """B packed sequences with N tokens in total. A column that neither algorithm nor pipeline stage uses may be None.
    ``held_tokens``: int64 [N], or None; see `tokens`.
    ``lengths``: tokens of each sequence, prompt and response, B of them.
    ``loss_mask``: bool [N]; True on the trained tokens. A token's log-probability is computed at the token before it,
        so the first token of a sequence cannot be trained.
    ``advantages``: float32 [N].
    ``behaviour_logprobs``: float32 [N], of the policy that sampled the tokens.
    ``ref_logprobs``: float32 [N], of the reference model.
    ``proximal_logprobs``: float32 [N], of the policy at the start of the training step.
    ``versions``: int32 [N], the policy version that sampled each token.
    ``routing``: integer [N, L, k]: the experts that each token is sent to, in the L layers of this rank's stage; the
        values at the last token of a sequence are not used (`replay`). None: the router chooses.
    ``kept_counts``: int32 [N], number of ids that truncated sampling kept for each token; 0: it was sampled from the
        whole vocabulary. None: all were.
    ``kept_ids``: int32, these ids, token by token: the only column that is not aligned with the tokens.
    ``shared``: where rows are computed, in a micro-batch whose sequences share some; None: each by itself.
    ``token_weight``: float32 [N]; factor of a token's loss. None: 1.
    ``shares``: float32 [N]; the share that a sequence has in its conversation, of which it is one of several branches.
        None: 1.
    ``normaliser``: float32 [N]; the sum of losses is divided by its sum over the trained tokens. None: token_weight,
        which gives the weighted mean.
    ``version``: the policy version being trained.
    ``updated``: the weights have been updated since the start of the training step: these sequences are not of its
        first minibatch."""

    held_tokens: torch.Tensor | None
    lengths: list[int]
    loss_mask: torch.Tensor
    advantages: torch.Tensor | None = None
    behaviour_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    proximal_logprobs: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    normaliser: torch.Tensor | None = None
    version: int | None = None
    updated: bool = False
    routing: torch.Tensor | None = None
    kept_counts: torch.Tensor | None = None
    kept_ids: torch.Tensor | None = None
    shared: SharedRows | None = None

    def __post_init__(self) -> None:
        rows = sum(self.lengths)
        for name, column in self._columns().items():
            if column.shape != (rows,) and not (name == "routing" and len(column) == rows):
                raise ValueError(f"{name} has shape {list(column.shape)}; expected [{rows}], the sum of the lengths")
        if self.kept_counts is not None and self.kept_ids is not None:
            counted = int(self.kept_counts.sum())
            if len(self.kept_ids) != counted or int(self.kept_counts.min() if rows else 0) < 0:
                raise ValueError(f"kept_ids has {len(self.kept_ids)} ids; expected {counted}, the sum of kept_counts")
        if rows and self.loss_mask[self._starts()].any():
            raise ValueError("loss_mask is set on the first token of a sequence, which has no log-probability")

    @classmethod
    def from_packed(
        cls,
        prompt_lengths: Sequence[int] | torch.Tensor,
        response_lengths: Sequence[int] | torch.Tensor,
        *,
        prompts: torch.Tensor | None = None,
        responses: torch.Tensor | None = None,
        advantages: torch.Tensor | None = None,
        behaviour_logprobs: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
        versions: torch.Tensor | None = None,
        sampled: torch.Tensor | None = None,
        shares: torch.Tensor | None = None,
        routing: torch.Tensor | None = None,
        kept_counts: torch.Tensor | None = None,
        kept_ids: torch.Tensor | None = None,
    ) -> Sequences:
        """Pack B samples whose columns are already packed, each column separately. Columns that this rank does not
        hold are None.
        ``prompts``, ``responses``: their tokens, sample by sample. Without prompts (which the last stage of a pipeline
            does not read) their places hold `UNREAD`; without both there are no tokens.
        ``advantages``, ``shares``: one per sample, repeated for its tokens.
        ``behaviour_logprobs``, ``ref_logprobs``, ``versions``, ``kept_counts``: one number per response token.
        ``sampled``: bool, one per response token: whether it is trained. None: all are.
        ``kept_ids``: as many of each response token as its kept_counts.
        ``routing``: [tokens, L, k], of every token except the last of each sample.
        Raise ValueError: prompts and responses differ in number."""
        if len(prompt_lengths) != len(response_lengths):
            raise ValueError(
                f"{len(prompt_lengths)} prompt_lengths and {len(response_lengths)} response_lengths; "
                "expected one of each per sample"
            )
        both = [torch.as_tensor(lengths, dtype=torch.int64) for lengths in (prompt_lengths, response_lengths)]
        lengths, of_response = both[0] + both[1], response_rows(*both)

        def aligned(values: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            return None if values is None else _fill(torch.zeros(len(of_response), dtype=dtype), of_response, values)

        tokens = None
        if responses is not None:
            tokens = _fill(torch.full((len(of_response),), UNREAD), of_response, responses)
            tokens = tokens if prompts is None else _fill(tokens, ~of_response, prompts)
        packed = cls(
            tokens,
            lengths=lengths.tolist(),
            loss_mask=of_response if sampled is None else _fill(of_response.clone(), of_response, sampled),
            advantages=None if advantages is None else advantages.float().repeat_interleave(lengths),
            shares=None if shares is None else shares.float().repeat_interleave(lengths),
            behaviour_logprobs=aligned(behaviour_logprobs),
            ref_logprobs=aligned(ref_logprobs),
            versions=aligned(versions, torch.int32),
            kept_counts=aligned(kept_counts, torch.int32),
            kept_ids=None if kept_ids is None else kept_ids.to(torch.int32),
        )
        return packed if routing is None else packed.with_routing(routing)

    def with_routing(self, routing: torch.Tensor) -> Sequences:
        """Return the sequences with ``routing`` [tokens, L, k] of every token except the last of each sequence."""
        routing_NLk = routing.new_zeros(self.rows, *routing.shape[1:])
        return replace(self, routing=_fill(routing_NLk, self.before_last_N, routing))

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids, int64 [N]; on the first stage all of them, on the last the responses', on others none."""
        assert self.held_tokens is not None, "this stage of the pipeline holds no tokens"
        return self.held_tokens

    @property
    def rows(self) -> int:
        """Number of tokens, N."""
        return len(self.loss_mask)

    @property
    def num_computed(self) -> int:
        """Number of rows that a forward pass computes: N, less those that sequences share."""
        return self.rows if self.shared is None else self.shared.count

    def sharing(self, shared: Sequence[int]) -> Sequences:
        """Return the sequences, of which each shares its first ``shared`` rows with the one before it."""
        return replace(self, shared=SharedRows(self.lengths, shared)) if any(shared) else self

    def computed(self, column_N: torch.Tensor) -> torch.Tensor:
        """Return the values of a column at the rows that a forward pass computes."""
        return column_N if self.shared is None else column_N[self.shared.own_N]

    def computed_at(self, rows: torch.Tensor) -> torch.Tensor:
        """Return where ``rows`` are among the rows that a forward pass computes: int64."""
        return rows if self.shared is None else self.shared.row_N[rows]

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, int64 [N]."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return torch.arange(sum(self.lengths)) - self._starts(keep_empty=True).repeat_interleave(lengths)

    def loss_totals(self) -> tuple[float, float]:
        """Return these sequences' share of the sum of all tokens' weights, and of the divisor of the losses."""
        mask = self.loss_mask.to(torch.float64)
        weight = mask if self.token_weight is None else mask * self.token_weight
        normaliser = weight if self.normaliser is None else mask * self.normaliser
        return float(weight.sum()), float(normaliser.sum())

    @property
    def trained_rows(self) -> torch.Tensor:
        """Rows of the n trained tokens, int64 [n]."""
        return self.loss_mask.nonzero().squeeze(1)

    def last_rows(self) -> torch.Tensor:
        """Return the row of the last token of every sequence that is not empty: int64."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return lengths.cumsum(0)[lengths > 0] - 1

    @property
    def before_last_N(self) -> torch.Tensor:
        """Whether a token is followed by another one of its sequence: bool [N]."""
        before_last_N = torch.ones(self.rows, dtype=torch.bool)
        before_last_N[self.last_rows()] = False
        return before_last_N

    def rows_of(self, indices: Sequence[int]) -> torch.Tensor:
        """Return the rows of the tokens of some sequences, sequence by sequence: int64."""
        return _places(torch.tensor(self.lengths, dtype=torch.int64), torch.tensor(indices, dtype=torch.int64))

    def kept_at(self, rows: torch.Tensor) -> KeptIds | None:
        """Return the kept ids of the tokens at ``rows``; None: all were sampled from the whole vocabulary."""
        if self.kept_counts is None or self.kept_ids is None:
            return None
        places = _places(self.kept_counts.to(torch.int64), rows)
        return KeptIds(self.kept_counts[rows].to(torch.int64), self.kept_ids[places].to(torch.int64))

    def select(self, indices: Sequence[int], rows: torch.Tensor | None = None) -> Sequences:
        """Return the sequences at ``indices``, in that order; [] gives an empty batch with the same columns. ``rows``:
        `rows_of` the indices, if the caller has computed them."""
        return self._at(self.rows_of(indices) if rows is None else rows, [self.lengths[i] for i in indices])

    def until_trained(self) -> Sequences:
        """Return the sequences without what follows their last trained token, on which no loss depends."""
        lengths, positions_N = torch.tensor(self.lengths, dtype=torch.int64), self.positions
        owner_N = owners(lengths)
        ends_B = torch.zeros_like(lengths).scatter_reduce(0, owner_N, (positions_N + 1) * self.loss_mask, "amax")
        return self._at((positions_N < ends_B[owner_N]).nonzero().squeeze(1), ends_B.tolist())

    def _at(self, rows: torch.Tensor, lengths: list[int]) -> Sequences:
        columns: dict[str, Any] = {name: column[rows] for name, column in self._columns().items()}
        if self.kept_counts is not None and self.kept_ids is not None:
            columns["kept_ids"] = self.kept_ids[_places(self.kept_counts.to(torch.int64), rows)]
        return replace(self, lengths=lengths, shared=None, **columns)

    def _columns(self) -> dict[str, torch.Tensor]:
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in NOT_COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}

    def _starts(self, keep_empty: bool = False) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = lengths.cumsum(0) - lengths
        return starts if keep_empty else starts[lengths > 0]


def response_rows(prompt_lengths: torch.Tensor, response_lengths: torch.Tensor) -> torch.Tensor:
    """Return whether each row of packed samples with these lengths (int64 [B]) is of a response: bool [N]."""
    sizes = torch.stack([prompt_lengths, response_lengths], dim=1)
    return torch.tensor([False, True]).repeat(len(sizes)).repeat_interleave(sizes.flatten())


def plan_micro_batches(
    lengths: Sequence[int], token_budget: int, shared: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the indices of the sequences of each micro-batch (invariants above). Best-fit decreasing, n log n.
    ``shared``: as of `prefixes.links`; None: nothing."""
    together = runs(lengths, shared or [0] * len(lengths), token_budget)
    sizes = [size for _, size in together]
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending: the first with enough room is the best fit
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(free, (sizes[index], 0))
        room, target = free.pop(place) if place < len(free) else (token_budget, len(bins))
        if target == len(bins):
            bins.append([])
        bins[target].append(index)
        if room - sizes[index] >= 0:
            insort(free, (room - sizes[index], target))
    in_order = [sorted(run, key=lambda i: (sizes[i], i)) for run in bins]
    return [[index for run in order for index in together[run][0]] for order in in_order]


def _places(lengths: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return where the elements of the ``chosen`` lists lie, of lists with these ``lengths`` one behind the other:
    int64."""
    starts, lengths = (lengths.cumsum(0) - lengths)[chosen], lengths[chosen]
    new_starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - new_starts).repeat_interleave(lengths)


def _fill(column_N: torch.Tensor, where_N: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    assert len(values) == int(where_N.sum()), f"{len(values)} values for {int(where_N.sum())} tokens"
    column_N[where_N] = values.to(column_N.dtype)
    return column_N
