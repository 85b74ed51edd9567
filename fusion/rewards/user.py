"""Load a user's own reward function from `file.py:function`, and find from its parameters what it asks for.

(prompt, response, answer, **fields) -> float              one sample
(prompts, responses, answers, **fields) -> list of floats  a batch of samples: every argument is a list
(data_source, solution_str, ground_truth, extra_info)      verl's names, also in the plural: given by name
other_responses, another parameter of either               the other responses of the sample's group: texts
prefill, likewise                                          the end of the prompt that belongs to the response
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fusion.rewards.config import split_path
from fusion.rewards.wire import BATCH, OF_RUN, LoadedReward

RewardFunction = Callable[..., Any]
PLACES = {"prompt": 0, "response": 1, "answer": 2, "solution_str": 1, "ground_truth": 2}
BATCH_PLACES = {"prompts": 0, "responses": 1, "answers": 2, "solution_strs": 1, "ground_truths": 2}
"""Names of parameters → place of what they receive among prompt, response and answer"""
COLUMNS = {"data_sources": "data_source", "extra_infos": "extra_info"}
"""Parameters of verl that receive columns of a batch → the columns"""
VERL_COLUMNS = {*COLUMNS, *COLUMNS.values()}
UNCLEAR = {"completions", "completion_ids"}
PARAMETERS = "(prompt, response, answer, **fields) or (prompts, responses, answers, **fields)"


def load_user_function(path: str) -> LoadedReward:
    """Import the file (its folder becomes importable) and load the function.

    A function without `**fields` receives only the fields that it names. A parameter with a default keeps it where a
    row's field is null, or in a batch that of every row. Executes the file's code: call it in a guarded child only.
    Raise ValueError: the file or function does not exist, the file cannot be imported, or the function does not accept
    the arguments (names `reward.path`). Raise MemoryError: the file exceeds the memory limit."""
    module, name = import_file(path, "reward")
    function = getattr(module, name, None)
    if not callable(function):
        defined = sorted(n for n, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"reward.path={path!r}: the file defines no function {name!r}; it defines {defined}")
    return _fit_arguments(function, path)


def _fit_arguments(function: RewardFunction, path: str) -> LoadedReward:
    signature = _signature(function, path)
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    scores_batch = tuple(p.name for p in positional[:2]) == BATCH or "solution_strs" in named
    places = BATCH_PLACES if scores_batch else PLACES
    by_name = _is_called_by_name(signature, places)
    # Without known names in other places, the first three are given by position, whatever their names. A field of the
    # name of such an argument cannot be passed, too.
    arguments = {name: places[name] for name in named if name in places} if by_name else {}
    taken = {*arguments} if by_name else {p.name for p in positional[:3]}
    if by_name and (not {1, 2} <= {*arguments.values()} or any(p.kind is p.POSITIONAL_ONLY for p in positional)):
        raise ValueError(
            f"reward.path={path!r}: it takes {signature}, expected {PARAMETERS}: it is not clear which parameters "
            "receive response and answer; name them so, or solution_str and ground_truth"
        )
    accepted = named.keys() - taken
    optional = {name for name in accepted if named[name].default is not inspect.Parameter.empty}
    accepts_any_field = any(p.kind is p.VAR_KEYWORD for p in parameters)
    column_of = {name: COLUMNS.get(name, name) if scores_batch else name for name in accepted}
    name_of = {column: name for name, column in column_of.items()}

    def call(prompt: Any, response: Any, answer: Any, /, **fields: Any) -> Any:
        texts = (prompt, response, answer)
        passed = {name: texts[place] for name, place in arguments.items()}
        for column, value in fields.items():
            name = name_of.get(column, column)
            is_null = all(item is None for item in value) if scores_batch and name in optional else value is None
            if name not in taken and (accepts_any_field or name in accepted) and not (name in optional and is_null):
                passed[name] = value
        return function(*(() if by_name else texts), **passed)

    return LoadedReward(
        call,
        required_fields=tuple(sorted(column_of[name] for name in accepted - optional - {*OF_RUN})),
        scores_batch=scores_batch,
        asks=tuple(name for name in OF_RUN if name in accepted),
    )


def import_file(path: str, key: str) -> tuple[ModuleType, str]:
    """Import the file of `reward.path`, or of that of another group ``key``; its folder becomes importable. Return the
    module and the name that the path asks for.
    Raise ValueError: the file does not exist or cannot be imported.
    Raise MemoryError: the file exceeds the memory limit."""
    file, name = split_path(path, key)
    file = file.absolute()
    # A unique module name, so that a user's `math.py` does not shadow the standard library's.
    spec = importlib.util.spec_from_file_location(f"{key}_of_user_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{key}.path={path!r}: importing it raised {type(error).__name__}: {error}") from error
    return module, name


def _is_called_by_name(signature: inspect.Signature, places: Mapping[str, int]) -> bool:
    """Return whether the arguments are given by name: the first three cannot be given by position, one of them has the
    name of a column that verl passes or of what a run knows, or any parameter has the name of another place."""
    try:
        signature.bind_partial("", "", "")
    except TypeError:
        return True
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind not in variadic]
    elsewhere = any(places.get(name, place) != place for place, name in enumerate(names))
    return elsewhere or not {*names[:3]}.isdisjoint({*VERL_COLUMNS, *OF_RUN})


def _signature(function: RewardFunction, path: str) -> inspect.Signature:
    """Return the signature of a function whose arguments can be told. Raise ValueError: it is not such a function."""
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_kind(called) for is_kind in kinds for called in (function, type(function).__call__)):
        raise ValueError(
            f"reward.path={path!r}: it is asynchronous or a generator; expected a function that returns a number"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward.path={path!r}: its arguments are not known, expected {PARAMETERS}: {error}"
        ) from error
    if unclear := sorted(UNCLEAR & signature.parameters.keys()):
        raise ValueError(
            f"reward.path={path!r}: it takes {signature}, expected {PARAMETERS}: {unclear[0]} (TRL's) may be texts or "
            "chats; name it responses"
        )
    unnamed = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if len(unnamed) > 3:
        raise ValueError(f"reward.path={path!r}: it takes {signature}, expected {PARAMETERS}: {unnamed[3]} has no name")
    return signature
