"""Says whether a recipe can learn: what `tba check` sees of its problems, answers and rewards, and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tba.errors import UserError
from tba.recipe import Recipe
from tba.record.text import frame_of, percent, printable, within
from tba.types import Json, StopReason

_TURNS = 16  # turns and observations of an episode that are shown
MANY_COPIES = 0.5  # share of answers that are copies from which on it is said
FEW, MANY = 0.1, 0.3  # shares of prompts whose rewards vary below which, of answers cut off above which, it is said


@dataclass(frozen=True)
class Signal:
    """Holds what a few rounds of the untrained model say of the problems and of the reward."""

    train: int  # problems
    held_out: int
    both: int  # held-out problems whose prompt is one of training too
    answers: int  # sampled here
    groups: int  # of answers to one prompt
    size: int  # answers of the largest
    reward: float  # mean
    varied: float  # share of prompts whose answers got different rewards: the others teach nothing
    best: float  # share of the prompts all of whose answers got the highest reward seen
    truncated: float  # shares of answers that were cut off at the token limit, and that have no text
    empty: float
    copies: float  # share of answers that equal an earlier one of the same round to the same prompt
    failed: float  # share of answers whose environment failed: they have no reward
    shown: Sequence[Json]  # a few prompts, each with a few answers and their marks

    @classmethod
    def of(cls, probes: Sequence[Json]) -> Signal:
        """Sums up what a searcher's probes found. Raises `UserError` when there is no answer with a reward."""
        groups = [np.array(rewards) for probe in probes for rewards in probe["groups"]]
        stopped, problems = Counter[str](), probes[0]["problems"]
        for probe in probes:
            stopped.update(probe["stopped"])
        if not groups:
            raise UserError(
                f"the environment failed in all of {stopped['failed']} episodes: the log has the line of the error"
            )
        rewards = np.concatenate(groups)
        answers = len(rewards) + stopped["failed"]
        return cls(
            train=problems["train"],
            held_out=problems["eval"],
            both=problems["both"],
            answers=answers,
            groups=len(groups),
            size=max(map(len, groups)),
            reward=float(rewards.mean()),
            varied=float(np.mean([np.ptp(own) > 0 for own in groups])),
            best=float(np.mean([own.min() == rewards.max() for own in groups])),
            truncated=stopped[StopReason.LENGTH.value] / answers,
            empty=stopped["empty"] / answers,
            copies=stopped["copies"] / answers,
            failed=stopped["failed"] / answers,
            shown=probes[0]["shown"],
        )

    def facts(self, taught: bool = False, group_size: int = 0) -> dict[str, str]:
        """Returns what was seen, by name. taught: by teachers, for whom rewards need not differ. group_size: answers
        to each prompt of a batch.
        """
        larger = f"; a batch's have {group_size}, in which they differ at least as often" * (group_size > self.size)
        shared = f", of which {self.both:,} are among the former" if self.both else ""
        return {
            "problems": f"{self.train:,} to train on, {self.held_out:,} held out{shared}",
            "answers": f"{self.answers:,} sampled: mean reward {self.reward:.3g}, {percent(self.truncated)} cut off, "
            f"{percent(self.empty)} empty, {percent(self.copies)} copies of others"
            + (f", {percent(self.failed)} failed in their environments" if self.failed else ""),
            "groups": f"{self.groups:,} of at most {self.size} answers: in {percent(self.varied)} rewards differ"
            + ("; the teacher teaches in all of them" if taught else "; only these teach something")
            + larger,
        }

    def examples(self) -> RenderableType:
        """Returns a few prompts as the model sees them, each with its first answers and their rewards."""
        frame = frame_of(prompt["prompt"] for prompt in self.shown)
        found: list[RenderableType] = []
        if any(frame):
            around = "{prompt}".join(printable(part, 400, newlines=False) for part in frame)
            found.append(Text(f"each prompt stands in: {around}", style="dim"))
        for prompt in self.shown:
            found.append(Text(printable(within(frame, prompt["prompt"]).strip()[-400:], 400, newlines=False)))
            for answer in prompt["answers"]:
                if answer["turns"]:
                    found.append(Padding(_episode(answer), (0, 0, 0, 2)))
                    continue
                said = printable(answer["text"].strip(), 120, newlines=False) or "(nothing)"
                mark = printable(answer["mark"], 200, newlines=False)
                found.append(Padding(Text.assemble(said, ("  reward " + mark, "dim")), (0, 0, 0, 2)))
        return Group(*found)

    @property
    def good(self) -> str:
        """Says where there is no advice."""
        return (
            f"Nothing stands in the way: rewards differ in {percent(self.varied)} of the groups, and few answers are "
            "cut off or empty."
        )

    def advice(self, recipe: Recipe) -> list[str]:
        """Returns the one or two things to change before the run, the most important first; none if it can learn."""
        found = []
        taught = any(recipe.teachers.shares(1))  # then answers of the same reward teach something, too
        if taught:
            pass
        elif self.varied == 0 and self.best == 1:
            found.append(
                "every answer gets the same reward: try the reward on an answer that is right, and on a wrong one"
            )
        elif self.varied < FEW and self.best > 0.5:
            found.append("nearly all answers get the highest reward: give harder problems")
        elif self.varied < FEW:
            found.append(
                f"rewards differ in {percent(self.varied)} of the groups only, and the others teach nothing: give "
                "easier problems, a model that succeeds now and then (tba sft), a reward with steps in between, or "
                f"more answers to each prompt (--samples-per-prompt and --group-size, now {recipe.samples_per_prompt} "
                f"and {recipe.group_size})"
            )
        if self.truncated > MANY:
            found.append(
                f"{percent(self.truncated)} of the answers are cut off: set --model.generation.max-completion-tokens "
                "higher, or ask for short answers"
            )
        if self.empty > MANY:
            found.append(f"{percent(self.empty)} of the answers are empty: look at the prompts as the model sees them")
        if self.copies > MANY_COPIES and recipe.replay.buffer.distinct:
            found.append(
                f"{percent(self.copies)} of the answers equal another one to their prompt, and of equal ones the "
                "replay buffer keeps one: sample more varied answers (--exploration.temperature), give problems with "
                "more to say, or keep them all (--replay.buffer.no-distinct)"
            )
        return found[:2]


def _episode(answer: Json) -> Text:
    """Returns an episode by turns, and what was read between them."""
    turns = answer["turns"]
    found = Text.assemble(("reward " + printable(answer["mark"], 200, newlines=False), "dim"))
    for own, text in turns[:_TURNS]:
        shown = printable(text.strip(), 120, newlines=False) or "(nothing)"
        found.append(f"\n{'says ' if own else 'reads'} {shown}")
    return found.append(f"\n... and {len(turns) - _TURNS} more") if len(turns) > _TURNS else found
