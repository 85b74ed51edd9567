"""Hold the weights of vLLM's model in our `Buckets`.

    vLLM's nn.Module ── its parameters ── views of units ── Buckets ── allocated, released and moved by a switch
                        (on an emulated card: host views of them)

A parameter's `.data` is set again whenever the memory of its unit has been allocated again: before each forward pass
the addresses of the units are compared with those of the last one."""

from typing import Any

import torch

from fusion.inference.backends import vllm_core
from fusion.inference.backends.support import check_card
from fusion.inference.backends.vllm_checks import (
    KeyedWeights,
    check_absorbed,
    check_experts,
    check_live,
    check_recorded,
    check_tensors,
)
from fusion.inference.backends.vllm_latents import AbsorbedLatents
from fusion.inference.config import RolloutConfig
from fusion.model import Buckets, Mesh, ModelConfig, plan_units, unit_bytes
from fusion.model.formats import Format, engine_format, local_table
from fusion.model.id_mask import IdMask
from fusion.model.spec import Latent
from fusion.npu import Device


class VllmModel:
    """Start vLLM (`vllm_core.start`) and hold one rank's shard of its weights. Construction is collective.
    ``batch_invariant``: must be False: vLLM's results depend on the batch.
    ``routing``: let the engine record the experts of its tokens.
    ``share``, ``resident``: as of `Buckets`.
    Raise ImportError: vLLM is not installed.
    Raise ValueError: its model, or the layout, is not described (`fusion.model.formats.vllm`), or as `check_card` and
        `check_recorded`.
    Raise WeightsNotOurs: its tensors are not those of the table, or not what it computes from."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        device: Device,
        dtype: torch.dtype = torch.float32,
        *,
        rollout: RolloutConfig,
        routing: bool = False,
        bucket_bytes: int = 256 << 20,
        batch_invariant: bool = False,
        share: Buckets | None = None,
        resident: bool = True,
    ):
        assert not batch_invariant, "check_vllm refuses it"
        self.config, self.mesh, self.device, self.bucket_bytes = config, mesh, device, bucket_bytes
        check_card(config, device.kind)
        self.format: Format = engine_format("vllm", device.kind, device.operators)
        max_bytes, parallel = unit_bytes(bucket_bytes), mesh.parallel
        self.table = local_table(self.format, config, parallel, mesh.rank, max_bytes=max_bytes, itemsize=dtype.itemsize)
        keyed = KeyedWeights(config, dtype)
        self.core = vllm_core.start(config, mesh, device, rollout, dtype, load=keyed.load, routing=routing)
        module = self.core.module
        check_tensors(self.table, module, dtype, mesh.rank)
        keyed.check(self.table, module)
        check_experts(self.table, module)
        check_absorbed(module)
        if isinstance(config.attention, Latent):
            for path, norm in module.named_modules():  # which vLLM gives the epsilon of the other norms
                if path.endswith(("q_a_layernorm", "kv_a_layernorm")):
                    norm.variance_epsilon = config.attention.norm_eps
        check_live(self.core, self.table)
        if routing:
            check_recorded(self.core, config)
        self._params = {name: param.requires_grad_(False) for name, param in module.named_parameters()}
        for tensor in self._params.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # frees vLLM's own memory first
        self._latents = AbsorbedLatents(module, device)
        apart = [param for param in self.table if param.storage == "card"]
        units = plan_units(self.table, dtype.itemsize, max_bytes)
        self.weights = Buckets(units, device, dtype, owner="weights", share=share, resident=resident, apart=apart)
        for param in apart:
            self._params[param.name].data = device.host_view(self.weights.views[param.name])
        self._addresses: list[int] = [0] * len(self.weights.flats)
        module.register_forward_pre_hook(self._follow_storage)
        if config.masked_ids:
            model: Any = module  # which gathers the logits from all TP ranks
            mask = IdMask(config, range(config.vocab_size), next(module.parameters()).device)
            compute = model.compute_logits
            model.compute_logits = lambda hidden: mask(compute(hidden))

    def addresses(self) -> list[int]:
        """Return where the units lie that vLLM's parameters are views of from the next pass on, and copies of them."""
        self._follow_storage()
        return self._addresses + self._latents.addresses()

    def derive(self) -> None:
        """Derive what vLLM stores beside the weights from their present values, and count it as weights."""
        self._follow_storage()
        self._latents.write()

    def release_derived(self) -> None:
        """Free what `derive` has allocated."""
        self._latents.release()

    def _follow_storage(self, *inputs: Any) -> None:
        """Set the parameters' data to the views of units that have been allocated since the last pass."""
        addresses: list[int] = [flat.untyped_storage().data_ptr() for flat in self.weights.flats]
        if addresses == self._addresses:
            return
        assert all(addresses), "vLLM's weights are not resident"
        self.device.synchronize()
        for plan, now, before in zip(self.weights.plans, addresses, self._addresses, strict=True):
            if now != before:
                for param, _ in plan.entries:
                    self._params[param.name].data = self.device.host_view(self.weights.views[param.name])
        self._addresses = addresses
        self._latents.follow()
