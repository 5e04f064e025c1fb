"""Groups as tensors: padding, masks, shifts and slicing are here and nowhere else.

Invariant: a row carries its group as data (`group_B`), so nothing depends on the order of rows, and a group may be
ragged or split over micro-batches.

Shape legend: B rows (one completion each), T completion positions, G groups (one prompt each), P prompt positions, S
steps of a completion, L its later segments, N teachers, K top tokens of a teacher, C these and all others together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tba.types import TEACHER, TOP_IDS, TOP_LOGS, Completion, FloatArray, Group, Prompt, TopScores, Trajectory

AnsweredPrompt: TypeAlias = tuple[Prompt, Sequence[Completion]]
ScoresOfAnswer = TypeVar("ScoresOfAnswer", "FloatArray", TopScores)


@dataclass(frozen=True)
class Batch:
    """Groups as tensors. Padded positions hold token 0, log-probability 0 and mask False."""

    prompt_GP: Tensor  # int64, right-padded
    prompt_length_G: Tensor  # int64
    completion_BT: Tensor  # int64, right-padded
    length_B: Tensor  # int64, completion tokens
    mask_BT: Tensor  # bool: positions the policy sampled, which are the ones that are trained
    log_reference_BT: Tensor  # float32, 0 where the mask is False
    reward_B: Tensor  # float32
    group_B: Tensor  # int64, index into the G prompts
    log_behavior_BT: Tensor | None = None  # float32, 0 where the mask is False; None unless every row has it
    step_start_BS: Tensor | None = None  # int64, where steps begin, then the row's length; None unless every row has it
    step_value_BS: Tensor | None = None  # float32, the value before each step, then 0; None likewise
    some_behavior_BT: Tensor | None = None  # as log_behavior_BT where only some rows have it, NaN in those that do not
    as_sampled_G: Tensor | None = None  # bool: the group's answers come as often as they were sampled; None: all do
    lag_B: Tensor | None = None  # int64: updates since the policy itself, at its temperature, drew it; -1: it did not
    log_teacher_BTN: Tensor | None = None  # float32, of each of N teachers, 0 where the mask is False; None likewise
    log_anchor_BT: Tensor | None = None  # float32, of the run's reference where log_reference_BT is a teacher's
    top_id_BTK: Tensor | None = None  # int32, the tokens a teacher finds most probable; None unless every row has K
    log_top_BTC: Tensor | None = None  # float32, of these under the teacher, and of all others; -inf: there is none
    segment_start_BL: Tensor | None = None  # int64, where later segments begin, then the row's length; None: no row's

    @property
    def rows(self) -> int:
        return int(self.completion_BT.shape[0])

    @property
    def groups(self) -> int:
        return int(self.prompt_GP.shape[0])

    @property
    def first_length_B(self) -> Tensor:
        """Returns the length of each row's first segment, which is the one that reads the prompt: int64."""
        return self.length_B if self.segment_start_BL is None else self.segment_start_BL[:, 0]

    def later_segments(self) -> list[tuple[int, int, int]]:
        """Returns (row, begin, end) of each later segment, row by row and in order."""
        if self.segment_start_BL is None:
            return []
        edge_BL = torch.cat([self.segment_start_BL, self.length_B[:, None]], 1).tolist()
        return [(row, a, b) for row, edges in enumerate(edge_BL) for a, b in pairwise(edges) if a < b]

    def to(self, device: torch.device | str) -> Batch:
        """Returns the batch on another device."""
        tensors = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **{name: to_device(tensor, torch.device(device)) for name, tensor in tensors.items()})

    def select(self, rows: Tensor) -> Batch:
        """Returns the batch of these rows (int64 indices), trimmed to the longest of them, with only their prompts."""
        length_B = self.length_B[rows]
        width = int(length_B.max())
        used_G, group_B = torch.unique(self.group_B[rows], return_inverse=True)
        prompt_width = int(self.prompt_length_G[used_G].max())
        log_behavior_BT, start_BS, value_BS = self.log_behavior_BT, self.step_start_BS, self.step_value_BS
        steps = 0 if start_BS is None else int((start_BS[rows] < length_B[:, None]).sum(1).max())
        segment_start_BL = None if self.segment_start_BL is None else self.segment_start_BL[rows]
        if segment_start_BL is not None:
            later = int((segment_start_BL < length_B[:, None]).sum(1).max())
            segment_start_BL = segment_start_BL[:, :later] if later else None
        return Batch(
            prompt_GP=self.prompt_GP[used_G, :prompt_width],
            prompt_length_G=self.prompt_length_G[used_G],
            completion_BT=self.completion_BT[rows, :width],
            length_B=length_B,
            mask_BT=self.mask_BT[rows, :width],
            log_reference_BT=self.log_reference_BT[rows, :width],
            reward_B=self.reward_B[rows],
            group_B=group_B,
            log_behavior_BT=None if log_behavior_BT is None else log_behavior_BT[rows, :width],
            step_start_BS=None if start_BS is None else start_BS[rows, :steps],
            step_value_BS=None if value_BS is None else value_BS[rows, :steps],
            some_behavior_BT=None if self.some_behavior_BT is None else self.some_behavior_BT[rows, :width],
            as_sampled_G=None if self.as_sampled_G is None else self.as_sampled_G[used_G],
            lag_B=None if self.lag_B is None else self.lag_B[rows],
            log_teacher_BTN=None if self.log_teacher_BTN is None else self.log_teacher_BTN[rows, :width],
            log_anchor_BT=None if self.log_anchor_BT is None else self.log_anchor_BT[rows, :width],
            top_id_BTK=None if self.top_id_BTK is None else self.top_id_BTK[rows, :width],
            log_top_BTC=None if self.log_top_BTC is None else self.log_top_BTC[rows, :width],
            segment_start_BL=segment_start_BL,
        )


