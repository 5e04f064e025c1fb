"""Answers of another model, behind an OpenAI-compatible endpoint, as a searcher's: what asks it and reads its replies.

Invariant: an answer becomes the tokens that an import of the same text would have. A reply that holds no answer is
refused with a reason, and is no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tba.engines.endpoint import Budget, EndpointAnswer, EndpointEngine
from tba.errors import UserError
from tba.fields import as_declared
from tba.imported_answers.encoding import Encoder
from tba.imported_answers.parsing import parse_answer
from tba.protocols import Acted, Model, PromptSource
from tba.recipe import Recipe
from tba.rewards.endpoint import Endpoint, EndpointClient, usage_in
from tba.runtime.importing import encoder_of
from tba.tables import Refusal, Values
from tba.types import Completion, Json, Prompt
from tba.user_code import problems_of


@dataclass(frozen=True)
@as_declared
class AnsweringEndpoint(Endpoint):
    """A model behind an OpenAI-compatible endpoint that answers a run's prompts."""

    temperature: float = 1.0
    timeout: float = 300.0  # answers may be long
    retries: int = 6  # a minute of pauses, and longer where the server asks for it

    def name_of(self, setting: str) -> str:
        """Returns what errors call a setting: an option of `tba search`, or a limit that has none."""
        options = {"url": "--endpoint", "model": "--model"}
        return options.get(setting, f"its {setting.replace('_', ' ')}")


@dataclass
class EndpointAnswers:
    """Asks an endpoint for the answers of one searcher. Raises `UserError` for an endpoint without address or model."""

    endpoint: Endpoint
    api: Literal["chat", "completions"] | None = None  # None: chat where the run's prompts are chats, else completions
    budget: Budget = field(default_factory=Budget)
    engine: EndpointEngine | None = None  # once it is attached
    on_done: None = None  # nobody waits to be told of an answer
    _encoder: Encoder | None = None

    def __post_init__(self) -> None:
        EndpointClient(self.endpoint)  # says what it lacks

    def check(self, recipe: Recipe) -> None:
        """Raises `UserError` where an endpoint cannot answer the recipe's prompts, or its run could not learn from the
        answers. Nothing is asked.
        """
        if "log_behavior" in recipe.objective.needs:
            raise UserError(
                f"the run's objective, {type(recipe.objective).__name__}, needs the log-probabilities of whoever "
                "answered, which answers of an endpoint do not have: take an objective without, such as "
                "TrajectoryBalance"
            )
        if recipe.vine is not None:
            raise UserError(
                "the recipe estimates the values of an answer's steps (vine) by continuing it, which an endpoint does "
                "not do: take a recipe without it"
            )
        problems = problems_of(recipe.task, "train")
        if isinstance(recipe.task, Acted) or any(problem.tools for problem in problems):
            raise UserError(
                "the run's task has an environment or tools, and an endpoint is asked for one answer without tools: "
                "let an agent play the episodes (`tba serve`), or import finished ones (`tba import`)"
            )
        if self.api is None:
            self.api = "completions" if isinstance(problems[0].prompt, str) else "chat"
        self._encoder = encoder_of(recipe)

    def attach(self, model: Model, longest_prompt: int, source: PromptSource) -> tuple[EndpointEngine, PromptSource]:
        """Returns an engine that asks the endpoint, and the prompts that it answers. `check` comes before."""
        encoder, api = self._encoder, self.api
        assert encoder is not None
        assert api is not None
        max_tokens = model.max_completion_tokens
        client = EndpointClient(replace(self.endpoint, api=api, max_tokens=max_tokens))

        def ask(prompt: Prompt) -> EndpointAnswer:
            return _read_reply(client.ask(_question(client.settings, prompt)), api, prompt)

        def encode(row: Values) -> Completion | Refusal:
            answer = parse_answer(row)
            encoded = answer if isinstance(answer, Refusal) else encoder.encode(answer)
            return encoded if isinstance(encoded, Refusal) else encoded.completion

        self.engine = EndpointEngine(str(client), ask, encode, max_tokens, lambda: client.calls_at_once, self.budget)
        return self.engine, source


def _question(settings: Endpoint, prompt: Prompt) -> dict[str, Json]:
    """Returns the body of the call that asks for one answer to a prompt."""
    sampling = {"model": settings.model, "max_tokens": settings.max_tokens, "temperature": settings.temperature}
    if settings.api == "completions":
        return {**sampling, "prompt": prompt.text}
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return {**sampling, "messages": [dict(message) for message in messages]}


def _read_reply(reply: Mapping[str, Any], api: Literal["chat", "completions"], prompt: Prompt) -> EndpointAnswer:
    """Returns the answer to a prompt in an endpoint's reply, as a line of an import has it."""
    usage = usage_in(reply.get("usage"))
    row: Values | Refusal
    try:
        choice = reply["choices"][0]
        row = {"key": prompt.key, "finish_reason": choice.get("finish_reason")}
        if api == "completions":
            row |= {"response": choice["text"]}
        else:
            message = choice["message"]
            row |= {"messages": [{"role": "assistant", **{name: message.get(name) for name in _ANSWER_FIELDS}}]}
    except (KeyError, IndexError, TypeError, AttributeError):
        row = Refusal("a reply without an answer as an OpenAI-compatible endpoint gives it")
    return EndpointAnswer(row, None if usage.uncounted_calls else usage.tokens)


_ANSWER_FIELDS = ("content", "tool_calls")
