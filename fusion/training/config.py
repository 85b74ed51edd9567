"""The config groups `training` and `algorithm`."""

from dataclasses import dataclass, field

from fusion.model.adapters import TARGETS, Adapters
from fusion.model.prefixes import SHARE_PREFIXES
from fusion.telemetry.keys import POSITIVE, Unsupported, key
from fusion.telemetry.validation import Checks, Group, is_finite

ALGORITHMS = {
    "grpo": "fusion.training.algorithms.grpo:GRPO",
    "dr_grpo": "fusion.training.algorithms.dr_grpo:DrGRPO",
    "dapo": "fusion.training.algorithms.dapo:DAPO",
    "gspo": "fusion.training.algorithms.gspo:GSPO",
    "rloo": "fusion.training.algorithms.rloo:RLOO",
    "reinforce_plus_plus": "fusion.training.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
}
"""Module and class of each algorithm"""
COMPARE_SIBLINGS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo")
"""The algorithms whose advantages are 0 without other responses to the same prompt (`Algorithm.by_group`)."""
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
CORRECTIONS = {
    "none": "fusion.training.corrections:none",
    "tis_token": "fusion.training.corrections:tis_token",
    "tis_sequence": "fusion.training.corrections:tis_sequence",
    "decoupled": "fusion.training.corrections:decoupled",
    "icepop": "fusion.training.corrections:icepop",
    "mask_sequence": "fusion.training.corrections:mask_sequence",
}
"""Module and function of each correction"""


LR, LORA_LR = 1e-6, 1e-5
"""Default learning rates: of all weights, and of adapters, which learn best at ten times the rate"""


@dataclass
class LoraConfig(Group, path="training.lora"):
    """Train adapters beside a frozen base (LoRA, arXiv 2106.09685). Trainer and engine compute with both, unmerged; the
    reference is the base. Checkpoints and exports hold the adapters alone."""

    rank: int = key(
        0,
        at_least=0,
        at_most=65_536,
        read_by="plan simulate",
        unsupported_by={
            "megatron": Unsupported("Megatron-Core's layers have no adapters here"),
            "vllm": Unsupported("vLLM's layers have no adapters here"),
        },
    )
    """Rank of the adapters; 0: all weights are trained. 1 to 32 suffice for reinforcement learning."""

    alpha: float = key(32.0, above=0, only={"rank": POSITIVE}, timeless=True)
    """The adapters' product is multiplied by alpha / rank."""

    targets: list[str] = key(factory=lambda: [*TARGETS], only={"rank": POSITIVE}, read_by="plan simulate")
    """What has adapters: `attention`: all matrices of attention; `mlp`: of dense layers and of shared experts;
    `experts`: of routed experts. Router, embedding and head never have any."""

    dropout: float = key(0.0, only={"rank": POSITIVE}, timeless=True)
    """Only 0: with dropout the trainer's log-probabilities would be those of another policy than the engine's."""

    @property
    def adapters(self) -> Adapters | None:
        return Adapters(self.rank, self.alpha, tuple(self.targets)) if self.rank else None

    def check(self, check: Checks) -> None:
        named = isinstance(self.targets, list) and bool(self.targets) and {*self.targets} <= {*TARGETS}
        check.that("targets", named and len({*self.targets}) == len(self.targets), f"some of {', '.join(TARGETS)}")
        check.that("dropout", self.dropout == 0, "0")


