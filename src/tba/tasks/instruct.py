"""Open questions with one to three instructions whose fulfilment a function can check, answered in a few words.

Invariant: training and evaluation share no topic, and so no text; the five kinds of `HELD_OUT` are in no training
prompt. A problem is a function of seed, split and its number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from tba.errors import UserError
from tba.fields import as_declared
from tba.protocols import Reward
from tba.rewards.ifeval import instruction_kinds
from tba.rewards.instructions import ShareFulfilled
from tba.tasks.held_out import is_held_out
from tba.tasks.instruct_kinds import KINDS, Kind
from tba.types import Problem, Split

# The five whose names have the smallest digests (blake2b of 8 bytes): fixed before the first run, and by nobody.
HELD_OUT = frozenset(("no_letter", "detectable_format:title", "parentheses", "name_twice", "punctuation:no_comma"))

QUESTIONS = (
    "What is the best thing about {topic}?",
    "Why do people like {topic}?",
    "Give me a tip about {topic}.",
    "Tell me something interesting about {topic}.",
    "Describe {topic} to a child.",
    "What should a beginner know about {topic}?",
    "Write a short note about {topic}.",
    "What makes {topic} important?",
    "How would you explain {topic} to a friend?",
    "What comes to your mind when you think of {topic}?",
)

_TOPICS = """
tea, coffee, bread, cheese, honey, apples, tomatoes, chocolate, soup, rice, salt, pepper, lemons, potatoes, pancakes,
mushrooms, ice cream, noodles, olive oil, garlic, dogs, cats, horses, elephants, dolphins, owls, bees, ants, spiders,
whales, penguins, wolves, turtles, butterflies, bats, frogs, sharks, crows, foxes, camels, trees, roses, moss, cactuses,
bamboo, seeds, forests, deserts, rivers, lakes, mountains, volcanoes, islands, caves, glaciers, beaches, waterfalls,
swamps, the ocean, the moon, the sun, stars, comets, planets, rain, snow, thunder, wind, fog, rainbows, clouds,
sunsets, spring, summer, autumn, winter, bicycles, trains, airplanes, boats, buses, bridges, tunnels, lighthouses,
windmills, castles, museums, libraries, theaters, markets, hospitals, schools, kitchens, gardens, balconies, stairs,
doors, windows, mirrors, clocks, candles, lamps, chairs, umbrellas, shoes, hats, gloves, pockets, buttons, blankets,
pillows, pencils, paper, ink, books, maps, letters, stamps, newspapers, poems, novels, fairy tales, jokes, riddles,
puzzles, chess, card games, board games, kites, dolls, drums, pianos, guitars, violins, choirs, dancing, painting,
photography, pottery, knitting, sewing, cooking, baking, fishing, hiking, swimming, running, skiing, climbing, sailing,
camping, gardening, cycling, yoga, football, tennis, basketball, archery, sleep, dreams, memory, laughter, music,
silence, patience, courage, kindness, honesty, friendship, curiosity, trust, teamwork, birthdays, holidays, weddings,
picnics, breakfast, homework, neighbors, grandparents, babies, teachers, nurses, farmers, firefighters, bakers, tailors,
robots, computers, telephones, radios, cameras, satellites, rockets, microscopes, magnets, batteries, electricity,
glass, steel, wood, gold, plastic, soap, sugar, cotton, wool, leather, recycling, compost, water, fire, shadows, echoes,
numbers, circles, triangles, money, voting, traffic lights, elevators, zoos, circuses, parks, playgrounds, fireworks
"""
TOPICS = tuple(topic.strip() for topic in _TOPICS.split(","))
_EVALUATED_TOPICS = 0.25  # share of the topics that is held out
_RULES = {kind.name: kind.rules for kind in KINDS}
_COUNTS = (1,) * 6 + (2,) * 3 + (3,)  # instructions of a prompt, each as often as it stands here


@dataclass(frozen=True)
@as_declared
class Instruct:
    """Questions about everyday topics. An answer's reward is the share of its instructions that it fulfils."""

    kinds: Literal["trained", "held_out"] = "trained"  # of the evaluation: one to three kinds, or one held-out kind
    train_problems: int = 4000  # distinct prompts
    eval_problems: int = 400  # distinct prompts
    seed: int = 0  # of the problems
    least_words: int = 0  # of an answer: one more instruction in the reward, which the prompt does not say, where no
    # other rules the length; in training alone, so that accuracy stays comparable; 0: none

    def __post_init__(self) -> None:
        if self.least_words < 0:
            raise UserError(f"instruct has least_words {self.least_words}: give a number of words, or 0 for none")
        if min(self.train_problems, self.eval_problems) < 1 or self.seed < 0:
            raise UserError(
                f"instruct has {self.train_problems} train_problems, {self.eval_problems} eval_problems and seed "
                f"{self.seed}: give at least 1 of each, and a seed from 0"
            )

    @property
    def name(self) -> str:
        return "instruct"

    def problems(self, split: Split) -> list[Problem]:
        """Returns distinct problems. Raises `UserError` without the package if-verifiable."""
        instruction_kinds()  # says that the package is missing, before a run begins
        held_out = split == "eval" and self.kinds == "held_out"
        kinds = [kind for kind in KINDS if (kind.name in HELD_OUT) == held_out]
        topics = [topic for topic in TOPICS if is_held_out(topic, _EVALUATED_TOPICS) == (split == "eval")]
        count = self.eval_problems if split == "eval" else self.train_problems
        rng = Random(f"{self.seed} {split} {self.kinds if split == 'eval' else ''}")  # noqa: S311
        problems: dict[str, Problem] = {}
        while len(problems) < count:
            problem = _problem(rng, topics, kinds, 1 if held_out else rng.choice(_COUNTS))
            problems.setdefault(str(problem.prompt), problem)
        least_words = self.least_words if split == "train" else 0
        return [_add_length(problem, least_words) if least_words else problem for problem in problems.values()]

    def reward(self) -> Reward:
        return ShareFulfilled()


def _add_length(problem: Problem, least_words: int) -> Problem:
    """Returns a problem with one more instruction, of so many words, unless it has one about the answer's length."""
    instructions = problem.fields["instructions"]
    if any("length" in _RULES[instruction["kind"]] for instruction in instructions):
        return problem
    instruction = {"kind": "least_words", "arguments": {"count": least_words}}
    return replace(problem, fields={**problem.fields, "instructions": [*instructions, instruction]})


def _problem(rng: Random, topics: list[str], kinds: list[Kind], count: int) -> Problem:
    question = rng.choice(QUESTIONS).format(topic=rng.choice(topics))
    chosen_kinds: list[Kind] = []
    for kind in rng.sample(kinds, len(kinds)):
        if len(chosen_kinds) < count and not any(kind.rules & chosen_kind.rules for chosen_kind in chosen_kinds):
            chosen_kinds.append(kind)
    instructions = [kind.instruction(rng) for kind in chosen_kinds]
    content = " ".join([question, *(wording for wording, _ in instructions)])
    fields = {"question": question, "instructions": [check for _, check in instructions]}
    return Problem(({"role": "user", "content": content},), fields)
