"""How much a text's score differs from its tokens' score, under the model that sampled it.

A teacher with another tokenizer scores the text of an answer, written in its own tokens (`runtime/teaching.py`). Were
the teacher the sampler itself, that would differ only where it samples a text in other tokens than its tokenizer
writes, for which the reference is asked besides (not here). This samples answers to prompts from a file, scores each by
its sampled tokens and by its text alone, and prints the differences; and for the file's own texts whether they read
back as they were written.

    python lab/benchmarks/retokenised.py MODEL FILE [--field question] [--chat] [--prompts 64] [--tokens 128]

FILE: JSON lines with the field, or (.txt, .txt.gz) plain text, whose lines of at least 40 characters are begun.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tba.engines.transformers import EngineSettings
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.rollout.prompts import PromptSettings, encode
from tba.runtime.teaching import ScoredByText
from tba.tasks.arithmetic import Arithmetic
from tba.types import Completion, FloatArray, Problem, Prompt, Sampling, StopReason, Version

AT_ONCE = 16  # prompts that are answered and scored together
BEGINNING = 20  # characters of a line of plain text that are a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--field", default="question")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generation = EngineSettings(slots=AT_ONCE * options.samples, max_completion_tokens=options.tokens)
    model = HuggingFace(options.model, device="cpu", dtype="float32", generation=generation).prepared(Arithmetic())
    tokenizer = model.tokenizer()
    texts = list(texts_of(options.file, options.field))
    again = [tokenizer.encode(text, add_special_tokens=False) for text in texts[: 10 * options.prompts]]
    changed_count = sum(tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids for ids in again)
    size = f"{len(again)} whole texts of {sum(map(len, again)):,} tokens"
    print(f"{size}: {changed_count} are written in other tokens after they were read")
    plain = options.file.suffix != ".jsonl"
    problems = [
        Problem(({"role": "user", "content": text},) if options.chat else text[:BEGINNING] if plain else text)
        for text in texts[: options.prompts]
    ]
    prompts = encode(problems, "retokenised", tokenizer, PromptSettings(max_tokens=512, when_too_long="drop")).prompts
    engine, reference = model.engine(Version(), 512), model.reference(1.0, Version())
    by_text = ScoredByText(reference, Alike(), tokenizer, tokenizer, options.chat)
    rng = np.random.default_rng(options.seed)
    rows = []
    for start in range(0, len(prompts), AT_ONCE):
        prompt_batch = prompts[start : start + AT_ONCE]
        pairs = list(zip(prompt_batch, generate(engine, prompt_batch, options.samples, Sampling(), rng), strict=True))
        for (_, answers), log_by_token, whole in zip(
            pairs, reference.log_probabilities_of(pairs), by_text.log_probabilities_of(pairs), strict=True
        ):
            for answer, log_T, text_T in zip(answers, log_by_token, whole, strict=True):
                ended = answer.stop_reason is StopReason.EOS
                rows.append((ended, len(log_T), float(log_T.sum(dtype=float)), float(text_T.sum(dtype=float))))
    for name, ended in (("ended", True), ("cut off", False)):
        if ended_rows := [row[1:] for row in rows if row[0] == ended]:
            length, log_by_token, whole = np.array(ended_rows).T
            print(f"{name}: {summary(length, whole - log_by_token)}")


class Alike:
    """A reference to which all ways to write a text are alike, so that the text's own score is left."""

    version = Version()

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        return [[np.zeros(len(c.tokens), np.float32) for c in completions] for _, completions in answered]


def summary(length: np.ndarray, gain: np.ndarray) -> str:
    """Returns in words how the scores by text differ from those by token, in nats."""
    is_changed = np.abs(gain) > 1e-2  # beyond rounding
    text = f"{len(gain)} answers of {length.mean():.0f} tokens, {100 * is_changed.mean():.1f} % score otherwise by text"
    if is_changed.any():
        low, middle, high = np.quantile(gain[is_changed], [0, 0.5, 1])
        text += f": by {middle:+.1f} nats in the middle ({low:+.1f} to {high:+.1f})"
    return f"{text}; over all, by {gain.mean():+.3f} nats each, {gain.sum() / length.sum():+.5f} a token"


def texts_of(path: Path, field: str) -> Iterator[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            if path.suffix == ".jsonl":
                yield json.loads(line)[field]
            elif len(line.strip()) >= 40:
                yield line.strip()


if __name__ == "__main__":
    main()
