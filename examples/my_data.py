"""Answers that are there already, from wherever: learning from them alone, without a searcher.

tba sample examples/two_rewards.py --prompts 400 --samples 20 --out answers.jsonl
tba train examples/my_data.py --offline --data answers.jsonl
"""

from dataclasses import replace

from two_rewards import recipe as doubling  # a file of the same folder

# A line of the file has a prompt and an answer; the task's reward marks it, whatever the line says. Several answers to
# a prompt are needed, with different rewards: one alone says nothing about which is better.
#
#     {"prompt": "345+345=", "response": "096"}
#     {"prompt": "345+345=", "response": "086"}

recipe = replace(doubling, name="my_data", description="twice a number, learnt from a file of answers")