@dataclass(frozen=True)
class FetchedBatch:
    """A batch, and the groups that replay drew for it."""

    groups: Sequence[Group]
    batch: Batch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on `device`. To a GPU it is copied from pinned memory on a stream of its own, so that neither
    the host nor earlier work of the GPU waits for it, only work that is launched from here on.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    compute_stream = torch.cuda.current_stream(device)
    copy_stream = _copy_stream(compute_stream.device)
    with torch.cuda.stream(copy_stream):
        copy = tensor.pin_memory().to(device, non_blocking=True)
    compute_stream.wait_stream(copy_stream)
    copy.record_stream(compute_stream)  # so that the copy stream does not give its memory away before it is used
    return copy


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which a GPU copies tensors from the host."""
    return torch.cuda.Stream(device)


def distinct_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the rows to evaluate (indices [D]) and, for each row, its place among these ([B]).

    Rows of one group with the same tokens, the same mask, the same segments and the same top tokens have the same
    log-probabilities under any policy, so the first of them stands for all. The rows to evaluate stay in order.
    """
    columns = [batch.group_B[:, None], batch.length_B[:, None], batch.completion_BT, batch.mask_BT.to(torch.int64)]
    columns += [] if batch.segment_start_BL is None else [batch.segment_start_BL]
    key_BX = torch.cat(columns, 1)
    _, class_B, size_K = torch.unique(key_BX, dim=0, return_inverse=True, return_counts=True)
    if batch.top_id_BTK is not None and len(size_K) < batch.rows:  # only equal answers have their top tokens compared
        repeated = (size_K[class_B] > 1).nonzero()[:, 0]
        key_RX = torch.cat([class_B[repeated, None], batch.top_id_BTK[repeated].flatten(1).long()], 1)
        class_B[repeated] = len(size_K) + torch.unique(key_RX, dim=0, return_inverse=True)[1]
        _, class_B = torch.unique(class_B, return_inverse=True)
    row_B = torch.arange(batch.rows, device=class_B.device)
    first_K = row_B.new_full((int(class_B.max()) + 1,), batch.rows).scatter_reduce(0, class_B, row_B, "amin")
    first_D, place_K = first_K.unique(return_inverse=True)
    return first_D, place_K[class_B]


