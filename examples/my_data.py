"""Answers that are there already, from wherever: learning from them alone, without a searcher.

    tba sample examples/two_rewards.py --prompts 400 --samples 20 --out answers.jsonl
    tba train examples/my_data.py --offline --data answers.jsonl

end, in a run of ours (docs/your_task.md says on what machine), with

    metric                       before                after  points  problems
    pass@1/greedy   22.2 % [14.9, 31.8]  65.6 % [55.3, 74.6]   +43.3        90
    pass@1/sampled  24.4 % [16.7, 34.2]  42.2 % [32.5, 52.5]   +17.8        90
"""

from dataclasses import replace

from two_rewards import recipe as doubling  # a file of the same folder

import tba

# A line of the file has a prompt and an answer; the task's reward marks it, whatever the line says. Several answers to
# a prompt are needed, with different rewards: one alone says nothing about which is better.
#
#     {"prompt": "345+345=", "response": "096"}
#     {"prompt": "345+345=", "response": "086"}

# Without searchers nothing shows the policy what it has begun to say instead, so it is held nearer to where it began:
# beta is 0.5. With the 0.05 of two_rewards.py a run ended at 6.7 % (greedy, after 200 steps).

recipe = replace(
    doubling,
    name="my_data",
    description="twice a number, learnt from a file of answers",
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.5)),
    steps=150,
)
