"""Load a user's own reward function from `file.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable

from fusion.rewards.config import split_path

RewardFunction = Callable[..., float]


def load_user_function(path: str) -> RewardFunction:
    """Import the file (its folder becomes importable) and return `fn(prompt, response, answer, **fields) -> float`.

    A function without `**fields` receives only the fields of the data row that it names. Executes the file's code: call
    it in a guarded child only.

    Raises:
        ValueError: the file or function does not exist, the file cannot be imported, or the function does not accept
            the arguments (names `reward.path`).
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
    except Exception as error:
        raise ValueError(f"reward.path={path!r}: importing it raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        defined = sorted(n for n, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"reward.path={path!r}: the file defines no function {name!r}; it defines {defined}")
    return _fit_arguments(function, path)


def _fit_arguments(function: RewardFunction, path: str) -> RewardFunction:
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    accepts_any_field = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    try:
        signature.bind_partial("", "", "")
    except TypeError as error:
        raise ValueError(
            f"reward.path={path!r}: it takes {signature}, expected (prompt, response, answer, **fields): {error}"
        ) from error

    def call(prompt: str, response: str, answer: str, **fields: object) -> float:
        accepted = fields if accepts_any_field else {k: v for k, v in fields.items() if k in named}
        return function(prompt, response, answer, **accepted)

    return call
