"""Map the names of settings in verl, in TRL and in earlier versions to the keys here. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

_NAMES = {
    "model.path": "actor_rollout_ref.model.path model",
    "data.source": "data.train_files",
    "eval.files": "data.val_files",
    "data.prompt_field": "data.prompt_key",
    "data.answer_field=reward_model.ground_truth": "reward_model.ground_truth",
    "data.chat_template_kwargs": "data.apply_chat_template_kwargs",
    "data.prompts_per_step": "data.train_batch_size",
    "data.long_prompts": "data.truncation",
    "rollout.max_response_length": "data.max_response_length max_completion_length",
    "data.long_prompts=skip": "data.filter_overlong_prompts",
    "algorithm.group_size": "actor_rollout_ref.rollout.n num_generations",
    "rollout.sampling.temperature": "actor_rollout_ref.rollout.temperature temperature",
    "rollout.sampling.top_p": "actor_rollout_ref.rollout.top_p top_p",
    "rollout.sampling.top_k": "actor_rollout_ref.rollout.top_k top_k",
    "environment.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "environment.tools": "actor_rollout_ref.rollout.multi_turn.format",
    "eval.samples": "actor_rollout_ref.rollout.val_kwargs.n",
    "eval.temperature": "actor_rollout_ref.rollout.val_kwargs.temperature",
    "eval.top_p": "actor_rollout_ref.rollout.val_kwargs.top_p",
    "eval.top_k": "actor_rollout_ref.rollout.val_kwargs.top_k",
    "algorithm.minibatches": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "training.token_budget": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "": "actor_rollout_ref.actor.ppo_epochs num_iterations algorithm.gamma algorithm.lam",
    "training.lr": "actor_rollout_ref.actor.optim.lr learning_rate",
    "training.betas": "actor_rollout_ref.actor.optim.betas",
    "training.schedule": "actor_rollout_ref.actor.optim.lr_scheduler_type lr_scheduler_type",
    "training.recompute": "actor_rollout_ref.model.enable_gradient_checkpointing gradient_checkpointing",
    "training.lora.rank": "actor_rollout_ref.model.lora_rank",
    "training.lora.alpha": "actor_rollout_ref.model.lora_alpha",
    "training.lora.rank and training.lora.alpha and training.lora.targets": "peft_config",
    "training.warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "training.weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
    "training.clip_grad": "actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.optim.clip_grad",
    "algorithm.clip_low": "actor_rollout_ref.actor.clip_ratio_low epsilon",
    "algorithm.clip_high": "actor_rollout_ref.actor.clip_ratio_high epsilon_high",
    "algorithm.clip_low and algorithm.clip_high": "actor_rollout_ref.actor.clip_ratio",
    "algorithm.kl_coef and algorithm.kl_in=loss": """
        actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef""",
    "algorithm.kl_coef and algorithm.kl_in=reward": "algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef",
    "algorithm.name": "algorithm.adv_estimator",
    "algorithm.normalize_advantages": "algorithm.norm_adv_by_std_in_grpo scale_rewards",
    "algorithm.loss_aggregation": "actor_rollout_ref.actor.loss_agg_mode",
    "parallel.infer.tp": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "parallel.train.tp": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "parallel.train.ep": "actor_rollout_ref.actor.megatron.expert_model_parallel_size",
    "parallel.train.pp": "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "parallel.train.etp": "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size",
    "parallel.train.cp": """
        actor_rollout_ref.actor.ulysses_sequence_parallel_size
        actor_rollout_ref.actor.megatron.context_parallel_size""",
    "rollout.backend": "actor_rollout_ref.rollout.name",
    "rollout.max_length": "actor_rollout_ref.rollout.max_model_len",
    "rollout.engine.kv_fraction": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "rollout.engine.max_seqs": "actor_rollout_ref.rollout.max_num_seqs",
    "rollout.engine.max_batch_tokens": "actor_rollout_ref.rollout.max_num_batched_tokens",
    "reward.path": """
        reward.custom_reward_function.path reward.custom_reward_function.name custom_reward_function.path
        reward_funcs""",
    "cluster.npus": "trainer.n_gpus_per_node trainer.nnodes",
    "run.steps": "trainer.total_training_steps trainer.total_epochs max_steps num_train_epochs",
    "run.save_every": "trainer.save_freq save_steps",
    "eval.every": "trainer.test_freq eval_steps",
    "run.name": "trainer.experiment_name",
    "run.dir": "trainer.default_local_dir",
    "run.loggers": "trainer.logger report_to",
    "run.resume": "trainer.resume_mode resume_from_checkpoint",
    "rollout.sampling.min_p": "min_p",
    "algorithm.kl_coef": "beta",
    "algorithm.name and algorithm.loss_aggregation": "loss_type",
    "reward.terms": "reward_weights",
    "algorithm.correction": "vllm_importance_sampling_correction",
    "rollout.backend=vllm": "use_vllm",
    "model.dtype": "bf16",
    "run.dir and run.name": "output_dir",
}
OTHER_NAMES = {name: here for here, names in _NAMES.items() for name in names.split()}
"""Key by its name in verl or TRL; "": there is no counterpart. The table is that of docs/coming_from.md."""

NOTES = {
    "data.long_prompts": "refuse or skip: no prompt is cut",
    "algorithm.minibatches": "the number of minibatches, not their size",
    "cluster.npus": "cards of all nodes together",
    "run.steps": "steps, not epochs",
}
"""How the value of a key differs from that of its counterparts; as in docs/coming_from.md"""

_MOVED = {
    "rollout.sampling": "temperature top_k top_p min_p stop forced_median forced_spread",
    "rollout.engine": """
        block_size max_seqs max_batch_tokens kv_fraction max_kv_tokens prefix_cache batch_invariant
        vllm_graphs=graphs""",
    "rollout.schedule": "order length_classes chunk_tokens probe",
    "rollout.kv_pool": """
        suspended_kv=suspended max_parked_kv_mib=max_parked_mib kv_spill=spill max_spilled_kv_mib=max_spilled_mib
        kv_spread=spread kv_pull_tokens=pull_tokens kv_remote=remote""",
    "rollout.drafts": """
        drafts=source draft_tree=tree draft_history=history draft_mib=mib draft_group_mib=group_mib
        draft_max_age=max_age draft_exchange=exchange""",
}
MOVED = {
    f"rollout.{old}": f"{group}.{new or old}"
    for group, names in _MOVED.items()
    for old, _, new in (name.partition("=") for name in names.split())
}
"""Key by its name in earlier versions"""

_BY_ACCEPTANCE = "gone: what is verified follows from how often drafts are right (docs/rollout.md#drafts)"
REMOVED = {"rollout.drafts.budget": _BY_ACCEPTANCE, "rollout.draft_budget": _BY_ACCEPTANCE}
"""Why there is no such key any more, by its names; saved values are ignored"""
NOW = MOVED | REMOVED
"""What a name of an earlier version is now"""


def check_moved(keys: Iterable[str]) -> None:
    """Raise ValueError for the first name of an earlier version, with what it is now."""
    for key in keys:
        if key in NOW:
            raise ValueError(f"{key} is {NOW[key]}")


def migrate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by full key under the present keys."""
    return {MOVED.get(key, key): value for key, value in settings.items() if key not in REMOVED}


def migrate_groups(config: dict[str, Any]) -> dict[str, Any]:
    """Move the values of a config, groups within groups, to the present keys, and return it."""
    for old, new in NOW.items():
        (*groups, name), values = old.split("."), config
        for group in groups:
            values = values.get(group, {})
            values = values if isinstance(values, dict) else {}
        if isinstance(values.get(name, {}), dict):  # absent, or a group of this name
            continue
        value, (*path, last), node = values.pop(name), new.split("."), config
        if old in REMOVED:
            continue
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return config
