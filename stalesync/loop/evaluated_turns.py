"""Evaluate in several turns: rounds of answers of the engines, and of their environments between them.

    prompts ─ reset ─► asked ─► engines: `Worker.answer` ─┬─ turn ended ─► environments ─┬─► asked again, with that
                                                          └─ cut ─► answered             └─► answered, or failed

A round begins when engines and environments have answered the one before. Noise is keyed by the prompt's id and the
position, as in a single turn. The tokens of an answer pass the controller, unlike those of rollouts: there are few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.environments import Failure
from fusion.rewards import RewardOutcome
from fusion.rollout import EvalAnswer
from stalesync.loop.groups import ENVIRONMENT
from stalesync.policy.conversations import Append, Command, Complete, Conversations, ConversationSpec, FailGroup, Step
from stalesync.prompts import Prompt
from stalesync.prompts.environments import Environments

POLL_S = 0.5
"""Interval at which the health of the cards is checked while environments are awaited"""


@dataclass(frozen=True)
class Turns:
    """A prompt and what was said behind it. ``observation``: number of its last tokens, which no engine has read."""

    prompt: Prompt
    response: tuple[int, ...] = ()
    observation: int = 0


class EvaluatedTurns:
    """Conversations that begin with prompts.

    Attributes:
        left: those that the engines are to continue, by id.
        outcomes: of those whose environment failed.
    """

    def __init__(self, environments: Environments, spec: ConversationSpec, prompts: Sequence[Prompt]) -> None:
        self._environments = environments
        self.conversations = Conversations(spec)
        environments.tracked.append(self.conversations)
        self.left: dict[str, Turns] = {}
        self.outcomes: dict[str, RewardOutcome] = {}
        self._away: dict[str, tuple[Turns, EvalAnswer]] = {}
        """Conversations whose environments are awaited, with their last answers"""
        self.answers: dict[str, EvalAnswer] = {}
        """Answers to the prompts whose conversations have ended"""
        started = environments.begin(prompts)
        for prompt in prompts:
            match started[prompt.id]:
                case Failure(kind, detail):
                    self._end(prompt.id, RewardOutcome(None, error=f"{ENVIRONMENT}{kind}", detail=detail))
                case begun:
                    self.conversations.admit(prompt.id, [prompt.id], begun.digest)
                    self.left[prompt.id] = Turns(environments.prompt(prompt, begun))

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of those that the engines are to continue."""
        return [turns.prompt for turns in self.left.values()]

    def observe(self, answers: Mapping[str, EvalAnswer]) -> None:
        """Record answers of the engines: conversations whose turn has ended are away, the others have ended."""
        for id, answer in answers.items():
            turns = self.left.pop(id)
            turns = replace(turns, response=(*turns.response, *answer.tokens), observation=0)
            self._away[id] = turns, answer
            if answer.finish_reason == "turn":
                end = self._environments.bridge.end_of(answer.tokens)
                self._execute(self.conversations.observe_turn(id, len(turns.response), answer.turn, end))
            else:
                self._finish(id, cut=answer.finish_reason == "length")

    def await_environments(self, check: Callable[[], None]) -> None:
        """Wait until no conversation is away. ``check``: polled meanwhile, as it may raise."""
        last_s = time.perf_counter()
        while self._away:
            self._environments.arrived.wait(POLL_S)
            check()
            for stepped in self._environments.take(self._away):
                self._execute(self._environments.observe(self.conversations, stepped))
            now = time.perf_counter()
            for failed in self.conversations.observe_elapsed(now - last_s):
                self._execute(failed)
            last_s = now

    def close(self) -> None:
        """End the environments of all conversations."""
        self._environments.pool.end([*self.answers, *self.left, *self._away])
        self._environments.tracked.remove(self.conversations)

    def _execute(self, command: Command | None) -> None:
        match command:
            case Append(id, ids):
                turns, _ = self._away.pop(id)
                self.left[id] = replace(turns, response=(*turns.response, *ids), observation=len(ids))
            case Step(id):
                self._environments.step(self.conversations.of(id), self._away[id][0].prompt)
            case Complete(id, cut):
                self._finish(id, cut)
            case FailGroup(group=id, kind=kind, detail=detail):
                del self._away[id]
                self._end(id, RewardOutcome(None, error=f"{ENVIRONMENT}{kind}", detail=detail))

    def _finish(self, id: str, cut: bool) -> None:
        _, answer = self._away.pop(id)
        sampled = answer.response_tokens - self.conversations.of(id).observation_tokens
        self.answers[id] = replace(answer, response_tokens=sampled, finish_reason="length" if cut else "stop")

    def _end(self, id: str, outcome: RewardOutcome) -> None:
        self.outcomes[id] = outcome
        self.answers[id] = EvalAnswer(id, text="", response_tokens=0, finish_reason="abort")
