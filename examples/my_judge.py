"""A judge: another model, behind an OpenAI-compatible endpoint, grades names that a small policy invents.

    python examples/judge_server.py &            # a stand-in for a judge, which grades by a rule
    tba train examples/my_judge.py

ends, in a run of ours (docs/your_task.md says on what machine), with

    metric                    before                  after  points  problems
    pass@1/greedy   0.0 % [0.0, 3.7]  100.0 % [96.3, 100.0]  +100.0       100
    pass@1/sampled  3.0 % [1.0, 8.5]    60.0 % [50.2, 69.1]   +57.0       100

A real judge, whose key is in the environment variable OPENAI_API_KEY (--task.judge.token-variable: in another):

    tba train examples/my_judge.py --task.judge.url https://api.openai.com/v1 --task.judge.model NAME
"""

import random
from dataclasses import dataclass

import tba

QUESTION = "How well does the name {name!r} suit a {kind} in a children's book? Reply with a number from 0 to 10 only."


@dataclass(frozen=True)
class Names:
    """`dragon mo>` is to be answered by a dragon's name that begins with mo."""

    judge: tba.Endpoint = tba.Endpoint(
        url="http://127.0.0.1:8808/v1",
        model="stand-in",
        max_tokens=8,
        retries=2,
        calls_per_second=200,  # at temperature 0, the default, the same question is asked only once
    )
    name: str = "names"

    def problems(self, split: str) -> list[tba.Problem]:
        draw = random.Random(0)  # the same problems each time
        kinds = ["dragon", "knight", "witch", "robot", "horse", "pirate", "ghost", "giant", "mouse", "king"]
        pairs = [(kind, a + b) for kind in kinds for a in "bcdfghjklmnprstvw" for b in "aeiou"]
        draw.shuffle(pairs)
        problems = [self.problem(kind, beginning, draw) for kind, beginning in pairs]
        return problems[:100] if split == "eval" else problems[100:]

    def problem(self, kind: str, beginning: str, draw: random.Random) -> tba.Problem:
        """The demonstration shows what a name looks like, and is neither good nor bad."""
        syllables = [draw.choice("bdgklmnrstvz") + draw.choice("aeiou") for _ in range(draw.randint(1, 3))]
        invented = beginning + "".join(syllables) + draw.choice(["", "n", "r", "s", "x"])
        return tba.Problem(f"{kind} {beginning}>", {"kind": kind, "beginning": beginning}, demonstration=invented)

    def reward(self) -> tba.WeightedFunctions:
        ask = self.judge.start()

        def grade(prompt: str, completion: str, kind: str) -> float:
            reply = ask(QUESTION.format(name=completion, kind=kind)).strip(" .\n")
            return int(reply) / 10 if reply in map(str, range(11)) else 0.0  # what is no grade counts as the lowest

        return tba.WeightedFunctions(((grade, 0.8), (begins, 0.2)), concurrency=8)  # so many calls at once, in threads


def begins(prompt: str, completion: str, beginning: str) -> float:
    return float(completion.startswith(beginning))


recipe = tba.Recipe(
    name="my_judge",
    description="names invented by a small policy, graded by a judge behind an endpoint",
    task=Names(),
    model=tba.HuggingFace(
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(max_positions=64),
            tokenizer="characters",
            sft=tba.SupervisedSettings(steps=150, lr=2e-3),
        ),
        generation=tba.EngineSettings(slots=140, max_completion_tokens=12),
        device="cpu",  # leave it out to use a GPU
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    optimizer=tba.OptimizerSettings(lr=1e-4, schedule=tba.WarmupStableDecay(10, 80, 60)),
    replay=tba.ReplaySettings(
        pacing=tba.Pacing(max_mean_uses=2),  # of an answer: a judge may be slow, and then the trainer waits for it
        buffer=tba.BufferSettings(deduplicate=False),
    ),
    evaluation=tba.EvaluationSettings(problems=0, threshold=0.9),  # right: the judge gives 9 or 10, and it begins so
    steps=150,
    samples_per_prompt=20,
    prompts_per_round=7,
)
