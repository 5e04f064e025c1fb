"""What a part of a run does from its beginning to its end, in a process or an actor of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tba.recipe import Recipe
from tba.runtime.offline import nothing_more
from tba.runtime.run_dir import RunDirectory
from tba.runtime.searcher_loop import SearchHalf
from tba.runtime.trainer_loop import start_training
from tba.train.ranks import Meeting

_LOOK = 0.1  # seconds between two looks for weights to evaluate, where that is all there is to do


def search(recipe: Recipe, start: Callable[[], SearchHalf], stop: Callable[[], bool]) -> None:
    """Rounds until told to stop. Consumes prompts and weights, waits for nothing; offline it only evaluates."""
    torch.set_num_threads(recipe.run.threads)
    half = start()
    if not recipe.offline:
        half.examiner.between = half.round_between
    try:
        while not stop() and not half.evaluate():
            if recipe.offline:
                time.sleep(_LOOK)
            else:
                half.round()
    finally:
        half.close()


def train(recipe: Recipe, run: RunDirectory, stop: Callable[[], bool], meeting: Meeting | None = None) -> None:
    """Steps until all are done or told to stop. Waits for batches; searchers unblock it. `meeting`: of its ranks."""
    torch.set_num_threads(recipe.run.threads)
    settings, fill = recipe.run, nothing_more if recipe.offline else None
    half = start_training(
        recipe,
        run,
        stop,
        prefetch=settings.prefetch,
        background=settings.publish_in_background,
        fill=fill,
        meeting=meeting,
    )
    try:
        while not half.finished and not stop():
            half.step()
        half.finish()
    finally:
        half.close()
