"""Track the groups in progress: their prompts and scored samples, until each ends trained, filtered or failed.

generated samples ──────────────────────────────► admission: observe_generated
scored samples ─► all of a group ─┬─ trainable ─► admission: observe_scored ─► … take: trained
                                  └─ not ───────► admission: observe_filtered, observe_failed; the queue drops them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distqueue import DistQueue
from fusion.rewards import RewardOutcome
from fusion.telemetry import RunFolder
from fusion.training.algorithms import Algorithm
from stalesync.admission import Admission
from stalesync.prompts import Prompt
from stalesync.samples import GeneratedSample, ScoredSample


@dataclass
class Groups:
    """Tracks the groups of a run. ``size``: number of samples of a group."""

    size: int
    admission: Admission
    prompts: dict[str, Prompt]
    """Prompts of all groups that have not ended, by id; shared with the scorer"""
    algorithm: Algorithm
    queue: DistQueue
    folder: RunFolder
    scored: dict[str, list[ScoredSample]] = field(default_factory=dict)
    """Scored samples by group, of groups that have not ended"""
    num_failed_rewards: int = 0
    """Number of samples that could not be scored since the start of the run"""
    step: int = 1
    """The step in whose record an ended group is logged: the current one or, while a checkpoint is taken, the last one,
    which the checkpoint contains"""
    _ended: list[ScoredSample] = field(default_factory=list)
    """Samples of groups that failed or were filtered since `take`"""

    def admit(self, prompts: Iterable[Prompt]) -> None:
        """Admits a group for each prompt."""
        admitted = {prompt.id: prompt for prompt in prompts}
        self.prompts.update(admitted)
        self.admission.observe_admitted({group: len(prompt.ids) for group, prompt in admitted.items()})

    def note(self, generated: Sequence[GeneratedSample], scored: Sequence[ScoredSample]) -> None:
        """Records samples, and reports generated samples and completely scored groups to `Admission`."""
        for sample in generated:
            self.admission.observe_generated(sample.id, sample.response_tokens)
        for one in scored:
            group = one.prompt.id
            members = self.scored.setdefault(group, [])
            members.append(one)
            if len(members) == self.size:
                self._judge(group, members)

    def take(self, trained: Iterable[str]) -> tuple[dict[str, list[ScoredSample]], list[ScoredSample]]:
        """Removes groups that are going to be trained; returns their samples by group, and the samples of all groups
        that ended since the last call, by id."""
        groups = {group: self.scored.pop(group) for group in trained}
        for group in groups:
            del self.prompts[group]
        samples = [sample for members in groups.values() for sample in members] + self._ended
        self._ended = []
        return groups, sorted(samples, key=lambda sample: sample.id)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain JSON; ``expected`` lists the groups with unscored samples, for readers of the file."""
        return {
            "texts": [asdict(prompt) for prompt in self.prompts.values()],
            "expected": sorted(group for group in self.prompts if len(self.scored.get(group, ())) < self.size),
            "scored": [_plain(sample) for members in self.scored.values() for sample in members],
            "failed_rewards": self.num_failed_rewards,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state into this new object; other keys are ignored."""
        self.num_failed_rewards = state["failed_rewards"]
        for fields in state["texts"]:
            self.prompts[fields["id"]] = Prompt(**fields | {"ids": tuple(fields["ids"])})
        for fields in state["scored"]:
            outcome, group = RewardOutcome(**fields["outcome"]), fields["group"]
            others = {key: value for key, value in fields.items() if key not in ("outcome", "group")}
            sample = ScoredSample(prompt=self.prompts[group], outcome=outcome, **others)
            self.scored.setdefault(group, []).append(sample)

    def _judge(self, group: str, members: list[ScoredSample]) -> None:
        """Decides whether a group whose samples are all scored may be trained, or ends."""
        errors = [member.outcome.error for member in members]
        self.num_failed_rewards += sum(error is not None for error in errors)
        if all(errors):
            why = f"reward_{errors[0]}"
            self.admission.observe_failed(group, why)
            self._end(group, f"failed:{why}", why)
        elif rule := self.algorithm.filter_rule([member.outcome.reward for member in members]):
            self.admission.observe_filtered(group, rule)
            self._end(group, f"filtered:{rule}", rule)
        else:
            self.admission.observe_scored(group, sum(one.tokens for one in members if one.outcome.error is None))

    def _end(self, group: str, ended: str, reason: str) -> None:
        """Ends a group that is not trained: drops its samples from the queue."""
        self.folder.log_groups(self.step, [group], ended)
        members = self.scored.pop(group)
        del self.prompts[group]
        self.queue.drop([member.id for member in members], reason)
        self._ended += members


def _plain(sample: ScoredSample) -> dict[str, Any]:
    fields = asdict(sample)
    return fields | {"group": fields.pop("prompt")["id"]}
