"""Adapters in every layout: gradients are peft's, a delta is counted once, and the base keeps its bits."""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion.ep_switch import weights_checksum
from fusion.model import ModelConfig, Parallel
from fusion.model.gathering import gather_tensors
from fusion.model.peft import of_peft
from fusion.model.peft_folder import adapter_params, check_adapter, described
from fusion.training import Sequences, load_checkpoint, save_checkpoint
from fusion.training.algorithms import cross_entropy
from tests.families import family_checkpoint
from tests.helpers import run_ranks
from tests.stacked import Stacked
from tests.training.ranks import Case, make_engine, my_share, sample_batch, train

LORA = {"rank": 4, "alpha": 12.0}
LAYOUTS = {
    "one": Parallel(),
    "TP2EP2": Parallel(4, tp=2, ep=2),
    "PP2": Parallel(2, pp=2),
    "ETP2": Parallel(2, etp=2),
    "EP4": Parallel(4, ep=4),
    "TP4ETP2": Parallel(4, tp=4, etp=2, ep=2),
    "TP2PP2EP2": Parallel(4, tp=2, pp=2, ep=2),
}


@cache
def checkpoint(kind: str) -> str:
    return family_checkpoint(tempfile.mkdtemp(), kind)


@cache
def adapter(kind: str) -> str:
    """A folder of peft with adapters that have learned something, of the model of a kind."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp())
    config = replace(ModelConfig.from_hf(checkpoint(kind)), adapters=adapters_of(LORA))
    described_as = described(config, checkpoint(kind))
    (folder / "adapter_config.json").write_text(json.dumps(described_as))
    model = AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, peft.LoraConfig.from_pretrained(folder))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    check_adapter(folder, config)  # as peft has written it
    return str(folder)


def adapters_of(lora: dict[str, Any]) -> Any:
    from fusion.training.config import LoraConfig

    return LoraConfig(**lora).adapters


def gradients_of_peft(kind: str, batch: Sequences) -> dict[str, torch.Tensor]:
    """Gradients of the mean cross-entropy of the trained tokens, by the names of the parameter table."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter(kind), is_trainable=True)
    losses, start = [], 0
    for length in batch.lengths:
        tokens, mask = batch.tokens[start : start + length], batch.loss_mask[start : start + length].bool()
        start += length
        if mask.any():
            logits = model(tokens.unsqueeze(0)).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")[mask[1:]])
    torch.cat(losses).mean().backward()
    found = {
        name.replace(".default.weight", ".weight"): parameter.grad
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    config = replace(ModelConfig.from_hf(checkpoint(kind)), adapters=adapters_of(LORA))
    return {name: of_peft(name, found, config) for name in adapter_params(config)}


def gradients(rank: int, device: Any, case: Case, operators: Any = None) -> dict[str, list[Any]]:
    """This rank's share of every gradient: box and values; AdamW's first moment with a decay of 0 is the gradient."""
    before = device.operators
    device.operators = operators or before
    try:
        return _gradients(device, case)
    finally:
        device.operators = before


def _gradients(device: Any, case: Case) -> dict[str, list[Any]]:
    engine = make_engine(case, device)
    engine.forward_backward(my_share(sample_batch(case.samples, case.seed), engine), cross_entropy)
    engine.optimizer_step()
    found: dict[str, list[Any]] = {}
    for chunk in engine.chunks(engine.state_dict()):
        kind, _, name = chunk.name.partition("/")
        if kind == "exp_avg" and chunk.owned:
            found.setdefault(name, []).append((chunk.offset, chunk.shape, chunk.tensor.cpu().clone()))
    return found


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("qwen3_moe", layout) for layout in ("one", "TP2EP2", "PP2", "ETP2", "EP4")),
        ("deepseek_v3", "TP2EP2"),
        *(
            pytest.param(kind, layout, marks=pytest.mark.extended)
            for kind, layout in (
                ("qwen3_moe", "TP4ETP2"),  # two ranks share a key/value head
                ("qwen3_moe", "TP2PP2EP2"),
                ("qwen2_moe", "TP2EP2"),
                ("deepseek_v2", "PP2"),
                ("glm4_moe", "ETP2"),
                ("mixtral", "EP4"),
                ("llama", "TP2PP2EP2"),
            )
        ),
    ],
)
def test_gradients_are_those_of_peft(kind, layout):
    compare(kind, LAYOUTS[layout])


def test_gradients_of_stacked_experts_are_those_of_peft():
    compare("qwen3_moe", LAYOUTS["TP2EP2"], Stacked())


