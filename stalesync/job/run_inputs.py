"""Describe what a checkpoint depends on: every setting, and the content of models, reward files and evaluation files.

    {"settings":   {key: value},
     "files":      {key: {file: size and digest}},
     "masked_ids": [[first, end], …], ids without a token,
     "checksums":  {role: {file: checksum of the weights that the cards have loaded from it}}}

Files of at most `WHOLE_BYTES` are digested whole, larger ones in three pieces; of these, the cards add a checksum of
all weights while they load them, which is the same in every layout. The order of prompts depends on `data.source`,
whose digest is part of the state of `PromptSource`."""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fusion.model.huggingface import WHOLE_BYTES
from stalesync.job.config import Config
from stalesync.job.keys import value_of
from stalesync.job.overrides import known_keys
from stalesync.process.host_files import MAX_NAMED, digest_of

Digests = Mapping[str, Mapping[str, Any]]
"""Digest by config key and file; the file is "" where the key names one file"""
IN_PART = ("eval.files", "reward.terms")
"""Keys with several entries, of which some may be added and removed: the content of those that stay is compared"""
UNREAD = (".md", ".lock", ".gitattributes", ".gitignore")
"""Ends of the names of files in a model's folder that nothing reads"""


def settings_of(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps({key: value_of(config, key) for key in known_keys()}))  # as a checkpoint returns them


def inputs_of(config: Config, masked_ids: Iterable[Iterable[int]]) -> dict[str, Any]:
    """Return what a start depends on, without the weights. ``masked_ids``: of `WorkerSpec`. Raise OSError if a file
    cannot be read."""
    masked = [list(bounds) for bounds in masked_ids]
    return {"settings": settings_of(config), "files": digest_files(config), "masked_ids": masked}


def digest_files(config: Config) -> dict[str, dict[str, str]]:
    """Return digests of the files that a run depends on, but `data.source`; raise OSError if one cannot be read."""
    reward = config.reward
    paths = {
        "model.path": _folder(config.model.path),
        "reward.model": _folder(reward.model) if reward.model else {},
        "reward.path": _code(reward.path, name=""),
        "environment.path": _code(config.environment.path, name=""),
        "reward.terms": {name: path for spec in reward.term_specs() for name, path in _code(spec.reward).items()},
        "eval.files": {spec.path: Path(spec.path) for spec in config.eval.specs()},
    }
    paths["eval.files"] |= {name: path for spec in config.eval.specs() for name, path in _code(spec.reward).items()}
    named = [(key, name, path) for key, files in paths.items() for name, path in files.items()]
    with ThreadPoolExecutor(8) as threads:
        digests = list(threads.map(lambda one: digest_of(one[2], WHOLE_BYTES), named))
    found: dict[str, dict[str, str]] = {key: {} for key, files in paths.items() if files}
    for (key, name, _), digest in zip(named, digests, strict=True):
        found[key][name] = digest
    return found


def find_other_content(saved: Digests, new: Digests, changed: Iterable[str] = ()) -> dict[str, str]:
    """Return by key what has other content than at the checkpoint. ``changed``: keys with another value. Of a reward or
    an environment that is another one, the content is expected to differ."""
    ignored = {key for key in changed if key.startswith(("reward.", "environment."))}
    found = {}
    for key in saved.keys() & new.keys() - ignored:
        names = saved[key].keys() & new[key].keys() if key in IN_PART else saved[key].keys() | new[key].keys()
        if differing := sorted(name for name in names if saved[key].get(name) != new[key].get(name)):
            listed = ", ".join(differing[:MAX_NAMED]) + (" …" if len(differing) > MAX_NAMED else "")
            found[key] = f"other content of {listed}" if listed else "the file has other content"
    return found


def _folder(path: str) -> dict[str, Path]:
    files = (file for file in Path(path).iterdir() if file.is_file() and not file.name.endswith(UNREAD))
    return {file.name: file for file in files if not file.name.startswith("LICENSE")}


def _code(reward: str | None, name: str | None = None) -> dict[str, Path]:
    """Return the file of a reward that is a function of the user."""
    file, colon, _ = (reward or "").rpartition(":")
    return {file if name is None else name: Path(file)} if colon else {}
