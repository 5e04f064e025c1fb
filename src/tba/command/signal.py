"""Whether a recipe can learn: what `tba check` sees of its problems, answers and rewards, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.errors import UserError
from tba.recipe import Recipe
from tba.record.text import frame_of, percent, printable, within
from tba.types import Json, StopReason

_TURNS = 16  # turns and observations of an episode that are shown
FEW, MANY = 0.1, 0.3  # shares of prompts whose rewards vary below which, of answers cut off above which, it is said


@dataclass(frozen=True)
class Signal:
    """What a few rounds of the untrained model say of the problems and of the reward."""

    train: int  # problems
    held_out: int
    both: int  # held-out problems whose prompt is one of training too
    answers: int  # sampled here
    reward: float  # mean
    varied: float  # share of prompts whose answers got different rewards: the others teach nothing
    best: float  # share of the prompts all of whose answers got the highest reward seen
    truncated: float  # shares of answers that were cut off at the token limit, and that have no text
    empty: float
    failed: float  # share of answers whose environment failed: they have no reward
    shown: Sequence[Json]  # a few prompts, each with a few answers and their marks

    @classmethod
    def of(cls, probe: Json) -> Signal:
        """From what a searcher's probe found."""
        groups = [np.array(rewards) for rewards in probe["groups"]]
        stopped = probe["stopped"]
        if not groups:
            raise UserError(
                f"the environment failed in all of {stopped['failed']} episodes: the log has the line of the error"
            )
        rewards = np.concatenate(groups)
        answers = len(rewards) + stopped.get("failed", 0)
        return cls(
            train=probe["problems"]["train"],
            held_out=probe["problems"]["eval"],
            both=probe["problems"]["both"],
            answers=answers,
            reward=float(rewards.mean()),
            varied=float(np.mean([np.ptp(own) > 0 for own in groups])),
            best=float(np.mean([own.min() == rewards.max() for own in groups])),
            truncated=stopped.get(StopReason.LENGTH.value, 0) / answers,
            empty=stopped.get("empty", 0) / answers,
            failed=stopped.get("failed", 0) / answers,
            shown=probe["shown"],
        )

    def lines(self, hide_text: bool) -> list[str]:
        """Returns what was seen, for people; hide_text: without prompts and answers."""
        shared = f", of which {self.both:,} are among the former" if self.both else ""
        found = [
            f"problems: {self.train:,} to train on, {self.held_out:,} held out{shared}",
            f"{self.answers:,} answers sampled: mean reward {self.reward:.3g}; rewards differ in "
            f"{percent(self.varied)} of the groups; {percent(self.truncated)} cut off, {percent(self.empty)} empty"
            + (f", {percent(self.failed)} failed in their environments" if self.failed else ""),
        ]
        frame = frame_of(prompt["prompt"] for prompt in self.shown)
        if any(frame) and not hide_text:
            around = "{prompt}".join(printable(part, 400, newlines=False) for part in frame)
            found.append(f"each prompt below stands in: {around}")
        for prompt in () if hide_text else self.shown:
            found.append(f"  {printable(within(frame, prompt['prompt']).strip()[-400:], 400, newlines=False)}")
            for answer in prompt["answers"]:
                if answer["turns"]:
                    found += _episode(answer)
                    continue
                text = printable(answer["text"].strip(), 120, newlines=False) or "(nothing)"
                found.append(f"    reward {answer['mark']}: {text}")
        return found

    def advice(self, recipe: Recipe) -> list[str]:
        """Returns the one or two things to change before the run, the most important first; none if it can learn."""
        found = []
        if self.varied == 0 and self.best == 1:
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
        if self.both:
            found.append(
                f"{self.both:,} held-out problems are trained on too, so that their accuracy is not that of new ones: "
                "keep the splits apart"
            )
        return found[:2]


def _episode(answer: Json) -> list[str]:
    """Returns an episode by turns, and what was read between them."""
    turns = answer["turns"]
    found = [f"    reward {answer['mark']}:"]
    for own, text in turns[:_TURNS]:
        shown = printable(text.strip(), 120, newlines=False) or "(nothing)"
        found.append(f"      {'says ' if own else 'reads'} {shown}")
    return [*found, f"      ... and {len(turns) - _TURNS} more"] if len(turns) > _TURNS else found
