"""Sample as the embedded engine does, and verify its drafts, in place of vLLM's sampler and proposer.

    running sequences ─ `Drafter` ─► drafts that fit ─► vLLM's scheduler ─► one pass over sequence and draft
        ─► keyed sampler: the draft's tokens as far as they are those that are sampled, and one more

A token's noise is keyed by (run seed, request, position), so the tokens are those that the embedded engine samples
from the same logits; log-probabilities are those of the distribution that was sampled from, whose kept ids are recorded
with the tokens. vLLM for Ascend does none of it. vLLM is started without speculative decoding, which would fix the
number of drafted tokens at its start: it schedules, computes and takes back any tokens that its scheduler is given.

Invariant: with drafts, single paths, a step computes at most ``max_tokens`` tokens; no draft preempts a sequence."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import nn

from fusion.inference.backends.vllm_core import VllmCore
from fusion.inference.sampler import noise_of, sample
from fusion.inference.sequence import Sequence
from fusion.inference.verification import Drafter, Verification, max_depths


class KeyedSampler(nn.Module):
    """Stand in for `sampler` and `rejection_sampler` of the model runner. Created only where vLLM is installed.
    ``verified``: drafts of the step, by request id; set before it. ``sampled``: logprob and kept ids (`Sampled`) of
    each token of the last call, by request id; requests without a token are left out."""

    def __init__(self, runner: Any, sequences: Mapping[str, Sequence], seed: int):
        super().__init__()
        self._runner, self._sequences, self._seed = runner, sequences, seed
        self.verified: Mapping[str, Verification] = {}
        self.sampled: dict[str, list[tuple[float, bytes]]] = {}
        runner.sampler = self
        runner.rejection_sampler = lambda metadata, draft_probs, logits, sampling_metadata: self(logits)

    def forward(self, logits: torch.Tensor, sampling_metadata: Any = None, **_: Any) -> Any:
        """Return vLLM's `SamplerOutput` with the tokens of every request. ``logits``: a row of each request and one
        more of each token of its draft. A request whose prompt is not complete yet gets a 0, which the runner
        discards; -1: no token."""
        from vllm.v1.outputs import SamplerOutput

        batch, row = self._runner.input_batch, 0
        names = batch.req_ids[: batch.num_reqs]
        single, drafted = list[tuple[int, Sequence]](), list[tuple[int, Verification]]()
        for name in names:
            seq, one = self._sequences[name], self.verified.get(name)
            if one is not None:
                drafted.append((row, one))
            elif seq.computed == len(seq.tokens):
                single.append((row, seq))
            row += 1 if one is None else len(one)
        sampled = self._sample(logits, single, drafted) if single or drafted else {}
        self.sampled = {name: [result[1:] for result in results] for name, results in sampled.items()}
        tokens = [[token for token, _, _ in sampled[name]] if name in sampled else [0] for name in names]
        width = max(map(len, tokens), default=1)
        padded = torch.tensor([token + [-1] * (width - len(token)) for token in tokens], dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=padded.to(logits.device), logprobs_tensors=None)

    def _sample(
        self, logits: torch.Tensor, single: list[tuple[int, Sequence]], drafted: list[tuple[int, Verification]]
    ) -> dict[str, list[tuple[int, float, bytes]]]:
        """Return token, logprob and kept ids of requests, by request id; each is given with its first row."""
        sequences, verified = [seq for _, seq in single], [one for _, one in drafted]
        rows = [row for row, _ in single] + [row + i for row, one in drafted for i in range(len(one))]
        params = [seq.params for seq in sequences] + [draft.seq.params for draft in verified for _ in draft.tokens]
        chosen = logits if rows == list(range(len(logits))) else logits[torch.tensor(rows, device=logits.device)]
        drawn = sample(chosen, params, noise_of(sequences, verified, self._seed))
        results = list(zip(drawn.tokens, drawn.logprobs, drawn.kept or [b""] * len(rows), strict=True))
        sampled = {seq.request.id: [result] for seq, result in zip(sequences, results, strict=False)}
        end = len(single)
        for one in verified:
            of_rows, end = results[end : end + len(one)], end + len(one)
            kept = one.follow([token for token, _, _ in of_rows])
            sampled[one.seq.request.id], one.seq.noise = [of_rows[row] for row in kept], []
        return sampled


def propose(core: VllmCore, drafter: Drafter, running: Items[Sequence], max_tokens: int) -> dict[str, Verification]:
    """Give vLLM's scheduler drafts of the sequences that decode in the next step; return them by request id."""
    from vllm.v1.outputs import DraftTokenIds

    decodes = [seq for seq in running if seq.computed + 1 == len(seq.tokens)]
    if not decodes:
        return {}
    room = max(0, max_tokens - sum(len(seq.tokens) - seq.computed for seq in running))
    blocks = core.free_blocks - len(running)  # a sequence may need one for the token that it computes anyway
    proposed: dict[str, Verification] = {}
    for seq, draft in zip(decodes, drafter.draft(decodes, max_depths(decodes), room), strict=True):
        if draft is None or not draft.tokens or len(draft.tokens) > room:
            continue
        one = Verification.of(seq, draft, core.block_size)
        assert len(one.paths) == 1, "vLLM verifies single paths"
        needed = one.blocks_of_tail(0, core.block_size) - 1
        if needed > blocks:
            continue
        room, blocks = room - len(draft.tokens), blocks - needed
        proposed[seq.request.id] = one
    core.scheduler.update_draft_token_ids(DraftTokenIds(list(proposed), [one.tokens[1:] for one in proposed.values()]))
    return proposed
