"""Other trainers' models inside this project's train engine.

    support            checks whether Megatron-Core can train a model in a layout; pure
    megatron_model     MegatronModel: Megatron-Core's GPTModel over our `Buckets`, in place of `Transformer`
    megatron_gpt       builds that GPTModel from a model's specification
    megatron_layers    its norms, attention of packed sequences, latent attention, and router
    megatron_device    redirects Megatron-Core's calls of `torch.cuda` to the card

Megatron-Core is imported only when a `MegatronModel` is created. Optimizer, masters, losses, checkpoints and switches
are those of the embedded trainer: they see the model's table (`fusion.model.formats.megatron`) and its storage."""
