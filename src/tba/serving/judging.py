"""Episodes of environments, judged by acting their turns again in an environment of the run.

Invariant: one thread owns the hosts. While it acts some episodes, others that end wait, and are acted together next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeAlias

from tba.tables import Refusal
from tba.types import Completion, Judgement, Prompt

Replay: TypeAlias = Callable[[Sequence[tuple[Prompt, Completion]]], list[Completion | Refusal]]


class EpisodeJudge:
    """Gives completions the judgements of their environments."""

    def __init__(self, replay: Replay) -> None:
        """replay: returns each completion with its environment's judgement, or why it has none."""
        self._replay = replay
        self._thread = ThreadPoolExecutor(1, "environments")
        self._waiting: list[tuple[Prompt, Completion, asyncio.Future[Completion | Refusal]]] = []
        self._task: asyncio.Task[None] | None = None

    async def judge(self, prompt: Prompt, completion: Completion) -> tuple[Completion, str]:
        """Returns a completion with its judgement, and why it has none: then its reward is not a number, so that it is
        rejected and counted.
        """
        future: asyncio.Future[Completion | Refusal] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, completion, future))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._judge_waiting())
        judged = await future
        if isinstance(judged, Refusal):
            return replace(completion, judgement=Judgement(math.nan)), str(judged)
        return replace(completion, judgement=judged.judgement), ""

    async def _judge_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                pairs = [(prompt, completion) for prompt, completion, _ in batch]
                results = await loop.run_in_executor(self._thread, self._replay, pairs)
            except Exception as error:  # noqa: BLE001 - whatever an environment's code raises, its episodes fail
                results = [Refusal("its environment fails", f"{type(error).__name__}: {error}")] * len(batch)
            for (_, _, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    def close(self) -> None:
        """End the thread, once it has acted what it is acting."""
        self._thread.shutdown(wait=False, cancel_futures=True)