def collate(groups: Sequence[Group]) -> Batch:
    """Returns the groups as one batch, with rows in the order of groups. Raises `ValueError` for no groups."""
    if not groups:
        raise ValueError("collate needs at least one group")
    trajectories = [t for g in groups for t in g.trajectories]
    lengths = np.array([t.length for t in trajectories], dtype=np.int64)
    prompt_lengths = np.array([len(g.prompt.tokens) for g in groups], dtype=np.int64)
    rows, width = len(trajectories), int(lengths.max())
    prompt_tokens = np.zeros((len(groups), int(prompt_lengths.max())), dtype=np.int64)
    for g, group in enumerate(groups):
        prompt_tokens[g, : prompt_lengths[g]] = group.prompt.tokens
    completion_tokens = np.zeros((rows, width), dtype=np.int64)
    mask = np.zeros((rows, width), dtype=np.bool_)
    log_reference = np.zeros((rows, width), dtype=np.float32)
    has_behavior = [t.completion.log_behavior is not None for t in trajectories]
    log_behavior = np.zeros((rows, width), dtype=np.float32) if any(has_behavior) else None
    for b, trajectory in enumerate(trajectories):
        n, c = lengths[b], trajectory.completion
        completion_tokens[b, :n] = c.tokens
        mask[b, :n] = True if c.mask is None else c.mask
        log_reference[b, :n] = trajectory.log_reference
        if log_behavior is not None:
            log_behavior[b, :n] = np.nan if c.log_behavior is None else np.where(mask[b, :n], c.log_behavior, 0.0)
    log_reference *= mask
    log_behavior_BT = None if log_behavior is None else torch.from_numpy(log_behavior)
    step_start, step_value = _step_tensors(trajectories)
    return Batch(
        prompt_GP=torch.from_numpy(prompt_tokens),
        prompt_length_G=torch.from_numpy(prompt_lengths),
        completion_BT=torch.from_numpy(completion_tokens),
        length_B=torch.from_numpy(lengths),
        mask_BT=torch.from_numpy(mask),
        log_reference_BT=torch.from_numpy(log_reference),
        reward_B=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        group_B=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g) for g in groups])),
        log_behavior_BT=log_behavior_BT if all(has_behavior) else None,
        step_start_BS=step_start,
        step_value_BS=step_value,
        some_behavior_BT=None if all(has_behavior) else log_behavior_BT,
        as_sampled_G=torch.tensor([g.as_sampled for g in groups]),
        log_teacher_BTN=_log_teachers(trajectories, mask),
        top_id_BTK=_top_tensor(trajectories, TOP_IDS, mask, np.int32),
        log_top_BTC=_top_tensor(trajectories, TOP_LOGS, mask, np.float32),
        segment_start_BL=segment_starts([t.completion for t in trajectories]),
    )


def segment_starts(completions: Sequence[Completion]) -> Tensor | None:
    """Returns segment_start_BL of rows with these completions; None where each has one segment."""
    later = max(0 if c.begins is None else len(c.begins) for c in completions)
    if not later:
        return None
    start_BL = np.repeat([[len(c.tokens)] for c in completions], later, axis=1)
    for row, completion in zip(start_BL, completions, strict=True):
        if completion.begins is not None:
            row[: len(completion.begins)] = completion.begins
    return torch.from_numpy(start_BL)


def _log_teachers(trajectories: Sequence[Trajectory], mask: npt.NDArray[np.bool_]) -> Tensor | None:
    """Returns log_teacher_BTN from the arrays `log_teacher` [N, T]; None unless all rows have one of equal N."""
    log_teachers = [t.arrays.get(TEACHER) for t in trajectories]
    count = 0 if log_teachers[0] is None else len(log_teachers[0])
    teachers = np.zeros((*mask.shape, count), dtype=np.float32)
    for row, log_teacher in zip(teachers, log_teachers, strict=True):
        if log_teacher is None or len(log_teacher) != count:
            return None
        row[: log_teacher.shape[1]] = log_teacher.T
    return torch.from_numpy(teachers * mask[:, :, None])


def _top_tensor(
    trajectories: Sequence[Trajectory], name: str, mask: npt.NDArray[np.bool_], dtype: npt.DTypeLike
) -> Tensor | None:
    """Returns the rows [M, X] of an array, of each row's M trained tokens, where these are: [B, T, X]; None unless all
    rows have one of equal X.
    """
    arrays = [t.arrays[name] for t in trajectories if name in t.arrays]
    if len(arrays) < len(trajectories) or len({array.shape[1:] for array in arrays}) > 1:
        return None
    tensor = np.zeros((*mask.shape, *arrays[0].shape[1:]), dtype)
    tensor[mask] = np.concatenate(arrays)
    return torch.from_numpy(tensor)


