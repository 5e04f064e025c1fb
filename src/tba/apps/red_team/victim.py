"""The attacked model, which answers prompts: in this process (`ModelVictim`) or behind an endpoint (`endpoint`).

Invariant: what a victim's `start()` returns answers each prompt `count` times, in order. `start` is called in the
process that will ask; libraries and models are loaded by it, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from tba.errors import UserError
from tba.fields import as_declared
from tba.rewards.endpoint import check_sampling

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{attack}\n\n### Response:\n"
)
SLOT = "{attack}"


class StartedVictim(Protocol):
    """A victim that has been started."""

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        """Returns `count` sampled answers to each attack; [i] are those to attacks[i]."""


class Victim(Protocol):
    """The settings of a victim."""

    def start(self) -> StartedVictim: ...


@runtime_checkable
class AskedConcurrently(Protocol):
    """The settings of a victim that several calls may ask at once."""

    concurrency: int


@dataclass(frozen=True)
@as_declared
class ModelVictim:
    """A Hugging Face causal language model in the searcher's own process."""

    path: str = ""  # a folder or a Hub name
    template: str = SLOT  # the text it reads, with {attack} in it; `chat`: the model's chat template
    temperature: float = 0.7  # 0 is greedy
    top_p: float = 0.92
    max_tokens: int = 30  # longest answer
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of its weights; auto: bfloat16 on cuda, else float32
    rows_per_pass: int = 256  # answers that grow at the same time
    seed: int = 0  # seed of the answers: the same attacks in one call get the same answers

    def __post_init__(self) -> None:
        check_sampling("victim", self.temperature, self.top_p, self.max_tokens)
        if self.template != "chat" and SLOT not in self.template:
            raise UserError(f"the victim's template is {self.template!r}: put {SLOT} where the attack goes, or `chat`")
        if self.rows_per_pass < 1:
            raise UserError(f"the victim's rows_per_pass is {self.rows_per_pass}: give 1 or more answers at a time")

    def start(self) -> StartedVictim:
        """Loads the model. Raises `UserError` when it cannot be loaded."""
        if not self.path:
            raise UserError("red-teaming needs a victim: give --task.victim.path with a folder or a Hub name")
        from tba.apps.red_team.victim_model import VictimModel

        return VictimModel(**vars(self))

    def memory(self) -> tuple[str, int]:
        """Returns the device that it will be on, and the bytes of its weights there; 0 where that is not known."""
        from transformers import AutoModelForCausalLM

        from tba.apps.red_team.victim_model import expected_device
        from tba.models.arithmetic import judge_bytes

        device = expected_device(self.device)
        is_bfloat16 = self.dtype == "bfloat16" or (self.dtype == "auto" and device == "cuda")
        return device, judge_bytes(self.path, AutoModelForCausalLM, self.rows_per_pass, 2 if is_bfloat16 else 4)