def compare(kind: str, layout: Parallel, operators: Any = None) -> None:
    layout = layout if ModelConfig.from_hf(checkpoint(kind)).num_experts else replace(layout, ep=1, etp=1)
    training = {
        "betas": [0.0, 0.9],
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        "token_budget": 60,
        "load_balancing_coef": 0.0,
    }
    case = Case(checkpoint(kind), layout, training=training, lora=LORA, adapter=adapter(kind), bucket_bytes=1 << 16)
    whole: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for found in run_ranks(gradients, layout.world, case, operators):
        for name, chunks in found.items():
            for offset, shape, values in chunks:
                place = tuple(slice(start, start + size) for start, size in zip(offset, values.shape, strict=True))
                whole.setdefault(name, torch.zeros(shape))[place] += values
                written.setdefault(name, torch.zeros(shape))[place] += 1
    wanted = gradients_of_peft(kind, sample_batch(case.samples, case.seed))
    assert whole.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (written[name] == 1).all(), f"{name} is owned more than once, or not at all"
        torch.testing.assert_close(whole[name], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=1e-5, msg=name)


def ten_steps(rank: int, device: Any, case: Case) -> dict[str, Any]:
    engine = make_engine(case, device)
    batch = my_share(sample_batch(case.samples, case.seed), engine)
    before, base = weights_checksum(engine.model, base_only=True), engine.logprobs(batch)[0]
    for _ in range(10):
        engine.forward_backward(batch, cross_entropy)
        engine.optimizer_step()
    with engine.using_weights(None):
        reference = engine.logprobs(batch)[0]
    return {
        "unchanged": weights_checksum(engine.model, base_only=True) == before,
        "reference": torch.equal(reference, base),
        "learned": float((engine.logprobs(batch)[0] - base)[batch.loss_mask.bool()].sum()),
    }


def test_the_base_keeps_its_bits_and_is_the_reference():
    """Adapters begin as nothing, so that what the model computes first is the reference's."""
    case = Case(checkpoint("qwen3_moe"), LAYOUTS["TP2EP2"], training={"lr": 1e-2}, lora=LORA, samples=6)
    for found in run_ranks(ten_steps, 4, case):
        assert found["unchanged"] and found["reference"] and found["learned"] > 0


def save(rank: int, device: Any, case: Case, folder: str) -> dict[str, torch.Tensor]:
    engine = make_engine(case, device)
    engine.forward_backward(my_share(sample_batch(case.samples, case.seed), engine), cross_entropy)
    engine.optimizer_step()
    save_checkpoint(engine, folder)
    return {name: tensor for name, tensor in gather_tensors(engine.model) if tensor is not None}


def load(rank: int, device: Any, case: Case, folder: str) -> dict[str, torch.Tensor]:
    engine = make_engine(case, device)
    load_checkpoint(engine, folder)
    return {name: tensor for name, tensor in gather_tensors(engine.model) if tensor is not None}


def test_a_checkpoint_has_the_adapters_alone_and_is_loaded_in_another_layout(tmp_path):
    case = Case(checkpoint("qwen3_moe"), LAYOUTS["TP2EP2"], lora=LORA)
    saved = run_ranks(save, 4, case, str(tmp_path / "at"))[0]
    loaded = run_ranks(load, 2, case._replace(layout=LAYOUTS["ETP2"], seed=9), str(tmp_path / "at"))[0]
    assert saved.keys() == loaded.keys() and all(".lora_" in name for name in saved)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    tensors = json.loads((tmp_path / "at" / "tensors.json").read_text())
    assert "lora_A" in json.dumps(tensors) and "embed_tokens" not in json.dumps(tensors)
    with pytest.raises(RuntimeError, match="training.lora: .*rank=4.*; this run has .*rank=2"):
        run_ranks(load, 1, case._replace(layout=Parallel(), lora={"rank": 2}), str(tmp_path / "at"))


@pytest.mark.parametrize(
    "kind, stages",
    [("glm4_moe", 3), pytest.param("deepseek_v3", 4, marks=pytest.mark.extended)],
)
def test_a_stage_whose_layers_have_no_adapters_passes_gradients_on(kind, stages):
    """Only routed experts have some, and the layers of the first stage are dense."""
    case = Case(checkpoint(kind), steps=2, lora=LORA | {"targets": ["experts"]}, training={"clip_grad": 1e-3})
    (one,) = run_ranks(train, 1, case)
    for result in run_ranks(train, stages, case._replace(layout=Parallel(stages, pp=stages))):
        for step, metrics in enumerate(result["steps"]):
            assert metrics == pytest.approx(one["steps"][step], rel=1e-5, abs=1e-7)


def test_a_rank_without_adapters_saves_and_loads_nothing(tmp_path):
    layout, lora = Parallel(3, pp=3), LORA | {"targets": ["experts"]}
    case = Case(checkpoint("glm4_moe"), layout, lora=lora, dtype="bfloat16")
    saved = run_ranks(save, 3, case, str(tmp_path / "at"))[0]
    for again in (case, case._replace(layout=Parallel())):
        loaded = run_ranks(load, again.layout.world, again._replace(seed=9), str(tmp_path / "at"))[0]
        assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
