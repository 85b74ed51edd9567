"""Propose our drafts to vLLM's scheduler, in place of a proposer of its own.

    running sequences ─ `Drafter` ─► drafts that fit ─► vLLM's scheduler ─► one pass over sequence and draft
        ─► keyed sampler: the draft's tokens as far as they are those that are sampled, and one more

vLLM is started without speculative decoding, which would fix the number of drafted tokens at its start. It schedules,
computes and takes back any tokens that its scheduler is given; drafts are single paths.

Invariant: with drafts a step computes at most ``max_tokens`` tokens, and no draft preempts a sequence."""

from collections.abc import Sequence as Items

from fusion.inference.backends.vllm_core import VllmCore
from fusion.inference.sequence import Sequence
from fusion.inference.verification import Depths, Drafter, Verification


def propose(core: VllmCore, drafter: Drafter, running: Items[Sequence], max_tokens: int) -> dict[str, Verification]:
    """Give vLLM's scheduler drafts of the sequences that decode in the next step; return them by request id."""
    from vllm.v1.outputs import DraftTokenIds

    decodes = [seq for seq in running if seq.computed + 1 == len(seq.tokens)]
    if not decodes:
        return {}
    room = max(0, max_tokens - sum(len(seq.tokens) - seq.computed for seq in running))
    blocks = core.free_blocks - len(running)  # a sequence may need one for the token that it computes anyway
    proposed: dict[str, Verification] = {}
    for seq, draft in zip(decodes, drafter.draft(decodes, Depths(decodes), room), strict=True):
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
