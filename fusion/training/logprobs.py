"""Compute log-probability and entropy of tokens from hidden states, with the vocabulary split over TP, in one
collective.

    hidden_nD ─► tiles: rows x ids of this rank ─ reduce ─► numbers of each row ─ merge over tiles ─ gather ─ merge ─►
    backward     tiles ─► gradients of hidden states and head, summed in float32 in a fixed order

The backward pass computes the tiles again. Only where all logits are one tile it takes those of the forward pass.

The numbers of a row are those of `logit_tiles.py`. Of all ids log Z = M + log S, and the entropy is log S - U / S. The
vocabulary-parallel cross-entropy is that of Megatron-LM (arXiv 1909.08053, section 3), here with the entropy in the
same pass.

Where truncated sampling has kept only some ids of a row, log-probability, entropy and gradient are those of the
distribution over these ids.

Invariants: the memory beyond hidden states, their gradient and that of the head is that of one tile
(`logprob_bytes`), whatever the micro-batch; a micro-batch that is one tile gives bitwise what whole logits give."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusion.model import Head, Mesh, Transformer, context_rows
from fusion.model.collectives import shard_sizes, share_shards
from fusion.model.shared_rows import Reads
from fusion.model.tiling import TILE_BYTES, tile_shape
from fusion.npu import to_card
from fusion.training.batch import KeptIds, Sequences
from fusion.training.logit_tiles import Cells, Logits, Tiles
from fusion.training.model import TrainedModel


class TokenLogprobs(NamedTuple):
    """Float32 [n] of n tokens; log-probabilities and entropies carry gradients. ``kept_mass``: probability of the kept
    ids under the whole distribution, 1 where all are kept; None: none were given. ``masked_mass``: probability of the
    masked ids, were they not masked; None: not requested, or the model masks none."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    kept_mass: torch.Tensor | None = None
    masked_mass: torch.Tensor | None = None


def vocab_parallel_logprobs(
    hidden_nD: torch.Tensor,
    head: Head,
    targets_n: torch.Tensor,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    kept: KeptIds | None = None,
    with_mass: bool = False,
    tile_bytes: int = TILE_BYTES,
) -> TokenLogprobs:
    """Compute log-probabilities and entropies, float32 [n], of int64 targets [n] from the hidden states [n, D] that
    predict them. Arguments, but for ``head``, and results are the same on all TP ranks.
    ``head``: this TP rank's.
    ``temperature``: of the distribution.
    ``kept``: the ids over which the distribution of each token is, the target among them; on the host. None: the
        vocabulary.
    ``with_mass``: whether to compute the mass of the ids that the head masks.
    ``tile_bytes``: as `TILE_BYTES`."""
    row_chunk, num_ids = tile_shape(len(hidden_nD), head.num_ids, tile_bytes)
    device = hidden_nD.device
    tiles = Tiles(
        head,
        row_chunk=row_chunk,
        id_ranges=[range(start, min(start + num_ids, head.num_ids)) for start in range(0, head.num_ids, num_ids)],
        first_id=mesh.tp_rank * head.num_ids,
        temperature=temperature,
        cells=None if kept is None else [Cells.of(chunk, device) for chunk in kept.split(row_chunk)],
        with_mass=with_mass and head.mask is not None,
    )
    is_one_tile = row_chunk >= len(hidden_nD) and num_ids >= head.num_ids
    kept_logits: list[Logits] | None = [] if is_one_tile and torch.is_grad_enabled() else None
    return TokenLogprobs(*_Logprobs.apply(tiles, mesh, kept_logits, targets_n, hidden_nD, *head.blocks))