def _step_tensors(trajectories: Sequence[Trajectory]) -> tuple[Tensor | None, Tensor | None]:
    """Returns (start_BS, value_BS) from the arrays `step_start` and `step_value`; None each unless every row has both.

    Raises `ValueError` for steps that do not begin at 0 and go up within the completion.
    """
    if not all("step_start" in t.arrays and "step_value" in t.arrays for t in trajectories):
        return None, None
    rows, width = len(trajectories), max(len(t.arrays["step_start"]) for t in trajectories)
    start = np.repeat([[t.length] for t in trajectories], width, axis=1)
    value = np.zeros((rows, width), dtype=np.float32)
    for b, trajectory in enumerate(trajectories):
        starts, values = trajectory.arrays["step_start"].tolist(), trajectory.arrays["step_value"]
        is_ordered = all(step < next_step for step, next_step in pairwise([*starts, trajectory.length]))
        if starts[:1] != [0] or not is_ordered or len(values) != len(starts):
            raise ValueError(
                f"the steps of trajectory {trajectory.uid} begin at {starts} and have {len(values)} values, but they "
                f"have to begin at 0 and go up to below its {trajectory.length} tokens, each with a value"
            )
        start[b, : len(starts)], value[b, : len(starts)] = starts, values
    return torch.from_numpy(start), torch.from_numpy(value)


@dataclass
class _Pass:
    """Counts the tokens of one pass: each prompt once with its completions, or every row padded to the longest, and
    then each later segment by itself.
    """

    share_prompt: bool
    tokens: int = 0  # those without padding
    rows: int = 0
    longest_row: int = 0  # prompt and first segment
    later_tokens: int = 0  # of later segments
    last_group: int = -1

    def with_completions(self, group: int, prompt: int, lengths: Sequence[tuple[int, int]]) -> _Pass:
        """Returns the pass that also runs completions to a group's prompt: of each the length, and its first
        segment's.
        """
        tokens = self.tokens + sum(length for length, _ in lengths) + (0 if group == self.last_group else prompt)
        longest_row = max(self.longest_row, prompt + max(first_length for _, first_length in lengths))
        later_tokens = self.later_tokens + sum(length - first_length for length, first_length in lengths)
        return _Pass(self.share_prompt, tokens, self.rows + len(lengths), longest_row, later_tokens, group)

    @property
    def cost(self) -> int:
        return self.tokens if self.share_prompt else self.rows * self.longest_row + self.later_tokens


def micro_batches(batch: Batch, max_tokens: int, by_group: bool = True, share_prompt: bool = True) -> Iterator[Tensor]:
    """Yields row indices of micro-batches of at most `max_tokens` tokens. A prompt counts once with its completions;
    without `share_prompt` each row counts as its prompt and completion, padded to the longest row, where later segments
    are rows of their own without padding.

    With `by_group` a group that fits stays whole, and one that does not fit is split, rows sorted by length. A single
    row larger than the limit goes alone, because it cannot be made smaller.
    """
    pass_rows: list[int] = []
    current_pass = empty_pass = _Pass(share_prompt)
    lengths = list(zip(batch.length_B.tolist(), batch.first_length_B.tolist(), strict=True))
    prompt = batch.prompt_length_G.tolist()
    by_length = torch.argsort(batch.length_B, stable=True)
    group_sorted = batch.group_B[by_length]
    for g in range(batch.groups):
        rows = by_length[group_sorted == g].tolist()
        group_cost = current_pass.with_completions(g, prompt[g], [lengths[b] for b in rows]).cost if rows else 0
        if by_group and pass_rows and group_cost > max_tokens:
            yield torch.tensor(pass_rows)
            pass_rows, current_pass = [], empty_pass
        for b in rows:
            extended_pass = current_pass.with_completions(g, prompt[g], [lengths[b]])
            if pass_rows and extended_pass.cost > max_tokens:
                yield torch.tensor(pass_rows)
                pass_rows, extended_pass = [], empty_pass.with_completions(g, prompt[g], [lengths[b]])
            pass_rows.append(b)
            current_pass = extended_pass
    if pass_rows:
        yield torch.tensor(pass_rows)


def largest_group(batch: Batch, share_prompt: bool = True) -> int:
    """Returns the tokens that a pass of the largest group runs, as `micro_batches` counts them."""
    return max(pass_tokens(batch, share_prompt, batch.group_B == g) for g in range(batch.groups))


def pass_tokens(batch: Batch, share_prompt: bool, chosen_B: Tensor | slice = slice(None)) -> int:
    """Returns the tokens that a pass of these rows runs, as `micro_batches` counts them; without `chosen_B` of all."""
    length_R, first_R, group_R = batch.length_B[chosen_B], batch.first_length_B[chosen_B], batch.group_B[chosen_B]
    if not len(length_R):
        return 0
    prompt_R = batch.prompt_length_G[group_R]
    if not share_prompt:
        return len(length_R) * int((prompt_R + first_R).max()) + int((length_R - first_R).sum())
    return int(length_R.sum() + batch.prompt_length_G[group_R.unique()].sum())


