"""Define the interface of an inference engine as used by the other packages. `EmbeddedEngine` implements it.

An engine is one TP/EP/PP group of ranks with one scheduler; an object is one rank of it. *Collective* means: called on
all ranks of the engine, in the same order of calls, on the thread that steps it. *Thread-safe* means: can be called on
any thread at any time, also while another thread is inside `step`; the call takes effect at the next step, the same one
on every rank.

    allocate_kv ─► step, step, … ─► suspend ─► release_kv ─► new weights, policy_version = v ─► allocate_kv ─► …

Weights are accessed directly, not by methods: a switch writes them into the `WeightHolder` that the engine was built
with."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from fusion.inference.config import RolloutConfig
from fusion.inference.request import Output, Request


class InferEngine(Protocol):
    """One rank of an engine."""

    on_adopt: Callable[[int], None]
    """Callback of the owner of the weights: called after `adopt` on every rank, between the same two steps, with the
    policy version; must change the weights to that version before it returns."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0 of the engine, which receives requests and control calls."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the engine."""

    # Memory and weights, between two steps

    @property
    def policy_version(self) -> int:
        """Policy version of the weights; part of the names of KV blocks, and recorded with every sampled token."""

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Declare that the weights are those of another policy. Collective. New requests never use KV of older
        weights; unfinished requests are recomputed or, with rollout.kv_pool.suspended=keep, continued on their KV."""

    def allocate_kv(self) -> None:
        """Allocate the KV cache from the free memory of the device, within the limits of the config. Collective.
        Raise ValueError: the memory is too small for one block, or for a waiting request; names the keys to change."""

    def release_kv(self) -> None:
        """Release the KV cache's memory. Unfinished requests keep their tokens and wait. Collective."""

    def reconfigure(self, config: RolloutConfig) -> None:
        """Change the limits of memory, sequences and tokens from the next `allocate_kv` on. Collective; only while no
        KV cache is allocated.
        Raise ValueError: a value out of range, by key."""

    # Control calls: thread-safe, on the leader

    def submit(self, requests: Iterable[Request]) -> None:
        """Submit requests; they start at the next step.
        Raise ValueError: a request is malformed or can never fit; names its id, the field or key to change, its value
        and what was expected. None is submitted, and the engine continues."""

    def abort(self, ids: Iterable[str] | None = None) -> None:
        """Abort requests (None: all) at the next step, whose outputs contain their tokens, with reason "abort".
        Unknown ids are ignored."""

    def forget(self, ids: Iterable[str]) -> None:
        """Free the parked KV of suspended requests that will not be resumed here. Unknown ids are ignored."""

    def pause(self) -> None:
        """Make `paused` true on every rank after the next step."""

    def adopt(self, version: int) -> None:
        """Make every rank call `on_adopt` before its next step and continue as policy ``version``."""

    def report(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Send plain JSON from any rank to the leader, with the next step. Thread-safe, on every rank."""

    def take_reports(self) -> list[dict[str, Any]]:
        """Return what all ranks have reported and what has arrived since the last call. Thread-safe, on the leader."""

    def status(self) -> dict[str, float]:
        """Return metrics of the whole engine at the last step. Thread-safe, on every rank.

        depth, running: number of waiting and of running requests; tokens_per_s: generated tokens per second in `step`;
        policy_version; kv_tokens: capacity of an attention rank; and the fields of `Counters`, totals since
        construction, `kv_pool_…` only with rollout.kv_pool.suspended=pool, `graph…` only where graphs are replayed."""

    # Generation

    def resume(self) -> None:
        """Clear `paused`. Collective."""

    @property
    def paused(self) -> bool:
        """Whether `pause` was called since `resume`; the same on every rank after the same step."""

    @property
    def idle(self) -> bool:
        """Whether the last step had nothing to compute on any rank; the same on every rank."""

    @property
    def last_step_kind(self) -> str:
        """Kind of this rank's last step: "prefill" (with or without decodes), "decode", or "" (nothing computed)."""

    def step(self) -> list[Output]:
        """Compute one step: for every running request at most one token, and those of its draft. Collective. Returns
        the requests that ended, on one of the ranks that schedule them; on the others an empty list.
        Raise FloatingPointError: a request's logits are NaN; names the request."""

    def suspend(self) -> list[Output]:
        """Suspend every request, also those not started, with reason "abort"; `Output.kv_rank` is set if the KV is
        kept on the host, `Output.kv_tokens` if it is in the machine's pool. Return the same as `step`. Collective."""

    @property
    def parked_kv_bytes(self) -> int:
        """Bytes of host memory used by this rank's KV of suspended requests."""
