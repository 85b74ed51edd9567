"""Our slices against Megatron-Core's own sharding of the same model, element by element.

Each global tensor is filled with numbers that name tensor and element. Megatron's local tensors are cut from them where
its own sharded state dict says they lie, ours where our table says; then both must hold the same numbers on each rank.
That its fused tensors mean what our table of them says, Megatron's own forward pass tells.
"""

from __future__ import annotations

import gc
import importlib.util

import pytest
import torch

from fusion.ep_switch import Layout, Switcher, plan_switch
from fusion.model import Mesh, PackedAttention, Parallel, Transformer, global_params, local_params
from fusion.model.formats import MEGATRON, megatron
from fusion.training.backends.megatron_model import MegatronModel
from tests.ep_switch.megatron_peer import Refit, build_peer, megatron_layout, why_not
from tests.ep_switch.switching import BUCKET, assert_filled, fill
from tests.families import family_config
from tests.helpers import run_ranks, tiny_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed (pip install -e .[megatron])",
    ),
]

WORLD4 = (0, 1, 2, 3)
UNTIED = tiny_config(tie_word_embeddings=False, num_hidden_layers=4)
TIED = tiny_config(num_hidden_layers=4)
LATENT = family_config("deepseek_v3")
LOW_RANK = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
LAYOUTS = {
    "TP2EP2": Parallel(4, tp=2, ep=2),
    "TP2PP2": Parallel(4, tp=2, pp=2),
    "TP2ETP2EP2": Parallel(4, tp=2, ep=2, etp=2),
    "TP2PP2ETP2": Parallel(4, tp=2, pp=2, etp=2),
    "EP4": Parallel(4, ep=4),
}


def numbered(config) -> dict[str, torch.Tensor]:
    """Every global tensor with elements that occur nowhere else in the model, exact in float32."""
    tensors, count = {}, 0
    for name, shape in global_params(config).items():
        numel = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(count, count + numel, dtype=torch.float32).view(shape)
        count += numel
    assert count < 1 << 24
    return tensors


def assemble(table, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Local tensors by name, cut from global ones by a table."""
    locals_ = {}
    for param in table:
        local = torch.full(param.shape, torch.nan)
        for part in param.parts:
            part.view(local).copy_(values[part.name][tuple(slice(*span) for span in part.region)])
        locals_[param.name] = local
    return locals_


def spread(table, locals_: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """Global tensors that hold what a rank holds, and NaN elsewhere."""
    tensors = {name: torch.full(shape, torch.nan) for name, shape in global_params(config).items()}
    for param in table:
        for part in param.parts:
            box = tensors[part.name][tuple(slice(*span) for span in part.region)]
            piece = part.view(locals_[param.name])
            assert bool((box.isnan() | (box == piece)).all()), f"{param.name} contradicts itself"
            box.copy_(piece)
    return tensors


def fill_by_megatron(model, whole: dict[str, torch.Tensor]) -> int:
    """Writes every local tensor from the global ones where Megatron's sharded state dict says it lies."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    written = 0
    for name, entry in model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp}).items():
        shards = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for shard in shards:
            if not isinstance(shard, ShardedTensor):
                continue
            stacked, words = list(shard.global_offset[: shard.prepend_axis_num]), name.split(".")
            numbers = [i for i, word in enumerate(words) if word.isdigit()]
            for place, number in zip(numbers, stacked, strict=True):  # layer, then expert
                words[place] = str(number)
            source = whole[".".join(words)]
            assert tuple(source.shape) == tuple(shard.global_shape[len(stacked) :]), name
            starts = shard.global_offset[len(stacked) :]
            window = tuple(slice(at, at + size) for at, size in zip(starts, shard.local_shape, strict=True))
            shard.data.data.copy_(source[window])
            written += shard.data.numel()
    return written


def computed_with(config, parallel, rank):
    """The embedded table without the correction biases of other stages."""
    own = parallel.layers(config.num_layers, parallel.coordinate("pp", rank))
    return [param for param in local_params(config, parallel, rank) if param.storage == "unit" or param.layer in own]


def assert_share(held, config, tp_rank, tp):
    """Rows of a whole tensor that TP cuts evenly, and nothing else."""
    if held.isnan().all():  # of another stage
        return
    rows = len(held) // tp
    present = ~held.isnan().any(1)
    assert present.nonzero().flatten().tolist() == list(range(tp_rank * rows, (tp_rank + 1) * rows))


def compare(rank, device, config, parallel):
    values = numbered(config)
    whole = assemble(megatron.local_params(config, Parallel(), 0), values)
    if config.tie_embeddings:
        whole["output_layer.weight"] = whole["embedding.word_embeddings.weight"]
    with megatron_layout(parallel), torch.no_grad():
        model = build_peer(config, parallel, rank, device)
        for param in model.parameters():
            param.fill_(torch.nan)
        fill_by_megatron(model, whole)
        theirs = {name: param.detach().cpu() for name, param in model.named_parameters()}
    table = megatron.local_params(config, parallel, rank)
    their_table = [param for param in table if param.storage == "unit" or param.name.startswith("decoder.")]
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {p.name: p.shape for p in their_table}
    ours_table = computed_with(config, parallel, rank)
    ours = spread(ours_table, assemble(ours_table, values), config)
    for name, held in spread(their_table, theirs, config).items():
        if parallel.tp > 1 and name.endswith(LOW_RANK):  # Megatron cuts them, the embedded trainer does not
            assert_share(held, config, parallel.coordinate("tp", rank), parallel.tp)
            continue
        same = torch.equal(held.nan_to_num(-1), ours[name].nan_to_num(-1))
        assert same, f"rank {rank} holds other elements of {name} than Megatron gives it"
    return sum(int((~tensor.isnan()).sum()) for tensor in ours.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [UNTIED, TIED, LATENT], ids=["untied", "tied", "latent"])
