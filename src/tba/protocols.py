"""The interfaces between components: what each needs of its neighbours, and nothing more.

    Task -> PromptSource -> Searcher --Journal--> replay (Selector) --groups--> Trainer
                       (Engine, Reward, Reference)                      (Policy, Objective)
                               ^                                               |
                               +--- WeightSource / WeightPublisher, every k ---+

Everything here is structural (`typing.Protocol`): an implementation imports nothing from this file. Torch is imported
for type checkers only, so that replay and types stay free of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from tba.errors import UserError
from tba.types import (
    Completion,
    Evaluation,
    FloatArray,
    IntArray,
    Json,
    Judgement,
    Outcome,
    Problem,
    Prompt,
    Sampling,
    Score,
    Split,
    StopReason,
    TokenScores,
    Trajectory,
    Version,
)

if TYPE_CHECKING:
    import torch

    from tba.batch import Batch
    from tba.sharding import Sharding


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


@runtime_checkable
class Reward(Protocol):
    """Grades completions in batches. Rewards are computed here; claimed ones are not trusted."""

    def judge(self, answers: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
        """Returns one judgement for each (prompt, completion), in order."""


@dataclass(frozen=True)
class GradingCalls:
    """Says how one part of a reward is called, and how many calls may be in progress at once."""

    name: str  # for messages and reports
    grade: Callable[[Sequence[tuple[Prompt, Completion]]], Any]  # returns one value for each answer; an awaitable of
    # these values where it is `asynchronous`
    unit: Literal["answer", "group", "waiting"] = "waiting"  # what one call gets: one answer, all answers to a prompt,
    # or all answers that wait
    concurrency: int = 1  # calls under way at once, of all searchers of a run together
    asynchronous: bool = False  # all calls run in one event loop
    copies: bool = True  # each call gets copies of prompts and completions, so that no other sees what it changes; a
    # part that changes nothing, or copies what it hands on, needs none


@runtime_checkable
class Separable(Protocol):
    """A reward whose parts are called answer by answer, group by group, or several calls at once.

    A reward without these methods is called by `judge`: one call at a time, about all answers that wait.
    """

    def calls(self) -> Sequence[GradingCalls]:
        """Returns how each part is called."""

    def judgement(self, values: Sequence[Any]) -> Judgement:
        """Returns the judgement of one answer, from the value that each part gave it, in the order of `calls`."""


@runtime_checkable
class Task(Protocol):
    """Gives prompts, and grades answers. A frozen dataclass; light: its files are read on use."""

    @property
    def name(self) -> str: ...

    def problems(self, split: Split) -> Sequence[Problem]:
        """Returns all problems of a split, in a fixed order; `train` and `eval` never share one."""

    def reward(self) -> Reward: ...


@runtime_checkable
class Examined(Protocol):
    """A task whose answers are evaluated by another reward than they are trained on, such as a gold model's."""

    def examination(self) -> Reward:
        """Returns the reward that evaluations use: 1 for an answer that counts as right, 0 for any other."""


@runtime_checkable
class JudgedByModels(Protocol):
    """A task whose rewards hold models, which every searcher loads."""

    def memory(self) -> Mapping[str, Mapping[str, int]]:
        """Returns the bytes that a searcher needs for these models, at most, by device (cpu, cuda or mps) and part.

        A model whose configuration cannot be read is left out; nothing is loaded, and CUDA is not started.
        """


@runtime_checkable
class RunsPrograms(Protocol):
    """A reward that runs what it grades."""

    def isolation(self, problems: Sequence[Problem]) -> str:
        """Returns in words how programs are isolated on this machine. Raises `UserError` where that is less than the
        reward asks for, or where the tests of a problem cannot be read.
        """


@runtime_checkable
class Selective(Protocol):
    """A task that does not train on all that its files hold."""

    def left_out(self) -> Mapping[str, int]:
        """Returns how many rows are no training problems, by the reason in words."""


@runtime_checkable
class ShowsFields(Protocol):
    """A task some of whose problems' fields agents may see (`tba serve`)."""

    shown_fields: tuple[str, ...]


