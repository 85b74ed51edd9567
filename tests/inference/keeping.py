"""Engines that keep KV, and the requests that come back to it."""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh
from fusion.offload import HostPool
from tests.inference.engines import card, empty_card, model
from tests.rollouts import rollout_config

LIMITS = dict(max_length=256, max_seqs=64, max_batch_tokens=512, suspended="keep", max_kv_tokens=64 * 256)


def keeping(pool=None, dtype=torch.float32, routing=False, folder=None, **rollout):
    """An engine that keeps, and its pool. ``folder``: of another model than the tiny one."""
    config, pool = rollout_config(**(LIMITS | rollout)), pool or HostPool(empty_card())
    loaded = model(dtype, config.engine.batch_invariant, folder=folder)
    made = EmbeddedEngine(loaded, Mesh.single(), card(), config, 5, routing, pool)
    made.allocate_kv()
    return made, pool


def long(count=4, prompt=(3, 4, 5) * 9, tokens=40, **fields):
    params = SamplingParams(max_tokens=tokens, stop_token_ids=())
    return [Request(f"r{i}", prompt, params, "g", **fields) for i in range(count)]


def steps(made, count):
    return [output for _ in range(count) for output in made.step()]


def resumed(wanted, outputs, had=None):
    """The requests of what was suspended, or has ended with its chunk, to go on where they were left. ``had``: id →
    what came before, extended."""
    by_name, had, again = {request.id: request for request in wanted}, {} if had is None else had, []
    for output in outputs:
        tokens, logprobs = had.setdefault(output.request_id, ([], []))
        tokens.extend(output.tokens)
        logprobs.extend(output.logprobs)
        if output.finish_reason in ("abort", "chunk"):
            again.append(replace(by_name[output.request_id], response=tuple(tokens), kv_rank=output.kv_rank))
    return again


def suspend_and_return(made, new_version=False):
    outputs = made.suspend()
    made.release_kv()
    if new_version:
        made.policy_version += 1
    made.allocate_kv()
    made.resume()
    return outputs
