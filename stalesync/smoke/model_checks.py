"""Check what a model computes on one card, in bfloat16 with the head size and the numbers of experts of large models.

a trainer and an engine on the same random weights
  operators   the card's own against those composed of PyTorch's, with 128 experts and more
  old         log-probabilities before the first update against those of the gradient's pass, and the engine's
  graphs      steps that are replayed against those that are computed, where the table's steps are captured
  repeated    the same pass again: equal gradients and tokens, bit by bit; requests in other batches, too
"""

import copy
import zlib
from typing import Any

import torch

from fusion.inference import EmbeddedEngine, Output, Request, RolloutConfig, SamplingParams
from fusion.inference.config import EngineConfig
from fusion.model import Mesh, ModelConfig, Transformer
from fusion.npu import Device
from fusion.npu.config import STACKING
from fusion.npu.operators import block_tokens, operators_of
from fusion.training import EmbeddedTrainEngine, Sequences, TrainingConfig
from fusion.training.algorithms import cross_entropy
from fusion.training.loss import LossInput, LossOutput
from stalesync.job.base_model import STD, pack_responses
from stalesync.smoke.report import check

EXPERTS = (128, 160)
"""Numbers of experts of Qwen3-30B-A3B and of DeepSeek-V2"""
VOCABULARY = 512

SHAPE = dict(
    model_type="qwen3_moe",
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    num_experts_per_tok=8,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    max_position_embeddings=1024,
)
"""Beside the number of experts: at most 8 million parameters"""

PROMPT, RESPONSE, SEQUENCES = 24, 8, 8
"""Tokens of each prompt and response; number of them"""
TOLERANCE = 0.05
"""Largest mean difference of log-probabilities (of about -7) that other roundings to bfloat16 may make: with random
weights, some tokens go to other experts then"""


def check_model(device: Device) -> dict[str, Any]:
    """Run all checks for every number of experts; return the mean differences by number."""
    of_count = {count: _check(device, count) for count in EXPERTS}
    gaps = {f"{name}_{count}": value for count, figures in of_count.items() for name, value in figures.items()}
    return {"operators": type(device.operators).__name__, **gaps}


def _check(device: Device, num_experts: int) -> dict[str, Any]:
    composing = copy.copy(device)
    composing.operators = operators_of(device.kind, "plain")
    model, composed = (_model(one, num_experts) for one in (device, composing))
    outputs = _generate(model, range(SEQUENCES))
    figures = _check_repeated(_model(device, num_experts, batch_invariant=True))
    trainer, composing_trainer = _trainer(model), _trainer(composed)
    batch = _batch(outputs)
    old = trainer.logprobs(batch)[0][batch.loss_mask]
    sampled = torch.tensor([value for out in outputs.values() for value in out.logprobs])
    figures["composed_diff"] = _close(
        "log-probabilities by the card's operators and by those composed of PyTorch's",
        old,
        composing_trainer.logprobs(batch)[0][batch.loss_mask],
    )
    figures["engine_diff"] = _close("log-probabilities of trainer and engine", old, sampled)
    if model.operators.name in STACKING:
        figures["graphs_diff"] = _check_graphs(model, outputs)
    first, gradients = _gradients(trainer, batch)
    figures["update_diff"] = _close("log-probabilities before the first update and in its gradient's pass", old, first)
    again, gradients_again = _gradients(trainer, batch)
    check(torch.equal(first, again), "the same pass again has equal log-probabilities, bit by bit", _gap(first, again))
    for name, gradient in gradients.items():
        other = gradients_again[name]
        claim = f"the same pass again has an equal gradient of {name}, bit by bit"
        check(bool(gradient.isfinite().all()) and torch.equal(gradient, other), claim, _gap(gradient, other))
    return figures