class Environment(Protocol):
    """A world to act in, free of tokens. One object lives through one episode: `reset` once, then turn by turn.

    With `step(text)` it answers each turn of the policy: with a text, which the policy reads before its next turn, or
    with None when the episode is over; or with an object with the attributes `observation`, `reward` and `done`, such
    as OpenEnv's `StepResult`, whose rewards then sum up to that of the episode.

    Without `step` its public methods with type hints and docstrings are tools that a turn may call; a turn that calls
    none is the answer, and the last.

    It may also have `get_reward() -> float`, asked once at the end (with the last turn's text, if it declares an
    argument `answer`), `cut(text)`, told before that of a last turn which had no room left to end, and `close()`. Each
    of these may be `async`. Arguments of `reset` are given by name, and only those that it declares.
    """

    @property
    def reset(self) -> Callable[..., Any]:
        """Returns the method that begins an episode. It gets those of the problem's fields and `seed` that it names.
        The seed must decide everything that is drawn, so that in a group the same actions meet the same world. The
        method returns the text that the policy reads first, after the prompt, or None.
        """


@runtime_checkable
class Acted(Protocol):
    """A task whose problems are answered by acting in an environment, in several turns."""

    @property
    def environment(self) -> Callable[[], Environment]:
        """Makes the environment of one episode; a class without arguments will do."""

    @property
    def turns(self) -> int:
        """Returns how many turns an episode has at most."""


@runtime_checkable
class LimitsEpisodes(Protocol):
    """A task that says what its episodes may take of time, memory and processes."""

    limits: Any  # `tba.EpisodeLimits`; None: the default


class Exploration(Protocol):
    """Draws the sampling settings of one searcher's round."""

    def draw(self, rng: np.random.Generator) -> Sampling: ...

    @property
    def full_support(self) -> bool:
        """Returns whether some draw has full support."""

    @property
    def greedy(self) -> bool:
        """Returns whether some draw is greedy (temperature 0), which leaves no log-probability to correct by."""


class Engine(Protocol):
    """Samples answers from weights that can be replaced at any time; knows their version."""

    @property
    def version(self) -> Version: ...

    def load(self, weights: Mapping[str, torch.Tensor], version: Version) -> None:
        """Copy `weights` into the model in place. Raises `KeyError` or `ValueError` on a name or shape mismatch.

        While answers grow it may be called from `interrupted` (`Flow.next`): the weights that are there at a token
        sample it, and an answer is by all those from `Completion.versions[0]` to `[1]`.
        """

    def flow(self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None) -> Flow:
        """Returns an empty flow of `count` completions of each prompt; with a `partner` they have several turns,
        between which it speaks.

        An engine has one flow at a time: another one ends it, and what that has not handed out is lost. Equal weights,
        prompts and generators give equal answers; `tba.generation` has the ways to ask for those of a fixed number.
        """


