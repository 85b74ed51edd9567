"""Run the reference and the reward model on one card.

cards that train   the trainer computes with the reference's weights in the training layout; the reward model is a
                   separate model; the weights of both are kept on the host (`FrozenWeights`). The reference of a policy
                   with adapters is its base: the trainer computes without them, and nothing is kept
separate cards     both are separate models, which stay in HBM
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from fusion.colocate.frozen.residency import Residency, choose_residency
from fusion.colocate.frozen.retokenize import Retokenizer
from fusion.colocate.frozen.scoring import sequence_scores, token_logprobs
from fusion.colocate.frozen.weights import FrozenWeights
from fusion.colocate.meshes import Meshes
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights.policy import PolicyWeights
from fusion.model import Buckets, Mesh, ModelConfig, Transformer, load_weights
from fusion.npu import Device
from fusion.offload import HostPool, Offloader
from fusion.rewards import RewardOutcome
from fusion.rewards.outcome import usable
from fusion.training import Sequences, TrainEngine


class FrozenRoles:
    """The frozen roles of a card. Constructed before the trainer, while memory suffices to copy the reference.
    ``on_host``: weights that are kept on this card's host, by role; ``reference``, ``reward_model``: separate models;
    None if the card has none; ``loaded``: checksums of what this card has loaded, by role and file (`load_weights`)."""

    def __init__(
        self, *, spec: WorkerSpec, rank: int, device: Device, meshes: Meshes, policy: PolicyWeights, pool: HostPool
    ):
        self.spec, self.device, self.meshes, self.policy = spec, device, meshes, policy
        self.offloader = Offloader(device, pool, spec.fusion.bucket_bytes)
        self.residency: Residency = "beside"
        self.on_host: dict[str, FrozenWeights] = {}
        self.reference: Transformer | None = None
        self.reward_model: Transformer | None = None
        self.retokenize: Retokenizer | None = None
        self.loaded: dict[str, dict[str, int]] = {}
        if meshes.reference is not None:
            self.reference = self._load("reference", spec.policy().base, spec.model.path, mesh=meshes.reference)
        elif rank in spec.deployment.reference and spec.training.lora.adapters is None:
            self.on_host["reference"] = FrozenWeights(self._copy_of_trainer(), device, pool)
        reward = spec.reward_model
        if meshes.reward_model is not None and reward is not None:
            config = ModelConfig.from_hf(reward.path)
            self.reward_model = self._load("reward_model", config, reward.path, mesh=meshes.reward_model)
            if policy.train is not None:
                self.on_host["reward_model"] = FrozenWeights(self.reward_model.weights, device, pool)
            if reward.retokenize:
                ends = spec.detokenizer.end_token_ids if spec.detokenizer else ()
                self.retokenize = Retokenizer(spec.model.path, reward.path, ends)

    def choose_residency(self, free_bytes: int) -> None:
        """Choose the residency when the trainer is in HBM. ``free_bytes``: the minimum over all cards."""
        needed = sum(frozen.weights.nbytes for frozen in self.on_host.values())
        fusion = self.spec.fusion
        self.residency = choose_residency(fusion.deployment, fusion.resident, free_bytes=free_bytes, role_bytes=needed)
        if self.residency == "all":
            for frozen in self.on_host.values():
                frozen.make_resident()

    @property
    def needs_room(self) -> bool:
        """Whether roles must still be loaded into HBM, so that the optimizer stays on the host until training."""
        return bool(self.on_host) and self.residency != "all"

    @contextmanager
    def reference_in_hbm(self, trainer: TrainEngine | None) -> Iterator[None]:
        """Keep the reference's weights in HBM during the block; without separate cards the trainer computes with
        them. While it accumulates gradients, which have their memory, they replace the actor's weights."""
        with self._in_hbm("reference", trainer is not None and trainer.accumulating):
            if self.reference is not None:
                yield
                return
            assert trainer is not None
            held = self.on_host.get("reference")
            with trainer.using_weights(None if held is None else held.weights):
                yield

    def reward_model_in_hbm(self) -> AbstractContextManager[None]:
        return self._in_hbm("reward_model")

    def logprobs(self, sequences: Sequences, trainer: TrainEngine | None) -> torch.Tensor:
        """Return float32 [N] on the CPU: the reference's log-probability of every response token. Called in
        `reference_in_hbm`; collective over the reference's mesh, which is the trainer's unless the reference has
        separate cards."""
        if self.reference is None:
            assert trainer is not None
            return trainer.logprobs(sequences)[0]
        return token_logprobs(
            self.reference,
            sequences,
            token_budget=self.spec.training.token_budget,
            temperature=self.spec.temperature,
            share=self.spec.training.share_prefixes,
        )

    def scores(self, samples: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[RewardOutcome]:
        """Return one outcome per sample (prompt, response: int64 [L]). In `reward_model_in_hbm`, collective."""
        assert self.reward_model is not None
        tokens = [self._reward_tokens(prompt, response) for prompt, response in samples]
        max_length = self.reward_model.config.max_positions
        fits = [index for index, ids in enumerate(tokens) if 0 < len(ids) <= max_length]
        values = sequence_scores(self.reward_model, [tokens[index] for index in fits], self.spec.training.token_budget)
        scores = dict(zip(fits, values, strict=True))
        return [_outcome(scores.get(index), len(ids), max_length) for index, ids in enumerate(tokens)]

    def _reward_tokens(self, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
        """Return a sample in the reward model's tokens, int64 [L]."""
        if self.retokenize is None:
            return torch.cat([prompt, response])
        return torch.tensor(self.retokenize(prompt.tolist(), response.tolist()), dtype=torch.int64)

    @contextmanager
    def _in_hbm(self, role: str, replacing: bool = False) -> Iterator[None]:
        if role not in self.on_host:
            yield
            return
        assert self.policy.train is not None
        residency: Residency = "one" if replacing and self.residency == "beside" else self.residency
        with self.on_host[role].in_hbm(residency, self.policy.train.weights, self.offloader):
            yield

    def _load(self, role: str, config: ModelConfig, path: str, *, mesh: Mesh) -> Transformer:
        dtype, bucket_bytes = self.spec.model.torch_dtype, self.spec.fusion.bucket_bytes
        model = Transformer(config.without_predictors, mesh, self.device, dtype=dtype, bucket_bytes=bucket_bytes)
        model.requires_grad_(False)
        self.loaded[role] = load_weights(model, path)
        return model

    def _copy_of_trainer(self) -> Buckets:
        assert self.policy.train is not None
        source = self.policy.train.weights
        apart = [param for param in source.apart if param.storage == "card"]
        copy = Buckets(source.plans, self.device, source.dtype, owner="weights", apart=apart)
        copy.card.copy_(source.card)
        for into, flat in zip(copy.flats, source.flats, strict=True):
            into.copy_(flat)
        return copy


def _outcome(score: float | None, length: int, max_length: int) -> RewardOutcome:
    if score is None:
        return RewardOutcome(None, "too_long", f"{length} tokens; the reward model has {max_length} positions")
    if not usable(score):
        return RewardOutcome(None, "bad_type", f"the reward model's score is {score}")
    return RewardOutcome(score)
