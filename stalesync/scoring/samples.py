"""Define a sample in the controller: ids, lengths, versions, text, reward, but no tokens. Plain data, one object
from its arrival to the end of its training (a frozen dataclass would take three times as long to create)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from fusion.rewards import RewardOutcome, RewardSample
from fusion.rollout.types import branch_id
from stalesync.policy.conversations import Conversation
from stalesync.prompts import Prompt

LOST = "lost"
"""Why a sample cannot be scored, and why a group fails, whose samples the queue has lost"""


@dataclass(slots=True)
class Sample:
    """A finished response. ``id``: of its row in the queue, or of the first one where it is a conversation in several
    branches; ``outcome``: assigned once, when it is scored; ``oldest``,
    ``newest``: policy versions of its tokens; ``cut``: whether the limit of tokens ended it; ``others``: the other
    responses of its group, where a reward asks for them; ``observed_tokens``: tokens of the response that the policy
    has not sampled, of a conversation; ``row_tokens``: of a conversation in several branches, tokens of prompt and
    response of each; ``prompt_tokens`` are the first one's, ``response_tokens`` all their responses'."""

    id: str
    prompt: Prompt
    response: str
    prompt_tokens: int
    response_tokens: int
    outcome: RewardOutcome = field(init=False, repr=False)
    oldest: int = 0
    newest: int = 0
    cut: bool = False
    observed_tokens: int = 0
    row_tokens: Sequence[int] = ()
    others: Sequence[str] = ()

    @property
    def group(self) -> str:
        return self.prompt.id

    @property
    def sampled_tokens(self) -> int:
        return self.response_tokens - self.observed_tokens

    @property
    def tokens(self) -> int:
        return sum(self.row_tokens) or self.prompt_tokens + self.response_tokens

    @property
    def rows(self) -> list[str]:
        """Ids of its rows in the queue, of which the last one was scored."""
        return [branch_id(self.id, number) for number in range(len(self.row_tokens) or 1)]

    def add_branches(self, conversation: Conversation) -> None:
        """Add what a conversation has in other branches to its last one, which this sample is so far."""
        self.row_tokens = (*conversation.row_tokens, len(conversation.prompt) + self.response_tokens)
        self.response_tokens += conversation.response_tokens
        self.observed_tokens = conversation.observation_tokens
        self.response = conversation.text(self.response)
        self.oldest, self.newest = min(self.oldest, conversation.span[0]), max(self.newest, conversation.span[1])

    def for_reward(self) -> RewardSample:
        """Return what a reward sees of the sample."""
        return self.prompt.for_reward(self.response, self.others)

    def state_dict(self) -> dict[str, Any]:
        """Return a scored sample as plain JSON, with the id of its group in place of the prompt."""
        outcome = asdict(self.outcome)
        if self.outcome.terms is None:
            del outcome["terms"]
        return self.unscored_state_dict() | {"outcome": outcome}

    def unscored_state_dict(self) -> dict[str, Any]:
        """Return a sample that has no outcome yet, likewise."""
        fields = {name: getattr(self, name) for name in SAVED} | {"group": self.group}
        return fields | {name: value for name in SAVED_IF_SET if (value := getattr(self, name))}

    @classmethod
    def restore(cls, prompt: Prompt, state: Mapping[str, Any]) -> "Sample":
        """Restore a sample of ``prompt`` from what `state_dict` or `unscored_state_dict` returned."""
        optional = {name: state[name] for name in SAVED_IF_SET if name in state}
        sample = cls(prompt=prompt, **optional, **{name: state[name] for name in SAVED})
        if "outcome" in state:
            sample.outcome = RewardOutcome(**state["outcome"])
        return sample


SAVED = ("id", "response", "prompt_tokens", "response_tokens", "oldest", "newest")
"""Fields of the state of a sample, besides its outcome"""
SAVED_IF_SET = ("cut", "observed_tokens", "row_tokens")
by_id = attrgetter("id")
"""Key by which samples are sorted"""
