"""The code of docs/coming_from.md, run as it stands there, on a few rows in verl's columns and with a small model."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import tba
from tba.__main__ import main
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import StopReason, Version

PAGE = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text(encoding="utf-8")
RUN, OF_VERL = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SMALL = (
    *(
        "--runtime",
        "inline",
        "--steps",
        "2",
        "--groups-per-step",
        "2",
        "--group-size",
        "4",
        "--samples-per-prompt",
        "4",
    ),
    *("--replay.pacing.warm-up", "8", "--evaluation.problems", "4", "--model.device", "cpu"),
    *("--model.generation.max-completion-tokens", "3", "--run-name", "NAME"),
)


def rows(first: int, count: int, split: str) -> list[dict[str, object]]:
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {n}+1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": split, "index": n, "answer": f"#### {n + 1}"},
        }
        for n in range(first, first + count)
    ]


def test_the_run_of_the_page_reads_verls_rows_and_is_graded_by_a_function_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE.py").write_text(RUN)
    for name, split in (("train", rows(0, 6, "train")), ("test", rows(20, 4, "test"))):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split))
    tokenizer = character_tokenizer("What is+1?uer:\n023456789")  # so few that some answers are right
    tokenizer.chat_template = TEMPLATE
    shape = ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=16, max_positions=128)
    shape.start(tokenizer).save_pretrained("model")
    tokenizer.save_pretrained("model")
    data = ("--task.train", "train.jsonl", "--task.eval", "test.jsonl", "--model.path", "model")
    assert main(["train", "FILE.py", *SMALL, *data]) == 0
    run = tba.open_run("runs/NAME")
    assert run.summary is not None
    assert (run.summary.steps, run.summary.trajectories.closes()) == (2, True)
    rewards = []
    for trajectory in run.trajectories():
        numbers = re.findall(r"-?\d[\d,]*", trajectory.completion.text)
        right = bool(numbers) and numbers[-1] == trajectory.prompt.fields["reward_model"]["ground_truth"]
        assert trajectory.reward == float(right)
        rewards.append(right)
    assert 0 < sum(rewards) < len(rewards)


def test_a_score_function_of_verl_is_called_with_its_own_four_arguments(tmp_path: Path) -> None:
    (tmp_path / "verl.py").write_text(OF_VERL)
    compute_score = runpy.run_path(str(tmp_path / "verl.py"))["compute_score"]
    reward = tba.Jsonl(Path("unread"), marked_by=compute_score).reward()
    one = np.array([1], dtype=np.int32)
    prompt = tba.Prompt("openai/gsm8k", one, "?", {"reward_model": {"ground_truth": "1234"}})
    said = [tba.Completion(one, text, StopReason.EOS, (Version(), Version())) for text in ("#### 1,234", "#### 12", "")]
    assert [judged.reward for judged in reward.judge([(prompt, answer) for answer in said])] == [1.0, 0.0, 0.0]
