"""Train MoE models on packed sequences with TP, EP, expert-TP, pipeline and data parallelism and a sharded optimizer.

    samples ─ batch ─► Sequences ─ TrainEngine.forward_backward(sequences, loss) ─► gradients (fp32 buckets)
                                   TrainEngine.optimizer_step()                  ─► weights, in place
                                   TrainEngine.logprobs(sequences)               ─► behaviour and reference columns

    config        TrainingConfig, AlgorithmConfig: the config groups `training` and `algorithm`
    interface     TrainEngine: the interface of a trainer as used by the other packages
    batch         Sequences; plan_micro_batches: division over micro-batches, pure
    micro_batches divides a batch over micro-batches, in which sequences share the rows of their prefix
    division      split_over_ranks, split_groups: division over ranks and minibatches, pure
    pipeline      1F1B as programs of passes and messages, pure;    stage      Stage runs them
    logprobs      log-probability and entropy over a split vocabulary, one collective
    algorithms/   advantages and losses, one file each;             loss       input, output and functions of losses
    corrections   for samples of another policy, pure;              gaps       gap between trainer and engine
    replay        replays and records the routing of a batch
    objective     the loss over all micro-batches, ranks and stages, and its metrics
    engine        EmbeddedTrainEngine: the same code for every layout
    shards        which elements an optimizer owns, shares and counts, pure
    optimizer     ShardedAdamW, bucket by bucket;                   states     storage of its states
    router_bias   moves correction biases against the load of experts
    schedule      learning rate by step, pure
    checkpoint    saves global tensors and loads them in any layout, bitwise
    chunk_files   writes boxes of global tensors to files, reads any; chunk_reader for torch.distributed.checkpoint
    export        a checkpoint as a Hugging Face folder, on the host alone

`EmbeddedTrainEngine` is the embedded `TrainEngine`; adapters of other trainers go into `backends/`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
