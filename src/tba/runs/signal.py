"""Says whether a recipe can learn: what `tba check` sees of its problems, answers and rewards, what to change, and what
to try besides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tba.errors import UserError
from tba.objectives.raft import Raft
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.record.text import frame_of, percent, printable, strip_frame
from tba.replay.selection import RecencyReward
from tba.runs.probe import UPDATES
from tba.schedules import WarmupConstant
from tba.types import Json, StopReason

_TURNS = 16  # turns and observations of an episode that are shown
MANY_COPIES = 0.5  # share of answers that are copies from which on it is said
FEW, MANY = 0.1, 0.3  # shares of prompts whose rewards vary below which, of answers cut off above which, it is said
RARE = 0.05  # share of right answers below which old ones are worth more than new ones: it was measured at 0.03
FAST = 0.9  # effective sample size after the first updates below which raw weights were seen to fall on the way


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
    right: float  # share of answers with the reward of a right one (`--evaluation.threshold`)
    partial: float  # share of answers with a reward above 0 that is less than a right one's
    truncated: float  # shares of answers that were cut off at the token limit, and that have no text
    empty: float
    copies: float  # share of answers that equal an earlier one of the same round to the same prompt
    failed: float  # share of answers whose environment failed: they have no reward
    shown: Sequence[Json]  # a few prompts, each with a few answers and their marks

    @classmethod
    def of(cls, probes: Sequence[Json], threshold: float = 1.0) -> Signal:
        """Sums up what a searcher's probes found. Raises `UserError` when there is no answer with a reward.

        threshold: the least reward of a right answer.
        """
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
            right=float((rewards >= threshold).mean()),
            partial=float(((rewards > 0) & (rewards < threshold)).mean()),
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
            found.append(Text(printable(strip_frame(frame, prompt["prompt"]).strip()[-400:], 400, newlines=False)))
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
        objective = recipe.objective
        if isinstance(objective, Raft) and objective.keep == "positive" and self.partial:
            found.append(
                f"RAFT learns every answer with a reward above 0, also the {percent(self.partial)} that are right in "
                "part only: set --objective.keep best, or give rewards of 0 and 1"
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

    def proposals(self, recipe: Recipe, effective: float | None) -> list[str]:
        """Returns settings that are worth a try and that the recipe does not have, each with what was measured.

        effective: share of the answers from before the first updates that still count after them; None: not measured.
        """
        proposals = []
        schedule, decay = recipe.optimizer.schedule, recipe.steps // 4
        if 0 < self.right < RARE and (share := _recent_share(recipe)):
            proposals.append(
                f"data of all ages: --replay.selection.m 0 (now {share:g}), since success is rare, "
                f"{percent(self.right)} of {self.answers:,} answers. Where it was 3 %, sums ended at 96 to 97 % so, "
                "at 38 to 62 from recent data alone (repeats dropped, more answers to a prompt than a group has: "
                "docs/results.md, which data)"
            )
        if isinstance(schedule, WarmupConstant) and decay and (stable := recipe.steps - schedule.warmup - decay) > 0:
            proposals.append(
                f"a rate that decays: WarmupStableDecay({schedule.warmup}, {stable}, {decay}) as the optimizer's "
                f"schedule, in the recipe's code, since it is constant after {schedule.warmup} of {recipe.steps} "
                "updates. With such a decay sums ended at 96.9 %, without at 95.7; at three times the rate at 93.8 and "
                "79.1"
            )
        if not recipe.optimizer.averaged and effective is not None and effective < FAST:
            proposals.append(
                f"averaged weights: --optimizer.averaged, since the policy moves fast: {UPDATES} updates leave an "
                f"effective sample size of {percent(effective)}. At 1e-4 sums fell by up to 6.5 points on the way, "
                "averages by 1.7, to the same end (docs/run.md)"
            )
        return proposals


def _recent_share(recipe: Recipe) -> float:
    """Returns the share of groups that are of new data only, in the place of which an objective for data of any age can
    have old ones; 0 where there is none.
    """
    selection, objective = recipe.replay.selection, recipe.objective
    if recipe.offline or recipe.control.signal != "none" or any(recipe.teachers.shares(1)):
        return 0.0
    if not isinstance(selection, RecencyReward) or selection.mix == "group":
        return 0.0
    return selection.m if isinstance(objective, TrajectoryBalance) and objective.off_policy != "none" else 0.0


def _episode(answer: Json) -> Text:
    """Returns an episode by turns, and what was read between them."""
    turns = answer["turns"]
    found = Text.assemble(("reward " + printable(answer["mark"], 200, newlines=False), "dim"))
    for own, text in turns[:_TURNS]:
        shown = printable(text.strip(), 120, newlines=False) or "(nothing)"
        found.append(f"\n{'says ' if own else 'reads'} {shown}")
    return found.append(f"\n... and {len(turns) - _TURNS} more") if len(turns) > _TURNS else found
