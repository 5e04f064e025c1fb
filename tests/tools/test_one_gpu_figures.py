"""docs/hardware.md says what one GPU was measured to do."""

import json
from pathlib import Path
from types import ModuleType

import pytest


def test_what_was_measured_stands_in_the_table_and_what_was_not_says_so(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = tmp_path / "one_gpu.json"
    monkeypatch.setattr(tool, "AFTER", after)
    page = "\n".join(tool.measured())
    assert "- *After*: **not measured yet**." in page
    assert "| engine | 72 slots: launches in a decode step | 1,126 | 60 |\n" in page
    assert "256 slots: tokens/s in a continuous flow (aimed at 25,000)" in page.partition("Not measured, by part:")[2]
    assert "| turns |" not in page
    about = {"machine": {"gpus": ["Some Card"], "cores": 4}, "versions": {"torch": "1", "transformers": "2"}}
    shared = {"turns": {"left": {"trainer": 0.5, "searcher": 0.25}, "of_the_slower_half": 0.25}}
    parts = {
        "engine": {"launches_a_step": 58.0},
        "sharing": {},
        "arrangements": shared,
        "trainer": {"failed": "no memory"},
    }
    after.write_text(json.dumps({"about": about, "parts": parts}))
    page = "\n".join(tool.measured())
    assert "- *After*: one Some Card, 4 cores, torch 1, transformers 2." in page
    assert "| engine | 72 slots: launches in a decode step | 1,126 | 60 | 58 |" in page
    assert f"| | kernels in a decode step | 1,126 | | {tool.NEVER} |".replace("| |", "|  |") in page
    assert "| turns | 0.5 | 0.25 | 0.25 |" in page
    assert page.count(f"| {tool.NEVER} | {tool.NEVER} | {tool.NEVER} |") == len(tool.ARRANGEMENTS) - 1
