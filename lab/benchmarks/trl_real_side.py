"""One run of TRL's GRPO on `instruct` with a real model, for against_trl.py: runs in TRL's own environment.

Of ours it imports the reward only (by PYTHONPATH), which is the same function on both sides. It writes the curve of
sampled held-out success over its own wall-clock, from which evaluation is left out, after every evaluation.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tba.rewards.instructions import is_fulfilled


def share(text: str, problem: dict[str, Any]) -> float:
    """The share of the instructions that the answer fulfils, as `ShareFulfilled` has it."""
    return sum(is_fulfilled(instruction, problem["question"], text) for instruction in problem["instructions"]) / len(
        problem["instructions"]
    )


class Examination(TrainerCallback):
    """Sampled success every so many steps; the clock stands still meanwhile, and the run ends at the deadline."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.model: Any = None
        self.curve: list[tuple[int, float, float]] = []
        self.out = self.began = 0.0
        self.steps = 0

    def seconds(self) -> float:
        return time.perf_counter() - self.began - self.out

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()
        self.examine()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps = state.global_step
        late = self.seconds() > self.settings["deadline"]
        if late:  # the trainer has set it itself after its last step
            control.should_training_stop = True
        if late or self.steps % self.settings["every"] == 0:
            self.examine()

    def examine(self) -> None:
        now = time.perf_counter()
        self.model.eval()
        right, problems = 0, self.settings["eval"]
        self.tokenizer.padding_side = "left"
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(1)
            for start in range(0, len(problems), 50):
                part = problems[start : start + 50]
                read = self.tokenizer.apply_chat_template(
                    [messages for messages, _ in part],
                    add_generation_prompt=True,
                    padding=True,
                    return_tensors="pt",
                    return_dict=True,
                )
                drawn = {"do_sample": True, "temperature": self.settings["temperature"], "top_k": 0, "top_p": 1.0}
                generated = self.model.generate(**read, **drawn, max_new_tokens=self.settings["max_completion"])
                texts = self.tokenizer.batch_decode(
                    generated[:, read["input_ids"].shape[1] :], skip_special_tokens=True
                )
                right += sum(share(text, problem) == 1.0 for text, (_, problem) in zip(texts, part, strict=True))
        self.model.train()
        self.curve.append((self.steps, now - self.began - self.out, right / len(problems) if problems else 0.0))
        self.out += time.perf_counter() - now
        print(self.curve[-1], flush=True)
        self.write()

    def write(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        each = self.seconds() / max(self.steps, 1)
        figures = {"curve": self.curve, "seconds_per_step": each, "peak_gb": peak}
        Path(self.settings["out"]).write_text(json.dumps(figures) + "\n")


def main(path: Path) -> None:
    """`python trl_real_side.py settings.json`: writes settings["out"]."""
    settings = json.loads(path.read_text())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    problems = Dataset.from_dict(
        {
            "prompt": [p for p, _ in settings["train"]],
            "problem": [json.dumps(problem) for _, problem in settings["train"]],
        }
    )

    def reward(completions: list[Any], problem: list[str], **kwargs: Any) -> list[float]:
        return [share(c[0]["content"], json.loads(t)) for c, t in zip(completions, problem, strict=True)]

    config = GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        max_grad_norm=1.0,
        seed=settings["seed"],
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        temperature=settings["temperature"],
        top_k=0,
        dataloader_num_workers=0,
        per_device_train_batch_size=settings["part"],
        gradient_accumulation_steps=settings["batch"] // settings["part"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_completion"],
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=problems,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=settings["rank"], lora_alpha=settings["rank"] * 2, target_modules="all-linear"),
    )
    examination = Examination(tokenizer, settings)
    examination.model = trainer.model
    trainer.add_callback(examination)
    trainer.train()
    examination.write()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
