"""Engines that share one KV pool, and requests that move between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fusion.inference import EmbeddedEngine
from fusion.model import Mesh
from fusion.offload import HostPool
from fusion.rollout.kv_pool.files import KVFiles
from fusion.rollout.kv_pool.pool import KVPoolSpec
from tests.inference.engines import card, empty_card, model
from tests.inference.keeping import resumed
from tests.rollouts import rollout_config

LIMITS = dict(max_length=256, max_seqs=64, max_batch_tokens=512, suspended="pool", batch_invariant=True)
LIMITS |= dict(max_kv_tokens=64 * 256)  # of all sequences: several engines are on one card


def pooling(
    root, rank=0, *, dtype=torch.float32, routing=False, spec=None, drafter=None, peers=None, folder=None, **rollout
):
    """An engine of one rank. ``peers``: pools of other machines; ``folder``: of another model than the tiny one."""
    config = rollout_config(**(LIMITS | rollout))
    made = EmbeddedEngine(
        model(dtype, config.engine.batch_invariant, folder=folder),
        Mesh.single(),
        empty_card(),
        config,
        5,
        routing,
        HostPool(card()),
        drafter=drafter,
        kv_store=KVFiles(spec or KVPoolSpec("run"), rank, root, peers) if config.kv_pool.pools_kv else None,
    )
    made.allocate_kv()
    return made


def moved(wanted, outputs, had=None):
    """As `resumed`, with what is in the pool instead of where it was."""
    tokens_by_id = {output.request_id: output.kv_tokens for output in outputs}
    again = resumed(wanted, outputs, had)
    return [replace(request, kv_rank=None, kv_tokens=tokens_by_id[request.id]) for request in again]


def files_in(root):
    return sorted(path for path in Path(root).rglob("*") if path.is_file() and path.parent.name == "files")


def figures(made):
    """Hits, pulls, misses, damaged files."""
    status = made.status()
    return tuple(int(status[f"kv_pool_{name}"]) for name in ("hits", "pulls", "misses", "damaged"))
