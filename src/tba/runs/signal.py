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
from tba.runs.probe import DRIFT_UPDATES, SampledRounds
from tba.schedules import WarmupConstant
from tba.types import Json, StopReason

_MOST_TURNS = 16  # turns and observations of an episode that are shown
MOST_COPIES = 0.5  # share of answers that are copies above which there is advice
LEAST_VARIED, MOST_CUT_OFF = 0.1, 0.3  # least share of prompts with varied rewards, most of answers cut off or empty
RARE_SUCCESS = 0.05  # share of right answers below which old ones are worth more than new ones: it was measured at 0.03
FAST_DRIFT = 0.9  # effective sample size after the first updates below which raw weights were seen to fall on the way


@dataclass(frozen=True)
class Signal:
    """Holds what a few rounds of the untrained model say of the problems and of the reward."""

    train: int  # problems
    held_out: int
    shared_problems: int  # held-out problems whose prompt is one of training too
    answers: int  # sampled here
    groups: int  # of answers to one prompt
    largest_group: int  # answers of the largest
    mean_reward: float
    varied_share: float  # share of prompts whose answers got different rewards: the others teach nothing
    best_share: float  # share of the prompts all of whose answers got the highest reward seen
    right_share: float  # share of answers with the reward of a right one (`--evaluation.threshold`)
    partial_share: float  # share of answers with a reward above 0 that is less than a right one's
    truncated_share: float  # shares of answers that were cut off at the token limit, and that have no text
    empty_share: float
    copied_share: float  # share of answers that equal an earlier one of the same round to the same prompt
    failed_share: float  # share of answers whose environment failed: they have no reward
    example_prompts: Sequence[Json]  # a few prompts, each with a few answers and their marks

    @classmethod
    def of(cls, probes: Sequence[SampledRounds], threshold: float = 1.0) -> Signal:
        """Sums up what a searcher's probes found. Raises `UserError` when there is no answer with a reward.

        threshold: the least reward of a right answer.
        """
        groups = [np.array(rewards) for probe in probes for rewards in probe.groups]
        stop_counts = Counter[str]()
        for probe in probes:
            stop_counts.update(probe.stop_counts)
        if not groups:
            raise UserError(
                f"the environment failed in all of {stop_counts['failed']} episodes: the log has the line of the error"
            )
        rewards = np.concatenate(groups)
        answers = len(rewards) + stop_counts["failed"]
        return cls(
            train=probes[0].train_problems,
            held_out=probes[0].held_out,
            shared_problems=probes[0].shared_problems,
            answers=answers,
            groups=len(groups),
            largest_group=max(map(len, groups)),
            mean_reward=float(rewards.mean()),
            varied_share=float(np.mean([np.ptp(group) > 0 for group in groups])),
            best_share=float(np.mean([group.min() == rewards.max() for group in groups])),
            right_share=float((rewards >= threshold).mean()),
            partial_share=float(((rewards > 0) & (rewards < threshold)).mean()),
            truncated_share=stop_counts[StopReason.LENGTH.value] / answers,
            empty_share=stop_counts["empty"] / answers,
            copied_share=stop_counts["copies"] / answers,
            failed_share=stop_counts["failed"] / answers,
            example_prompts=probes[0].examples,
        )

    def facts(self, has_teacher: bool = False, group_size: int = 0) -> dict[str, str]:
        """Returns the figures, by name. has_teacher: rewards need not differ. group_size: answers to each prompt of a
        batch.
        """
        is_larger = group_size > self.largest_group
        lesson_note = "; the teacher teaches in all of them" if has_teacher else "; only these teach something"
        lesson_note += f"; a batch's have {group_size}, in which they differ at least as often" * is_larger
        shared_note = f", of which {self.shared_problems:,} are among the former" if self.shared_problems else ""
        return {
            "problems": f"{self.train:,} to train on, {self.held_out:,} held out{shared_note}",
            "answers": f"{self.answers:,} sampled: mean reward {self.mean_reward:.3g}, "
            f"{percent(self.truncated_share)} cut off, {percent(self.empty_share)} empty, "
            f"{percent(self.copied_share)} copies of others"
            + (f", {percent(self.failed_share)} failed in their environments" if self.failed_share else ""),
            "groups": f"{self.groups:,} of at most {self.largest_group} answers: in {percent(self.varied_share)} "
            f"rewards differ{lesson_note}",
        }

    def examples(self) -> RenderableType:
        """Returns a few prompts as the model sees them, each with its first answers and their rewards."""
        frame = frame_of(prompt["prompt"] for prompt in self.example_prompts)
        lines: list[RenderableType] = []
        if any(frame):
            surroundings = "{prompt}".join(printable(part, 400, newlines=False) for part in frame)
            lines.append(Text(f"each prompt stands in: {surroundings}", style="dim"))
        for prompt in self.example_prompts:
            lines.append(Text(printable(strip_frame(frame, prompt["prompt"]).strip()[-400:], 400, newlines=False)))
            for answer in prompt["answers"]:
                if answer["turns"]:
                    lines.append(Padding(_episode_text(answer), (0, 0, 0, 2)))
                    continue
                answer_text = printable(answer["text"].strip(), 120, newlines=False) or "(nothing)"
                mark = printable(answer["mark"], 200, newlines=False)
                lines.append(Padding(Text.assemble(answer_text, ("  reward " + mark, "dim")), (0, 0, 0, 2)))
        return Group(*lines)

    @property
    def encouragement(self) -> str:
        """Returns the sentence for a run to which there is no advice."""
        return (
            f"Nothing stands in the way: rewards differ in {percent(self.varied_share)} of the groups, and few answers "
            "are cut off or empty."
        )

    def advice(self, recipe: Recipe) -> list[str]:
        """Returns the one or two things to change before the run, the most important first; none if it can learn."""
        advice = []
        if any(recipe.teachers.shares(1)):  # then answers of the same reward teach something, too
            pass
        elif self.varied_share == 0 and self.best_share == 1:
            advice.append("every answer gets the same reward: try it on an answer that is right, and on a wrong one")
        elif self.varied_share < LEAST_VARIED and self.best_share > 0.5:
            advice.append("nearly all answers get the highest reward: give harder problems")
        elif self.varied_share < LEAST_VARIED:
            advice.append(
                f"rewards differ in {percent(self.varied_share)} of the groups only, and the others teach nothing: "
                "give easier problems, a model that succeeds now and then (tba sft), a reward with steps in between, "
                "or more answers to each prompt (--samples-per-prompt and --group-size, now "
                f"{recipe.samples_per_prompt} and {recipe.group_size})"
            )
        objective = recipe.objective
        if isinstance(objective, Raft) and objective.keep == "positive" and self.partial_share:
            advice.append(
                f"RAFT learns every answer with a reward above 0, also the {percent(self.partial_share)} that are "
                "right in part only: set --objective.keep best, or give rewards of 0 and 1"
            )
        if self.truncated_share > MOST_CUT_OFF:
            advice.append(
                f"{percent(self.truncated_share)} of the answers are cut off: set "
                "--model.generation.max-completion-tokens higher, or ask for short answers"
            )
        if self.empty_share > MOST_CUT_OFF:
            share = percent(self.empty_share)
            advice.append(f"{share} of the answers are empty: look at the prompts as the model sees them")
        if self.copied_share > MOST_COPIES and recipe.replay.buffer.deduplicate:
            advice.append(
                f"{percent(self.copied_share)} of the answers equal another one to their prompt, and of equal ones the "
                "replay buffer keeps one: sample more varied answers (--exploration.temperature), give problems with "
                "more to say, or keep them all (--replay.buffer.no-deduplicate)"
            )
        return advice[:2]

    def proposals(self, recipe: Recipe, effective: float | None) -> list[str]:
        """Returns settings that are worth a try and that the recipe does not have, each with what was measured.

        effective: share of the answers from before the first updates that still count after them; None: not measured.
        """
        proposals = []
        schedule, decay = recipe.optimizer.schedule, recipe.steps // 4
        if 0 < self.right_share < RARE_SUCCESS and (share := _recent_share(recipe)):
            proposals.append(
                f"data of all ages: --replay.selection.m 0 (now {share:g}), since success is rare, "
                f"{percent(self.right_share)} of {self.answers:,} answers. Where it was 3 %, sums ended at 96 to 97 % "
                "so, at 38 to 62 from recent data alone (repeats dropped, more answers to a prompt than a group has: "
                "docs/results.md, which data)"
            )
        if isinstance(schedule, WarmupConstant) and decay and (stable := recipe.steps - schedule.warmup - decay) > 0:
            proposals.append(
                f"a rate that decays: WarmupStableDecay({schedule.warmup}, {stable}, {decay}) as the optimizer's "
                f"schedule, in the recipe's code, since it is constant after {schedule.warmup} of {recipe.steps} "
                "updates. With such a decay sums ended at 96.9 %, without at 95.7; at three times the rate at 93.8 and "
                "79.1 (with the default form of before 2026-11-28)"
            )
        if not recipe.optimizer.weight_average and effective is not None and effective < FAST_DRIFT:
            proposals.append(
                f"averaged weights: --optimizer.weight-average, since the policy moves fast: {DRIFT_UPDATES} updates "
                f"leave an effective sample size of {percent(effective)}. At 1e-4 sums fell by up to 6.5 points on the "
                "way, averages by 1.7, to the same end (docs/run.md; with the default form of before 2026-11-28)"
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


def _episode_text(answer: Json) -> Text:
    """Returns an episode by turns, with the observations between them."""
    turns = answer["turns"]
    lines = Text.assemble(("reward " + printable(answer["mark"], 200, newlines=False), "dim"))
    for is_policy, text in turns[:_MOST_TURNS]:
        line = printable(text.strip(), 120, newlines=False) or "(nothing)"
        lines.append(f"\n{'says ' if is_policy else 'reads'} {line}")
    return lines.append(f"\n... and {len(turns) - _MOST_TURNS} more") if len(turns) > _MOST_TURNS else lines
