"""What starts a run elsewhere fits this package: the RayJob, the Slurm script, the Dockerfile. None is run here."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tba.settings import find, override

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@cache
def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return {line.partition("==")[0].lower(): line.partition("==")[2].split()[0] for line in lines if "==" in line}


@pytest.fixture
def ray_job() -> Any:
    return yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())


def pods(ray_job: Any) -> list[tuple[int, Any]]:
    """How many pods there are of each kind, and what each is made of."""
    cluster = ray_job["spec"]["rayClusterSpec"]
    workers = [(group["replicas"], group["template"]["spec"]) for group in cluster["workerGroupSpecs"]]
    return [(1, cluster["headGroupSpec"]["template"]["spec"]), *workers]


def test_the_ray_jobs_command_sets_fields_that_exist_and_gives_each_gpu_a_worker(ray_job: Any) -> None:
    program, option, script = shlex.split(ray_job["spec"]["entrypoint"])
    assert (program, option) == ("sh", "-c")
    subprocess.run(["sh", "-n", "-c", script], check=True)
    (training,) = re.findall(r"exec tba train (.*?);", script)
    (resuming,) = re.findall(r"exec tba resume (.*?);", script)
    recipe_name, *words = training.split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert resuming == f"{options.pop('--runs')}/{options.pop('--run-name')}"
    assert f"-e {resuming}/recipe.json " in script
    recipe = override(find(recipe_name), [word for pair in options.items() for word in pair], "tba train")
    assert recipe.runtime == "cluster"
    gpus = [n * int(pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)) for n, pod in pods(ray_job)]
    assert gpus[0] == 0
    assert sum(gpus) == recipe.trainer.count + recipe.searcher_count
    assert resuming.startswith(pods(ray_job)[0][1]["containers"][0]["volumeMounts"][0]["mountPath"])


def test_every_pod_of_the_ray_job_has_ray_of_our_version_its_token_and_its_volumes(ray_job: Any) -> None:
    assert ray_job["spec"]["rayClusterSpec"]["rayVersion"] == pins("constraints.txt")["ray"]
    environment = yaml.safe_load(ray_job["spec"]["runtimeEnvYAML"])["env_vars"]
    for _, pod in pods(ray_job):
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        values = {variable["name"]: variable for variable in container["env"]}
        assert values["RAY_AUTH_MODE"]["value"] == "token"
        assert set(values["RAY_AUTH_TOKEN"]["valueFrom"]) == {"secretKeyRef"}
        assert pod["terminationGracePeriodSeconds"] >= int(environment["RAY_JOB_STOP_WAIT_TIME_S"])


def test_the_slurm_script_is_bash_and_its_signal_reaches_it_alone() -> None:
    script = CLUSTER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    options = re.findall(r"^#SBATCH (--\S+)", text, flags=re.MULTILINE)
    assert {"--signal=B:TERM@300", "--requeue", "--open-mode=append"} < set(options)
    assert text.index("#SBATCH") < text.index("set -euo")  # Slurm reads no option behind a command
    (example,) = re.findall(r"^# +sbatch slurm\.sbatch (.*)$", text, flags=re.MULTILINE)
    recipe_name, *words = example.split()
    recipe = override(find(recipe_name), ["--runtime", "cluster", *words], "tba train")
    nodes, gpus = (int(re.findall(rf"--{name}=(\d+)", text)[0]) for name in ("nodes", "gpus-per-node"))
    assert [count for count, _ in recipe.cluster.described_nodes()] == [gpus] * nodes


def build_arguments() -> list[dict[str, str]]:
    """The arguments of each `docker build` that the Dockerfile names."""
    lines = re.findall(r"^# docker build (.*)$", DOCKERFILE, flags=re.MULTILINE)
    return [dict(re.findall(r"--build-arg (\w+)=(\S+)", line)) for line in lines]


def test_the_dockerfile_names_builds_of_torch_extras_and_files_that_there_are() -> None:
    spec = importlib.util.spec_from_file_location("preflight", ROOT / "tools" / "preflight.py")
    assert spec is not None
    assert spec.loader is not None
    preflight = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(preflight)
    builds = {"cpu", *preflight.OLDER.values(), "cu{}{}".format(*preflight.DEFAULT_CUDA)}
    defaults = dict(re.findall(r"^ARG (\w+)=(\S*)$", DOCKERFILE, flags=re.MULTILINE))
    assert len(build_arguments()) >= 4
    for arguments in build_arguments():
        assert arguments.keys() <= defaults.keys()
        values = {**defaults, **arguments}
        assert values["TORCH"] in builds
        extras = [extra for extra in values["EXTRAS"].split(",") if extra]
        assert set(extras) <= set(PROJECT["optional-dependencies"])
        assert ("vllm" in extras) == (values["CONSTRAINTS"] == "constraints-vllm.txt")
        conflicts = unmet_requirements(values["CONSTRAINTS"], extras)
        assert not conflicts, conflicts
    for sources in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, flags=re.MULTILINE):
        assert all(list(ROOT.glob(source)) for source in sources.split())
    assert f"torch=={pins('constraints.txt')['torch']}" == f"torch=={pins('constraints-vllm.txt')['torch']}"


def unmet_requirements(constraints: str, extras: list[str]) -> list[str]:
    """What the package needs, with extras, in another version than a file of constraints allows."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    requirements = [Requirement(text) for text in texts]
    return [
        str(r) for r in requirements if r.name in pins(constraints) and pins(constraints)[r.name] not in r.specifier
    ]