def deal(batch: Batch, ranks: int, max_tokens: int, share_prompt: bool = True) -> list[Tensor]:
    """Returns the row indices for each rank. Whole groups are dealt, the largest first, each to the rank that has the
    fewest tokens so far.

    A rank may get no rows. Where a rank would get more than `max_tokens`, the micro-batches are dealt instead, if there
    are no more of them than ranks (a group larger than a pass is split then).
    """
    tokens_G = batch.prompt_length_G.scatter_add(0, batch.group_B, batch.length_B).tolist()
    rank_of_group, rank_tokens = [0] * batch.groups, [0] * ranks
    for g in sorted(range(batch.groups), key=lambda g: -tokens_G[g]):
        rank_of_group[g] = min(range(ranks), key=rank_tokens.__getitem__)
        rank_tokens[rank_of_group[g]] += tokens_G[g]
    owner_B = torch.tensor(rank_of_group, device=batch.group_B.device)[batch.group_B]
    if max(pass_tokens(batch, share_prompt, owner_B == rank) for rank in range(ranks)) > max_tokens:
        parts = list(micro_batches(batch, max_tokens, share_prompt=share_prompt))
        if len(parts) <= ranks:
            device = batch.group_B.device
            no_rows = torch.zeros(0, dtype=torch.int64)
            return [part.to(device) for part in (*parts, *[no_rows] * (ranks - len(parts)))]
    return [(owner_B == rank).nonzero()[:, 0] for rank in range(ranks)]


def shortest_row(batch: Batch) -> Tensor:
    """Returns the index of the shortest row, as a micro-batch of its own."""
    return batch.length_B.argmin()[None]


def score_in_passes(
    answered_prompts: Sequence[AnsweredPrompt],
    scores_of: Callable[[Batch], Iterable[ScoresOfAnswer]],
    tokens_per_pass: int,
    share_prompt: bool,
) -> list[list[ScoresOfAnswer]]:
    """Returns the scores of completions of several prompts; `scores_of` gives those of one pass, row by row."""
    if not any(completions for _, completions in answered_prompts):
        return [[] for _ in answered_prompts]
    batch = answers_to_score(answered_prompts)
    scores: dict[int, ScoresOfAnswer] = {}
    for rows in micro_batches(batch, tokens_per_pass, share_prompt=share_prompt):
        scores |= zip(rows.tolist(), scores_of(batch.select(rows)), strict=True)
    rows_in_order = iter(range(batch.rows))
    return [[scores[next(rows_in_order)] for _ in completions] for _, completions in answered_prompts]


def answers_to_score(answered_prompts: Sequence[AnsweredPrompt]) -> Batch:
    """Returns a batch of answers to be scored, whose rewards and reference log-probabilities are not known yet: 0."""
    completions = [c for _, completions in answered_prompts for c in completions]
    length_B = np.array([len(c.tokens) for c in completions], dtype=np.int64)
    prompt_length_G = np.array([len(prompt.tokens) for prompt, _ in answered_prompts], dtype=np.int64)
    prompt_GP = np.zeros((len(answered_prompts), prompt_length_G.max()), dtype=np.int64)
    completion_BT = np.zeros((len(completions), length_B.max()), dtype=np.int64)
    for row, (prompt, _) in zip(prompt_GP, answered_prompts, strict=True):
        row[: len(prompt.tokens)] = prompt.tokens
    mask_BT = np.arange(length_B.max()) < length_B[:, None]
    for row, mask, completion in zip(completion_BT, mask_BT, completions, strict=True):
        row[: len(completion.tokens)] = completion.tokens
        if completion.mask is not None:
            mask[: len(completion.tokens)] = completion.mask
    return Batch(
        prompt_GP=torch.from_numpy(prompt_GP),
        prompt_length_G=torch.from_numpy(prompt_length_G),
        completion_BT=torch.from_numpy(completion_BT),
        length_B=torch.from_numpy(length_B),
        mask_BT=torch.from_numpy(mask_BT),
        log_reference_BT=torch.zeros(completion_BT.shape, dtype=torch.float32),
        reward_B=torch.zeros(len(completions), dtype=torch.float32),
        group_B=torch.from_numpy(np.repeat(np.arange(len(answered_prompts)), [len(c) for _, c in answered_prompts])),
        segment_start_BL=segment_starts(completions),
    )
