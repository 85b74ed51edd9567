"""Context parallelism saves the memory of a training card that the cost model plans: the peak of HBM in forward and
backward pass of one micro-batch of whole sequences, from the allocator of emulated cards, beyond what is held before
and without recomputation. A dense and a sparse layer of grouped-query attention (fp32)."""

from __future__ import annotations

import pytest
import torch

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.setup import Setup, TrainingLimits, Workload
from fusion.costmodel.shape import Shape
from fusion.model import Mesh, ModelConfig, Parallel, Transformer
from fusion.npu import Device
from fusion.training import EmbeddedTrainEngine, TrainingConfig
from fusion.training.algorithms import cross_entropy
from tests.helpers import run_ranks, tiny_config
from tests.training.sequences import sequences_of

SIZES, TOKENS, SEQUENCES, WIDTH = (1, 2, 4), 8192, 2, 128


@pytest.mark.extended
def test_the_peak_falls_with_the_cards_that_share_a_sample():
    sizes = dict(hidden_size=WIDTH, num_attention_heads=8, num_key_value_heads=4, head_dim=WIDTH // 8)
    layers = dict(mlp_only_layers=[0], intermediate_size=3 * WIDTH, moe_intermediate_size=WIDTH)
    config = tiny_config(max_position_embeddings=TOKENS, **sizes, **layers)
    peak_bytes = {cp: max(run_ranks(peak_of_a_pass, cp, config, timeout_s=300)) for cp in SIZES}
    planned = {cp: planned_bytes(config, cp) for cp in SIZES}
    for cp, bound in ((2, 0.6), (4, 0.35)):
        ratio, expected = peak_bytes[cp] / peak_bytes[1], planned[cp] / planned[1]
        print(
            f"cp={cp}: {peak_bytes[cp] / 1e6:.0f} of {peak_bytes[1] / 1e6:.0f} MB, {ratio:.2f}, planned {expected:.2f}"
        )
        assert ratio <= bound and ratio == pytest.approx(expected, rel=0.15)


def peak_of_a_pass(rank: int, device: Device, config: ModelConfig) -> int:
    world = torch.distributed.get_world_size()
    model = Transformer(config, Mesh.create(Parallel(world, cp=world)), device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    settings = TrainingConfig(lr=1e-4, token_budget=TOKENS, load_balancing_coef=0.01)
    engine, generator = EmbeddedTrainEngine(model, model.mesh, device, settings), torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, TOKENS // SEQUENCES), generator=generator)
    batch = sequences_of(list(tokens[:, :16]), list(tokens[:, 16:]))
    engine.forward_backward(batch, cross_entropy)  # what is allocated once
    held = device.memory().allocated
    device.reset_peak()
    engine.forward_backward(batch, cross_entropy)
    device.synchronize()
    return device.memory().peak_allocated - held


def planned_bytes(config: ModelConfig, cp: int) -> float:
    longest = TOKENS // SEQUENCES
    setup = Setup(
        Shape("model", config),
        hardware_named("ascend_910b"),
        train=Parallel(cp, cp=cp),
        infer=Parallel(cp),
        training=TrainingLimits(TOKENS, recompute=False),
        workload=Workload(SEQUENCES, 16.0, longest - 16.0, longest - 16),
    )
    return estimate_memory(setup).phases["train"]["activations"]
