"""Hold conversations between the engines and their environments, as decided in `conversations.py`.

    engine ─ turn ended ─► buffer: away ─ the row's text ─► EnvPool ─┬─► observation ─► the row; buffer: waiting
                                                                     ├─► another prompt; buffer: waiting, and
                                                                     ├─► `Worker.complete` ─► a finished sample
                                                                     └─► failed: its group is cancelled

Only this file and `evaluated_turns.py` ask environments. Nothing waits for one but the first messages of new groups,
whose seconds are limited by the pool. While the run is paused, for a checkpoint or an evaluation, answers are held: in
a checkpoint these conversations are away, and after a resume their turns are observed again.

A conversation, or a branch of it, is completed by a living engine's first card. If that dies meanwhile, another one
does it, unless the finished sample is in the queue."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from distqueue import Column, DistQueue, PackedBatch
from fusion.colocate import Worker
from fusion.rewards import RewardOutcome
from fusion.rollout import EndedConversation, Entry
from fusion.rollout.partial_samples import OBSERVATION, RESUMED, TURN, TURN_TOKENS, lose_rows, read_rows
from fusion.telemetry import Metrics
from stalesync.cards.cards import Cards
from stalesync.cards.stage_calls import stage_call
from stalesync.loop.groups import ENVIRONMENT, Groups
from stalesync.policy.conversations import (
    Append,
    Branch,
    Command,
    Complete,
    Conversation,
    Conversations,
    ConversationSpec,
    FailGroup,
    StepEnvironment,
)
from stalesync.process.failures import EnvironmentsFailed
from stalesync.prompts import Prompt, PromptSource
from stalesync.prompts.config import DataConfig
from stalesync.prompts.environments import Environments
from stalesync.scoring.samples import Sample
from stalesync.scoring.scoring import RESPONSE, Scorer

MAX_UNSTARTED = 1000
"""Number of prompts in a row whose environments do not begin after which the run ends"""
log = logging.getLogger(__name__)


class Conversing:
    """Converse for the groups in progress."""

    def __init__(
        self,
        *,
        environments: Environments,
        spec: ConversationSpec,
        engines: Sequence[Sequence[int]],
        cards: Cards,
        queue: DistQueue,
        groups: Groups,
        scorer: Scorer,
        source: PromptSource,
        data: DataConfig,
    ) -> None:
        self.environments, self.spec = environments, spec
        self.conversations = Conversations(spec)
        environments.tracked.append(self.conversations)
        self._engines, self._cards, self._queue, self._groups, self._scorer = engines, cards, queue, groups, scorer
        self._admission = groups.admission
        self._source, self._data = source, data
        self._to_append: list[Append] = []
        self._to_complete: dict[str, EndedConversation] = {}
        """Conversations and branches for whose end no engine was left, by the id of their sample's row"""
        self._completing: set[str] = set()
        """Conversations whose finished samples have not arrived"""
        self._to_cancel: dict[str, str] = {}
        """Group that fails → kind of failure, until none of its members is completing"""
        self._polled_s: float | None = None
        """Time of the last `poll` (`time.perf_counter`); None: the run was paused since"""
        self._metrics = Metrics()

    def next(self, count: int) -> list[Prompt]:
        """Return the next prompts, with what their environments say first; rows whose environment does not begin are
        replaced, and their groups recorded as failed."""
        prompts: list[Prompt] = []
        unstarted = 0
        while len(prompts) < count:
            drawn = self._source.next(count - len(prompts))
            started = self._start(drawn)
            prompts += started
            unstarted = 0 if started else unstarted + len(drawn)
            if unstarted > MAX_UNSTARTED:
                label = self.environments.config.label
                raise EnvironmentsFailed(f"{label}: no environment of {unstarted} prompts begins")
        return prompts

    def _start(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        started, results = list[Prompt](), self.environments.begin(prompts)
        for prompt in prompts:
            result = results[prompt.id]
            if result.failure:
                self._groups.log_unstarted(prompt.id, result.failure)
                self._observe_failed(prompt.id, result.failure, result.detail)
                continue
            try:
                prompt = self.environments.prompt(prompt, result)
            except ValueError as error:
                if self._data.long_prompts == "refuse":
                    raise EnvironmentsFailed(f"{error}, or set data.long_prompts=skip") from None
                self._metrics.add("env/long_prompts", 1, rule="sum")
                continue
            self.conversations.admit(prompt.id, self._groups.ids_of(prompt.id), result.digest)
            started.append(prompt)
        return started

    def poll(self) -> bool:
        """Pass on what engines and environments have said since the last call; return whether there was anything."""
        now = time.perf_counter()
        elapsed_s, self._polled_s = 0.0 if self._polled_s is None else now - self._polled_s, now
        self._observe_turns(self._admission.buffer.take_away())
        answers = self.environments.take()
        entries = self._admission.buffer.entries
        for stepped in answers:
            if stepped.id in entries and entries[stepped.id].state == "away":
                prompt = self._groups.prompts[entries[stepped.id].group]
                self._execute(self.environments.observe(self.conversations, stepped, prompt))
        self._append()
        for failed in self.conversations.observe_elapsed(elapsed_s):
            self._execute(failed)
        self.end_cancelled()
        self._complete()
        return bool(answers)

    def pause(self) -> None:
        """Hold the answers of environments until the next `poll`: time that passes until then does not count."""
        self._polled_s = None
        self.end_cancelled()
        self._complete()

    @property
    def num_completing(self) -> int:
        """Number of completed conversations whose samples have not arrived, and of branches that are not completed."""
        entries = self._admission.buffer.entries
        self._completing = {id for id in self._completing if id in entries and entries[id].state == "away"}
        return len(self._completing) + sum(command.continues for command in self._to_complete.values())

    def end(self, finished: Iterable[Sample]) -> None:
        if ids := [sample.id for sample in finished]:
            self.environments.pool.end(ids)

    def end_cancelled(self) -> None:
        """End groups whose environments have failed, as far as engines have returned their requests."""
        for group in [group for group in self._to_cancel if not self._awaits(group)]:
            self._groups.cancel(group, self._to_cancel.pop(group))
        self._scorer.note_lost(self._groups.end_cancelled())
        if rows := self._admission.buffer.take_left_rows():
            self._queue.drop(rows, RESUMED)

    def records(self, ids: Sequence[str], metrics: Metrics) -> dict[str, Conversation]:
        """Remove the conversations of samples of ended groups; return them by id, and add their metrics to a step's."""
        failed = [group for group in self.conversations.failed if group not in self._groups.prompts]
        taken = self.conversations.take(ids)
        self.conversations.take([id for group in failed for id in self._groups.ids_of(group)])  # which never arrived
        metrics.spread("env/num_turns", [conversation.num_turns for conversation in taken])
        if any(conversation.begins for conversation in taken):
            metrics.spread("env/num_branches", [len(conversation.begins) + 1 for conversation in taken])
        metrics.spread("env/num_tool_calls", [conversation.num_tool_calls for conversation in taken])
        metrics.spread("env/seconds", [conversation.seconds for conversation in taken])
        metrics.add("env/retries_total", self.conversations.take_num_retries())
        metrics.add("env/failed", 0, rule="sum")
        metrics.update(self._metrics.result())
        self._metrics = Metrics()
        return {conversation.id: conversation for conversation in taken}

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON, between two steps."""
        return {"conversations": self.conversations.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; other keys are ignored, and conversations of groups that have ended."""
        saved = state.get("conversations", ())
        self.conversations.load_state_dict(one for one in saved if one["group"] in self._groups.prompts)

    def _awaits(self, group: str) -> bool:
        """Whether a finished sample of a group has not arrived that was completed here, or a branch is not yet."""
        if not self.num_completing:
            return False
        is_left = any(command.group == group for command in self._to_complete.values())
        return is_left or not self._completing.isdisjoint(self._groups.ids_of(group))

    def _observe_turns(self, entries: Sequence[Entry]) -> None:
        turns = self._read_turns([entry for entry in entries if entry.state == "away"])
        for entry in entries:
            if entry.id not in turns:
                continue
            text, tokens = turns[entry.id]
            end = self.environments.bridge.end_of(tokens)
            span = entry.oldest, entry.newest
            self._execute(self.conversations.observe_turn(entry.id, entry.generated, text, end, span))

    def _execute(self, command: Command | None) -> None:
        match command:
            case StepEnvironment(id):
                one = self.conversations.of(id)
                self.environments.step(one, self._groups.prompts[one.group])
            case Append():
                self._to_append.append(command)
            case Branch(id, prompt, max_tokens, ended):
                self._end_row(id, ended, continues=True)
                self._admission.observe_branched(id, len(prompt), max_tokens)
            case Complete(id, cut):
                self._end_row(id, self.conversations.of(id).prompt, cut=cut)
                self._completing.add(id)
                self.environments.pool.end([id])
            case FailGroup():
                self._fail(command)

    def _end_row(self, id: str, prompt: Sequence[int], *, cut: bool = False, continues: bool = False) -> None:
        entry = self._admission.buffer.entries[id]
        prompt = tuple(prompt) or self._groups.prompts[entry.group].ids
        self._to_complete[entry.name] = EndedConversation(entry.earlier, entry.group, prompt, cut, continues)

    def _append(self) -> None:
        """Put observations into the rows of their conversations, which are dispatched again; an engine ends those whose
        row is lost."""
        appended, self._to_append = self._to_append, []
        if appended:
            rows = [self._admission.buffer.entries[command.id].earlier for command in appended]
            column = Column.of_numbers([command.tokens for command in appended], torch.int64, OBSERVATION)
            self._queue.put(PackedBatch.from_samples(rows, {OBSERVATION: column}))
        for one in appended:
            self._admission.observe_returned(one.id, len(one.tokens))

    def _fail(self, failed: FailGroup) -> None:
        log.error("group %r fails, as an environment has failed (%s): %s", failed.group, failed.kind, failed.detail)
        self.environments.pool.end(self._groups.ids_of(failed.group))
        self._to_cancel[failed.group] = failed.kind
        self._observe_failed(failed.group, failed.kind, failed.detail)

    def _observe_failed(self, group: str, kind: str, detail: str) -> None:
        """Count a group whose environment failed, and its samples among those that have no reward: a run ends where
        these are many."""
        for name in ("env/failed", f"env/failed_{kind}"):
            self._metrics.add(name, 1, rule="sum")
        outcome = RewardOutcome(None, error=f"{ENVIRONMENT}{kind}", detail=detail)
        self._scorer.observe_outcomes([outcome] * len(self._groups.ids_of(group)))

    def _complete(self) -> None:
        """Have a living engine's first card finish the conversations that have ended."""
        living = {*self._cards.living}
        firsts = [ranks[0] for ranks in self._engines if {*ranks} <= living]
        while self._to_complete and firsts:
            rank = firsts.pop()
            ended = [*self._to_complete.values()]
            self._cards.ask_each({rank: stage_call(Worker.complete, ended)})
            if rank in self._cards.living:
                self._to_complete.clear()
            else:  # what it has done before it died is in the queue
                finished = {*self._queue.holding(RESPONSE)} & self._to_complete.keys()
                left = {*self._queue.holding(TURN)} & {self._to_complete[id].row for id in finished}
                self._queue.drop(sorted(left), RESUMED)
                self._to_complete = {id: one for id, one in self._to_complete.items() if id not in finished}

    def _read_turns(self, entries: Sequence[Entry]) -> dict[str, tuple[str, list[int]]]:
        """Return text and tokens of the last turns of conversations, by id. Those whose row is lost end as lost."""
        read = read_rows(self._queue, [entry.earlier for entry in entries], [TURN, TURN_TOKENS])
        lose_rows(self._queue, {entry.name: entry.group for entry in entries if entry.earlier not in read})
        return {
            entry.id: (columns[TURN], columns[TURN_TOKENS].tolist())
            for entry in entries
            if (columns := read.get(entry.earlier)) is not None
        }
