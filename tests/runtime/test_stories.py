"""A real pretrained model, stories260K, through a whole run: from a GGUF file to a folder that any program opens."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from runs import inline
from stories import STORIES
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.training.checkpoint import newest_checkpoint

OPENINGS = [
    f"<s>{when}, {who} {what}"
    for when in ("Once upon a time", "One day", "One morning", "After lunch")
    for who in ("a child", "a friend", "the baby", "the doctor", "a teacher", "somebody")
    for what in ("was in the park.", "went to the shop.", "found a ball.")
]


def test_a_pretrained_model_learns_what_is_rewarded_and_is_saved_as_a_plain_folder(tmp_path: Path) -> None:
    """Twenty updates make stories of a girl out of stories of anybody; only weights of the model's names are saved."""
    lines = tmp_path / "openings.jsonl"
    lines.write_text("".join(json.dumps({"prompt": opening}) + "\n" for opening in OPENINGS))
    summary = inline(tmp_path / "run", "--task.train", str(lines), source=Path(__file__).with_name("stories.py"))
    before, after = (e.value for e in summary.evaluations)
    assert after > before + 0.25
    assert summary.trajectories.closes()
    newest = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None
    trained = AutoModelForCausalLM.from_pretrained(newest.path)
    base = AutoModelForCausalLM.from_pretrained(STORIES)
    assert trained.state_dict().keys() == base.state_dict().keys()
    text = AutoTokenizer.from_pretrained(newest.path)("Once upon a time", return_tensors="pt")
    with torch.no_grad():
        assert not torch.allclose(trained(**text).logits, base(**text).logits, atol=0.1)
