"""`examples/cluster/slurm.sbatch` under Slurm: two Slurm nodes on this machine, each with a Ray node of the toy's run.

    apt-get install slurm-wlm munge; service munge start       as root
    python lab/benchmarks/slurm_job.py [--minutes 20] [--out lab/results/slurm_job.csv]

The job has a time limit of so many minutes, and Slurm sends SIGTERM 300 s before it, as the script asks. The run ends
with a checkpoint, the job is requeued, and continues the run; once it has made steps, `scancel` ends it by SIGINT. A
row says what happened, at which step, how many rows the journal had before and how many of these it then lacks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import rows_of
from job_events import EventWriter, event_rows, until

from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.training.checkpoint import newest_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, TOY = ROOT / "examples" / "cluster" / "slurm.sbatch", ROOT / "tests" / "toy" / "recipe.py"
DEADLINE = 1200.0  # seconds that each wait may take
CONFIGURATION = """
ClusterName=local
SlurmctldHost=localhost
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={home}
SlurmdSpoolDir={home}/%n
SlurmctldPidFile={home}/controller.pid
SlurmdPidFile={home}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
GresTypes=gpu
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[16821-16822] CPUs=2
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def output_of(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


class Job:
    """The job of one run, and what has become of both."""

    def __init__(self, home: Path, minutes: int) -> None:
        self.run = home / "runs" / "run"
        environment = {**os.environ, "TBA_RUNS": str(self.run.parent), "TBA_RUN_NAME": self.run.name}
        words = ["sbatch", "--parsable", f"--time={minutes}", "--nodes=2", "--gpus-per-node=0", f"--output={home}/log"]
        words += [str(SCRIPT), str(TOY), "--searchers", "2", "--steps", "999999", "--cluster.searcher-cpus", "1"]
        process = subprocess.run(words, check=True, capture_output=True, text=True, env=environment, cwd=home)
        self.number = process.stdout.strip()

    def fact(self, name: str) -> str:
        """Returns what Slurm says of the job under that name."""
        words = output_of("scontrol", "show", "job", self.number).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def steps(self) -> int:
        rows = read_metrics(self.run) if self.run.exists() else []
        return int(rows[-1]["step"]) if rows else 0

    def wait_for_steps(self, step_target: int) -> None:
        until(
            lambda: self.steps() >= step_target or self.fact("JobState") in ("FAILED", "TIMEOUT"),
            f"step {step_target}",
            DEADLINE,
        )
        if self.steps() < step_target:
            raise RuntimeError(
                f"the job ended before step {step_target}: {self.fact('JobState')}, {self.fact('Reason')}"
            )


def tell(home: Path, minutes: int, write: EventWriter) -> None:
    """Tell the story of one job, and write a row for each event."""
    job, journal = Job(home, minutes), home / "runs" / "run" / "journal.sqlite"
    job.wait_for_steps(10)
    write(["started", job.steps(), len(rows_of(journal)), 0, f"nodes {job.fact('NodeList')}"])
    until(lambda: job.fact("Restarts") != "0", "Slurm's SIGTERM and the requeued job", DEADLINE)
    step, rows = job.steps(), rows_of(journal)
    checkpoint = newest_checkpoint(job.run / "checkpoints")
    write(["requeued", step, len(rows), 0, f"newest checkpoint {checkpoint.path.name if checkpoint else 'NONE'}"])
    job.wait_for_steps(step + 10)
    now = rows_of(journal)
    write(["continued", job.steps(), len(now), sum(now.get(seq) != row for seq, row in rows.items()), ""])
    subprocess.run(["scancel", "--batch", "--signal=INT", job.number], check=True)
    until(lambda: job.fact("JobState") not in ("RUNNING", "COMPLETING"), "the end of the job", DEADLINE)
    summary = Summary.read(job.run)
    closes = summary is not None and summary.tokens.closes() and summary.trajectories.closes()
    state = (
        f"{job.fact('JobState')}, exit code {job.fact('ExitCode')}, the account {'closes' if closes else 'DOES NOT'}"
    )
    write(["scancel --signal=INT", job.steps(), len(rows_of(journal)), 0, state])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("lab/results/slurm_job.csv"))
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="slurm"))
    (home / "slurm.conf").write_text(CONFIGURATION.format(home=home))
    os.environ.update({"SLURM_CONF": str(home / "slurm.conf"), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(home)})
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python_path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    daemons = [subprocess.Popen(["slurmctld", "-D"])]
    daemons += [subprocess.Popen(["slurmd", "-D", "-N", node]) for node in ("n1", "n2")]
    try:
        until(lambda: output_of("sinfo", "--noheader", "--format=%T") == "idle", "two idle nodes", DEADLINE)
        with event_rows(options.out) as write:
            tell(home, options.minutes, write)
        return 0
    finally:
        print((home / "log").read_text(errors="replace")[-3000:] if (home / "log").exists() else "no log")
        subprocess.run(["scancel", "--full", "--user=root"], check=False)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
