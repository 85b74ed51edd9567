"""Define the config group `rollout`: how responses are sampled and scheduled, and how an engine uses its card."""

import os
import re
from dataclasses import dataclass, field
from math import inf

from fusion.inference.request import SamplingParams
from fusion.inference.validation import check_sampling
from fusion.npu.config import STACKING, table_of
from fusion.telemetry.classes import OWN_CLASS
from fusion.telemetry.keys import SET, Unsupported, key
from fusion.telemetry.validation import Checks, Group

DRAFTS = ("none", "siblings", "history", "both")
AUTO = "auto"
"""Value of a key that follows from others when a run starts (`stalesync/job/automatic.py`); until then it is off"""
POOLED, DRAFTED = {"suspended": ("pool",)}, {"source": DRAFTS[1:]}
"""Where keys of `rollout.kv_pool` and of `rollout.drafts` have an effect"""
FORCED_SPREAD = (0.89, 0.43, 0.01)
"""Spread of a published trace (`stalesync/prompts/lengths.py`)"""

WRITTEN_LINE_END = re.compile(r"\\n(?![a-z])")
"""A backslash and an n that no shell has read as a line end; before a lowercase letter it may be LaTeX, as in \\neq"""
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Keys of `rollout.sampling` that a request has, too"""

ORDERS = {
    "fifo": "fusion.rollout.orders.fifo:FifoOrder",
    "least_generated": "fusion.rollout.orders.least_generated:LeastGeneratedOrder",
    "context": "fusion.rollout.orders.context:ContextOrder",
    "history": "fusion.rollout.orders.history:HistoryOrder",
    "oracle": "fusion.rollout.orders.oracle:OracleOrder",
    "histopipe": "fusion.rollout.orders.histopipe:HistoPipeOrder",
}
"""Module and class of each order of requests"""

BLOCK_MULTIPLE = 16
"""A block is a multiple of the widest vector, so that no score is computed in the remainder of a loop."""


@dataclass
class SamplingConfig(Group, path="rollout.sampling"):
    """How a token is sampled, and where a response ends."""

    temperature: float = key(1.0, timeless=True)
    """Divides the logits, 1e-5 to 1e5; 0: greedy decoding, only where nothing is trained."""
    top_k: int = key(0, timeless=True)
    """Samples from the k most likely tokens; 0: from all. With top_k, top_p or min_p at most 1,024 tokens are sampled
    from, which are recorded for the trainer: its log-probabilities are renormalised over them."""
    top_p: float = key(1.0, timeless=True)
    """Samples from the smallest set of most likely tokens whose probability reaches top_p; 1: from all."""
    min_p: float = key(0.0, timeless=True)
    """Excludes tokens less likely than min_p times the most likely one; 0: none."""
    stop: list[str] = key(factory=list, timeless=True)
    """Stop strings: a response ends with the token that completes one of them, besides at the model's and the
    tokenizer's end tokens. It stays in the response and in the text that is rewarded."""
    forced_median: float | None = key(None, at_least=1, read_by="plan simulate")
    """For measurements: ends responses at lengths drawn from a long-tailed distribution with this median in tokens, the
    same in every run with a seed (`stalesync/prompts/lengths.py`), and not where the policy ends them; null: off. With
    an environment it is the length of each turn."""
    forced_spread: list[float] = key(factory=lambda: list(FORCED_SPREAD), read_by="plan simulate")
    """With forced_median, the standard deviations of the logarithm of lengths between rows of the data and within a
    group, and the share of responses that are max_response_length long."""

    def check(self, check: Checks) -> None:
        check_sampling(check.group, self)
        texts = all(isinstance(text, str) and text and not WRITTEN_LINE_END.search(text) for text in self.stop)
        check.that("stop", texts, "a list of texts, none of them empty, with a line end (bash: $'\\n') instead of \\n")
        spread = self.forced_spread
        known = len(spread) == 3 and all(isinstance(one, (int, float)) and 0 <= one < inf for one in spread)
        check.that("forced_spread", known and spread[2] <= 1, "two standard deviations and a share, none negative")


