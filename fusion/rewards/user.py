"""Load a user's own reward function from `file.py:function`, and find from its parameters what it asks for.

(prompt, response, answer, **fields) -> float              one sample
(prompts, responses, answers, **fields) -> list of floats  a batch of samples: every argument is a list
other_responses, another parameter of either               the other responses of the sample's group: texts
prefill, likewise                                          the end of the prompt that belongs to the response
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

from fusion.rewards.config import split_path
from fusion.rewards.loaded import BATCH, OF_RUN, LoadedReward

RewardFunction = Callable[..., Any]
PARAMETERS = "(prompt, response, answer, **fields) or (prompts, responses, answers, **fields)"


def load_user_function(path: str) -> LoadedReward:
    """Import the file (its folder becomes importable) and load the function.

    A function without `**fields` receives only the fields that it names. A parameter with a default keeps it where a
    row's field is null, or in a batch that of every row. Executes the file's code: call it in a guarded child only.

    Raises:
        ValueError: the file or function does not exist, the file cannot be imported, or the function does not accept
            the arguments (names `reward.path`).
        MemoryError: the file exceeds the memory limit.
    """
    file, name = split_path(path)
    file = file.absolute()
    # A unique module name, so that a user's `math.py` does not shadow the standard library's.
    spec = importlib.util.spec_from_file_location(f"reward_of_user_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"reward.path={path!r}: importing it raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        defined = sorted(n for n, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"reward.path={path!r}: the file defines no function {name!r}; it defines {defined}")
    return _fit_arguments(function, path)


def _fit_arguments(function: RewardFunction, path: str) -> LoadedReward:
    signature = _signature(function, path)
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # The first three are given by position, whatever their names; a field of such a name cannot be passed, too.
    by_position = {p.name for p in positional[:3]}
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = named.keys() - by_position
    optional = {name for name in accepted if named[name].default is not inspect.Parameter.empty}
    accepts_any_field = any(p.kind is p.VAR_KEYWORD for p in parameters)
    scores_batch = tuple(p.name for p in positional[:2]) == BATCH

    def call(prompt: Any, response: Any, answer: Any, /, **fields: Any) -> Any:
        passed = {
            name: value
            for name, value in fields.items()
            if name not in by_position
            and (accepts_any_field or name in accepted)
            and not (name in optional and (all(one is None for one in value) if scores_batch else value is None))
        }
        return function(prompt, response, answer, **passed)

    return LoadedReward(
        call,
        required_fields=tuple(sorted(accepted - optional - {*OF_RUN})),
        scores_batch=scores_batch,
        asks=tuple(name for name in OF_RUN if name in accepted),
    )


def _signature(function: RewardFunction, path: str) -> inspect.Signature:
    """Return the signature of a function that three texts and further arguments by name can be passed to.

    Raises:
        ValueError: it is not such a function.
    """
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_kind(called) for is_kind in kinds for called in (function, type(function).__call__)):
        raise ValueError(
            f"reward.path={path!r}: it is asynchronous or a generator; expected a function that returns a number"
        )
    signature = None
    try:
        signature = inspect.signature(function)
        signature.bind_partial("", "", "")
    except (TypeError, ValueError) as error:
        takes = f"it takes {signature}" if signature else "its arguments are not known"
        raise ValueError(f"reward.path={path!r}: {takes}, expected {PARAMETERS}: {error}") from error
    unnamed = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if len(unnamed) > 3:
        raise ValueError(f"reward.path={path!r}: it takes {signature}, expected {PARAMETERS}: {unnamed[3]} has no name")
    return signature
