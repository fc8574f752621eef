"""Package metadata. Tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

# The DeepSpeed JSON files live at the top of the repository, where users look for them, and are installed as the data folder
# ebft_ds/ds_configs, so that the package finds its defaults after `pip install` too (see ebft_ds/config/deepspeed_files.py).
packages = [*find_packages(include=["ebft_ds", "ebft_ds.*"]), "ebft_ds.ds_configs"]

setup(
    name="ebft_ds",
    version="0.1.0",
    description="Energy-Based Fine-Tuning of language models on DeepSpeed ZeRO-3",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=packages,
    package_dir={"ebft_ds.ds_configs": "ds_configs"},
    package_data={"ebft_ds": ["py.typed"], "ebft_ds.ds_configs": ["*.json", "README.md"]},
    install_requires=[
        "torch>=2.13,<2.14",
        "transformers>=5.16.1,<5.20",
        "deepspeed>=0.19.8,<0.20",
        "peft>=0.21,<0.22",
        "datasets>=5.2,<6",
        "safetensors>=0.8",
        "tensorboard>=2.21",
        "pydantic>=2.12,<3",
        "typer>=0.20",
        "rich>=14",
        "msgspec>=0.20",
        "aiohttp>=3.14",  # thousands of concurrent requests to rollout servers; datasets brings it along anyway
        "psutil>=7",
        "pyyaml>=6.0.2",
        "numpy>=2",
        "jaxtyping>=0.3.3",
        "setuptools<81",  # DeepSpeed builds its ops with it at run time; newer ones drop pkg_resources, which vLLM still needs
        "ninja",
    ],
    extras_require={
        "vllm": ["vllm==0.32.*"],
        "liger": ["liger-kernel>=0.8.5,<0.9"],
        "grain": ["grain>=0.2.18,<0.3"],  # pipelines that call the collect functions of RewardTrainer
        "dev": [
            "packaging",
            "grain>=0.2.18,<0.3",
            "pytest>=9",
            "pytest-timeout>=2.4",
            "hypothesis>=6.150",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<2.5",
            "import-linter>=2.10",
            "beartype>=0.22",
            "trl>=1.16,<1.17",  # tools/bench.py reward measures against it
            "types-PyYAML",
            "types-psutil",
        ],
    },
    entry_points={
        "console_scripts": ["ebft-ds = ebft_ds.cli.app:main"],
        # vLLM loads this in every process of a server: it registers the weight-transfer engines "ebft_gloo" and "ebft_disk".
        "vllm.general_plugins": ["ebft_ds = ebft_ds.sidecar.plugin:register"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
