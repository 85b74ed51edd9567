"""Specify the architecture of a model layer by layer. Plain data: no torch.

    LayerSpec ─┬─ attention ─┬─ GroupedQuery ─ Rotary         heads, biases, norms of queries and keys
               │             └─ Latent ─ Rotary               low-rank queries, keys and values (MLA)
               ├─ mlp ───────┬─ Dense                         one SwiGLU
               │             └─ Sparse ─ Router, SharedExpert routed experts, and one that every token passes
               └─ sandwich                                    norms also after attention and after the MLP

`AttentionSpec` and `MLPSpec` are tagged unions: what depends on the kind matches on the class, so another kind of
attention is another class in the union, and another branch in the parameter table and in the transformer. A family
(`fusion.model.families`) reads the specification from a `config.json`; the parameter table, the transformer and the
layouts ask nothing else. Specifications are resolved when a model is built, not for each token."""

from dataclasses import dataclass, field
from typing import Literal

from fusion.npu.operators.gating_spec import Gating

RotaryKind = Literal["default", "linear", "yarn", "llama3"]
QKNorm = Literal["none", "head", "projection"]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first ``width`` channels of a head (arXiv 2104.09864).

    ``linear`` divides positions by ``factor`` (arXiv 2306.15595). ``yarn`` divides those of low frequencies, and
    multiplies cosines and sines by ``attention_factor`` (arXiv 2309.00071): ``beta_fast`` and ``beta_slow`` are the
    rotations over ``original_max_positions`` between which frequencies are blended, ``truncate`` rounds that range to
    whole channels. ``mscale`` and ``mscale_all_dim``: what ``attention_factor`` and the softmax scale of latent
    attention follow from; 0: not stated. ``llama3`` (arXiv 2407.21783) divides frequencies of fewer than
    ``low_freq_factor`` rotations over ``original_max_positions``, keeps those of more than ``high_freq_factor``, and
    blends between them.

    ``interleaved``: channels 2i and 2i + 1 are rotated together, not i and i + width / 2."""

    width: int
    theta: float = 10000.0
    kind: RotaryKind = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    interleaved: bool = False


@dataclass(frozen=True)
class GroupedQuery:
    """Attention whose query heads share key/value heads in groups (GQA).

    ``qk_norm``: the RMS norm of queries and keys before the rotation, of each ``head`` or of the whole ``projection``
    (all heads at once)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    out_bias: bool = False

    def kv_copies(self, tp: int) -> int:
        """Number of neighbouring TP ranks that have the same keys and values."""
        return max(1, tp // self.num_kv_heads)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values of all heads are products with one latent vector of ``kv_rank`` channels per token, and all heads
    share one rotated key of ``rope_dim`` channels. A head has ``nope_dim`` channels that are not rotated, then
    ``rope_dim`` that are, and ``value_dim`` channels of values. ``q_rank``: channels of the latent vector that queries
    are computed from; None: they are computed from the hidden state. Both latents are normalised, with ``norm_eps``."""

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary: Rotary
    q_rank: int | None
    softmax_scale: float
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_width(self) -> int:
        """Channels of a token in the KV cache of a layer: the latent and the shared rotated key."""
        return self.kv_rank + self.rope_dim

    def kv_copies(self, tp: int) -> int:
        """Number of neighbouring TP ranks that have the same latents: all."""
        return tp


AttentionSpec = GroupedQuery | Latent


@dataclass(frozen=True)
class Dense:
    """A SwiGLU of ``width`` inner channels."""

    width: int


@dataclass(frozen=True)
class Router(Gating):
    """A `Gating`; ``float32``: its logits are computed in float32, whatever the weights' dtype."""

    float32: bool = False


@dataclass(frozen=True)
class SharedExpert:
    """A SwiGLU of ``width`` inner channels that every token passes, added to the routed experts' output. ``gated``:
    multiplied by the sigmoid of a product with the token."""

    width: int
    gated: bool = False


@dataclass(frozen=True)
class Sparse:
    """A mixture of ``num_experts`` SwiGLUs of ``width`` inner channels each."""

    num_experts: int
    width: int
    router: Router
    shared: SharedExpert | None = None


MLPSpec = Dense | Sparse


@dataclass(frozen=True)
class LayerSpec:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)).

    ``sandwich``: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))) (Pangu Ultra, arXiv 2504.07866, section
    2.1)."""

    attention: AttentionSpec
    mlp: MLPSpec
    sandwich: bool = False


@dataclass(frozen=True)
class SwiGLUNames:
    """Names of the three matrices of a SwiGLU, below the name of the module."""

    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"


@dataclass(frozen=True)
class Names:
    """Names of a family's tensors in a checkpoint, below `model.layers.N`, where families differ."""

    router: str = "mlp.gate.weight"
    correction: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    expert: SwiGLUNames = field(default_factory=SwiGLUNames)
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate.weight"