@dataclass
class EngineConfig(Group, path="rollout.engine"):
    """How many sequences and tokens an engine computes at a time, and how much memory it takes."""

    block_size: int = key(16, at_least=BLOCK_MULTIPLE, at_most=1 << 20, read_by="simulate")
    """Tokens of a KV block, the unit of memory and of prefix sharing; a multiple of 16. Rounded up to a multiple of
    what the card's attention reads, 128 on Ascend, 256 on CUDA, on each of the parallel.infer.dcp ranks that share
    it."""
    max_seqs: int = key(256, at_least=1, read_by="plan simulate")
    """Maximum number of sequences that an attention rank decodes at a time."""
    max_batch_tokens: int = key(4096, at_least=1, read_by="plan simulate")
    """Maximum number of tokens of one step of an attention rank; longer prompts are prefilled in chunks. At least
    max_seqs."""
    kv_fraction: float = key(0.9, above=0, at_most=1, read_by="plan simulate")
    """Fraction of the free memory that the KV cache takes, as far as max_seqs sequences of rollout.max_length tokens
    need it; it is allocated last."""
    max_kv_tokens: int | None = key(None, at_least=1, read_by="simulate")
    """Upper bound of the KV cache in tokens of one attention rank; null: that of kv_fraction."""
    prefix_cache: bool = key(True, read_by="simulate")
    """Shares KV blocks between requests with a common prefix, within one policy version."""
    batch_invariant: bool = key(
        False, unsupported_by={"vllm": Unsupported("vLLM's results depend on the batch by rounding")}
    )
    """Computes bitwise the same logprobs under any batching, chunking or order of arrival, at some cost in speed."""
    graphs: bool = key(
        False,
        only={"parallel.infer.pp": (1,), "parallel.infer.dcp": (1,), "training.lora.rank": (0,)},
        why="as such steps wait for the host",
    )
    """Replays steps that only decode as graphs of the card, of padded sizes; they are captured where a size recurs, and
    again after weights or KV cache have moved. Their memory is not part of kv_fraction. On CUDA and Ascend cards; with
    rollout.backend=vllm, vLLM's own, on CUDA (docs/operators.md)."""

    def check(self, check: Checks) -> None:
        check.that("block_size", self.block_size % BLOCK_MULTIPLE == 0, f"a multiple of {BLOCK_MULTIPLE}")
        check.that(
            "max_batch_tokens",
            self.max_batch_tokens >= self.max_seqs,
            f"at least rollout.engine.max_seqs={self.max_seqs}, as every running sequence decodes one token per step",
        )


@dataclass
class ScheduleConfig(Group, path="rollout.schedule"):
    """Which request an engine receives next, and when it returns it."""

    order: str = key("history", read_by="simulate")
    """Which waiting request an engine receives next (`fusion/rollout/orders`): `history` (the most tokens left,
    estimated from the same row's last epoch, unless that foretells nothing, and from finished responses of the group;
    while many responses run away, as `least_generated`), `fifo` (the oldest), `least_generated` (the one with the
    fewest tokens so far), `context` (Seer: one response of each group first, then the groups whose finished responses
    are longest); `oracle` (the most tokens left) only with sampling.forced_median; `histopipe` (RhymeRL: by the length
    in the last epoch, one step from short to long, the next from long to short, on engines that each prefer a class of
    lengths; to compare with, as it brings nothing beyond `history`: docs/rollout.md) only with
    stalesync.max_staleness > 0; `module:Class`, a subclass of `fusion.rollout.orders.interface.Order` of your own
    (docs/rollout.md). With chunk_tokens it decides again after every chunk, otherwise only where a response begins;
    where nothing is known of lengths, `history` is then `fifo`."""
    length_classes: int = key(4, at_least=1, only={"order": ("histopipe",)})
    """With order=histopipe, number of classes by length among which a step's groups are divided evenly, and the engines
    such that the longest class takes as little time as possible; at most one for each engine. 1: engines take any."""
    chunk_tokens: int | str | None = key(AUTO, one_of=(AUTO,), at_least=1, read_by="simulate")
    """A response returns to the request buffer after this many new tokens and resumes on any engine with free capacity,
    the oldest first (divided rollout: Seer, arXiv 2511.14617); null: it ends on the engine where it began. Which
    requests are batched together then depends on timing: at staleness 0 a run is bitwise repeatable only with
    engine.batch_invariant. `auto`: an eighth of max_response_length, if that is at least 1,024 and either
    engine.batch_invariant or stalesync.max_staleness > 0, else null."""
    probe: int | None = key(None, at_least=0)
    """Number of requests of a group that an engine begins before the others, so that these have whole responses to
    draft from; fewer than algorithm.group_size. It is an order: where an engine has capacity, no request waits for
    them. 0: requests begin in order of arrival; null: 1 with drafts from siblings, else 0."""

    def check(self, check: Checks) -> None:
        known_order = self.order in ORDERS or OWN_CLASS.fullmatch(self.order) is not None
        check.that("order", known_order, f"one of {', '.join(ORDERS)}, or module:Class")