@dataclass
class TrainingConfig(Group, path="training"):
    """How an optimizer step is computed."""

    backend: str = key("embedded", one_of=("embedded", "megatron"))
    """Whose model is trained: `embedded`: this project's; `megatron`: Megatron-Core's GPTModel (`pip install
    megatron-core==0.16.1`). All families; optimizer, checkpoints and switches are the same."""

    lora: LoraConfig = field(default_factory=LoraConfig)

    lr: float | None = key(None, at_least=0, timeless=True)
    """Peak learning rate of AdamW; null: 1e-6, or 1e-5 with `lora.rank` > 0."""

    betas: list[float] = key(factory=lambda: [0.9, 0.95], timeless=True)
    """Decay rates of AdamW's first and second moment."""

    weight_decay: float = key(0.01, at_least=0, timeless=True)
    """Decoupled weight decay of matrices; the weights of norms do not decay."""

    clip_grad: float = key(1.0, at_least=0, timeless=True)
    """Largest norm of the whole gradient; a larger gradient is scaled down to it. 0: no clipping."""

    schedule: str = key("constant", one_of=("constant", "cosine"), timeless=True)
    """Learning rate after the warm-up: `constant`, or `cosine`, which decays to 0 at the last step of the run; if a
    resume changes that step, from the rate of its last step."""

    warmup_steps: int = key(0, at_least=0, timeless=True)
    """Optimizer steps over which the learning rate rises linearly from 0 to `lr`."""

    token_budget: int = key(16384, at_least=1, read_by="plan")
    """Maximum number of tokens of one micro-batch on one replica, whose cards share them with `parallel.train.cp`:
    bounds the memory of the layers' activations (that of log-probabilities is bounded whatever it is); does not change
    results."""

    share_prefixes: str = key(
        "auto",
        one_of=SHARE_PREFIXES,
        read_by="plan simulate",
        unsupported_by={"megatron": Unsupported("Megatron-Core's layers attend within whole sequences", ("on",))},
    )
    """Compute the rows of a prefix that sequences of a micro-batch have in common once, in training and for
    log-probabilities: the prompt of a group, and what branches of a conversation share. `auto`: where it saves time,
    decided from lengths; `on`: wherever tokens are equal; `off`. Changes results by rounding only."""

    recompute: bool = key(False, read_by="plan simulate")
    """Activation checkpointing: keep only the input of each layer and recompute the rest in the backward pass; less
    memory, about a third more compute."""

    load_balancing_coef: float | None = key(None, at_least=0, timeless=True)
    """Weight of the load-balancing loss of the experts; null: 0, as this loss trains the routers whatever the rewards
    are. `router_aux_loss_coef` of the model is never used."""

    load_balancing: str = key(
        "batch", one_of=("batch", "sequence"), only={"load_balancing_coef": POSITIVE}, refused=False, timeless=True
    )
    """What that loss is computed over: `batch`: all rows of the batch in all layers at once, as transformers does;
    `sequence`: each sequence in each layer, averaged over sequences and summed over layers (DeepSeek-V3, with a weight
    of 0.0001); the parts that lending divides a step into count by their trained tokens."""

    router_bias_rate: float = key(0.0, at_least=0, timeless=True)
    """What the correction bias of an overloaded expert loses, and that of an underloaded one gains, in an optimizer
    step (DeepSeek-V3 was pretrained with 0.001). Only for models whose routers have one; 0: the biases are kept."""

    @property
    def shares_prefixes(self) -> str:
        """`share_prefixes` in force: `off` with Megatron-Core, whose layers attend within whole sequences."""
        return "off" if self.backend == "megatron" else self.share_prefixes

    @property
    def peak_lr(self) -> float:
        """The peak learning rate in force: `lr`, with the default for null."""
        return self.lr if self.lr is not None else LORA_LR if self.lora.rank else LR

    @property
    def balancing_coef(self) -> float:
        """The weight of the load-balancing loss in force: `load_balancing_coef`, with 0 for null."""
        return self.load_balancing_coef or 0.0

    def describe_lora(self) -> str:
        """Return what is trained with adapters, and at which rate."""
        default = ": the default of adapters, ten times that of all weights" if self.peak_lr == LORA_LR else ""
        return f"training.lora.rank={self.lora.rank}: adapters alone are trained; training.lr={self.peak_lr:g}{default}"

    def describe_balancing(self, model_coef: float) -> str:
        """Return the weight of the load-balancing loss in force and where it comes from; ``model_coef``: what the
        model's config.json states."""
        stated = self.load_balancing_coef is not None
        origin = "as stated" if stated else f"the default, not {model_coef:g} of the model's config.json"
        return f"training.load_balancing_coef={self.balancing_coef:g}: {origin}"

    def check(self, check: Checks) -> None:
        betas = list(self.betas)
        rates = len(betas) == 2 and all(is_finite(beta) and 0 <= beta < 1 for beta in betas)
        check.that("betas", rates, "two numbers in [0, 1)")