def trained_logprobs(
    model: Transformer | TrainedModel,
    batch: Sequences,
    hidden_ND: torch.Tensor,
    *,
    temperature: float,
    with_mass: bool = False,
) -> TokenLogprobs:
    """Compute those of the trained tokens of a micro-batch, in the order of `Sequences.trained_rows`, from its hidden
    states; ``with_mass`` the mass of masked ids, too. On the last stage. Collective over context parallel, whose ranks
    compute those that their rows predict, from the hidden states of these, and have all of them in the end."""
    rows, device, mesh = batch.trained_rows, hidden_ND.device, model.mesh
    predicted_by = batch.computed_at(rows - 1)
    ends = torch.tensor(shard_sizes(batch.num_computed, mesh.parallel.cp)).cumsum(0)
    rank_n = torch.searchsorted(ends, predicted_by, right=True)
    own = rank_n == mesh.cp_rank
    read = predicted_by[own] - context_rows(batch.num_computed, mesh).start
    values = vocab_parallel_logprobs(
        hidden_ND.index_select(0, to_card(read, device)) if batch.shared is None else Reads(read, device)(hidden_ND),
        model.head,
        to_card(batch.tokens[rows[own]], device),
        mesh,
        temperature=temperature,
        kept=batch.kept_at(rows[own]),
        with_mass=with_mass,
    )
    if mesh.cp_group is None or not len(rows):
        return values
    sizes = rank_n.bincount(minlength=mesh.parallel.cp).tolist()
    own_values = {name: one for name, one in values._asdict().items() if one is not None}
    by_rank = {name: share_shards(one, sizes, mesh.cp_group) for name, one in own_values.items()}
    if batch.shared is None:
        return TokenLogprobs(**by_rank)
    places = to_card(rank_n.argsort(stable=True).argsort(), device)  # a shared row predicts tokens of several sequences
    return TokenLogprobs(**{name: one.index_select(0, places) for name, one in by_rank.items()})


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        mesh: Mesh,
        kept_logits: list[Logits] | None,
        targets: torch.Tensor,
        hidden: torch.Tensor,
        *blocks: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        chunks = tiles.rows(hidden=hidden, targets=targets)
        stats = [torch.cat([tiles.reduce(rows, ids, kept_logits) for rows in chunks], 1) for ids in tiles.id_ranges]
        target, *sums = _merged(_gather(_merged(torch.stack(stats)), mesh))
        log_z, entropy = _of_sums(*sums[:3])
        mass = masked_mass = None
        if tiles.with_mass:
            masked_mass = (sums[-1] - log_z).sigmoid()
            ctx.mark_non_differentiable(masked_mass)
        if tiles.cells is not None:
            whole, (kept_log_z, kept_entropy) = torch.cat([chunk.whole for chunk in tiles.cells]), _of_sums(*sums[3:6])
            mass = (kept_log_z - log_z).exp().where(~whole, 1.0)
            log_z, entropy = log_z.where(whole, kept_log_z), entropy.where(whole, kept_entropy)
            ctx.mark_non_differentiable(mass)
        ctx.tiles, ctx.kept_logits = tiles, kept_logits
        ctx.save_for_backward(hidden, targets, log_z, entropy)
        ctx.set_materialize_grads(False)
        return target - log_z, entropy, mass, masked_mass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None):
        tiles, head = ctx.tiles, ctx.tiles.head
        hidden, targets, log_z, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy, *_ = grads
        chunks = tiles.rows(
            hidden=hidden,
            targets=targets,
            log_z=log_z,
            entropy=entropy,
            grad_logprob=grad_logprob,
            grad_entropy=grad_entropy,
        )
        of_hidden: dict[int, torch.Tensor] = {}
        of_blocks: dict[int, torch.Tensor] = {}
        for ids in tiles.id_ranges:
            of_weights: dict[int, torch.Tensor] = {}
            for index, rows in enumerate(chunks):
                kept = ctx.kept_logits.pop() if ctx.kept_logits else None
                of_tile, *of_tile_weights = tiles.gradients(rows, ids, kept)
                _add(of_hidden, index, of_tile)
                for place, gradient in enumerate(of_tile_weights):
                    _add(of_weights, place, gradient)
            for place, (block, part) in enumerate(head.places_of(ids) if of_weights else ()):
                _place(of_blocks, head.blocks, block, part=part, gradient=of_weights[place])
        of_rows = of_hidden[0] if len(chunks) == 1 else torch.cat(list(of_hidden.values()))
        return *[None] * 4, of_rows.to(hidden.dtype), *(of_blocks.get(index) for index in range(len(head.blocks)))


def _add(totals: dict[int, torch.Tensor], key: int, more: torch.Tensor) -> None:
    """Add a gradient to the total of its key, if there is one, in float32."""
    totals[key] = totals[key].to(torch.float32).add_(more) if key in totals else more


def _place(
    gradients: dict[int, torch.Tensor], blocks: list[torch.Tensor], index: int, *, part: slice, gradient: torch.Tensor
) -> None:
    """Store the gradient of some rows of a block in that of the block."""
    if len(gradient) == len(blocks[index]):
        gradients[index] = gradient.to(blocks[index].dtype)
        return
    if index not in gradients:
        gradients[index] = torch.empty_like(blocks[index])
    gradients[index][part] = gradient


def _gather(stats_kn: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Gather the numbers of all TP ranks' ids: [ranks, k, n]."""
    if mesh.tp_group is None or stats_kn.shape[1] == 0:
        return stats_kn.unsqueeze(0)
    wire = stats_kn.new_empty(mesh.parallel.tp * len(stats_kn), stats_kn.shape[1])
    dist.all_gather_into_tensor(wire, stats_kn, group=mesh.tp_group)
    return wire.view(-1, *stats_kn.shape)


def _merged(stats_Pkn: torch.Tensor) -> torch.Tensor:
    """Merge the numbers (`Tiles.reduce`) of P parts of the ids: [k, n]."""
    if len(stats_Pkn) == 1:
        return stats_Pkn[0]
    num_sums, num_masked = divmod(stats_Pkn.shape[1] - 1, 3)
    target, *sums = stats_Pkn.split([1, *[3] * num_sums, *[1] * num_masked], dim=1)
    merged = [target.sum(0), *map(_merged_sums, sums[:num_sums])]
    return torch.cat([*merged, *(masked.logsumexp(0) for masked in sums[num_sums:])])


def _merged_sums(sums_P3n: torch.Tensor) -> torch.Tensor:
    """Merge (m, s, u) of P parts of the ids: [3, n]."""
    peaks, totals, moments = sums_P3n.unbind(1)
    peak = peaks.amax(0)
    scale = (peaks - peak).exp()
    moment = (scale * (moments + totals * (peaks - peak))).sum(0)
    return torch.stack([peak, (scale * totals).sum(0), moment])


def _of_sums(peak: torch.Tensor, total: torch.Tensor, moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log Z and the entropy of the ids that have been summed."""
    log_total = total.log()
    return peak + log_total, log_total - moment / total
