"""Run trainer, engine, switcher and frozen roles of an emulated card in modelled time: each computes like the default
one, then sleeps until its modelled end. A worker without a pace never imports this module or the cost model.

The ranks of a training step, of a switch, and of a step of an engine whose ranks exchange tokens between experts agree
on the longest duration and end together; ranks with the same schedule (TP, PP) compute the same duration."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusion.colocate.frozen.roles import FrozenRoles
from fusion.colocate.parts import WorkerParts
from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights.switching import PhaseSwitcher
from fusion.costmodel.pace import EngineCost, StepSums, SwitchCost, TrainerCost
from fusion.costmodel.roofline import attention_pairs
from fusion.costmodel.setup import SwitchLimits, limits_of
from fusion.inference import EmbeddedEngine, Output
from fusion.inference.sequence import EngineStep
from fusion.model import Mesh
from fusion.npu.pacer import Pacer
from fusion.rewards import RewardOutcome
from fusion.training import EmbeddedTrainEngine, Sequences, TrainEngine
from fusion.training.loss import Loss
from fusion.training.micro_batches import agreed, common_prefixes


def paced_parts(spec: WorkerSpec) -> WorkerParts:
    """Return the parts of a paced card of this run; all but the background switcher share one clock."""
    assert spec.pace is not None
    pace, pacer, first = spec.pace, Pacer(), spec.deployment.generate[0]
    trainer = TrainerCost(pace, spec.train, spec.training.recompute, spec.training.shares_prefixes)
    reference = replace(trainer, layout=spec.reference) if spec.reference else trainer
    reward = TrainerCost(pace, spec.reward_model.layout) if spec.reward_model else trainer
    engine = EngineCost(pace, spec.infer_of_one_engine, full_batch=spec.rollout.engine.max_seqs)
    switch = SwitchCost.of(
        pace, train=spec.train, infer=spec.infer, infer_first=first, fusion=limits_of(SwitchLimits, spec.fusion)
    )
    return WorkerParts(
        trainer=partial(PacedTrainEngine, pacer=pacer, cost=trainer),
        engine=partial(PacedEngine, pacer=pacer, cost=engine, adopt_s=switch.adopt_s),
        switcher=partial(PacedSwitcher, pacer=pacer, cost=switch),
        background_switcher=partial(PacedSwitcher, pacer=Pacer(), cost=switch),
        roles=partial(PacedRoles, pacer=pacer, reference_cost=reference, reward_cost=reward),
        pacer=pacer,
    )


def observe_load(step: EngineStep) -> StepSums:
    """Return the sums of an engine's step that its cost depends on."""
    decoding = step.decodes + [draft.seq for draft in step.verified]
    first, drafts = step.sampled[len(step.decodes) :], [(len(one) - 1, one.seq.computed + 1) for one in step.verified]
    return StepSums(
        decodes=len(decoding),
        contexts=sum(seq.computed + 1 for seq in decoding),
        first_tokens=len(first),
        first_contexts=sum(len(seq.tokens) for seq in first),
        prefill_tokens=sum(count for _, count in step.chunks),
        attended=sum(attention_pairs(count, seq.computed) for seq, count in step.chunks),
        drafted=sum(count for count, _ in drafts),
        drafted_pairs=sum(attention_pairs(*draft) for draft in drafts),
    )


class PacedEngine(EmbeddedEngine):
    """Add the time of KV copies: to the host as a separate step, except at the end of a chunk, where the copy overlaps
    with the next steps; from the host as part of a step."""

    def __init__(self, *args: Any, pacer: Pacer, cost: EngineCost, adopt_s: float = 0.0, **options: Any):
        super().__init__(*args, **options)
        self.pacer, self.cost, self.adopt_s = pacer, cost, adopt_s

    def step(self) -> list[Output]:
        outputs = super().step()
        if self.idle:
            self.pacer.rest()
        return outputs

    def suspend(self) -> list[Output]:
        before = self.parked.blocks_copied_out
        outputs = super().suspend()
        if out := self.parked.blocks_copied_out - before:
            with self.pacer.step({"kv": self.cost.out_s(self._tokens(out))}, {}):
                pass
        return outputs

    def _adopt(self, version: int) -> None:
        with self.pacer.step({"adopt": self.adopt_s}, {}):
            super()._adopt(version)

    def _compute(self, step: EngineStep) -> list[Output]:
        seconds, ideal = self.cost(observe_load(step))
        if back := sum(end - first for _, first, end in step.restored):
            seconds = {**seconds, "kv": self.cost.back_s(self._tokens(back))}
        group = self.mesh.world_group if self.mesh.ep_group is not None else None
        with self.pacer.step(seconds, ideal, group):
            return super()._compute(step)

    def _tokens(self, blocks: int) -> int:
        return blocks * self.config.engine.block_size


