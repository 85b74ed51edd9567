"""Begin conversations with their environments, and pass the model's turns on to them.

    row ─ task ─► reset ─► first messages ─► Prompt            before a group is admitted
    turn of the model ─► `step` ─► … ─► `take`: its answer     never waits

The seed of an environment depends on run and prompt, so that all conversations of a group begin alike."""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from fusion.environments import EnvPool, StepOrder, Stepped, Task
from fusion.environments.config import EnvironmentConfig
from fusion.environments.render import Bridge
from stalesync.policy.conversations import Command, Conversation, Conversations, seed_of
from stalesync.prompts.source import Prompt


class Environments:
    """The environments of a job, while the block lasts, and how its model reads what they say. ``max_prompt_tokens``:
    of what they say first."""

    def __init__(self, config: EnvironmentConfig, bridge: Bridge, seed: int, max_prompt_tokens: int) -> None:
        self.config, self.bridge, self._seed, self._max_prompt_tokens = config, bridge, seed, max_prompt_tokens
        self.arrived = threading.Event()
        """Set when `take` has something to return"""
        self.wake: Callable[[], None] = lambda: None
        """Called then, on another thread"""
        self.pool = EnvPool(config, self._note_arrived)
        self.tracked: list[Conversations] = []
        """Where the rewards of conversations are found"""
        self._held: list[Stepped] = []
        """Answers that `take` was not asked for"""

    def __enter__(self) -> "Environments":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def begin(self, prompts: Sequence[Prompt]) -> dict[str, Stepped]:
        """Return the first messages of conversations by id, or why there are none after all retries. Conversations
        whose ids are equal up to a slash begin alike."""
        results: dict[str, Stepped] = {}
        left = [*prompts]
        for _ in range(1 + self.config.retries):
            if left:
                begun = self.pool.reset([(task_of(prompt), self._seed_of(prompt.id)) for prompt in left])
                results |= {prompt.id: result for prompt, result in zip(left, begun, strict=True)}
                left = [prompt for prompt in left if results[prompt.id].failure]
        return results

    def prompt(self, prompt: Prompt, started: Stepped) -> Prompt:
        """Return a prompt with what its environment says first in place of the row's text. Raise ValueError: the chat
        template refuses that, or it has too many tokens."""
        assert started.turn is not None, started.detail
        messages, tools = [dict(message) for message in started.turn.messages], [*started.tools]
        ids = self.bridge.first(messages, tools)
        if len(ids) > self._max_prompt_tokens:
            raise ValueError(
                f"{self.config.label}: {prompt.id} begins with {len(ids)} tokens, more than data.max_prompt_length="
                f"{self._max_prompt_tokens}; increase it"
            )
        return replace(prompt, ids=tuple(ids), messages=messages, tools=tools)

    def observe(self, conversations: Conversations, stepped: Stepped, prompt: Prompt) -> Command | None:
        """Record an answer in ``conversations``, with its tokens up to where the model speaks again; return what
        follows. ``prompt``: with which the conversation began."""
        one, turn, ids, whole = conversations.of(stepped.id), stepped.turn, None, list[int]()
        try:
            if turn is not None and not turn.done:
                ids = self.bridge.bridge(
                    one.end,
                    turn.messages,
                    had_thought=one.had_thought,
                    earlier=one.messages,
                    first=prompt.messages,
                )
                if ids is None:
                    whole = self.bridge.first([*prompt.messages, *one.messages, *turn.messages], prompt.tools)
        except ValueError as error:  # the chat template refuses these messages
            self.pool.end([stepped.id])  # so that the next attempt is a fresh environment
            stepped = replace(stepped, turn=None, failure="bad_turn", detail=str(error))
        had_thought = self.bridge.has_thought(whole)
        return conversations.observe_stepped(
            stepped, ids, prompt=whole, first_prompt_tokens=len(prompt.ids), had_thought=had_thought
        )

    def step(self, conversation: Conversation, prompt: Prompt) -> None:
        """Have the environment of a conversation answer its last action, sooner or later."""
        seed, said = self._seed_of(conversation.id), (tuple(conversation.actions), tuple(conversation.observed))
        self.pool.begin(StepOrder(conversation.id, task_of(prompt), seed, *said))

    def take(self, wanted: Collection[str] | None = None) -> list[Stepped]:
        """Return the answers that have come, to these conversations only (None: to all)."""
        self.arrived.clear()
        answers, self._held = [*self._held, *self.pool.poll()], []
        if wanted is not None:
            self._held = [answer for answer in answers if answer.id not in wanted]
            answers = [answer for answer in answers if answer.id in wanted]
        return answers

    def reward_of(self, id: str) -> float:
        """Return the reward of a conversation so far. On any thread."""
        return self._tracking(id).reward_of(id)

    def of(self, id: str) -> Conversation:
        """Return a conversation, which the caller does not change. On any thread."""
        return self._tracking(id).of(id)

    def _tracking(self, id: str) -> Conversations:
        return next(one for one in self.tracked if id in one)

    def _note_arrived(self) -> None:
        self.arrived.set()
        self.wake()

    def _seed_of(self, id: str) -> int:
        return seed_of(self._seed, id.partition("/")[0])


def task_of(prompt: Prompt) -> Task:
    return Task(prompt.chat or prompt.text, prompt.answer, prompt.fields)
