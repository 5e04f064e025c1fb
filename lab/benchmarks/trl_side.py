"""One run of a TRL trainer, for against_trl.py: runs in TRL's own environment, and imports nothing of ours.

It reads its settings and the problems as JSON from a file, trains, and writes the curve of sampled held-out accuracy
over its own wall-clock, from which evaluation is left out.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Examination(TrainerCallback):
    """Sampled accuracy every so many steps; the clock stands still meanwhile."""

    def __init__(self, model: Any, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.curve: list[tuple[float, float]] = []
        self.out = 0.0  # seconds spent here
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()
        self.examine()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.settings["every"] == 0:
            self.examine()
        target, deadline = self.settings.get("stop_at"), self.settings.get("deadline")
        reached = target is not None and self.curve[-1][1] >= target
        if reached or (deadline is not None and self.curve[-1][0] > deadline):
            control.should_training_stop = True

    def examine(self) -> None:
        now = time.perf_counter()
        training = self.model.training
        self.model.eval()
        right = 0
        problems = self.settings["eval"]
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(1)
            for start in range(0, len(problems), 250):
                part = problems[start : start + 250]
                # every prompt of the task has the same number of tokens: no padding
                prompt = torch.tensor([self.tokenizer.encode(p, add_special_tokens=False) for p, _ in part])
                generated = self.model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=self.settings["max_completion"],
                )
                texts = self.tokenizer.batch_decode(generated[:, prompt.shape[1] :], skip_special_tokens=True)
                right += sum(text == answer for text, (_, answer) in zip(texts, part, strict=True))
        self.model.train(training)
        self.curve.append((now - self.began - self.out, right / len(problems)))
        self.out += time.perf_counter() - now


def trainer_of(settings: dict[str, Any], model: Any, tokenizer: Any, folder: str) -> Any:
    """GRPO, RLOO or Online DPO with the same batch, K, temperature and length, plain float32, nothing written."""
    problems = Dataset.from_dict(
        {"prompt": [p for p, _ in settings["train"]], "answer": [a for _, a in settings["train"]]}
    )
    common: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "max_steps": settings["steps"],
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 20,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "seed": settings["seed"],
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "temperature": 1.0,
        "top_k": 0,
        "dataloader_num_workers": 0,
    }
    batch, k = settings["batch"], settings["group_size"]

    judge = settings.get("judge", {"seconds": 0.0, "concurrency": 1})
    threads = ThreadPoolExecutor(judge["concurrency"])  # as many calls at once as on our side

    def grade(text: str, answer: str) -> float:
        time.sleep(judge["seconds"])
        return float(text == answer)

    def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return list(threads.map(grade, completions, answer))

    kind = settings["trainer"]
    if kind == "online_dpo":
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        config = OnlineDPOConfig(
            **common, per_device_train_batch_size=batch // 2, max_new_tokens=settings["max_completion"], beta=[0.1]
        )
        return OnlineDPOTrainer(
            model=model, args=config, reward_funcs=right, train_dataset=problems, processing_class=tokenizer
        )
    sizes = {
        "per_device_train_batch_size": batch,
        "num_generations": k,
        "max_completion_length": settings["max_completion"],
    }
    if kind == "rloo":
        from trl import RLOOConfig, RLOOTrainer

        config = RLOOConfig(**common, **sizes, beta=0.0)  # with beta its reference is loaded by the model's Hub name
        return RLOOTrainer(
            model=model, args=config, reward_funcs=right, train_dataset=problems, processing_class=tokenizer
        )
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(**common, **sizes, beta=0.0)
    return GRPOTrainer(model=model, args=config, reward_funcs=right, train_dataset=problems, processing_class=tokenizer)


def main(path: Path) -> None:
    """`python trl_side.py settings.json`: writes settings["out"]."""
    settings = json.loads(path.read_text())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    trainer = trainer_of(settings, model, tokenizer, settings["folder"])
    examination = Examination(trainer.model, tokenizer, settings)
    trainer.add_callback(examination)
    trainer.train()
    seconds = time.perf_counter() - examination.began - examination.out
    each = seconds / max(1, trainer.state.global_step)
    Path(settings["out"]).write_text(json.dumps({"curve": examination.curve, "seconds_per_step": each}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