@dataclass
class AlgorithmConfig(Group, path="algorithm"):
    """How the rewards of samples update the policy."""

    name: str = key("grpo", one_of=ALGORITHMS, timeless=True)
    """Algorithm: one of the files of `fusion/training/algorithms` (grpo, dr_grpo, dapo, gspo, rloo,
    reinforce_plus_plus)."""

    group_size: int = key(8, at_least=1, at_most=100_000, read_by="plan simulate")
    """Responses sampled for each prompt; advantages compare their rewards with each other: at least 2, except for
    reinforce_plus_plus."""

    clip_low: float = key(0.2, at_least=0, below=1, timeless=True)
    """The probability ratio of a token (gspo: of a sequence) is clipped at 1 - clip_low."""

    clip_high: float = key(0.2, at_least=0, at_most=1e30, timeless=True)
    """The probability ratio of a token (gspo: of a sequence) is clipped at 1 + clip_high."""

    kl_coef: float = key(0.0, at_least=0, read_by="simulate")
    """Weight of the KL divergence to the reference model; 0: no reference model is loaded."""

    kl_in: str = key("loss", one_of=("loss", "reward"), only={"kl_coef": POSITIVE}, refused=False, timeless=True)
    """Where the divergence is applied: `loss`: the estimate of each token is added to its loss; `reward`: the estimate
    of a whole response is subtracted from its reward."""

    normalize_advantages: bool = key(True, only={"name": ("grpo", "dapo", "gspo")}, refused=False, timeless=True)
    """Divide the advantages of a group by the standard deviation of its rewards (grpo, dapo, gspo; the formulas of the
    others leave no choice); false: only subtract the mean."""

    loss_aggregation: str | None = key(None, one_of=AGGREGATIONS, timeless=True)
    """How the losses of tokens are aggregated: `token_mean`: mean over all tokens of the batch; `sequence_mean`: mean
    over each sequence, then over sequences; `constant`: sum divided by sequences x rollout.max_response_length,
    however much of a conversation its environment says; null: the default of the algorithm (dr_grpo, rloo: constant;
    gspo: sequence_mean; others: token_mean)."""

    overlong_buffer: int | None = key(None, at_least=0, timeless=True)
    """Number of tokens before rollout.max_response_length over which an overlong penalty grows from 0 to 1; 0: no
    penalty; null: the default of the algorithm (dapo: a fifth of the maximum; others: none). Sampled tokens count: a
    conversation whose environment uses up the maximum is cut, but not penalised for that."""

    correction: str | None = key(None, one_of=CORRECTIONS)
    """Off-policy correction, for samples of an older policy (`fusion/training/corrections.py`): `none`, `tis_token`,
    `tis_sequence`, `decoupled`, `icepop` or `mask_sequence`; null: `none`, or `decoupled` where
    stalesync.max_staleness > 0, which with several minibatches costs a forward pass of the batch."""

    correction_cap: float | None = key(None, at_least=1, only={"correction": [*CORRECTIONS][1:]})
    """Largest importance weight of the correction (mask_sequence: the geometric mean of the ratios of a sequence lies
    between the inverse of the cap and the cap); null: the default of the correction (tis_token, tis_sequence and
    mask_sequence 2, decoupled and icepop 5)."""

    correction_floor: float | None = key(None, at_least=0, at_most=1, only={"correction": ("icepop", "mask_sequence")})
    """Masks tokens (icepop) or whole sequences with a token (mask_sequence) of a smaller ratio; null: the default of
    the correction (icepop 0.5, mask_sequence 0.0001)."""

    minibatches: int = key(1, at_least=1, read_by="simulate")
    """Number of optimizer steps that the samples of one loop step are divided into."""

    replay: str = key("none", one_of=("none", "train", "rollout"))
    """Routing replay, which experts every forward pass of a step uses: `rollout`: those of the engine (R3, arXiv
    2510.11370); `train`: those of the trainer before the first update of the step (R2, arXiv 2507.18071); `none`. With
    either, `training/routing_mismatch` is the fraction of (token, layer) pairs that the router would now route
    elsewhere."""

    @property
    def corrects_by(self) -> str:
        """The correction in force: `correction`, with `none` for null."""
        return self.correction or "none"

    def check(self, check: Checks) -> None:
        alone = self.name in COMPARE_SIBLINGS and self.group_size == 1
        compares = f"algorithm.name={self.name} compares the responses to a prompt, and one alone has an advantage of 0"
        check.that("group_size", not alone, f"at least 2, as {compares}")
