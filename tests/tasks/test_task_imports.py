"""Tasks and rewards are light: heavy and optional packages are imported when they are used."""

import subprocess
import sys

LIGHT = """
import importlib, pkgutil, sys
import tba.rewards, tba.tasks
for package in (tba.rewards, tba.tasks):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for name in ("preference.tldr", "preference.reward_model", "red_team.task", "red_team.endpoint"):
    importlib.import_module(f"tba.apps.{name}")
print(sorted({"torch", "transformers", "tokenizers", "datasets", "reasoning_gym"} & sys.modules.keys()))
"""


def test_importing_every_task_and_reward_loads_no_heavy_package() -> None:
    ended = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"
