"""Track the groups in progress: their prompts and scored samples, until each ends trained, filtered or failed.

generated samples ──────────────────────────────► admission: observe_generated
scored samples ─► all of a group ─┬─ trainable ─► admission: observe_scored ─► … take: trained
                                  └─ not ───────► admission: observe_filtered, observe_failed; the queue drops them
lost samples ─────► cannot be scored, if they were not yet; a group of which no sample is left has failed
failed environment ─► admission: observe_cancelled; the group ends when no engine has a request of it
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from distqueue import DistQueue, LostSample
from fusion.rewards import RewardOutcome
from fusion.rollout.types import conversation_of
from fusion.telemetry import RunFolder
from fusion.training.algorithms import Algorithm
from stalesync.loop.reference_stream import ReferenceStream
from stalesync.loop.sample_columns import SampleColumns
from stalesync.policy.admission import Admission
from stalesync.policy.reward_history import RewardHistory
from stalesync.prompts import Prompt
from stalesync.scoring.samples import LOST, Sample, by_id

ENVIRONMENT = "env_"
"""How the reason begins for which a group fails whose environment failed"""
log = logging.getLogger(__name__)


@dataclass
class Cancelled:
    """A group that ends because of an environment. ``arrived``: its finished samples, which are scored all the same;
    ``missing``: its other members, until they are reported."""

    why: str
    arrived: set[str]
    missing: set[str]


@dataclass
class Groups:
    """Track the groups of a run. ``size``: number of samples of a group."""

    size: int
    admission: Admission
    prompts: dict[str, Prompt]
    """Prompts of all groups that have not ended, by id; shared with the scorer"""
    algorithm: Algorithm
    queue: DistQueue
    folder: RunFolder
    reference: ReferenceStream | None = None
    """Computes the reference of complete groups; None: there is none"""
    rewards: RewardHistory | None = None
    """Rewards of the groups that may be trained, by row; None: they are not needed"""
    scored: dict[str, list[Sample]] = field(default_factory=dict)
    """Scored samples by group, of groups that have not ended; of complete groups in order of ids"""
    num_failed_rewards: int = 0
    """Number of samples that could not be scored since the start of the run"""
    step: int = 1
    """The step whose record has an ended group: the current or, in a checkpoint that is taken, the last"""
    lost: set[str] = field(default_factory=set)
    """Samples that the queue has lost"""
    num_noted_lost: int = 0
    """Number of samples that were passed to `note_lost`"""
    _ended: list[Sample] = field(default_factory=list)
    """Samples of groups that failed or were filtered since `take`"""
    _places: dict[str, int] = field(default_factory=dict)
    """Groups at the last `take`, in the order in which they were admitted"""
    _discarded: dict[str, list[str]] = field(default_factory=dict)
    """Reason → samples of groups that have ended, which the queue is about to drop"""
    _given_up: set[str] = field(default_factory=set)
    """Lost samples that were counted without having arrived; they may arrive after all"""
    _cancelled: dict[str, Cancelled] = field(default_factory=dict)
    """Groups whose environment has failed, until they end"""

    def admit(self, prompts: Iterable[Prompt]) -> None:
        admitted = {prompt.id: prompt for prompt in prompts}
        self.prompts.update(admitted)
        self.admission.observe_admitted({group: len(prompt.ids) for group, prompt in admitted.items()})

    def note(self, generated: Sequence[Sample], scored: Sequence[Sample]) -> None:
        """Record samples, and report generated samples and completely scored groups to `Admission`."""
        if self._given_up:
            generated = [sample for sample in generated if sample.id not in self._given_up]
            scored = [sample for sample in scored if sample.id not in self._given_up]
        self._record(generated, scored)

    def note_lost(self, lost: Sequence[LostSample]) -> list[Sample]:
        """Record samples that the queue has lost. One that was not taken from the queue yet counts as generated and
        cannot be scored, and is returned; one that was is lost to training only."""
        self.num_noted_lost += len(lost)
        given_up = []
        for one in lost:
            self.lost.add(one.id)
            log.error("sample %r has ended as %s", one.id, one.reason)
            entry = self.admission.buffer.entries.get(conversation_of(one.id))
            is_last = entry is not None and entry.name == one.id  # an earlier branch is lost to training only
            if one.group in self.prompts and entry is not None and is_last and entry.state in ("running", "away"):
                prompt = self.prompts[one.group]
                sample = Sample(entry.id, prompt, "", len(prompt.ids), entry.generated)
                sample.row_tokens = (entry.load,) * (entry.branch + 1) if entry.branch else ()
                sample.outcome = RewardOutcome(None, error=LOST, detail=one.reason)
                self._given_up.add(entry.id)
                given_up.append(sample)
                self._record([sample], [sample], lost=True)
        return given_up

    def cancel(self, group: str, kind: str) -> None:
        """Begin to end a group, as the environment of one of its members has failed."""
        ids, entries = self.ids_of(group), self.admission.buffer.entries
        why, arrived = f"{ENVIRONMENT}{kind}", {id for id in ids if entries[id].state == "finished"}
        self._cancelled[group] = Cancelled(why, arrived, missing={*ids} - arrived)
        self.admission.observe_cancelled(group, why)

    def end_cancelled(self) -> list[Sample]:
        """End the cancelled groups of which no engine has a request and whose finished samples are scored. Return the
        members that will not arrive, once: as samples without a response."""
        missing: list[Sample] = []
        for group, one in [*self._cancelled.items()]:
            if group in self.admission.ledger.in_flight:
                continue
            prompt = self.prompts[group]
            missing += [Sample(id, prompt, "", len(prompt.ids), 0) for id in sorted(one.missing)]
            one.missing.clear()
            if len(self.scored.setdefault(group, [])) == len(one.arrived):
                del self._cancelled[group]
                self._end(group, f"failed:{one.why}", one.why)
        self._drop_discarded()
        return missing

    def ids_of(self, group: str) -> list[str]:
        return [f"{group}/{member}" for member in range(self.size)]

    def log_unstarted(self, group: str, kind: str) -> None:
        """Record a group that was not admitted, as its environment does not begin."""
        ended = f"failed:{ENVIRONMENT}{kind}"
        self.folder.log_groups(self.step, [group], ended)
        self.admission.ledger.ended[ended] += 1

    def untrained(self, groups: Sequence[str], samples: SampleColumns) -> list[str]:
        """Return those of the groups, whose ``samples`` were passed to training, of which every sample was lost."""
        left = samples.without_errors
        if self.lost:
            left = left.where([self.lost.isdisjoint(sample.rows) for sample in left.samples])
        trained = set(left.groups)
        return [group for group in groups if group not in trained]

    def log_trained(self, groups: Sequence[str], samples: SampleColumns, lost: Iterable[str]) -> None:
        """Record how the groups that `take` returned last ended, in the order in which they were admitted, and the
        lengths of their ``samples``, which are in order of ids; ``lost``: those of which no sample was left."""
        first_of = {samples.groups[first]: first for first in range(0, len(samples), self.size)}
        """Group → the position of its first sample"""
        untrained, ledger = set(lost), self.admission.ledger
        of_members = {"response_tokens": samples.sampled_tokens}
        if any(samples.observed_tokens):
            of_members["observation_tokens"] = samples.observed_tokens
        groups = sorted(groups, key=self._places.__getitem__)
        outcomes = [(f"failed:{LOST}" if group in untrained else "trained", ledger.lag(group)) for group in groups]
        for (ended, lag), run in groupby(zip(outcomes, groups, strict=True), key=itemgetter(0)):
            ended_so = [group for _, group in run]
            firsts = [first_of[group] for group in ended_so]
            tokens: dict[str, list[Any]] = {"prompt_tokens": [samples.prompt_tokens[first] for first in firsts]}
            for name, lengths in of_members.items():
                tokens[name] = [lengths[first : first + self.size] for first in firsts]
            self.folder.log_groups(self.step, ended_so, ended, lag=lag, tokens=tokens)

    def _record(self, generated: Sequence[Sample], scored: Sequence[Sample], *, lost: bool = False) -> None:
        response_tokens = {sample.id: sample.response_tokens for sample in generated}
        assert len(response_tokens) == len(generated), "a sample has arrived twice"
        for sample in generated if self._cancelled else ():
            if (cancelled := self._cancelled.get(sample.group)) is not None:
                cancelled.arrived.add(sample.id)
                cancelled.missing.discard(sample.id)
        self.admission.observe_generated(response_tokens, lost=lost)
        for one in scored:
            group = one.prompt.id
            if (members := self.scored.get(group)) is None:
                members = self.scored[group] = []
            members.append(one)
            if len(members) == self.size:
                members.sort(key=by_id)
                self._judge(group, members)
        self._drop_discarded()

    def _drop_discarded(self) -> None:
        discarded, self._discarded = self._discarded, {}
        for reason, ids in discarded.items():  # one call of the queue, however many groups have ended
            self.queue.drop(ids, reason)

    def take(self, trained: Sequence[str]) -> tuple[SampleColumns, SampleColumns]:
        """Remove groups that are going to be trained; return their samples, and the samples of all groups that ended
        since the last call, both in order of ids."""
        self._places = {group: place for place, group in enumerate(self.prompts)}
        groups = [self.scored.pop(group) for group in trained]
        for group in trained:
            del self.prompts[group]
        # An id is that of its group, a slash and a number, and members are in order: so are those of sorted groups.
        groups.sort(key=lambda members: members[0].id)
        samples = SampleColumns.of(list(chain.from_iterable(groups)))
        ended, self._ended = self._ended, []
        return samples, SampleColumns.of(sorted([*samples.samples, *ended], key=by_id)) if ended else samples

    def state_dict(self) -> dict[str, Any]:
        return {
            "texts": [prompt.state_dict() for prompt in self.prompts.values()],
            "scored": [sample.state_dict() for members in self.scored.values() for sample in members],
            "failed_rewards": self.num_failed_rewards,
            **({} if self.rewards is None else {"rewards": self.rewards.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state into this new object; other keys are ignored."""
        self.num_failed_rewards = state["failed_rewards"]
        if self.rewards is not None:
            self.rewards.load_state_dict(state.get("rewards", {}))
        for fields in state["texts"]:
            self.prompts[fields["id"]] = Prompt(**fields | {"ids": tuple(fields["ids"])})
        for fields in state["scored"]:
            group = fields["group"]
            self.scored.setdefault(group, []).append(Sample.restore(self.prompts[group], fields))
        for members in self.scored.values():  # a state of an earlier format has them in order of arrival
            if len(members) == self.size:
                members.sort(key=by_id)

    def _judge(self, group: str, members: list[Sample]) -> None:
        """Decide whether a group whose samples are all scored may be trained, or end."""
        rewards, errors, tokens = list[float | None](), list[str](), 0
        for member in members:
            outcome = member.outcome
            rewards.append(outcome.reward)
            if outcome.error is None:
                tokens += member.tokens
            else:
                errors.append(outcome.error)
        self.num_failed_rewards += len(errors)
        if len(errors) == len(members):
            why = LOST if errors[0] == LOST else f"reward_{errors[0]}"
            self.admission.observe_failed(group, why)
            self._end(group, f"failed:{why}", why)
        elif rule := self.algorithm.filter_rule(rewards):
            self.admission.observe_filtered(group, rule)
            self._end(group, f"filtered:{rule}", rule)
        else:
            if self.rewards is not None:
                self.rewards.observe({member.id: member.outcome.reward for member in members})
            self.admission.observe_scored(group, tokens)
            if self.reference is not None:
                self.reference.observe(members)

    def _end(self, group: str, ended: str, reason: str) -> None:
        """End a group that is not trained; `_record` drops its samples from the queue."""
        self.folder.log_groups(self.step, [group], ended)
        members = self.scored.pop(group)
        del self.prompts[group]
        self._discarded.setdefault(reason, []).extend(row for member in members for row in member.rows)
        self._ended += members