@dataclass
class KVPoolConfig(Group, path="rollout.kv_pool"):
    """Where the KV of unfinished samples goes that leave their engine."""

    suspended: str = key(
        "recompute",
        one_of=("recompute", "keep", "pool"),
        read_by="simulate",
        unsupported_by={"vllm": Unsupported("vLLM's KV is always computed again")},
    )
    """What happens to the KV of unfinished samples when new weights arrive. `recompute`: it is discarded, and the
    samples are prefilled again under the new weights; `keep`: it is kept, parked in host memory while the card trains,
    and the samples resume with it, so that their KV is of several policy versions (the version of each token is
    recorded either way). Kept KV is in the memory of the engine that computed it: another engine, or a resumed run,
    computes it again. `pool`: where a request leaves its engine within a policy version (at the end of a chunk; hybrid:
    when its card trains), its KV goes to shared memory of the machine, from which any engine of it continues by copying
    (Seer's global KV pool, arXiv 2511.14617); prompts are shared in it, too. When new weights arrive it is freed, as
    with `recompute`: no token is computed behind KV of another version. What is missing or damaged is recomputed."""
    max_parked_mib: int | None = key(None, at_least=1, only={"suspended": ("keep", "pool")}, refused=False)
    """With suspended=keep or pool, MiB of host memory in which a card may park KV; keep: KV beyond that is computed
    again; pool: what was parked longest ago goes to `spill`, or is computed again. null: no limit, but a pool leaves
    half of /dev/shm free."""
    spill: str | None = key(None, only=POOLED)
    """With suspended=pool, folder on a local disk for KV that exceeds max_parked_mib; null: none."""
    max_spilled_mib: int | None = key(None, at_least=1, only={**POOLED, "spill": SET})
    """MiB that a card may have in `spill`; what was parked longest ago is removed first; null: until the disk is
    full."""
    spread: int = key(32, at_least=0, only=POOLED, read_by="simulate")
    """With suspended=pool, maximum imbalance at which a request returns to its KV: requests that the engine which
    has parked it may have more than the least loaded one."""
    pull_tokens: int = key(512, at_least=1, only=POOLED, read_by="simulate")
    """With suspended=pool, number of tokens from which an engine copies KV that another one has parked, or a prompt
    that another one has computed; shorter KV is computed again."""
    remote: str = key("ray", one_of=("none", "ray"), only=POOLED)
    """With suspended=pool, how KV travels to an engine on another machine: `ray`: as Ray objects, if it has at least
    twice pull_tokens and arrives before it could have been computed, by what was measured in this run; `none`: it is
    computed again."""

    def check(self, check: Checks) -> None:
        check.that("spill", self.spill is None or os.path.isabs(self.spill), "an absolute path, or null")

    @property
    def keeps_kv(self) -> bool:
        """Whether KV is kept over new weights."""
        return self.suspended == "keep"

    @property
    def pools_kv(self) -> bool:
        """Whether KV goes to the machine's pool."""
        return self.suspended == "pool"


@dataclass
class DraftsConfig(Group, path="rollout.drafts"):
    """What drafts tokens that an engine verifies."""

    source: str = key(AUTO, one_of=(AUTO, *DRAFTS), read_by="simulate")
    """What drafts several tokens of a response, which one forward pass verifies: `siblings` (the other responses of
    the group that the engine has generated so far), `history` (the responses of the prompt's last group, in an
    earlier epoch), `both`, each with phrases of the responses to all prompts; `none`. Every token is sampled with
    its own noise as without drafts: the same tokens with engine.batch_invariant, else up to rounding, as for any
    change of the batch. A token is verified where it is probable enough to be worth a row of the batch, by how
    often drafts were right in this run. They are measured to help where answers are long and a step takes many
    milliseconds, and to cost time with a small model and many sequences (docs/figures.md). `auto`: `both` where
    chunk_tokens=auto is a number and the machine has a C++ compiler, else `none`."""
    tree: int | None = key(
        None, at_least=1, only=DRAFTED, unsupported_by={"vllm": Unsupported("vLLM verifies single paths")}
    )
    """Maximum number of drafted tokens behind one token; 1: drafts are single paths, no trees; null: 4, of vLLM 1. How
    wide a tree is follows from how often its tokens are right."""
    history: int = key(1, at_least=1, at_most=8, only={"source": ("history", "both")})
    """Number of earlier groups of a prompt of which text is history, at most 8. 1: the text of the last one replaces
    the earlier; more: text counts half as much as that of the next group."""
    mib: int = key(1024, at_least=1, only=DRAFTED)
    """MiB of host memory of a card for the text from which it drafts, at most an eighth of it for phrases of all
    prompts; prompts without running requests that were used longest ago are dropped first."""
    group_mib: int = key(256, at_least=1, only=DRAFTED)
    """MiB of these that the text of one prompt may take, its last group included; beyond that the prompt is dropped,
    and its running responses are generated without drafts."""
    max_age: int | None = key(None, at_least=1, only=DRAFTED)
    """Training steps after which the text of a prompt is dropped if no request has used it; null: only where `mib` is
    exceeded. Useful where data.rows is null, as then no prompt comes again."""
    exchange: bool = key(True, only=DRAFTED)
    """Engines also draft from what others generate for the same prompts: siblings of a group that was divided between
    them, and history of a prompt that another engine had in the last epoch. It goes through one more process, which
    keeps at most `mib`; nothing is started where there are no two attention ranks that draft."""

    @property
    def is_on(self) -> bool:
        return self.from_siblings or self.from_history

    @property
    def from_siblings(self) -> bool:
        return self.source in ("siblings", "both")

    @property
    def from_history(self) -> bool:
        return self.source in ("history", "both")


