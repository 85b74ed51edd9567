"""Other inference engines inside this project's workers.

    support        checks whether vLLM can generate with a model, a layout and settings; pure
    vllm_calls     lists what is touched of vLLM, and the versions that have it
    vllm_core      starts vLLM in this process and in the engine's process groups
    vllm_groups    gives vLLM the process groups of a mesh
    vllm_host      makes vLLM's layers compute from plain tensors where it computes on the host
    vllm_latents   keeps what vLLM derives from weights of latent attention equal to them
    vllm_model     VllmModel: the weights of vLLM's model in our `Buckets`
    vllm_checks    checks at the start that vLLM's tensors are those of the table, and that it computes from them
    vllm_sampler   the keyed sampler in place of vLLM's, and our drafts
    vllm_routing   reads the experts that vLLM records
    vllm_engine    VllmEngine: the `InferEngine` over them

vLLM is imported only when an engine is started. Its weights are those of `fusion.model.formats.vllm`."""
