"""The trainer: packed sequences; TP, EP, expert-TP, pipeline and data parallel; an optimizer sharded over replicas.

    samples ─ batch ─► Sequences ─ TrainEngine.forward_backward(sequences, loss) ─► gradients (fp32 buckets)
                                   TrainEngine.optimizer_step()                  ─► weights, in place
                                   TrainEngine.logprobs(sequences)               ─► behaviour and reference columns

    config        TrainingConfig, AlgorithmConfig: the config groups `training` and `algorithm`
    interface     TrainEngine: what other rooms may ask of a trainer
    batch         Sequences; split_over_ranks, plan_micro_batches: who computes what, pure
    pipeline      1F1B as programs of passes and messages, pure;    stage      Stage follows them
    logprobs      log-probability and entropy over a split vocabulary, one collective
    algorithms/   advantages and losses, one file each over one interface;  loss  what losses are made of
    corrections   for samples of another policy, pure;   gaps   how far trainer and engine are apart
    replay        routing imposed on a batch and recorded of it
    objective     what the micro-batches of all ranks and stages add up to, and its metrics
    engine        EmbeddedTrainEngine: one path for every layout
    shards        which elements an optimizer owns, shares and counts, pure
    optimizer     ShardedAdamW on them, bucket by bucket;           states     where its states live
    schedule      learning rate by step, pure;                      checkpoint one file a rank, atomic, bitwise

`EmbeddedTrainEngine` is the `TrainEngine` of this house; others go into `backends/`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
