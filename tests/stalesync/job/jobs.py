"""A small job that is valid, and changes of it."""

from stalesync.job.config import Config

PACED = {"device__kind": "emulated", "device__pace": "qwen3_30b_a3b", "cluster__hardware": "ascend_910c"}


def job_of(checkpoint, **changes):
    """Return a job on four cards with the model of a folder. ``changes``: of keys, with `__` for the dots."""
    config = Config()
    config.model.path, config.data.source = checkpoint, "addition"
    config.cluster.npus = 4
    config.data.max_prompt_length, config.rollout.max_response_length = 16, 16
    for path, value in changes.items():
        node = config
        *parents, last = path.split("__")
        for parent in parents:
            node = getattr(node, parent)
        assert hasattr(node, last)
        setattr(node, last, value)
    return config
