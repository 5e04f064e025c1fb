"""The entry point of `examples/cluster/rayjob.yaml` by `ray job submit`, on two Ray nodes of this machine.

    pip install -e '.[cluster]'        submitted jobs need Ray's extra `default`
    python lab/benchmarks/ray_job.py [--out lab/results/ray_job.csv]

The first node is as the head of the manifest: it has no cores for workers, so the command moves to the second. The
recipe is the toy and not gsm8k, on two cores and not 32 GPUs; all else is the manifest's. The job is stopped (`ray job
stop`), which sends SIGTERM, and submitted again, which continues the run. A row says what happened, at which step, how
many rows the journal had before and how many of these it then lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # PyYAML comes without types
from faults import rows_of
from job_events import EventWriter, event_rows, until

from tba.record.metrics import read_metrics
from tba.training.checkpoint import newest_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MANIFEST, TOY = ROOT / "examples" / "cluster" / "rayjob.yaml", ROOT / "tests" / "toy" / "recipe.py"
DEADLINE = 600.0  # seconds that each wait may take
GCS, DASHBOARD = 6399, 8299  # ports on loopback


def takes_jobs() -> bool:
    with suppress(RuntimeError):
        ray("job", "list", "--address", f"http://127.0.0.1:{DASHBOARD}")
        return True
    return False


def ray(*words: str) -> str:
    """Returns what a command of Ray prints."""
    process = subprocess.run([str(Path(sys.executable).parent / "ray"), *words], capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"ray {' '.join(words)}: {process.stdout[-1500:]}{process.stderr[-1500:]}")
    return process.stdout


class Story:
    """The run, and the jobs that make it."""

    def __init__(self, home: Path) -> None:
        manifest = yaml.safe_load(MANIFEST.read_text())["spec"]
        self.run = home / "runs" / "toy"
        text = (
            manifest["entrypoint"].replace("/runs", str(self.run.parent)).replace("runs/gsm8k", f"runs/{self.run.name}")
        )
        text = text.replace("train gsm8k", f"train {TOY}").replace("--run-name gsm8k", f"--run-name {self.run.name}")
        text = text.replace("--cluster.trainer-gpus 1", "--cluster.trainer-cpus 1").replace(
            "--searchers 31", "--searchers 1"
        )
        self.entrypoint = text.replace("; fi", " --steps 999999; fi")
        self.environment = manifest["runtimeEnvYAML"]
        self.head_cpus = manifest["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"]

    def submit(self, number: int) -> str:
        """Submit the entry point, and return the name of the job."""
        name = f"story-{number}"
        words = ("--address", f"http://127.0.0.1:{DASHBOARD}", "--no-wait", "--submission-id", name)
        environment = json.dumps(yaml.safe_load(self.environment))
        ray("job", "submit", *words, "--runtime-env-json", environment, "--", *shlex.split(self.entrypoint))
        return name

    def steps(self) -> int:
        rows = read_metrics(self.run) if self.run.exists() else []
        return int(rows[-1]["step"]) if rows else 0

    def has(self, status: str, job: str) -> bool:
        """Returns whether Ray says `stopped` or `failed` of a job; some of its releases write it in capitals."""
        return status in ray("job", "status", "--address", f"http://127.0.0.1:{DASHBOARD}", job).lower()

    def logs(self, job: str) -> str:
        return ray("job", "logs", "--address", f"http://127.0.0.1:{DASHBOARD}", job)

    def wait_for_steps(self, job: str, step_target: int) -> None:
        until(lambda: self.steps() >= step_target or self.has("failed", job), f"step {step_target}", DEADLINE)
        if self.steps() < step_target:
            raise RuntimeError(f"no step {step_target} of {job}: {self.logs(job)[-3000:]}")


def tell(home: Path, write: EventWriter) -> None:
    """Tell the story, and write a row for each event."""
    story = Story(home)
    journal = story.run / "journal.sqlite"
    first_job = story.submit(1)
    story.wait_for_steps(first_job, 20)
    relocation_line = next(
        (line for line in story.logs(first_job).splitlines() if "cannot hold the trainer" in line), "NOT MOVED"
    )
    write(["submitted", story.steps(), len(rows_of(journal)), 0, relocation_line])
    ray("job", "stop", "--address", f"http://127.0.0.1:{DASHBOARD}", first_job)
    until(lambda: story.has("stopped", first_job), "the stopped job", DEADLINE)
    step, rows, checkpoint = story.steps(), rows_of(journal), newest_checkpoint(story.run / "checkpoints")
    write(["stopped", step, len(rows), 0, f"checkpoint {checkpoint.path.name if checkpoint else 'NONE'}"])
    second_job = story.submit(2)
    story.wait_for_steps(second_job, step + 10)
    now = rows_of(journal)
    write(["submitted again", story.steps(), len(now), sum(now.get(seq) != row for seq, row in rows.items()), ""])
    ray("job", "stop", "--address", f"http://127.0.0.1:{DASHBOARD}", second_job)
    until(lambda: story.has("stopped", second_job), "the stopped job", DEADLINE)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("lab/results/ray_job.csv"))
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="job"))  # short: the names of Ray's sockets begin with it
    os.environ.update({"HOME": str(home), "RAY_TMPDIR": str(home), "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1"})
    os.environ.update(
        {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    )
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    program, common = str(Path(sys.executable).parent / "ray"), ["--block", "--object-store-memory=150000000"]
    head = ["--head", "--node-ip-address=127.0.0.1", f"--port={GCS}", "--dashboard-host=127.0.0.1"]
    head += [f"--dashboard-port={DASHBOARD}", f"--num-cpus={Story(home).head_cpus}"]
    log = (home / "ray.log").open("wb")
    nodes = [subprocess.Popen([program, "start", *head, *common], stdout=log, stderr=log)]
    try:
        until(lambda: takes_jobs() or nodes[0].poll() is not None, "Ray and its dashboard", DEADLINE)
        worker = ["--address", f"127.0.0.1:{GCS}", "--node-ip-address=127.0.0.2", "--num-cpus=2"]
        nodes.append(subprocess.Popen([program, "start", *worker, *common], stdout=log, stderr=log))
        with event_rows(options.out) as write:
            tell(home, write)
        return 0
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
            node.wait(60)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
