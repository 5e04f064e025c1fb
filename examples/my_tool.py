"""A chat model learns to call a tool: a small one that is made here, so that nothing is downloaded.

    tba train examples/my_tool.py

Its base looks prices up at three problems in ten, and guesses the others. The run plays the episodes itself. With
`--searchers 0` an agent of yours plays them, any program that calls OpenAI's API: examples/my_agent.py.
docs/environments.md explains each part.
"""

import random

import tba

PRICES = {"bread": 31, "milk": 12, "cheese": 79, "rice": 25, "beans": 18, "onions": 14, "apples": 36, "pears": 42}
PRICES |= {"tea": 57, "coffee": 83, "salt": 11, "sugar": 23, "honey": 68, "flour": 19, "butter": 64, "eggs": 47}


class Price:  # one object lives through one episode; its public methods are the tools
    def reset(self, seed: int) -> str:
        self.item = random.Random(seed).choice(list(PRICES))
        return f"What does {self.item} cost?"

    def price(self, item: str) -> int:
        """Look up what an item costs.

        Args:
            item: its name
        """
        return PRICES[item]

    def get_reward(self, answer: str | None) -> float:  # of the first turn that calls no tool
        return float(answer == str(PRICES[self.item]))


def guesser(turns: list[str], draw: random.Random) -> str:  # plays what the base learns from
    if len(turns) > 1:
        return turns[-1]
    item = turns[0].split()[2]
    if draw.random() < 0.3:
        return f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>'
    return str(draw.choice(list(PRICES.values())))


TEMPLATE = """
{%- for tool in tools or () %}tool {{ tool.function.name }}<eos>{% endfor %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

recipe = tba.Recipe(
    name="my_tool",
    description="prices that a small chat model guesses, and a tool that knows them",
    task=tba.EnvironmentTask(
        Price, "prices", prompt=({"role": "user", "content": ""},), turns=3, held_out=100, player=guesser
    ),
    model=tba.HuggingFace(
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(max_positions=128),
            vocab_size=320,
            chat_template=TEMPLATE,
            sft=tba.SupervisedSettings(steps=300, batch_size=32, lr=3e-3, pool=1),
        ),
        generation=tba.EngineSettings(slots=32, max_completion_tokens=80),
        device="cpu",  # leave it out to use a GPU
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    optimizer=tba.OptimizerSettings(lr=3e-4, schedule=tba.WarmupStableDecay(5, 25, 10)),
    replay=tba.ReplaySettings(
        pacing=tba.Pacing(warm_up=64, max_mean_uses=2), buffer=tba.BufferSettings(deduplicate=False)
    ),
    evaluation=tba.EvaluationSettings(problems=100),
    steps=40,
    groups_per_step=4,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=4,
)