@runtime_checkable
class StagesWeights(Protocol):
    """An engine that can have weights brought to its device before they are loaded."""

    def stage(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Begins to copy `weights` to the engine's device, beside what it computes; returns what is to be given to
        `load`, or the weights themselves. Any thread may call it.
        """


@runtime_checkable
class ReportsFaults(Protocol):
    """An engine that can go on with a fault, such as one that makes it slow."""

    @property
    def fault(self) -> str:
        """Returns what is wrong, in words; empty: nothing."""


class Flow(Protocol):
    """Holds prompts that are being answered, to which further ones can be added at any time."""

    @property
    def prompts_submitted(self) -> int:
        """Returns how many prompts were submitted."""

    @property
    def prompts_needed(self) -> int:
        """Returns how many more prompts could begin to be answered now."""

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts; they are numbered from 0 in the order of submission. Raises `UserError` for one that is too
        long or empty, and then adds none.
        """

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Computes until prompts are finished, or (`until_needed`) more are needed; returns the finished ones as
        (number, completions). Between two calls nothing is computed, and other models may be used.

        Once `interrupted()` is true (asked every few tokens) it returns all that is left: what is unfinished as
        `StopReason.INTERRUPTED`, with at least the tokens it had (an unstarted one is left out). Further prompts may be
        submitted then. From `interrupted` and from a partner's `replies`, prompts may be submitted and requests
        cancelled, too.
        """
        ...

    def cancel(self, request: int) -> None:
        """Ends a request, (prompt, sample), as `StopReason.INTERRUPTED` with the tokens it has, as soon as `next` looks
        at what it computes; `request` is i * count + j. A request that has not begun is left out of what `next`
        returns, and its partner hears of an end without tokens. One that has ended is left as it is.

        Call it in the thread that calls `next`, between two calls or from within.
        """


@runtime_checkable
class AnsweredOneByOne(Protocol):
    """A flow that hands out a prompt's completions as they end, each under the prompt's number."""

    @property
    def unfinished_prompts(self) -> Container[int]:
        """Returns the numbers of the prompts of which more completions will come."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a request, (prompt, sample), that the policy has ended; `request` is i * count + j.

    An engine that does not say which T tokens were sampled leaves `tokens` and `log_behavior` empty.
    """

    request: int
    text: str  # decoded, special tokens and a matched stop string removed
    stop_reason: StopReason  # eos, stop_string, or length: the limit of this turn
    room: int  # tokens that its completion may still have
    tokens: Sequence[int] = ()  # [T] as they were sampled, the one that ended it included
    log_behavior: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))  # [T] as in `Completion`
    versions: tuple[Version, Version] = (Version(), Version())  # the first and the last weights that sampled it


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Limits one turn beside the engine's own limits. Raises `UserError` for limits that leave no token."""

    max_tokens: int | None = None  # of the turn; None: what its completion has room for
    stop_strings: tuple[str, ...] = ()  # the turn ends before the first of these in its text; none is a special token

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"a turn's max_tokens is {self.max_tokens}, but it must be at least 1")
        if "" in self.stop_strings:
            raise UserError("a stop string of a turn is empty, which would end every turn: leave it out")


class Partner(Protocol):
    """Talks with an engine's completions: at the end of a turn it gives the tokens to be read before the next turn.

    A completion goes on after an EOS token, a stop string or a limit of the turn (`LimitsTurns`) as long as its partner
    replies and there is room for another token; its `mask` says which tokens were sampled. A completion never waits for
    another one's reply.
    """

    def hear(self, turns: Sequence[Turn]) -> None:
        """Takes turns that have ended; the replies may come later."""

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        """Returns the replies since the last call by request: tokens to be read, or None where the completion ends.
        With `wait` it returns once there is a reply, or after a moment without one.
        """

    def ended(self, request: int, completion: Completion) -> Completion:
        """Takes a completion that has ended for any reason, and returns the completion that the engine hands out."""


@runtime_checkable
class LimitsTurns(Partner, Protocol):
    """A partner that limits each turn. A turn that reaches a limit of its own is heard and can be replied to."""

    def turn_limits(self, request: int) -> TurnLimits:
        """Returns the limits of the turn that a request begins."""
        ...


@runtime_checkable
class EndsWaits(Partner, Protocol):
    """A partner that has work for the thread of its flow besides the flow's own."""

    def must_return(self) -> bool:
        """Returns whether the flow's `next` is to return between two tokens, with what is finished by now."""
        ...


@runtime_checkable
class CountsReads(Partner, Protocol):
    """A partner that counts what its requests read."""

    def read_again(self, request: int) -> None:
        """Takes that a request which goes on is read again from its beginning: its keys and values were dropped."""
        ...


class AnswerScorer(Protocol):
    """Computes log-probabilities of answers under a model that is not trained, on the searcher's side."""

    def log_probabilities_of(
        self, answers: Sequence[tuple[Prompt, Sequence[Completion]]]
    ) -> Sequence[Sequence[TokenScores]]:
        """Returns scores of completions at the recipe's policy temperature: [i][j] is of the j-th completion of the
        i-th prompt.
        """


