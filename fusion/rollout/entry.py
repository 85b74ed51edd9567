"""Define what the request buffer holds of requests, groups and engines: plain data, without tokens."""

from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from fusion.rollout.types import branch_id

State = Literal["waiting", "running", "away", "finished"]


@dataclass(slots=True)
class Entry:
    """One request. ``max_tokens``: of its whole response; ``generated``: tokens so far; ``engine``: that has it while
    it runs; ``earlier``: the queue's row that holds its tokens so far, "" for none; ``oldest``, ``newest``: policy
    versions of its tokens so far, -1 for none; ``kv``: engine and attention rank that have its KV; ``kv_tokens``:
    number of tokens whose KV these have in the machine's pool; ``position``: in the order of all requests ever added;
    ``member``: its number in its group; ``behind``: whether probes run ahead of it; ``last_engine``: that had it last;
    ``reserved``: KV tokens that it occupies of the bound of its engine; ``step``: in which its group is expected to be
    trained; ``observation``: number of the last of ``generated`` that an environment has answered, and no engine has
    continued yet; ``branch``: number of the branch of a conversation that tokens, limits, row and versions are of."""

    id: str
    group: str
    prompt_tokens: int
    max_tokens: int
    position: int = 0
    member: int = 0
    behind: bool = False
    generated: int = 0
    state: State = "waiting"
    engine: int | None = None
    earlier: str = ""
    oldest: int = -1
    newest: int = -1
    kv: tuple[int, int] | None = None
    kv_tokens: int = 0
    last_engine: int | None = None
    reserved: int = 0
    step: int = 0
    observation: int = 0
    branch: int = 0

    @property
    def name(self) -> str:
        """The id by which engines and the queue know it."""
        return branch_id(self.id, self.branch)

    @property
    def load(self) -> int:
        """Number of known tokens that an engine must process to start or resume the request."""
        return self.prompt_tokens + self.generated

    @property
    def priority(self) -> int:
        """Priority in an engine: of its waiting requests those of the lowest priority begin first."""
        return int(self.behind and not self.generated)


NOT_SAVED = ("position", "member", "behind", "kv_tokens", "last_engine", "reserved")
SAVED = tuple(field.name for field in fields(Entry) if field.name not in NOT_SAVED)
"""Fields of an entry in the state of a buffer"""
SAVED_IF_SET = ("observation", "branch")


class Finished(NamedTuple):
    """``engines``: that had the requests which finished; ``groups``: in which no unfinished request is left."""

    engines: list[int]
    groups: list[str]


@dataclass(slots=True)
class RequestGroup:
    """The requests of a group. ``engine``: to which the last one was assigned, where requests are bounded;
    ``complete``: none of its samples was lost, so that all their lengths are known; ``cancelled``: by `end`."""

    members: list[Entry] = field(default_factory=list)
    num_unfinished: int = 0
    engine: int | None = None
    complete: bool = True
    cancelled: bool = False


@dataclass(slots=True)
class EngineHoldings:
    """What an engine has: ``requests``, their ``tokens``, and the KV tokens that they occupy of its bound."""

    requests: int = 0
    tokens: int = 0
    reserved: int = 0
