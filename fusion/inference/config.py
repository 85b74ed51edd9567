"""What a user may set about generation: the config group `rollout`."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.inference.request import SamplingParams, check_sampling

SUSPENDED_KV = ("recompute", "keep")

BLOCK_MULTIPLE = 16
"""Blocks are whole vectors of the widest unit, so that no element of a score is computed in a loop's remainder."""


@dataclass
class RolloutConfig:
    """How responses are sampled and how an engine uses its card."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Samples from the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Samples from the smallest set of most likely tokens whose probability reaches top_p; 1 keeps all."""
    min_p: float = 0.0
    """Leaves out tokens less likely than min_p times the most likely one; 0 keeps all."""
    max_response_length: int = 256
    """Tokens of a response, the end token included."""
    forced_median: float | None = None
    """For measurements: responses end at lengths drawn from a long-tailed distribution of this median in tokens, the
    same in every run of a seed (`stalesync/prompts/lengths.py`), and not where the policy ends them; null: off."""
    chunk_tokens: int | None = None
    """A response returns to the request buffer after every so many new tokens and goes on wherever there is room, the
    oldest first (divided rollout: Seer, arXiv 2511.14617); null: it ends on the engine where it began. Who is
    decoded beside whom then depends on the clock: at staleness 0 a run repeats to the bit only with batch_invariant."""
    max_length: int | None = None
    """Tokens of prompt and response together; null: as many as the model has positions."""
    block_size: int = 16
    """Tokens of a KV block, the unit of memory and of prefix sharing; a multiple of 16."""
    max_seqs: int = 256
    """Sequences that one attention rank decodes at a time."""
    max_batch_tokens: int = 4096
    """Tokens of one step of one attention rank; longer prompts are prefilled in chunks. At least max_seqs."""
    kv_fraction: float = 0.9
    """Share of the memory that is free when the KV cache is allocated (last) that it takes."""
    max_kv_tokens: int | None = None
    """Upper limit of the KV cache in tokens of one attention rank; null: what kv_fraction gives."""
    prefix_cache: bool = True
    """Shares KV blocks between requests whose tokens begin alike, under one policy version."""
    suspended_kv: str = "recompute"
    """What becomes of the KV of unfinished samples when new weights come. recompute: it is dropped, and they are
    prefilled again under the new weights; keep: it stays, parked in host memory while the card is needed for training,
    and they go on behind it, with KV of several policy versions (each token's version is recorded either way). KV that
    is kept is found in memory only, by the engine that made it: elsewhere, and after a resume, it is computed again."""
    max_parked_kv_mib: int | None = None
    """With suspended_kv=keep, MiB of host memory that a card may park KV in; what does not fit is computed again;
    null: no limit."""
    batch_invariant: bool = False
    """The same logprobs to the bit under any batching, chunking or order of arrival, at some cost in speed."""

    def validate(self) -> None:
        """Raises:
        ValueError: a value out of its range, naming the key.
        """
        for key in ("max_response_length", "max_seqs", "max_batch_tokens"):
            _expect(getattr(self, key) >= 1, key, getattr(self, key), "a positive integer")
        check_sampling("rollout", self.sampling())
        kv = self.suspended_kv
        _expect(kv in SUSPENDED_KV, "suspended_kv", kv, f"one of {', '.join(SUSPENDED_KV)}")
        for key in ("chunk_tokens", "max_length", "max_kv_tokens", "max_parked_kv_mib"):
            value = getattr(self, key)
            _expect(value is None or value >= 1, key, value, "a positive integer or null")
        forced = self.forced_median
        possible = forced is None or 1 <= forced <= self.max_response_length
        _expect(
            possible, "forced_median", forced, f"1 to rollout.max_response_length={self.max_response_length}, or null"
        )
        multiple = self.block_size >= BLOCK_MULTIPLE and self.block_size % BLOCK_MULTIPLE == 0
        _expect(multiple, "block_size", self.block_size, f"a positive multiple of {BLOCK_MULTIPLE}")
        _expect(0 < self.kv_fraction <= 1, "kv_fraction", self.kv_fraction, "a number in (0, 1]")
        _expect(
            self.max_batch_tokens >= self.max_seqs,
            "max_batch_tokens",
            self.max_batch_tokens,
            f"at least rollout.max_seqs={self.max_seqs}, as every running sequence decodes one token a step",
        )

    @property
    def keeps_kv(self) -> bool:
        return self.suspended_kv == "keep"

    def sampling(self, **changes: object) -> SamplingParams:
        """The sampling parameters of a request under this config."""
        values: dict = dict(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_response_length,
        )
        return SamplingParams(**(values | changes))


def _expect(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"rollout.{key}={value}: expected {expected}")