def _check_repeated(model: Transformer) -> dict[str, Any]:
    """Generate, and again all at once and in two parts: with `rollout.engine.batch_invariant` no bit depends on it."""
    outputs = _generate(model, range(SEQUENCES))
    halves = _generate(model, range(SEQUENCES // 2 - 1)) | _generate(model, range(SEQUENCES // 2 - 1, SEQUENCES))
    for others, batches in ((_generate(model, range(SEQUENCES)), "the same"), (halves, "other")):
        for id, out in outputs.items():
            claim = f"tokens and log-probabilities of {id} are equal in {batches} batches, bit by bit"
            same = (out.tokens, out.logprobs) == (others[id].tokens, others[id].logprobs)
            check(same, claim, out.logprobs, others[id].logprobs)
    return {"tokens": sum(len(out.tokens) for out in outputs.values())}


def _check_graphs(model: Transformer, outputs: dict[str, Output]) -> float:
    replayed = _generate(model, range(SEQUENCES), graphs=True)
    for id, out in outputs.items():
        check(out.tokens == replayed[id].tokens, f"a graph samples the tokens of {id}", out.tokens, replayed[id].tokens)
    own, other = (torch.tensor([out.logprobs for out in each.values()]) for each in (outputs, replayed))
    return _close("log-probabilities of steps that are replayed as graphs", own, other)


def _trainer(model: Transformer) -> EmbeddedTrainEngine:
    return EmbeddedTrainEngine(model, model.mesh, device=model.device, config=TrainingConfig(token_budget=1 << 12))


def _model(device: Device, num_experts: int, batch_invariant: bool = False) -> Transformer:
    config = ModelConfig.from_hf({**SHAPE, "num_experts": num_experts}, "shape")
    model = Transformer(config, Mesh.single(), device, torch.bfloat16, batch_invariant=batch_invariant)
    for param in model.table:
        for part in param.parts:  # a matrix alone or one of a stack, which only some tables of operators have
            view, random = part.view(model.weights.views[param.name]), torch.Generator()
            random.manual_seed(zlib.crc32(part.name.encode()))
            view.copy_(
                torch.ones(view.shape) if "norm" in part.name else torch.randn(view.shape, generator=random) * STD
            )
    return model


def _prompt(index: int) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(index)
    return tuple(torch.randint(0, VOCABULARY, (PROMPT,), generator=random).tolist())


def _generate(model: Transformer, indices: range, graphs: bool = False) -> dict[str, Output]:
    """Return the outputs of the prompts of these indices, sampled in one batch."""
    limits = EngineConfig(
        block_size=max(16, block_tokens(model.device.kind, model.operators.name)),
        max_seqs=SEQUENCES,
        batch_invariant=model.row_multiple > 1,
        graphs=graphs,
    )
    config = RolloutConfig(max_response_length=RESPONSE, engine=limits)
    engine = EmbeddedEngine(model, model.mesh, device=model.device, config=config, seed=0)
    engine.allocate_kv()
    params = SamplingParams(max_tokens=RESPONSE)
    engine.submit(Request(f"request {index:02d}", _prompt(index), params) for index in indices)
    outputs = {out.request_id: out for out in engine.run()}
    engine.release_kv()
    return dict(sorted(outputs.items()))


def _batch(outputs: dict[str, Output]) -> Sequences:
    return pack_responses([_prompt(index) for index in range(SEQUENCES)], [out.tokens for out in outputs.values()])


def _gradients(trainer: EmbeddedTrainEngine, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the log-probabilities of a gradient's pass, and copies of the gradients, which are then zero again."""
    seen: list[torch.Tensor] = []

    def loss(tokens: LossInput) -> LossOutput:
        seen.append(tokens.logprobs.detach().cpu())
        return cross_entropy(tokens)

    trainer.forward_backward(batch, loss)
    gradients = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    for gradient in trainer.gradients().values():
        gradient.zero_()
    return torch.cat(seen), gradients


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _close(claim: str, one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean difference, which must be at most TOLERANCE."""
    gap = float((one.cpu() - other.cpu()).abs().mean())
    check(gap <= TOLERANCE, f"{claim} differ by at most {TOLERANCE} on average", gap)
    return gap
