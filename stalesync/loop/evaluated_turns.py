"""Evaluate in several turns: rounds of answers of the engines, and of their environments between them.

    prompts ─ reset ─► asked ─► engines: `Worker.answer` ─┬─ turn ended ─► environments ─┬─► asked again, with that
                                                          └─ cut ─► answered             ├─► asked in another branch
                                                                                         └─► answered, or failed

A round begins when engines and environments have answered the one before. Noise is keyed by the prompt's id, the
branch and the position, as in a single turn. The tokens of an answer pass the controller, unlike those of rollouts:
there are few."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.rewards import RewardOutcome
from fusion.rollout import EvalAnswer
from fusion.rollout.types import branch_id
from stalesync.loop.groups import ENVIRONMENT
from stalesync.policy.conversations import (
    BAD_TURN,
    Append,
    Branch,
    Command,
    Complete,
    Conversations,
    ConversationSpec,
    FailGroup,
    StepEnvironment,
)
from stalesync.prompts import Prompt
from stalesync.prompts.environments import Environments

log = logging.getLogger(__name__)
POLL_S = 0.5
"""Interval at which the health of the cards is checked while environments are awaited"""


@dataclass(frozen=True)
class Turns:
    """A prompt and what was said behind it. ``observation``: number of its last tokens, which no engine has read. In
    another branch than the first, ``branch`` is its number, ``ids`` its prompt, and ``max_tokens`` its limit."""

    prompt: Prompt
    response: tuple[int, ...] = ()
    observation: int = 0
    branch: int = 0
    ids: tuple[int, ...] = ()
    max_tokens: int = 0

    @property
    def name(self) -> str:
        """The id by which engines know it."""
        return branch_id(self.prompt.id, self.branch)


class EvaluatedTurns:
    """Conversations that begin with prompts. ``left``: those that the engines are to continue, by id; ``outcomes``: of
    those whose environment failed."""

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
            if (begun := started[prompt.id]).failure:
                self._fail(prompt.id, begun.failure, begun.detail)
                continue
            try:
                self.left[prompt.id] = Turns(environments.prompt(prompt, begun))
                self.conversations.admit(prompt.id, [prompt.id], begun.digest)
            except ValueError as error:
                self._fail(prompt.id, BAD_TURN, str(error))

    @property
    def prompts(self) -> list[Prompt]:
        return [replace(one.prompt, ids=one.ids) if one.branch else one.prompt for one in self.left.values()]

    @property
    def answered(self) -> list[str]:
        """The ids by which engines know what has ended."""
        ended = [self.conversations.of(id) for id in self.answers if id in self.conversations]
        return [branch_id(output.id, branch) for output in ended for branch in range(len(output.begins) + 1)]

    def observe(self, answers: Mapping[str, EvalAnswer]) -> None:
        """Record answers of the engines: conversations whose turn has ended are away, the others have ended."""
        ids = {turns.name: id for id, turns in self.left.items()}
        for name, answer in answers.items():
            turns = self.left.pop(id := ids[name])
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
                prompt = self._away[stepped.id][0].prompt
                self._execute(self._environments.observe(self.conversations, stepped, prompt))
            now = time.perf_counter()
            for failed in self.conversations.observe_elapsed(now - last_s):
                self._execute(failed)
            last_s = now

    def close(self) -> None:
        self._environments.pool.end([*self.answers, *self.left, *self._away])
        self._environments.tracked.remove(self.conversations)

    def _execute(self, command: Command | None) -> None:
        match command:
            case Append(id, ids):
                turns, _ = self._away.pop(id)
                self.left[id] = replace(turns, response=(*turns.response, *ids), observation=len(ids))
            case Branch(id, ids, max_tokens):
                turns, _ = self._away.pop(id)
                self.left[id] = Turns(turns.prompt, branch=turns.branch + 1, ids=tuple(ids), max_tokens=max_tokens)
            case StepEnvironment(id):
                self._environments.step(self.conversations.of(id), self._away[id][0].prompt)
            case Complete(id, cut):
                self._finish(id, cut)
            case FailGroup():
                del self._away[command.group]
                self._fail(command.group, command.kind, command.detail)

    def _finish(self, id: str, cut: bool) -> None:
        _, answer = self._away.pop(id)
        one = self.conversations.of(id)
        sampled = one.response_tokens + answer.response_tokens - one.observation_tokens
        self.answers[id] = replace(
            answer, text=one.text(answer.text), response_tokens=sampled, finish_reason="length" if cut else "stop"
        )

    def _fail(self, id: str, kind: str | None, detail: str) -> None:
        if not self.outcomes:
            log.warning("held-out conversation %r: its environment has failed (%s): %s", id, kind, detail)
        self.outcomes[id] = RewardOutcome(None, error=f"{ENVIRONMENT}{kind}", detail=detail)
        self.answers[id] = EvalAnswer(id, text="", response_tokens=0, finish_reason="abort")
