"""The answers of an engine to a fixed number of prompts: what one flow gives that they all are submitted to at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tba.protocols import Engine, Partner
from tba.types import Completion, Prompt, Sampling


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    rng: np.random.Generator,
    interrupted: Callable[[], bool] | None = None,
) -> list[list[Completion]]:
    """Returns `count` completions of each prompt; [i] are those of prompts[i].

    Once `interrupted()` is true, unfinished completions come back as `Flow.next` says. Raises `UserError` for a prompt
    that is too long or empty, before anything is generated.
    """
    completions = dict(stream(engine, prompts, count, sampling, rng, interrupted))
    return [completions[i] for i in range(len(prompts))]


def stream(
    engine: Engine,
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    rng: np.random.Generator,
    interrupted: Callable[[], bool] | None = None,
    partner: Partner | None = None,
) -> Iterator[tuple[int, list[Completion]]]:
    """Yields (i, completions of prompts[i]) for each prompt once, as soon as all its completions are finished.

    With a `partner` the completions have several turns, between which the partner speaks.
    """
    flow = engine.flow(count, sampling, rng, partner)
    flow.submit(prompts)
    unfinished_count = len(prompts)
    while unfinished_count:
        finished_prompts = flow.next(interrupted, until_needed=False)
        unfinished_count -= len(finished_prompts)
        yield from finished_prompts
