"""A chat model learns to answer in few words: SmolLM2-135M-Instruct, or any model with a chat template.

    tba model smollm2 --out smollm2
    tba train examples/my_chat_task.py --model.dtype bfloat16           # or --model.path FOLDER_OR_HUB_NAME

ends, in a run of ours of three minutes (with --evaluation.samples 4), in which no answer is cut off any longer, with

    metric                       before                after  points  problems
    pass@1/sampled  60.0 % [31.3, 83.2]  92.5 % [62.5, 98.9]   +32.5        10
"""

import re
from dataclasses import dataclass

import tba

CAPITALS = """
France: Paris, Italy: Rome, Spain: Madrid, Portugal: Lisbon, Germany: Berlin, Austria: Vienna, Greece: Athens,
Poland: Warsaw, Hungary: Budapest, Norway: Oslo, Sweden: Stockholm, Finland: Helsinki, Denmark: Copenhagen,
Ireland: Dublin, Russia: Moscow, Turkey: Ankara, Egypt: Cairo, Kenya: Nairobi, Japan: Tokyo, China: Beijing,
India: Delhi, Thailand: Bangkok, Vietnam: Hanoi, Indonesia: Jakarta, Canada: Ottawa, Cuba: Havana, Peru: Lima,
Chile: Santiago, Venezuela: Caracas, Iran: Tehran
"""


def right(completion: str, answer: str) -> float:  # the reward; `answer` is a problem's field of that name
    return float(answer in completion) / max(1, len(completion.split()))  # the city, and the fewer words the better


@dataclass(frozen=True)
class Capitals:  # where problems come from; eval is held out
    name: str = "capitals"

    def problems(self, split: str) -> list[tba.Problem]:
        pairs = enumerate(re.findall(r"(\w+): (\w+)", CAPITALS))
        chosen = [pair for i, pair in pairs if (i % 3 == 2) == (split == "eval")]
        return [tba.Problem(self.question(country), {"answer": city}) for country, city in chosen]

    def question(self, country: str) -> tuple[dict[str, str], ...]:  # messages, which the model's own template writes
        return ({"role": "user", "content": f"What is the capital of {country}? Answer with the name of the city."},)

    def reward(self) -> tba.FunctionReward:
        return tba.FunctionReward(right)


recipe = tba.Recipe(
    name="capitals",
    task=Capitals(),
    model=tba.HuggingFace(path="smollm2", generation=tba.EngineSettings(max_completion_tokens=32)),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    policy_temperature=0.7,  # at 1 so small a model writes partly nonsense
    exploration=tba.Fixed(temperature=0.7),
    optimizer=tba.OptimizerSettings(lr=1e-5),  # docs/your_model.md: which rate for which size
    replay=tba.ReplaySettings(
        pacing=tba.Pacing(warm_up=64, max_mean_uses=3),
        buffer=tba.BufferSettings(deduplicate=False),  # answers are short: few differ
    ),
    evaluation=tba.EvaluationSettings(samples=8, threshold=1 / 7),  # correct: in at most seven words
    steps=30,
    groups_per_step=4,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=4,
)

if __name__ == "__main__":
    run = tba.train(recipe)  # or: tba train this_file.py --steps 100
    print(run)
