"""Define what a stage of an engine reports to the controller: plain data, without tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a policy that uses these loads no engine
    from fusion.inference import FinishReason


def row_of(id: str, num_tokens: int) -> str:
    """Return the id of the queue's row with the first ``num_tokens`` tokens of an unfinished sample."""
    return f"{id}~{num_tokens}"


def parse_row(row: str) -> tuple[str, int]:
    """Return sample and number of tokens of a row named by `row_of`."""
    id, _, num_tokens = row.rpartition("~")
    return id, int(num_tokens)


def branch_id(id: str, number: int) -> str:
    """Return the id of a conversation's branch, as engines and the queue know it; of the first, the conversation's."""
    return f"{id}.{number}" if number else id


def conversation_of(branch: str) -> str:
    """Return the id of the conversation of a branch named by `branch_id`: its group, a slash and a number."""
    group, slash, member = branch.rpartition("/")
    return f"{group}{slash}{member.partition('.')[0]}"


@dataclass(frozen=True)
class SuspendedSample:
    """An unfinished sample that left its engine. ``id``: of its branch (`branch_id`); ``generated``: response tokens so
    far, over all its chunks; ``earlier``: id of its row in the queue (`partial_samples`), "" while it has no token;
    ``versions``: policy versions of the oldest and the newest of its tokens; None if it gained none; ``kv_rank``: the
    attention rank of the engine that holds its KV (`Output.kv_rank`); None: the KV was freed; ``kv_tokens``: number of
    tokens whose KV is in the machine's pool (`Output.kv_tokens`); ``turn``: it ended, an environment answers next."""

    id: str
    generated: int
    earlier: str
    versions: tuple[int, int] | None
    kv_rank: int | None = None
    kv_tokens: int = 0
    turn: bool = False

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "SuspendedSample":
        """Restore a sample from its fields, also if they were sent as JSON."""
        versions = fields["versions"]
        return cls(**fields | {"versions": None if versions is None else tuple(versions)})


@dataclass(frozen=True)
class EndedConversation:
    """A conversation, or a branch of it, that ends behind its last turn. ``row``: that has its tokens in the queue
    (`row_of`); ``prompt``: token ids; ``cut``: whether a limit ended it; ``continues``: whether another branch does."""

    row: str
    group: str
    prompt: tuple[int, ...]
    cut: bool = False
    continues: bool = False


@dataclass(frozen=True)
class EvalAnswer:
    """A response to a held-out prompt: evaluated, never trained on. ``id``: of its request; ``text``: as a reward sees
    it (`Detokenizer`); "" on a card without a detokenizer; ``response_tokens``: how many it has; ``row``: of its tokens
    in the queue; "" where they were not kept; ``tokens``, ``turn``: of an ended turn, its tokens and text."""

    id: str
    text: str
    response_tokens: int
    finish_reason: "FinishReason"
    row: str = ""
    tokens: tuple[int, ...] = ()
    turn: str = ""
