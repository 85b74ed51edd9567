"""The distribution `rlfusion`: the packages fusion, stalesync and distqueue."""

from setuptools import find_packages, setup

LOGGERS = ["wandb", "mlflow", "swanlab", "trackio"]

setup(
    name="rlfusion",
    version="0.1.0",
    description="RL post-training of Mixture-of-Experts models on NPUs that both train and generate",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["fusion*", "stalesync*", "distqueue*"]),
    package_data={
        "": ["*.pyi"],
        "fusion.npu.emulator": ["*.cpp", "*.h"],
        "fusion.npu.fused": ["*.cpp", "*.h"],
        "fusion.rollout.drafts": ["*.cpp"],
        "fusion.costmodel.hardware": ["*.yaml"],
        "fusion.telemetry.page": ["assets/*.js", "assets/*.css", "assets/uplot/*"],
    },
    install_requires=[
        "torch>=2.9,<2.14",
        "numpy",
        "ray>=2.60",
        "hydra-core>=1.3",
        "transformers>=5.0",
        "safetensors",
        "xxhash>=3.0",
        "tokenizers",
        "datasets",
        "math-verify",
        "tensorboard",
        "rich>=14.1",
        "pyyaml",
        "lazy_loader>=0.6",
    ],
    extras_require={
        "test": ["pytest", "pytest-xdist>=3.2", "hypothesis", "ruff>=0.17,<0.18", "mypy>=2.4,<3"],
        "browser": ["playwright"],
        "loggers": LOGGERS,
        **{name: [name] for name in LOGGERS},
        "megatron": ["megatron-core==0.16.1"],
    },
)
