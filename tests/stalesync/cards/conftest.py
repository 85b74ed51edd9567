import pytest

from fusion.colocate import Deployment, FusionConfig, WorkerSpec
from fusion.inference import RolloutConfig
from fusion.model import Parallel
from fusion.model.options import PolicyModelConfig
from fusion.npu import DeviceConfig
from fusion.training import AlgorithmConfig, TrainingConfig
from tests.helpers import tiny_checkpoint


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return WorkerSpec(
        seed=5,
        steps=1,
        model=PolicyModelConfig(path=tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)),
        deployment=Deployment.colocated(2),
        train=Parallel(2),
        infer=Parallel(2, ep=2),
        fusion=FusionConfig(),
        rollout=RolloutConfig(max_response_length=6),
        training=TrainingConfig(),
        algorithm=AlgorithmConfig(),
        device=DeviceConfig("emulated", capacity_bytes=256 << 20),
    )
