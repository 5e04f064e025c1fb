"""An enumerable toy whose ideal policy can be written down: the ground truth that real components are tested against.

Invariant: everything follows from the fields of a `TabularTask`; the probability of every outcome is known exactly, so
that pi* = pi_ref exp(r / beta) / Z is an array and the distance to it a number.

Completions are strings over A symbols, at most L tokens: EOS (token 0) ends one early, one of L symbols is truncated. A
prefix of fewer than L symbols is a node of a complete A-ary tree, numbered level by level: the root is 0, node n
followed by symbol s (token 1..A) is node n A + s. An outcome has the number of its symbols' node, counting one level
deeper: outcome o < N is "node o, then EOS", the others are the truncated ones.

Shape legend: Q prompts (questions), N nodes, V = 1 + A next tokens, O = N + A^L outcomes, B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase, ascii_uppercase

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.policy.head import check_head_names, split_buckets, top_of, zero_parameters
from tba.protocols import PolicyOutput
from tba.types import Completion, FloatArray, Judgement, Problem, Prompt, Split, TopScores, Version

EOS = 0
WEIGHT = "prefix.logits"  # the one tensor of a tabular policy, [Q, N, V]


@dataclass(frozen=True)
class TabularTask:
    """A question is one lower-case letter, an answer a string of capitals, the reward a fixed table.

    Rewards are uniform in (0, 1], scaled so that each prompt's best answer has exactly 1.
    """

    seed: int = 0  # seed of the rewards and of the reference's logits
    symbols: int = 4  # A, size of the alphabet
    length: int = 3  # L, tokens of the longest completion
    prompts: int = 2  # prompts in each split; a tabular policy learns nothing about those of `eval`
    reference_spread: float = 1.0  # standard deviation of the reference's logits

    def __post_init__(self) -> None:
        if not 1 <= self.symbols <= 26 or not 1 <= self.prompts <= 13 or self.length < 1:
            raise UserError(
                f"the tabular task got {self.symbols} symbols, {self.prompts} prompts and length {self.length}; "
                "give 1 to 26 symbols, 1 to 13 prompts and a length of 1 or more."
            )

    @property
    def name(self) -> str:
        return "tabular"

    def problems(self, split: Split) -> Sequence[Problem]:
        """`prompts` letters from `a` on for training, the letters after them for evaluation."""
        first = 0 if split == "train" else self.prompts
        return [Problem(letter) for letter in ascii_lowercase[first : first + self.prompts]]

    def reward(self) -> TabularReward:
        return TabularReward(self)

    @property
    def questions(self) -> int:
        """Q, the prompts of both splits."""
        return 2 * self.prompts

    @property
    def nodes(self) -> int:
        """N, the prefixes after which a token is drawn."""
        return sum(self.symbols**depth for depth in range(self.length))

    @property
    def outcomes(self) -> int:
        """O, the completions there are."""
        return self.nodes + self.symbols**self.length

    def question(self, prompt: Prompt) -> int:
        """The row of a prompt, which its last letter names; `ValueError` when it is none of this task's."""
        q = int(prompt.tokens[len(prompt.tokens) - len(self.begun(prompt)) - 1]) - self.symbols - 1
        if not 0 <= q < self.questions:
            raise ValueError(f"the prompt {prompt.text!r} is not one of the {self.questions} of {self}")
        return q

    def begun(self, prompt: Prompt) -> list[int]:
        """Returns the symbols after a prompt's last letter: an answer that is to be continued."""
        tokens: list[int] = prompt.tokens.tolist()
        letters = [i for i, token in enumerate(tokens) if token > self.symbols]
        return tokens[max(letters, default=len(tokens) - 1) + 1 :]

    def outcome(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> int:
        """The number of a finished completion."""
        node = 0
        for token in tokens:
            node = node if token == EOS else node * self.symbols + int(token)
        return node

    def tokens(self, outcome: int) -> list[int]:
        """The completion of an outcome, with its EOS unless it is truncated: the inverse of `outcome`."""
        reversed_symbols, node = [], outcome
        while node > 0:
            node, below = divmod(node - 1, self.symbols)
            reversed_symbols.append(below + 1)
        return reversed_symbols[::-1] + ([EOS] if outcome < self.nodes else [])

    @cached_property
    def rewards_QO(self) -> npt.NDArray[np.float64]:
        """r(y; x) of every outcome."""
        raw = 1 - np.random.default_rng([self.seed, 0]).random((self.questions, self.outcomes))
        scaled: npt.NDArray[np.float64] = raw / raw.max(1, keepdims=True)
        return scaled

    @cached_property
    def reference_logits_QNV(self) -> npt.NDArray[np.float64]:
        """The logits of the reference policy, from which a policy starts."""
        shape = (self.questions, self.nodes, 1 + self.symbols)
        return np.random.default_rng([self.seed, 1]).normal(0.0, self.reference_spread, shape)


@dataclass(frozen=True)
class TabularReward:
    """Looks answers up in the task's table."""

    task: TabularTask

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """One judgement for each (prompt, completion), in order."""
        table, task = self.task.rewards_QO, self.task
        return [Judgement(float(table[task.question(p), task.outcome(c.tokens)])) for p, c in answered]


@dataclass(frozen=True)
class TabularTokenizer:
    """One token per character: EOS is `$`, symbols are capitals, prompts are lower-case letters."""

    symbols: int

    @property
    def characters(self) -> str:
        return "$" + ascii_uppercase[: self.symbols] + ascii_lowercase

    @property
    def eos_token_id(self) -> int | None:
        return EOS

    @property
    def end_of_turn(self) -> bool:
        """Whether a token ends a turn: none does, since every symbol is one."""
        return False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; there are no special tokens to add. Raises `ValueError` for a character it does not know."""
        return [self.characters.index(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The inverse of `encode`, without EOS on request."""
        return "".join(self.characters[i] for i in token_ids if not (skip_special_tokens and i == EOS))


class TabularPolicy:
    """A logit for every prompt, prefix and next token. It starts as the reference of its task.

    `temperature` is the recipe's policy temperature: log-probabilities are those of logits / temperature. Its heads are
    tables too: a value for every prompt and prefix (row q N + n), log Z for every prompt.
    """

    def __init__(
        self,
        task: TabularTask,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        heads: Iterable[str] = (),
    ) -> None:
        self.task = task
        self.temperature = temperature
        self.logits_QNV = torch.nn.Parameter(torch.tensor(task.reference_logits_QNV, dtype=dtype))
        rows = {"value": task.questions * task.nodes, "log_z": task.questions}
        self.heads = torch.nn.ModuleDict(
            {name: zero_parameters(torch.nn.Embedding(rows[name], 1, dtype=dtype)) for name in check_head_names(heads)}
        )

    @property
    def share_prompt(self) -> bool:
        """A table costs nothing."""
        return True

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Log-probabilities [B, T] of the batch's completions, 0 where its mask is False."""
        question_G = batch.prompt_GP.gather(1, batch.prompt_length_G[:, None] - 1)[:, 0] - self.task.symbols - 1
        node_B = torch.zeros_like(batch.group_B)
        nodes = []
        for t in range(batch.completion_BT.shape[1]):
            nodes.append(node_B)
            child_B = node_B * self.task.symbols + batch.completion_BT[:, t]
            node_B = torch.where(t + 1 < batch.length_B, child_B, 0)  # nothing follows: any node will do
        question_B1, node_BT = question_G[batch.group_B][:, None], torch.stack(nodes, 1)
        logits_BTV = self.logits_QNV[question_B1, node_BT]
        log_policy_BTV = (logits_BTV / self.temperature).log_softmax(-1)
        log_policy_BT = log_policy_BTV.gather(2, batch.completion_BT[:, :, None])[:, :, 0]
        value_BT = log_z_G = None
        if "value" in self.heads:
            value_BT = self.heads["value"](question_B1 * self.task.nodes + node_BT)[:, :, 0]
            value_BT = torch.where(batch.mask_BT, value_BT, 0.0)
        if "log_z" in self.heads:
            log_z_G = self.heads["log_z"](question_G)[:, 0]

        def entropy_B() -> Tensor:
            entropy_BT = torch.special.entr(log_policy_BTV.detach().exp()).sum(-1)
            return torch.where(batch.mask_BT, entropy_BT, 0.0).sum(1)

        log_top_BTC = None
        if batch.top_id_BTK is not None:
            bucket_BTJ = torch.cat([batch.completion_BT[:, :, None], batch.top_id_BTK.long()], 2)
            log_top_MC = split_buckets(log_policy_BTV.flatten(0, 1), bucket_BTJ.flatten(0, 1))[:, 1:]
            log_top_BTC = log_top_MC.unflatten(0, batch.completion_BT.shape)
        return PolicyOutput(torch.where(batch.mask_BT, log_policy_BT, 0.0), value_BT, log_z_G, entropy_B, log_top_BTC)

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return [self.logits_QNV, *self.heads.parameters()]

    def weights(self) -> Mapping[str, Tensor]:
        """The one tensor, detached; a view of the live parameter."""
        return {WEIGHT: self.logits_QNV.detach()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` in, in place. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        with torch.no_grad():
            self.logits_QNV.copy_(checked(weights, tuple(self.logits_QNV.shape)))

    def become(self, probability_QO: Tensor) -> None:
        """Set the logits so that `distribution(self)` is the given one, whose entries have to be positive."""
        mass_QO = probability_QO.detach().to(torch.float64).clone()
        n, a = self.task.nodes, self.task.symbols
        eos_QN = mass_QO[:, :n].clone()
        for node in range(n - 1, -1, -1):  # deepest first: the mass of a prefix is that of all its outcomes
            mass_QO[:, node] += mass_QO[:, node * a + 1 : node * a + 1 + a].sum(1)
        logits_QNV = torch.cat([eos_QN[:, :, None], mass_QO[:, 1:].unflatten(1, (n, a))], 2).log() * self.temperature
        with torch.no_grad():
            self.logits_QNV.copy_(logits_QNV - logits_QNV.logsumexp(-1, keepdim=True))


class TabularReference:
    """Log-probabilities under the task's reference policy, or under other weights that are loaded."""

    def __init__(
        self,
        task: TabularTask,
        temperature: float = 1.0,
        version: Version = Version(),  # noqa: B008 - frozen
    ) -> None:
        self.task = task
        self.temperature = temperature
        self._first_version = version
        self.load_first()

    @property
    def version(self) -> Version:
        return self._version

    def load_first(self) -> None:
        """Become the task's reference policy, as at the beginning."""
        self.load(TabularPolicy(self.task, self.temperature, torch.float64).weights(), self._first_version)

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Become another reference. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        shape = (self.task.questions, self.task.nodes, 1 + self.task.symbols)
        logits_QNV = checked(weights, shape).detach().cpu().to(torch.float64)
        self._log_policy_QNV = (logits_QNV / self.temperature).log_softmax(-1).numpy()
        self._version = version

    def log_probabilities(self, prompt: Prompt, completions: Sequence[Completion]) -> list[FloatArray]:
        """One float32 [T] array per completion, 0 where the policy did not sample."""
        logs = []
        for completion in completions:
            log_TV = self._next_tokens(prompt, completion)
            log_T = log_TV[np.arange(len(log_TV)), completion.tokens].astype(np.float32)
            logs.append(log_T if completion.mask is None else np.where(completion.mask, log_T, np.float32(0)))
        return logs

    def with_top(self, count: int, below: int | None = None) -> TabularTopTokens:
        return TabularTopTokens(self, count)

    def top_scores(self, prompt: Prompt, completion: Completion, count: int) -> TopScores:
        """The most probable tokens at each place of a completion without a mask."""
        log_TV = torch.from_numpy(self._next_tokens(prompt, completion)).float()
        top_TK, log_TJ = top_of(log_TV, torch.from_numpy(completion.tokens.astype(np.int64)), count)
        (log_T,) = self.log_probabilities(prompt, [completion])
        return TopScores(log_T, top_TK.numpy().astype(np.uint16), log_TJ[:, 1:].numpy().astype(np.float16))

    def _next_tokens(self, prompt: Prompt, completion: Completion) -> npt.NDArray[np.float64]:
        """[T, V]: the log-probabilities of what may come at each place."""
        nodes = [0]
        for token in completion.tokens[:-1]:
            nodes.append(nodes[-1] * self.task.symbols + int(token))
        return self._log_policy_QNV[self.task.question(prompt)][nodes]

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        """The same for several prompts at once."""
        return [self.log_probabilities(prompt, completions) for prompt, completions in answered]


@dataclass(frozen=True)
class TabularTopTokens:
    """A tabular reference as a teacher that names its most probable tokens."""

    reference: TabularReference
    count: int

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[TopScores]]:
        self.reference.log_probabilities_of(answered)  # which may be counted
        return [[self.reference.top_scores(prompt, c, self.count) for c in row] for prompt, row in answered]


def distribution(policy: TabularPolicy) -> Tensor:
    """[Q, O] float64: the probability of every outcome; each row sums to 1."""
    a = policy.task.symbols
    log_policy_QNV = (policy.logits_QNV.detach().to(torch.float64) / policy.temperature).log_softmax(-1)
    levels = [log_policy_QNV.new_zeros(policy.task.questions, 1)]  # log-probability of reaching each node, by depth
    for depth in range(policy.task.length):
        first = sum(a**d for d in range(depth))
        step_QNA = log_policy_QNV[:, first : first + a**depth, 1:]
        levels.append((levels[-1][:, :, None] + step_QNA).flatten(1))
    log_outcome_QO = torch.cat(levels, 1)
    log_outcome_QO[:, : policy.task.nodes] += log_policy_QNV[:, :, EOS]
    return log_outcome_QO.exp()


def ideal(task: TabularTask, beta: float, temperature: float = 1.0) -> Tensor:
    """[Q, O] float64: pi* = pi_ref exp(r / beta) / Z, pi_ref at the policy temperature (equation 2 of the paper)."""
    log_reference_QO = distribution(TabularPolicy(task, temperature, torch.float64)).log()
    return (log_reference_QO + torch.from_numpy(task.rewards_QO) / beta).softmax(1)


def total_variation(p_QO: Tensor, q_QO: Tensor) -> Tensor:
    """[Q]: half the summed absolute difference, in [0, 1]."""
    return (p_QO - q_QO).abs().sum(1) / 2


def checked(weights: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The one tensor of a tabular policy. Raises `KeyError` or `ValueError` when it is not what is published."""
    if set(weights) != {WEIGHT}:
        raise KeyError(f"a tabular policy has the one tensor {WEIGHT!r}, but got {sorted(weights)}")
    if tuple(weights[WEIGHT].shape) != shape:
        raise ValueError(f"{WEIGHT} has to be {shape}, but got {tuple(weights[WEIGHT].shape)}")
    return weights[WEIGHT]
