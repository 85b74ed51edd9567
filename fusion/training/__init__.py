"""The trainer: packed sequences, TP and EP and data parallel, an optimizer sharded over the replicas.

    samples ─ batch ─► Sequences ─ TrainEngine.forward_backward(sequences, loss) ─► gradients (fp32 buckets)
                                   TrainEngine.optimizer_step()                  ─► weights, in place
                                   TrainEngine.logprobs(sequences)               ─► behaviour and reference columns

    config        TrainingConfig, AlgorithmConfig: the config groups `training` and `algorithm`
    batch         Sequences; split_over_ranks, plan_micro_batches: who computes what, pure
    logprobs      log-probability and entropy over a split vocabulary, one collective
    algorithms/   advantages and losses, one file each over one interface
    engine        TrainEngine: micro-batches, global normalisation, load balancing, metrics
    shards        which elements an optimizer owns, pure;   optimizer   ShardedAdamW on them
    schedule      learning rate by step, pure;              checkpoint  one file a rank, atomic, bitwise

Beside `TrainEngine` there is room for another trainer with its face (`backends/`) and for pipeline stages inside it.
"""

from fusion.training.batch import Sequences, plan_micro_batches, split_over_ranks
from fusion.training.checkpoint import load_checkpoint, save_checkpoint
from fusion.training.config import AlgorithmConfig, TrainingConfig
from fusion.training.engine import TrainEngine
from fusion.training.optimizer import ShardedAdamW

__all__ = [
    "AlgorithmConfig",
    "Sequences",
    "ShardedAdamW",
    "TrainEngine",
    "TrainingConfig",
    "load_checkpoint",
    "plan_micro_batches",
    "save_checkpoint",
    "split_over_ranks",
]
