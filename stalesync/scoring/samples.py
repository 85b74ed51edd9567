"""Define a sample in the controller: ids, lengths, versions, text, reward, but no tokens. Plain data, one object
from its arrival to the end of its training (a frozen dataclass would take three times as long to create)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from fusion.rewards import RewardOutcome, RewardSample
from stalesync.prompts import Prompt

LOST = "lost"
"""Why a sample cannot be scored, and why a group fails, whose samples the queue has lost"""


@dataclass(slots=True)
class Sample:
    """A finished response. ``id``: of its row in the queue; ``outcome``: assigned once, when it is scored; ``oldest``,
    ``newest``: policy versions of its tokens; ``cut``: whether the limit of tokens ended it; ``others``: the other
    responses of its group, where a reward asks for them; ``observed_tokens``: tokens of the response that the policy
    has not sampled, of a conversation."""

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
    others: Sequence[str] = ()

    @property
    def group(self) -> str:
        return self.prompt.id

    @property
    def sampled_tokens(self) -> int:
        return self.response_tokens - self.observed_tokens

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

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
    def restore(cls, prompt: Prompt, state: Mapping[str, Any]) -> Sample:
        """Restore a sample of ``prompt`` from what `state_dict` or `unscored_state_dict` returned."""
        optional = {name: state[name] for name in SAVED_IF_SET if name in state}
        sample = cls(prompt=prompt, **optional, **{name: state[name] for name in SAVED})
        if "outcome" in state:
            sample.outcome = RewardOutcome(**state["outcome"])
        return sample


SAVED = ("id", "response", "prompt_tokens", "response_tokens", "oldest", "newest")
"""Fields of the state of a sample, besides its outcome"""

SAVED_IF_SET = ("cut", "observed_tokens")


by_id = attrgetter("id")
"""Key by which samples are sorted"""