def test_every_rank_holds_the_elements_that_megatron_gives_it(layout, config):
    held = run_ranks(compare, 4, config, LAYOUTS[layout])
    total = sum(tensor.numel() for tensor in numbered(config).values())
    assert all(0 < count < total for count in held) and sum(held) >= total


def there_and_back(rank, device, config, layouts):
    """Every element bitwise after every switch, the peak by the allocator within the plan's bound."""
    train, infer = (Mesh.create(layout.parallel) for layout in layouts)
    ours = MegatronModel(config, train, device, bucket_bytes=BUCKET)
    models = [ours, Transformer(config, infer, device, bucket_bytes=BUCKET, share=ours.weights, resident=False)]
    fill(models[0])
    shared_bytes = []
    for _ in range(2):
        for source, target in ((0, 1), (1, 0)):
            plan = plan_switch(layouts[source], layouts[target], BUCKET)
            switcher = Switcher(plan, models[source], models[target], device=device)
            gc.collect()
            storages = [flat.untyped_storage() for flat in models[source].weights.flats]
            held = {storage.data_ptr(): storage.nbytes() for storage in storages}
            others = device.memory().allocated - sum(held.values())
            device.reset_peak()
            switcher.run()
            peak = device.memory().peak_allocated - others
            assert_filled(models[target], via=layouts[source].dtype)
            rounding = 512 * (len(plan.source.units(rank)) + len(plan.target.units(rank)) + 4)
            assert peak <= plan.peak_bytes(rank) + rounding and plan.peak_bytes(rank) <= plan.bound_bytes(rank)
            shared_bytes.append(len(plan.shared_units(rank)))
    return shared_bytes


SWITCHES = {
    "TP2EP2 to EP4": (UNTIED, Parallel(4, tp=2, ep=2), Parallel(4, ep=4)),
    "PP2EP2 to TP2EP2": (TIED, Parallel(4, pp=2, ep=2), Parallel(4, tp=2, ep=2)),
    "TP2EP2ETP2 to TP4EP4": (UNTIED, Parallel(4, tp=2, ep=2, etp=2), Parallel(4, tp=4, ep=4)),
    "EP4 to EP4": (UNTIED, Parallel(4, ep=4), Parallel(4, ep=4)),
    "latent, PP2TP2EP2 to TP4EP4": (LATENT, Parallel(4, tp=2, ep=2, pp=2), Parallel(4, tp=4, ep=4)),
    "latent, TP2EP2ETP2 to EP4": (LATENT, Parallel(4, tp=2, ep=2, etp=2), Parallel(4, ep=4)),
    "sandwich norms, TP2EP2 to TP2EP2": (
        family_config("pangu_ultra_moe"),
        Parallel(4, tp=2, ep=2),
        Parallel(4, tp=2, ep=2),
    ),
    "gated shared expert, TP4EP2 to EP4": (
        family_config("qwen2_moe", num_key_value_heads=4),
        Parallel(4, tp=4, ep=2),
        Parallel(4, ep=4),
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_between_the_formats_are_bitwise_and_within_the_bound(name):
    config, train, infer = SWITCHES[name]
    layouts = [Layout(config, train, WORLD4, bucket_bytes=BUCKET, format=MEGATRON)]
    layouts.append(Layout(config, infer, WORLD4, bucket_bytes=BUCKET))
    shared = run_ranks(there_and_back, 4, config, layouts, timeout_s=300)
    if train == infer:
        assert all(min(units) > 0 for units in shared), "norms, routers and experts stay where they are"


def both_logits(rank, device, config):
    mesh = Mesh.single()
    generator = torch.Generator().manual_seed(3)
    values = {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in global_params(config).items()
    }
    ids = torch.randint(config.vocab_size, (11,), generator=generator).to(device.torch_device)
    positions = torch.arange(11, device=device.torch_device)
    logits = []
    for build in (Transformer, MegatronModel):
        model = build(config, mesh, device)
        for name, local in assemble(model.table, values).items():
            model.weights.views[name].copy_(local)
        with torch.no_grad():
            logits.append(model.head.logits(model(ids, positions, PackedAttention([11], model.device.operators))).cpu())
    return logits


@pytest.mark.parametrize("config", [tiny_config(tie_word_embeddings=False), LATENT], ids=["grouped", "latent"])
def test_megatron_computes_the_same_logits_from_the_same_tensors(config):
    ((ours, theirs),) = run_ranks(both_logits, 1, config)
    assert ours.std() > 0.5
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def refit_both_ways(rank, device, config, one, other):
    refit = Refit(config, device, one=one, other=other)
    return [refit.time(source, verify=True) for source in (0, 1)]


@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
@pytest.mark.parametrize("layout", ["TP2EP2", "TP2PP2"])
def test_the_peer_of_the_benchmark_copies_the_right_weights(layout):
    for seconds, peak_bytes in run_ranks(refit_both_ways, 4, UNTIED, LAYOUTS[layout], LAYOUTS["EP4"])[0]:
        assert seconds > 0 and peak_bytes > 0
