"""openPangu-Ultra-MoE in plain torch, for comparison: nothing of this project is imported.

Written from the authors' description of their release (`modeling_openpangu_moe.py`, arXiv 2505.04519): every formula
over whole sequences, one expert and one token set at a time, without a cache. Registered with transformers' Auto
classes, which have no such model, so that the tests load and save its folders as those of other families.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class PanguUltraMoEConfig(PreTrainedConfig):
    """The fields of the release, with its defaults."""

    model_type = "pangu_ultra_moe"

    vocab_size: int = 153600
    hidden_size: int = 7680
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_mtp_layers: int = 1
    num_attention_heads: int = 128
    num_key_value_heads: int = 128
    num_shared_experts: int = 1
    num_routed_experts: int = 256
    routed_scaling_factor: float = 2.5
    attention_kv_lora_dim: int = 512
    attention_q_lora_dim: int | None = 1536
    attention_qk_rope_dim: int = 64
    attention_v_dim: int = 128
    attention_qk_dim: int = 128
    num_experts_per_tok: int = 8
    num_dense_layers: int = 3
    norm_topk_prob: bool = True
    sandwich_norm: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | None = 1
    tie_word_embeddings: bool = False
    rope_theta: float = 25600000.0
    attention_dropout: float = 0.0


class Norm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        return self.weight * (x32 / (x32.square().mean(-1, keepdim=True) + self.eps).sqrt()).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, config: PanguUltraMoEConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_routed_experts, config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The weight of every expert for every token, 0 for those that are not chosen."""
        scores = (x.float() @ self.weight.float().T).sigmoid()
        chosen = scores.argsort(dim=-1, descending=True)[..., : self.config.num_experts_per_tok]
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.config.norm_topk_prob and self.config.num_experts_per_tok > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.config.routed_scaling_factor


class Experts(nn.Module):
    def __init__(self, config: PanguUltraMoEConfig):
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.experts = nn.ModuleList(SwiGLU(hidden, width) for _ in range(config.num_routed_experts))
        self.gate = Gate(config)
        self.shared_experts = SwiGLU(hidden, width * config.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, out = self.gate(x), self.shared_experts(x)
        for index, expert in enumerate(self.experts):
            out = out + expert(x) * weights[..., index : index + 1].to(x.dtype)
        return out


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Channels 2i and 2i + 1 of [..., length, width] as the plane that position p turns by p / theta^(2i / width)."""
    length, width = x.shape[-2:]
    speeds = theta ** -(torch.arange(0, width, 2).float() / width)
    angles = torch.arange(length).float()[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: PanguUltraMoEConfig):
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_attention_heads
        wide = heads * (config.attention_qk_dim + config.attention_qk_rope_dim)
        if config.attention_q_lora_dim is None:
            self.q_proj = nn.Linear(hidden, wide, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.attention_q_lora_dim, bias=False)
            self.q_a_layernorm = Norm(config.attention_q_lora_dim)
            self.q_b_proj = nn.Linear(config.attention_q_lora_dim, wide, bias=False)
        rank = config.attention_kv_lora_dim
        self.kv_a_proj_with_mqa = nn.Linear(hidden, rank + config.attention_qk_rope_dim, bias=False)
        self.kv_a_layernorm = Norm(rank)
        self.kv_b_proj = nn.Linear(rank, heads * (config.attention_qk_dim + config.attention_v_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.attention_v_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        nope, rope, rank = config.attention_qk_dim, config.attention_qk_rope_dim, config.attention_kv_lora_dim

        def by_head(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (config.num_attention_heads, -1)).transpose(-2, -3)

        if config.attention_q_lora_dim is None:
            queries = by_head(self.q_proj(x))
        else:
            queries = by_head(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        low = self.kv_a_proj_with_mqa(x)
        expanded = by_head(self.kv_b_proj(self.kv_a_layernorm(low[..., :rank])))
        shared = turned(low[..., rank:], config.rope_theta).unsqueeze(-3)
        scores = queries[..., :nope] @ expanded[..., :nope].transpose(-1, -2)
        scores = scores + turned(queries[..., nope:], config.rope_theta) @ shared.transpose(-1, -2)
        later = torch.ones(x.shape[-2], x.shape[-2]).triu(1).bool()
        scores = (scores / (nope + rope) ** 0.5).masked_fill(later, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ expanded[..., nope:]).transpose(-2, -3).flatten(-2))


class Layer(nn.Module):
    def __init__(self, config: PanguUltraMoEConfig, sparse: bool):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = Experts(config) if sparse else SwiGLU(hidden, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.sandwich = config.sandwich_norm
        if self.sandwich:
            self.pre_mlp_layernorm, self.post_mlp_layernorm = Norm(hidden, eps), Norm(hidden, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x))
        if not self.sandwich:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(x)))


class Body(nn.Module):
    def __init__(self, config: PanguUltraMoEConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, sparse=index >= config.num_dense_layers) for index in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class PanguUltraMoEForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = PanguUltraMoEConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PanguUltraMoEConfig):
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding, Gate)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def set_experts_implementation(self, implementation: Any) -> None:
        """There is only one."""

    def forward(self, input_ids: torch.Tensor, **unused: Any) -> CausalLMOutput:
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(self.model.norm(x)))


AutoConfig.register("pangu_ultra_moe", PanguUltraMoEConfig)
AutoModelForCausalLM.register(PanguUltraMoEConfig, PanguUltraMoEForCausalLM)