class ReferenceScorer(AnswerScorer, Protocol):
    """Computes log-probabilities under a version of the reference policy."""

    @property
    def version(self) -> Version: ...

    def log_probabilities_of(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        """Returns the log-probabilities of completions at the recipe's policy temperature: [i][j], float32 [T], of the
        j-th completion of the i-th prompt.
        """


class Reference(ReferenceScorer, Protocol):
    """Computes log-probabilities under the reference policy, on the searcher's side."""

    def load(self, weights: Mapping[str, torch.Tensor], version: Version) -> None:
        """Loads the weights of another reference, in place. Raises `KeyError` or `ValueError` on a name or shape
        mismatch.
        """

    def load_first(self) -> None:
        """Loads the weights and takes the version that it was made with again. A searcher asks for it where the trainer
        resumes from a checkpoint that is older than the first reset.
        """


@runtime_checkable
class ScoresTopTokens(Protocol):
    """A model that can say which tokens it finds most probable at each place."""

    def with_top(self, count: int, below: int | None = None) -> AnswerScorer:
        """Returns a scorer by the same model whose scores are `TopScores` of `count` tokens a place, all of them with
        numbers `below` a bound: those that the policy has.
        """


@runtime_checkable
class ScoredByCalls(Protocol):
    """A reference that waits for another program, such as a server. Answers are scored by calls in a window of its own,
    at the same time as the reward's.
    """

    @property
    def scoring(self) -> GradingCalls:
        """Returns how the reference is called; the values are `TokenScores`."""


@runtime_checkable
class Concurrent(Protocol):
    """A reference that can score in one thread while an engine samples in another."""

    @property
    def concurrent(self) -> bool:
        """Returns whether the reference scores in such a thread. On a processor the two threads would only share it."""


@dataclass(frozen=True)
class PolicyOutput:
    """The output of the model being trained for a batch. Shapes: B rows, T positions, G groups."""

    log_policy_BT: torch.Tensor  # 0 where the batch's mask is False
    value_BT: torch.Tensor | None = None
    log_z_G: torch.Tensor | None = None
    # [B] nats, once a gradient has gone through `log_policy_BT`: the entropy of the policy before a token, summed over
    # the row's sampled tokens; None: unknown
    entropy_B: Callable[[], torch.Tensor] | None = None
    log_top_BTC: torch.Tensor | None = None  # of the batch's top tokens at each place, and of all others together


Measured: TypeAlias = "dict[str, float | torch.Tensor]"  # metrics; a step reads its tensors all at once
TOP_TOKENS = "teacher_top"  # in the needs of an objective that learns from a teacher's most probable tokens
HEADS = frozenset({"value", "log_z"})  # what a policy can have besides its log-probabilities


class Policy(Protocol):
    """The model being trained. Its heads belong to it: parameters among the others, but none of its weights."""

    @property
    def heads(self) -> torch.nn.ModuleDict:
        """Returns the heads (of `HEADS`) that the policy was made with, by name, all zero at first."""

    @property
    def share_prompt(self) -> bool:
        """Returns whether each prompt is run once per group; else once per row, every row padded to the longest."""

    def evaluate(self, batch: Batch) -> PolicyOutput: ...

    def parameters(self) -> Sequence[torch.nn.Parameter]: ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Returns detached tensors by Hugging Face name, without heads; they are views of live parameters."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` in, in place."""


@runtime_checkable
class SharesPrompts(Protocol):
    """A policy that runs each prompt once per group where it can."""

    padding_reason: str  # why it cannot, and pads each row; empty: it can, or was not asked to


class ScoringPolicy(Protocol):
    """What can be evaluated as a policy, and is not trained."""

    @property
    def heads(self) -> torch.nn.ModuleDict: ...

    @property
    def share_prompt(self) -> bool: ...

    def evaluate(self, batch: Batch) -> PolicyOutput: ...


class WeightHolder(Protocol):
    """A policy whose weights can be replaced."""

    def weights(self) -> Mapping[str, torch.Tensor]: ...

    def load(self, weights: Mapping[str, torch.Tensor]) -> None: ...


@runtime_checkable
class ScoresInTrainer(Protocol):
    """A model whose reference can be spread over the trainer's ranks, or share a policy's memory."""

    def frozen_policy(self, temperature: float, sharding: Sharding | None, policy: Policy) -> ScoringPolicy | None:
        """Returns the policy as it begins: as this rank's rows of it, or the base of `policy`; None: neither."""
        ...


class SavedPolicy(Policy, Protocol):
    """A policy that can be spread over ranks, and written with weights that were gathered from them."""

    def everything(self) -> Mapping[str, torch.Tensor]:
        """Returns `weights` and the weights that adapters leave unchanged."""

    def save(self, path: Path, tokenizer: Any = None, weights: Mapping[str, torch.Tensor] | None = None) -> None: ...


class Objective(Protocol):
    """(policy output, batch, step) -> (scalar to minimise, metrics). Pure: no process, file or model class.

    `step` counts optimizer updates from 1, the one that is being made. With `by_group` metrics are means over rows.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Returns what the batch (`log_behavior`, `step_value`) or the policy (`HEADS`) must give."""

    @property
    def by_group(self) -> bool:
        """Returns whether the loss is a mean over rows of terms that need their own group alone."""

    def __call__(
        self, output: PolicyOutput, batch: Batch, step: int
    ) -> tuple[torch.Tensor, Mapping[str, float | torch.Tensor]]: ...


@runtime_checkable
class HasBeta(Protocol):
    """An objective with a reference, to which its policy is pulled."""

    beta: Callable[[int], float]  # strength of the pull, by step


@runtime_checkable
class HasRewardTemperature(Protocol):
    """An objective that divides rewards by a temperature."""

    reward_temperature: Callable[[int], float]  # by step


@runtime_checkable
class EndingSchedule(Protocol):
    """A schedule that is monotone and ends at a value."""

    last: float


@runtime_checkable
class HasLogZ(Protocol):
    """An objective that needs an answer's whole log-probability, and log Z of its prompt."""

    log_z: str  # how log Z is known; learned: by a head


@runtime_checkable
class HasOffPolicy(Protocol):
    """An objective that can correct for answers that other weights or settings have sampled."""

    off_policy: str  # none: it does not correct


@runtime_checkable
class HasFlow(Protocol):
    """An objective that balances the flow through the tokens of an answer."""

    flow: str  # learned; one: for a teacher that is the whole target


@runtime_checkable
class HasPull(Protocol):
    """An objective that can be pulled to the reference beside its teacher."""

    pull: float  # 0: it is not


@runtime_checkable
class HasRecentShare(Protocol):
    """A selection that mixes recent groups with others."""

    m: float  # share of recent groups


@runtime_checkable
class HasRefill(Protocol):
    """A selection that can pass over groups all of whose rewards are the same."""

    refill: bool


@runtime_checkable
class Remembering(Protocol):
    """An objective that learns from the batches of its run, with a state that a checkpoint keeps."""

    def state(self) -> Json: ...

    def restore(self, state: Json) -> None: ...


@runtime_checkable
class Startable(Protocol):
    """An objective's settings, from which each run has an objective of its own."""

    def start(self) -> Objective: ...


def start_objective(objective: Objective) -> Objective:
    """Returns the objective of one run: the one that settings start, or `objective` itself if it needs no start."""
    return objective.start() if isinstance(objective, Startable) else objective


class PromptSource(Protocol):
    """The source of the prompts that a searcher answers."""

    def take(self, count: int) -> tuple[list[int], list[Prompt]]:
        """Leases the next positions, and returns them and their prompts. The searcher gives the positions back with
        their trajectories.
        """

    def outcomes(self, rewards: Mapping[int, Sequence[float]]) -> Sequence[Outcome]:
        """Returns the outcomes that all searchers are told, from the answers' rewards by position."""


class Journal(Protocol):
    """Gives a part other than the trainer access to the journal, in the name of one owner.

    Every method may be called from another machine: the remote side is generated from these names, and the gateway on
    the trainer's machine answers to no others (`runtime/cluster/`). So arguments and results are plain values or the
    types of `tba.types`.
    """

    def put(
        self,
        trajectories: Sequence[Trajectory],
        leases: Sequence[int] = (),
        counters: Mapping[str, int] | None = None,
        outcomes: Sequence[Outcome] = (),
        staged: Sequence[Trajectory] = (),
        positions: Sequence[int] = (),
        samples: int = 0,
    ) -> None:
        """Returns once the trajectories are on disk. In the same transaction the leases are given back as done, and the
        owner's counters and the prompts' outcomes are added. A repeated call changes nothing.

        staged: graded answers to prompts whose other answers are not graded yet, which are on disk too then. They are
        given to nobody before they are put, by a later call or, after a crash, by `resume`. positions: the leased
        position of each of these. samples: answers that a group has.
        """

    def known(self, uids: Sequence[str]) -> set[str]:
        """Returns the uids of trajectories that were ever put."""

    def rows(self) -> int:
        """Returns how many trajectories were ever put, by all owners."""

    def lease(self, count: int, seconds: float) -> list[int]:
        """Leases `count` prompt positions of an endless order, which nobody else is given for `seconds`."""

    def lease_first(self, order: Sequence[int], count: int, seconds: float) -> list[int]:
        """Leases the first `count` positions in `order` that nobody holds; fewer when all are held."""

    def outcomes(self, after: int) -> list[tuple[int, int, float, float]]:
        """Returns (number, *outcome) of all outcomes numbered above `after`, in order."""

    def unscored(self, reference: Version, count: int, seconds: float) -> list[Trajectory]:
        """Leases up to `count` trajectories whose score under `reference` the trainer requests, for `seconds`."""

    def put_scores(self, scored: Sequence[Score], counters: Mapping[str, int] | None = None) -> None:
        """Writes scores in one transaction, like `put`."""

    def count(self, **increments: int) -> None:
        """Adds to the owner's counters."""

    def claim(self, job: str, seconds: float) -> bool:
        """Returns True for exactly one claimant, which then has the job until it is finished or `seconds` are over."""

    def finish(self, job: str, evaluations: Sequence[Evaluation]) -> None:
        """Records that the job is done, with its results; those of a job that another has finished are ignored."""

    def resume(self) -> None:
        """Ends the leases and jobs that an earlier process of this owner held, and puts the answers that it staged."""

    def close(self) -> None:
        """Closes the connection; calls that were not acknowledged are lost."""


class Answered(Protocol):
    """One problem of an evaluation and its answer."""

    @property
    def prompt(self) -> str: ...
    @property
    def completion(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def correct(self) -> bool: ...
    @property
    def metric(self) -> str: ...


class Records(Protocol):
    """Records a searcher's results for people and for the summary, on its own machine or through the gateway."""

    def write(self, evaluations: Sequence[Evaluation], answers: Sequence[Answered] = ()) -> None:
        """Writes the results of one evaluation of one version."""

    def fault(self, kind: str, message: str) -> None:
        """Records a fault that did not end the run."""

    def result(self, part: str, result: Json) -> None:
        """Records the figures of a part that the summary needs."""


@dataclass(frozen=True)
class EvaluationRequest:
    """Asks the searchers for the evaluation of a version."""

    version: Version  # under whose name it is recorded
    wall_seconds: float  # into the run, when it had these weights
    during: bool  # it is neither the first version of the run nor the last
    weights: Version | None = None  # that are evaluated: the version's own (None), or their average


@dataclass(frozen=True)
class Manifest:
    """Holds the trainer's only message to its searchers, which is published with each version of the weights."""

    evaluate: tuple[EvaluationRequest, ...] = ()
    stop: bool = False  # the last step has been made
    reference: Version | None = None  # which version is the reference policy from here on
    journal: Mapping[str, Json] = field(default_factory=dict)  # how much it held (`replay.missing_rows.JournalCounts`)
    wanted: int | None = None  # trajectories in all, before searchers are held back


@dataclass(frozen=True)
class PublishedWeights:
    """One published version: its manifest at once, its tensors when asked for."""

    version: Version
    manifest: Manifest
    read: Callable[[], Mapping[str, Any]]  # -> name -> torch.Tensor, some of them made when they are asked for


class WeightPublisher(Protocol):
    """Takes the weights that the trainer publishes."""

    def publish(self, weights: Mapping[str, torch.Tensor], version: Version, manifest: Manifest) -> None: ...


class WeightSource(Protocol):
    """Gives searchers the published weights."""

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        """Returns the newest published version if it is newer than `version` (None: any), else None. Never waits."""

    def at(self, version: Version) -> PublishedWeights:
        """Returns exactly this version. Raises `UserError` when it does not exist (any more)."""


class KeptWeights(Protocol):
    """Published versions that can be pinned, each for some reasons."""

    def versions(self) -> list[Version]: ...

    def pin(self, version: Version, reason: str) -> None: ...

    def unpin(self, version: Version, reason: str) -> None: ...

    def pins(self, version: Version) -> list[str]: ...


@dataclass(frozen=True)
class ComputeCost:
    """Holds a token's cost in floating-point operations of a forward pass, and the rate of the policy's device."""

    read: float  # of a token that the layers read
    scored: float  # of a token that goes through the head
    passes: int  # forwards that an update of a token costs
    rate: float  # operations a second

    def share(self, read: float, scored: float, seconds: float) -> float:
        """Returns the share of the best rate, 0 to 1, at which forwards over so many tokens took so long."""
        return (self.read * read + self.scored * scored) / seconds / self.rate if seconds > 0 else 0.0


@dataclass(frozen=True)
class Work:
    """Holds the sizes of a run that decide how much memory its model needs."""

    prompt_tokens: int  # of the longest prompt
    pass_tokens: int  # of one forward and backward pass, at most
    groups: int  # prompts of a step
    group_size: int  # answers to each
    ranks: int  # processes of the trainer
    moments_on_host: bool = False  # of the optimizer
    averaged: bool = False  # weights, by the optimizer
    parks: bool = False  # answers wait for replies, and others take their place


class ScoringModel(Protocol):
    """A model that only has to score answers, such as a teacher."""

    def prepared(self, task: Task, log: Any = ...) -> ScoringModel:
        """Returns the model, with its weights ready (a supervised warm start is run, or found in the cache)."""

    def tokenizer(self) -> Tokenizer: ...

    @property
    def positions(self) -> int | None:
        """Returns how many tokens a prompt and its answer have together at most; None: no limit."""

    def memory(self, work: Work) -> Mapping[str, Mapping[str, int]] | None:
        """Returns the bytes that a rank of the trainer (`trainer`; `host`: besides, on the host), an engine
        (`searcher`) and a `reference` need at most, by part, and those of a `checkpoint` and of published `weights` on
        the disk; None where that is unknown, or nothing is needed here.

        It has to be `prepared`; nothing is loaded.
        """

    def reference(self, temperature: float, version: Version) -> Reference: ...


class Model(ScoringModel, Protocol):
    """The weights a run begins with, and how searchers and the trainer use them."""

    def prepared(self, task: Task, log: Any = ...) -> Model:
        """Returns the model, with its weights ready (a supervised warm start is run, or found in the cache)."""

    @property
    def heads(self) -> frozenset[str]:
        """Returns which heads (`HEADS`) its policies can have."""

    @property
    def max_completion_tokens(self) -> int:
        """Returns how many tokens an answer of its engines has at most, the end of text included."""

    @property
    def never_sampled(self) -> tuple[str, ...]:
        """Returns the answers that rules of its engines forbid at any sampling settings, in words."""

    def policy(
        self,
        temperature: float,
        heads: frozenset[str] = ...,
        saved: Path | None = ...,
        sharding: Sharding | None = ...,
        moments_on_host: bool = ...,
        averaged: bool = ...,
    ) -> Policy:
        """Returns the policy to train, with its heads at zero; with the weights that `save` wrote into the folder
        `saved`.

        With a `sharding` it is this rank's share of it. With `moments_on_host` the optimizer's moments leave it their
        memory of the device; `averaged` weights take some. Raises `UserError` when it cannot be sharded.
        """

    @property
    def compute(self) -> torch.dtype:
        """Returns the type in which its policies, engines and references compute and weights are published."""

    @property
    def trainer_device(self) -> torch.device:
        """Returns where its policies are trained."""

    def arithmetic(self) -> ComputeCost | None:
        """Returns the cost of the model's tokens, measured now; None where it is unknown."""

    @property
    def gpus_per_searcher(self) -> int:
        """Returns over how many GPUs one searcher's engine is spread; 0 where the model runs on none."""

    def engine(self, version: Version, longest_prompt: int = ...) -> Engine:
        """Returns the engine that samples; it may refuse a prompt of more tokens than `longest_prompt`."""

    def save(self, policy: Policy, path: Path) -> None:
        """Saves the policy in the Hugging Face layout, with its tokenizer."""


@runtime_checkable
class SamplesBase(Protocol):
    """A model that can be sampled as it was before training, beside the engine that is given newer weights."""

    def base_engine(self, longest_prompt: int, reference: Reference | None = ...) -> Engine:
        """Returns an engine of the weights that a run begins with; may share those of a reference that keeps them for
        good. Raises `UserError` where the free memory does not hold it.
        """


@runtime_checkable
class LoadedFromPath(Protocol):
    """A model that is loaded from a folder, a file, or by a name on the Hub."""

    path: str


def path_of(model: object) -> str:
    """Returns the path that a model is loaded from; empty: it has none."""
    return model.path if isinstance(model, LoadedFromPath) else ""


@runtime_checkable
class LoadedOnDevice(Protocol):
    """A scoring model whose weights are loaded on this machine."""

    trainer_device: torch.device


@runtime_checkable
class LoadsOtherModels(Protocol):
    """A model that makes another one, with its own settings, from a path."""

    def with_path(self, path: str) -> Model: ...


@runtime_checkable
class HasAttentionHeads(Protocol):
    """A model whose attention has heads, which engines of several GPUs divide among them."""

    attention_heads: int | None  # None: unknown


@runtime_checkable
class HasDevice(Protocol):
    """A model whose device can be set."""

    device: str  # auto: what this machine has


@runtime_checkable
class HasDtype(Protocol):
    """A model whose precision can be set."""

    dtype: str  # auto: by the device; 4-bit: its base is quantized


@runtime_checkable
class HasGradientCheckpointing(Protocol):
    """A model whose backward pass can compute activations again."""

    gradient_checkpointing: bool | None  # None: left open


class AdapterSettings(Protocol):
    """The settings of a model's adapters."""

    rank: int  # 0: none


@runtime_checkable
class HasAdapters(Protocol):
    """A model that can train adapters in the place of its weights."""

    lora: AdapterSettings


class GenerationSettings(Protocol):
    """The settings of a model's engine."""

    engine: str
    slots: int | None
    stop_strings: tuple[int | str, ...]

    @property
    def slot_count(self) -> int:
        """Returns the completions that are generated simultaneously."""


@runtime_checkable
class HasGeneration(Protocol):
    """A model whose engine has settings."""

    generation: GenerationSettings


@runtime_checkable
class ChoosesEngine(Protocol):
    """A model that chooses its engine by what is to be sampled."""

    def may_use_vllm(self, longest_prompt: int) -> bool:
        """Returns whether answers may be sampled by vLLM. The model has to be `prepared`."""


@runtime_checkable
class HasChatTemplate(Protocol):
    """A model with settings of its chat template."""

    template_arguments: tuple[str, ...]  # each name=value
    day: str  # that the template takes for today; empty: left open