@dataclass
class RolloutConfig(Group, path="rollout"):
    """How responses are sampled and scheduled, and how an engine uses its card."""

    backend: str = key("embedded", one_of=("embedded", "vllm"))
    """Which engine generates: `embedded`: this project's, all families and options; `vllm`: vLLM in the worker's
    process, with the same sampler, noise and switches (`bash scripts/environment.sh --backend vllm`); what it does not
    do is refused by key (docs/backends.md)."""
    max_response_length: int = key(256, at_least=1, read_by="plan simulate")
    """Maximum number of tokens of a response, including the end token."""
    max_length: int | None = key(None, at_least=1)
    """Maximum number of tokens of prompt and response in total; null: the number of positions of the model."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    kv_pool: KVPoolConfig = field(default_factory=KVPoolConfig)
    drafts: DraftsConfig = field(default_factory=DraftsConfig)

    def check(self, check: Checks) -> None:
        median, order, probe = self.sampling.forced_median, self.schedule.order, self.schedule.probe
        Checks("rollout.sampling", self.sampling).that(
            "forced_median",
            median is None or median <= self.max_response_length,
            f"1 to rollout.max_response_length={self.max_response_length}, or null",
        )
        check = Checks("rollout.schedule", self.schedule)
        known = order != "oracle" or median is not None
        check.that("order", known, "another one without rollout.sampling.forced_median: the lengths are not known")
        unused = bool(probe) and not self.drafts.from_siblings
        source = f"rollout.drafts.source={self.drafts.source}"
        check.that("probe", not unused, f"0 or null with {source}: no sibling is drafted from")

    @property
    def max_chunk_tokens(self) -> int:
        """Number of new tokens after which a response returns to the request buffer; 0: none ever does."""
        chunk_tokens = self.schedule.chunk_tokens
        return chunk_tokens if isinstance(chunk_tokens, int) and chunk_tokens < self.max_response_length else 0

    @property
    def num_probes(self) -> int:
        """Number of requests of a group that begin before the others."""
        return int(self.drafts.from_siblings) if self.schedule.probe is None else self.schedule.probe

    @property
    def truncates(self) -> bool:
        """Whether the ids that sampling keeps are recorded with every token."""
        return self.sampling_params().truncates

    def length_limit(self, max_positions: int) -> int:
        """Return the maximum number of tokens of prompt and response in total, for a model with these positions."""
        return min(self.max_length or max_positions, max_positions)

    def sampling_params(self, **changes: object) -> SamplingParams:
        """Return the sampling parameters of a request under this config, with ``changes`` applied."""
        values: dict = {name: getattr(self.sampling, name) for name in SAMPLING}
        return SamplingParams(**(values | {"max_tokens": self.max_response_length} | changes))


def check_graphs(config: RolloutConfig, kind: str, operators: str) -> None:
    """Refuse graphs where the engine has none on a card of this ``kind`` (`Device.kind`; auto: not known yet) with this
    table of ``operators``.
    Raise ValueError: names the keys."""
    if not config.engine.graphs:
        return
    if config.backend == "embedded" and config.engine.batch_invariant:
        raise ValueError(
            "rollout.engine.graphs=true: expected false with rollout.engine.batch_invariant=true, as its experts wait "
            "for the host"
        )
    if config.backend == "vllm" and kind not in ("auto", "cuda"):
        raise ValueError(
            "rollout.engine.graphs=true: expected false with rollout.backend=vllm on other cards than CUDA's"
        )
    if config.backend == "embedded" and kind != "auto" and table_of(kind, operators) not in STACKING:
        raise ValueError(
            f"rollout.engine.graphs=true: the operators {table_of(kind, operators)!r} of this card wait for the host; "
            f"expected false, or device.operators={' or '.join(STACKING)}"
        )


def check_context(config: RolloutConfig, dcp: int) -> None:
    """Refuse decode context parallelism where it cannot be honoured. Raise ValueError: names both keys."""
    if dcp > 1 and config.engine.batch_invariant:
        raise ValueError(
            f"parallel.infer.dcp={dcp}: expected 1 with rollout.engine.batch_invariant=true, as partial sums of "
            "several ranks are merged, which equals the sum on one rank by rounding only"
        )
