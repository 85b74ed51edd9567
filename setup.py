"""The distribution `rlfusion`: the packages fusion, stalesync and distqueue, and the command `rlfusion`."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PACKAGED = ("recipes/conf/**/*.yaml", "recipes/shapes/**/*.yaml", "scripts/*.py")
"""Files outside of the packages that a wheel needs; `fusion/resources.py` finds them in `fusion/packaged`."""


class BuildPackages(build_py):
    """Copies the files of `PACKAGED` into a wheel. An editable installation finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for pattern in PACKAGED:
            for path in sorted(Path().glob(pattern)):
                target = Path(self.build_lib, "fusion/packaged", path)
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))


setup(
    name="rlfusion",
    version="0.1.0",
    description="RL post-training of Mixture-of-Experts models on NPUs that both train and generate",
    license="Apache-2.0",
    python_requires=">=3.10",
    cmdclass={"build_py": BuildPackages},
    entry_points={"console_scripts": ["rlfusion = stalesync.console:main"]},
    packages=find_packages(include=["fusion*", "stalesync*", "distqueue*"]),
    package_data={
        "": ["*.pyi"],
        "fusion.npu.emulator": ["*.cpp", "*.h", "schemas/*.txt"],
        "fusion.npu.operators": ["*.cpp", "*.h"],
        "fusion.rollout.drafts": ["*.cpp", "*.h"],
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
        "test": [
            "build",
            "pytest",
            "pytest-xdist>=3.2",
            "hypothesis",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<3",
            "peft>=0.21,<0.22",
            "sentencepiece",
            "tiktoken",
        ],
        "browser": ["playwright"],
        "loggers": ["wandb", "mlflow", "swanlab", "trackio"],
        "wandb": ["wandb"],
        "mlflow": ["mlflow"],
        "swanlab": ["swanlab"],
        "trackio": ["trackio"],
        "megatron": ["megatron-core==0.16.1"],
        "triton": ["triton>=3.6"],
    },
)
