"""What the rest of the house may ask of an inference engine. `EmbeddedEngine` is the implementation of this house.

An engine is one TP/EP/PP group of ranks with one scheduler; an object is one rank of it. *Collective* means: over all
ranks of the engine, in the same order of calls, on the thread that steps it. *Thread-safe* means: on any thread at any
time, also while another thread is inside `step`; these calls take effect at the next step, the same one on every rank.

    allocate_kv ─► step, step, … ─► suspend ─► release_kv ─► new weights, policy_version = v ─► allocate_kv ─► …

The weights themselves are not behind methods: a switch writes them into the `WeightHolder` the engine was built on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from fusion.inference.config import RolloutConfig
from fusion.inference.request import Output, Request


class InferEngine(Protocol):
    """One rank of an engine."""

    on_adopt: Callable[[int], None]
    """Set by the owner of the weights. Called on every rank between the same two steps after `adopt`, with the policy
    version; changes the weights to those of that version before it returns."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0 of the engine: the one that takes requests and control calls."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""

    # Memory and weights, between two steps

    @property
    def policy_version(self) -> int:
        """The policy that the weights are of; it names the KV and is recorded with every sampled token."""

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Declares that the weights are those of another policy. Collective. KV of older weights is never found by
        requests of the new one; unfinished requests are recomputed or, with rollout.suspended_kv=keep, continued."""

    def allocate_kv(self) -> None:
        """Allocates the KV cache out of the free memory of the device, by the limits of the config. Collective.

        Raises:
            ValueError: there is no room for one block, or for a request that waits; names the keys to change.
        """

    def release_kv(self) -> None:
        """Gives the KV cache's memory back. Unfinished requests keep their tokens and wait. Collective."""

    def reconfigure(self, config: RolloutConfig) -> None:
        """Changes the limits of memory, sequences and tokens from the next `allocate_kv` on. Collective; only while no
        KV cache is allocated.

        Raises:
            ValueError: a value out of range, by key.
        """

    # Control calls: thread-safe, on the leader

    def submit(self, requests: Iterable[Request]) -> None:
        """Takes requests in; they start at the next step.

        Raises:
            ValueError: a request that is malformed or can never fit, with its id and the key to change; none was taken.
        """

    def abort(self, ids: Iterable[str] | None = None) -> None:
        """Ends requests (None: all) with reason "abort" at the next step; their tokens are in its outputs. Unknown ids
        are ignored."""

    def forget(self, ids: Iterable[str]) -> None:
        """Frees the KV that is kept for suspended requests which will not come back. Unknown ids are ignored."""

    def pause(self) -> None:
        """Makes `paused` true on every rank after the next step."""

    def adopt(self, version: int) -> None:
        """Makes every rank call `on_adopt` before its next step and continue as policy ``version``."""

    def status(self) -> dict[str, float]:
        """Figures of the whole engine as of the last step. Thread-safe, on every rank.

        depth, running: requests that wait, and that run; tokens_per_s: generated tokens by seconds in `step`;
        policy_version; kv_tokens: capacity of an attention rank. Totals since construction: generated_tokens,
        preemptions, prefix_hit_tokens; dummy_steps (idle ranks that stepped for the experts' exchange);
        kv_restored_tokens (whose KV was copied back from the host); recomputed_tokens (computed again because their KV
        had been dropped); interrupted (requests that had tokens and lost their KV to new weights while they ran).
        """

    # Generation

    def resume(self) -> None:
        """Clears `paused`. Collective."""

    @property
    def paused(self) -> bool:
        """Whether `pause` was called since `resume`; the same on every rank after the same step."""

    @property
    def idle(self) -> bool:
        """Whether the last step found nothing to do on any rank; the same on every rank."""

    @property
    def last_step_kind(self) -> str:
        """What this rank computed in the last step: "prefill" (with or without decodes), "decode", or ""."""

    def step(self) -> list[Output]:
        """Computes one step: at most one token for every running request. Collective.

        Returns:
            the requests that ended, on one rank of those that schedule them; elsewhere an empty list.

        Raises:
            FloatingPointError: a request's logits are NaN; names it.
        """

    def suspend(self) -> list[Output]:
        """Ends every request, also those not started, with reason "abort"; `Output.kv_rank` says whose KV is kept on
        the host. Returns as `step`. Collective."""

    @property
    def parked_kv_bytes(self) -> int:
        """Host memory that this rank's KV of suspended requests takes."""