def common_prompts(sequences: Sequences, mesh: Mesh) -> list[int]:
    """Return how many tokens before its first trained one each sequence has in common with the one before it: what
    responses share by chance in tokens of the run, modelled ones do not. Collective over a pipeline's stages."""
    masks = sequences.loss_mask.split(sequences.lengths)
    prompts = [int(mask.to(torch.uint8).argmax()) if mask.any() else len(mask) for mask in masks]
    return list(map(min, prompts, agreed(common_prefixes(sequences), mesh)))


class PacedTrainEngine(EmbeddedTrainEngine):
    def __init__(self, *args: Any, pacer: Pacer, cost: TrainerCost, **options: Any):
        super().__init__(*args, **options)
        self.pacer, self.cost = pacer, cost

    def forward_backward(self, sequences: Sequences, loss: Loss, *, continued: bool = False) -> dict[str, float]:
        seconds = self.cost.train(sequences.lengths, common_prompts(sequences, self.mesh))
        with self.pacer.step(seconds, group=self.mesh.world_group):
            return super().forward_backward(sequences, loss, continued=continued)

    def optimizer_step(self, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        with self.pacer.step(self.cost.update()):
            return super().optimizer_step(before_update)

    def logprobs(self, sequences: Sequences, record: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        seconds = self.cost.forward(sequences.lengths, "logprobs", common_prompts(sequences, self.mesh))
        with self.pacer.step(seconds, group=self.mesh.world_group):
            return super().logprobs(sequences, record)


class PacedSwitcher(PhaseSwitcher):
    """Add the time of switches. Loading the optimizer overlaps with training; work that needs it earlier waits for it
    (kind ``onload``)."""

    def __init__(self, *, pacer: Pacer, cost: SwitchCost, **options: Any):
        super().__init__(**options)
        self.pacer, self.cost = pacer, cost
        self._arrives_s = 0.0

    def to_infer(self, version: int, share: InferenceShare, while_generating: bool = False) -> None:
        with self._paced(self.cost.infer_s, self.meshes.actor):
            super().to_infer(version, share, while_generating)

    def to_train(self) -> None:
        with self._paced(self.cost.train_s, self.meshes.trainers):
            super().to_train()

    def load_optimizer(self) -> None:
        if self._away(self.optimizer):
            self._arrives_s = self.pacer.now + self.cost.onload_s
        super().load_optimizer()

    def await_optimizer(self) -> None:
        super().await_optimizer()
        if self.pacer.stepping:
            self.pacer.until(self._arrives_s, "onload")

    def _paced(self, seconds: float, group: Any) -> Any:
        return self.pacer.step({"switch": seconds}, {}, group)


class PacedRoles(FrozenRoles):
    def __init__(self, *, pacer: Pacer, reference_cost: TrainerCost, reward_cost: TrainerCost, **options: Any):
        super().__init__(**options)
        self.pacer, self.reference_cost, self.reward_cost = pacer, reference_cost, reward_cost

    def logprobs(self, sequences: Sequences, trainer: TrainEngine | None) -> torch.Tensor:
        if self.reference is None:
            return super().logprobs(sequences, trainer)  # the trainer's pace
        common = common_prompts(sequences, self.reference.mesh)
        seconds = self.reference_cost.forward(sequences.lengths, "logprobs", common)
        with self.pacer.step(seconds, group=self.reference.mesh.world_group):
            return super().logprobs(sequences, trainer)

    def scores(self, samples: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[RewardOutcome]:
        assert self.reward_model is not None
        seconds = self.reward_cost.forward([len(prompt) + len(response) for prompt, response in samples], "score")
        with self.pacer.step(seconds, group=self.reward_model.mesh.world_group):
            return super().scores(samples)
