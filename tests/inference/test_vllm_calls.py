"""`vllm_calls` lists every import of vLLM and every private name of it; `contract` finds what sources lack."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fusion.inference.backends import vllm_calls
from stalesync.job.contract import misfits

FOLDER = Path(vllm_calls.__file__).parent
LISTED = [
    (path, row)
    for group in vars(vllm_calls).values()
    if isinstance(group, dict)
    for path, rows in group.items()
    if path.endswith(".py")
    for row in rows
]
SOURCES = {
    "vllm/a.py": """
from vllm.b import Base
from vllm.b import around
class Runner(Base, around.Module):
    limit: int
    def __init__(self, config, *, size=1):
        self.block = size
    def step(self, plan, *, fast=False): ...
    def allocate(self, config): ...
Runner.step.marked = True
""",
    "vllm/b/__init__.py": "from .c import Base, helper as helped\nfrom vllm.d import around\n",
    "vllm/d.py": "from vllm.b import around\n",
    "vllm/b/c.py": """
try:
    def helper(a, b=2, *rest): ...
except ImportError:
    pass
class Base:
    count: int
    def inherited(self): self.late = 1
class Fields:
    a: int
    b: int = 0
""",
}


def names_of(row: str) -> list[str]:
    return [node.attr for node in ast.walk(ast.parse(row.removeprefix("def "))) if isinstance(node, ast.Attribute)]


def modules():
    return [(path.name, ast.parse(path.read_text())) for path in sorted(FOLDER.glob("vllm_*.py"))]


def test_every_import_of_vllm_has_a_row():
    roots = {(path, row.removeprefix("def ").partition("(")[0].partition(".")[0]) for path, row in LISTED}
    listed_modules = {path for path, _ in LISTED}
    found = 0
    for name, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("vllm", "vllm_ascend"):
                stem = node.module.replace(".", "/")
                for alias in node.names:
                    candidates = {f"{stem}/__init__.py", f"{stem}.py"}
                    is_module = f"{stem}/{alias.name}.py" in listed_modules
                    exported = stem == "vllm" and any(root == alias.name for _, root in roots)
                    assert is_module or exported or any((path, alias.name) in roots for path in candidates), (
                        f"{name}: no row of {node.module}.{alias.name}"
                    )
                    found += 1
            elif isinstance(node, ast.Import) and node.names[0].name.startswith("vllm"):
                assert f"{node.names[0].name.replace('.', '/')}.py" in listed_modules, f"{name}: {node.names[0].name}"
    assert found > 20


def test_every_private_name_of_vllm_has_a_row():
    listed = {name for _, row in LISTED for name in names_of(row)} | {row for _, row in LISTED}
    for name, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                if owner not in ("self", "torch.ops"):
                    assert node.attr in listed, f"{name}: no row of {owner}.{node.attr}"


VLLM = {
    "batch": "InputBatch",
    "block_pool": "BlockPool",
    "cache": "CacheConfig",
    "cache_config": "CacheConfig",
    "cached": "CachedRequestData",
    "capturer": "RoutedExpertsCapturer",
    "communicator": "CpuCommunicator",
    "compilation_config": "CompilationConfig",
    "driver_worker": "WorkerWrapperBase",
    "exchanged": "DPMetadata",
    "executor": "ExecutorWithExternalLauncher",
    "get_forward_context": "ForwardContext",
    "group": "KVCacheGroupSpec",
    "impl": "CPUAttentionBackendImpl",
    "kv_cache_manager": "KVCacheManager",
    "load_config": "LoadConfig",
    "model_config": "ModelConfig",
    "new": "NewRequestData",
    "norm": "RMSNorm",
    "of_client": "EngineCoreOutputs",
    "old": "Scheduler",
    "parallel_config": "ParallelConfig",
    "quant_method": "LinearMethodBase",
    "rotary": "RotaryEmbedding",
    "routed_experts_capturer": "RoutedExpertsCapturer",
    "routed_experts_mgr": "RoutedExpertsManager",
    "runner": "GPUModelRunner",
    "_runner": "GPUModelRunner",
    "scheduler": "Scheduler",
    "spec": "FullAttentionSpec",
    "vllm_config": "VllmConfig",
    "wanted": "KVCacheTensor",
    "worker": "Worker",
    "_kv_config": "KVCacheConfig",
    "vllm_checks.owner": "LinearBase",
    "vllm_core.layer": "Attention",
    "vllm_engine.plan": "SchedulerOutput",
    "vllm_groups.config": "VllmConfig",
    "vllm_host.experts": "CPUFusedMOE",
    "vllm_latents.layer": "MLAAttention",
    **dict.fromkeys(
        "CPUAttentionBackend CUDAGraphMode CUDAGraphWrapper EngineArgs MoEActivation RequestStatus".split()
    ),
    **dict.fromkeys("ascend embedding executors ops state".split(), ""),
}
"""Name (in one file) of what is vLLM's → its class; None: the name is the class; "": a module"""
BOTH = {
    "vllm_checks.layer": "attention expert_map=RoutedExperts impl=MLAAttention mlp named_parameters",
    "vllm_checks.loaded": "load_weights=LlamaForCausalLM",
    "vllm_core.config": "family max_positions to_hf num_blocks=KVCacheConfig kv_cache_tensors=KVCacheConfig",
    "vllm_core.tensor": "data_ptr size=KVCacheTensor untyped_storage",
    "vllm_engine.output": "finish_reason=EngineCoreOutput kv_rank new_token_ids=EngineCoreOutput"
    " request_id=EngineCoreOutput routing",
    "vllm_engine.request": "id priority request_id=Request",
    "vllm_host.layer": "expert_map=RoutedExperts get_kv_cache_spec=Attention record w13_weight w2_weight",
    "vllm_host.module": "layer_id=MoERunner routed_experts=MoERunner",
    "vllm_host.self": "_match_cos_sin_cache_dtype=RotaryEmbedding device_group=CpuCommunicator"
    " head_size=RotaryEmbedding is_neox_style=RotaryEmbedding model=GPUModelRunner world_size=CpuCommunicator",
    "vllm_model.module": "compute_logits=LlamaForCausalLM named_modules named_parameters parameters"
    " register_forward_pre_hook",
}
"""Names of what is vLLM's and of what is not: their attributes, with the class of vLLM's"""
OURS = """
BinOp Compare Constant ENVIRONMENT F IfExp Path Verification _C _REPLACED _STATED _copies _core _device _kv _latents
_params absorbed actual along attention begun blake2b blocks buffer by_head config control copy core data device dict
dist draft drafted drafter drawn dtype engine environ environment expected experts flat flatten from_numpy
get_parameter get_submodule getattr global_params hashlib hooks input_ int json k key keyed kv_b_proj kv_caches kwargs
latent_layers limits local logits mesh model module name next nn np num_scheduled_tokens num_tokens_across_dp_cpu one
operators_of os output owned owners padded parallel param params part patch patches path plan policy_version proposed q
query random raw request rollout routed_experts routing running sampled sampler secrets seen self seq sequences single
stale static_forward_context str super tempfile tensor theirs to topk_ids topk_weights torch totals untyped_storage
update_from_output value values vars verified view vllm_core w13 w2 weight weights
"""
"""Names of what is this project's, torch's or Python's"""
OURS_OF_VLLM = {"forward", "pads_heads", "weight", "__init__", "torch", "_C"}
"""Attributes of what is vLLM's that its modules have as PyTorch's, and one that is set here"""


