"""One run of TRL's DistillationTrainer with a real model, for distil_against_trl.py: runs in TRL's own environment.

It takes nothing of ours. After some of the updates it writes the adapter, and the wall-clock and CPU seconds since the
first update began, which leave the writing out, with the answers and the answers' tokens that it has sampled by then.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class Counting(DistillationTrainer):
    """TRL's trainer, which counts what it samples, and whose rate rises as ours: transformers' would begin at 0."""

    answers = tokens = 0
    rise = 1  # updates

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        shape = LambdaLR(optimizer or self.optimizer, lambda done: min(1.0, (done + 1) / self.rise))
        self.lr_scheduler = shape
        return shape

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.answers += len(batch["completion_mask"])
        self.tokens += int(batch["completion_mask"].sum())
        return batch


class Saving(TrainerCallback):
    """Writes the adapter every so many updates, while both clocks stand still."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.every, self.folder = settings["every"], Path(settings["folder"])
        self.trainer: Any = None
        self.curve: list[dict[str, float]] = []
        self.wall = self.cpu = 0.0  # when the clocks would have begun, had nothing been written

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every:
            return
        wall, cpu = time.perf_counter(), time.process_time()
        self.trainer.model.save_pretrained(self.folder / f"step-{state.global_step}" / "adapter")
        self.curve.append(
            {
                "update": state.global_step,
                "wall": wall - self.wall,
                "cpu": cpu - self.cpu,
                "answers": self.trainer.answers,
                "tokens": self.trainer.tokens,
            }
        )
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


def main(path: Path) -> None:
    """`python trl_distil_side.py settings.json`: writes adapters, and the curve as settings["out"]."""
    settings = json.loads(path.read_text())
    torch.set_num_threads(settings["threads"])
    config = DistillationConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        max_steps=settings["updates"],
        learning_rate=settings["rate"],
        weight_decay=0.0,
        max_grad_norm=settings["clip"],
        seed=settings["seed"],
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        per_device_train_batch_size=settings["batch"],
        max_completion_length=settings["max_completion"],
        temperature=1.0,
        top_k=0,
        beta=1.0,
        model_init_kwargs={"dtype": settings["dtype"]},
        teacher_model_init_kwargs={"dtype": settings["dtype"]},
    )
    saving = Saving(settings)
    rank = settings["rank"]
    trainer = Counting(
        model=settings["model"],
        teacher_model=settings["teacher"],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": settings["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[saving],
    )
    saving.trainer, trainer.rise = trainer, settings["warm_up"]
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    Path(settings["out"]).write_text(json.dumps({"curve": saving.curve, "peak_gb": peak}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