def test_every_attribute_of_vllm_has_a_row():
    """Each name whose attributes are read is known as vLLM's or as another's; vLLM's have a row of their class."""
    listed = {row.removeprefix("def ").partition("(")[0] for _, row in LISTED}
    found = set()
    for file, module in modules():
        if file == "vllm_calls.py":
            continue
        for node in ast.walk(module):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            while isinstance(owner, ast.Call | ast.Subscript):
                owner = owner.func if isinstance(owner, ast.Call) else owner.value
            name = getattr(owner, "attr", getattr(owner, "id", type(owner).__name__))
            in_file, where = f"{file.removesuffix('.py')}.{name}", f"{file}:{node.lineno}: {ast.unparse(node)}"
            if in_file in BOTH:
                classes = dict((*one.split("="), "")[:2] for one in BOTH[in_file].split())
                assert node.attr in classes, where
                owner_class = classes[node.attr] or None
            elif in_file in VLLM or name in VLLM:
                owner_class = VLLM[in_file if in_file in VLLM else name]
                owner_class = name if owner_class is None else owner_class
            else:
                assert name in OURS.split(), where
                continue
            if owner_class is None or node.attr in OURS_OF_VLLM:
                continue
            row = f"{owner_class}.{node.attr}".removeprefix(".")
            assert row in listed, f"{where}: no row of {row}"
            found.add(row)
    assert len(found) > 90


@pytest.mark.parametrize(
    "path, row, problem",
    [
        ("vllm/a.py", "Runner(_, size=_)", None),
        ("vllm/a.py", "Runner(_, width=_)", "Runner has no parameter width"),
        ("vllm/a.py", "Runner()", "Runner also needs config"),
        ("vllm/a.py", "Runner.block", None),
        ("vllm/a.py", "Runner.late", None),
        ("vllm/a.py", "Runner.count", None),
        ("vllm/a.py", "Runner.gone", "no Runner.gone"),
        ("vllm/a.py", "Runner.inherited()", None),
        ("vllm/a.py", "Runner.inherited(_)", "Runner.inherited takes 0 positional arguments, 1 are given"),
        ("vllm/a.py", "Runner.step(_, fast=_)", None),
        ("vllm/a.py", "Runner.block()", "Runner.block is no function"),
        ("vllm/a.py", "def Runner.allocate(self, config)", None),
        ("vllm/a.py", "def Runner.allocate(self, plan)", "the parameters self, config, expected self, plan"),
        ("vllm/a.py", "def Runner.step(self, plan)", "the parameters self, plan, fast, expected self, plan"),
        ("vllm/a.py", "def Runner.step(self, plan, *_)", None),
        ("vllm/b/__init__.py", "helped(_, _, _, _)", None),
        ("vllm/b/__init__.py", "helped(_, c=_)", "helped has no parameter c"),
        ("vllm/b/c.py", "Fields(a=_)", None),
        ("vllm/b/c.py", "Fields(b=_)", "Fields also needs a"),
        ("vllm/b/c.py", "Fields(a=_, c=_)", "Fields has no field c"),
        ("vllm/gone.py", "anything", "no anything"),
    ],
)
def test_what_sources_lack_is_found(path, row, problem):
    found = misfits({path: (row,)}, SOURCES.get)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
