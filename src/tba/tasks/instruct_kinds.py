"""The kinds of instructions of the task `instruct`, each with its wordings, its arguments and what it rules.

Invariant: two kinds that rule the same part of an answer are never asked of one answer, so that every prompt can be
fulfilled; all of a kind's wordings say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from tba.types import Json

Arguments = Mapping[str, Json]


@dataclass(frozen=True)
class Kind:
    """One kind: an instruction is a wording of it with arguments drawn at random."""

    name: str  # what `rewards.instructions` checks; IFEval's have a colon
    wordings: tuple[str, ...]  # {name}: an argument
    rules: frozenset[str] = frozenset()  # the parts of an answer that it rules
    draw: Callable[[Random], Arguments] = lambda rng: {}

    def instruction(self, rng: Random) -> tuple[str, dict[str, Json]]:
        """Returns an instruction in words, and as its check takes it."""
        arguments = self.draw(rng)
        spelled = {k: " and ".join(f'"{x}"' for x in v) if isinstance(v, list) else v for k, v in arguments.items()}
        return rng.choice(self.wordings).format(**spelled), {"kind": self.name, "arguments": dict(arguments)}


def _parts(parts: str) -> frozenset[str]:
    return frozenset(parts.split())


_COMMON_WORDS = ("the", "and", "is", "of", "a", "to", "in", "it", "that", "can")
_REQUIRED_WORDS = (
    *(
        "simple",
        "often",
        "people",
        "time",
        "always",
        "small",
        "great",
        "morning",
        "learn",
        "together",
        "quiet",
        "world",
    ),
    *("family", "careful", "water", "light", "strong", "change", "slowly", "home", "friend", "color", "early", "warm"),
)
_FIRST_WORDS = ("Well", "Sure", "Honestly", "Today", "People", "Once", "Many", "Perhaps", "Imagine", "Usually")
_ENDINGS = ("That is all.", "I hope this helps.", "Try it yourself.", "Now you know.", "The end.", "What do you think?")

KINDS: tuple[Kind, ...] = (
    Kind(
        "punctuation:no_comma",
        ("Do not use any commas.", "Your whole answer must not contain a comma.", "Leave out all commas."),
    ),
    Kind(
        "startend:end_checker",
        ('End your answer with the exact words "{end_phrase}"', 'The last words of your answer must be "{end_phrase}"'),
        _parts("end stop"),
        lambda rng: {"end_phrase": rng.choice(_ENDINGS)},
    ),
    Kind(
        "keywords:existence",
        ("Use the words {keywords}.", "Your answer must include {keywords}."),
        _parts("words"),
        lambda rng: {"keywords": rng.sample(_REQUIRED_WORDS, 2)},
    ),
    Kind(
        "keywords:forbidden_words",
        ("Do not use the words {forbidden_words}.", "The words {forbidden_words} are forbidden."),
        _parts("words end start"),
        lambda rng: {"forbidden_words": rng.sample(_COMMON_WORDS, 2)},
    ),
    Kind(
        "keywords:letter_frequency",
        ('Use the letter "{letter}" {let_relation} {let_frequency} times.',),
        _parts("words"),
        lambda rng: {
            "letter": rng.choice("bfgmpuwy"),
            "let_frequency": rng.choice((2, 3, 4)),
            "let_relation": rng.choice(("less than", "at least")),
        },
    ),
    Kind(
        "length_constraints:number_words",
        ("Answer with {relation} {num_words} words.", "Use {relation} {num_words} words."),
        _parts("length"),
        lambda rng: {"relation": "less than", "num_words": rng.choice((10, 15, 20, 25))},
    ),
    Kind(
        "detectable_format:number_bullet_lists",
        (
            'Answer with exactly {num_bullets} bullet points that begin with "* ".',
            "Give a list of exactly {num_bullets} bullets (* like this).",
        ),
        _parts("start end length layout"),
        lambda rng: {"num_bullets": rng.choice((2, 3))},
    ),
    Kind(
        "detectable_format:number_highlighted_sections",
        (
            "Highlight at least {num_highlights} part of your answer with asterisks, like *this*.",
            "Put *asterisks* around at least {num_highlights} phrase.",
        ),
        frozenset(),
        lambda rng: {"num_highlights": 1},
    ),
    Kind(
        "detectable_format:title",
        ("Give your answer a title in double angular brackets, such as <<a title>>.", "Include a title like <<this>>."),
        _parts("start"),
    ),
    Kind(
        "detectable_content:number_placeholders",
        (
            "Use at least {num_placeholders} placeholder in square brackets, such as [name].",
            "Include {num_placeholders} placeholder or more, like [address].",
        ),
        frozenset(),
        lambda rng: {"num_placeholders": 1},
    ),
    Kind(
        "detectable_content:postscript",
        (
            "Add a postscript that begins with {postscript_marker}",
            "At the end, write a postscript starting with {postscript_marker}",
        ),
        _parts("end case length"),
        lambda rng: {"postscript_marker": "P.S."},
    ),
    Kind(
        "length_constraints:number_paragraphs",
        (
            "Write {num_paragraphs} short paragraphs, with *** between them.",
            "Write {num_paragraphs} paragraphs separated by the divider ***",
        ),
        _parts("length layout"),
        lambda rng: {"num_paragraphs": 2},
    ),
    Kind(
        "words_between",
        ("Use between {low} and {high} words.", "Your answer must have {low} to {high} words."),
        _parts("length"),
        lambda rng: dict(zip(("low", "high"), rng.choice(((5, 10), (10, 20), (15, 25), (20, 30))), strict=True)),
    ),
    Kind(
        "sentences",
        ("Answer in exactly {count} sentences.", "Write exactly {count} sentences."),
        _parts("length layout stop"),
        lambda rng: {"count": rng.choice((2, 3))},
    ),
    Kind(
        "first_word",
        ('Begin your answer with the word "{word}".', 'The first word must be "{word}".'),
        _parts("start case"),
        lambda rng: {"word": rng.choice(_FIRST_WORDS)},
    ),
    Kind("parentheses", ("Put something in parentheses (like this).", "Use parentheses at least once.")),
    Kind(
        "numbered_list",
        (
            "Answer with a numbered list of exactly {items} items (1., 2., ...).",
            "Give exactly {items} numbered points.",
        ),
        _parts("start end length layout stop"),
        lambda rng: {"items": rng.choice((2, 3))},
    ),
    Kind(
        "hashtags",
        ("Include at least {count} hashtag, such as #idea.", "Use {count} hashtag or more (#like #this)."),
        frozenset(),
        lambda rng: {"count": 1},
    ),
    Kind(
        "figures",
        ("Use at least {count} number written in figures, such as 12.", "Include {count} number or more, in digits."),
        frozenset(),
        lambda rng: {"count": 1},
    ),
    Kind("title_case", ("Write In Title Case, Like This.", "Begin every word with a capital letter."), _parts("case")),
    Kind(
        "capital_words",
        ("Write at least {count} word in ALL CAPITALS.", "Put {count} word or more in CAPITAL letters."),
        _parts("case"),
        lambda rng: {"count": 1},
    ),
    Kind("asks", ("Ask a question in your answer.", "Include a question to the reader."), _parts("stop end")),
    Kind(
        "no_letter",
        ('Do not use the letter "{letter}" anywhere.', 'Your answer must not contain the letter "{letter}".'),
        _parts("words start end"),
        lambda rng: {"letter": rng.choice("kbvjx")},
    ),
    Kind("one_line", ("Write everything on one line.", "Do not begin a new line."), _parts("layout")),
    Kind("colon", ("Use a colon (:) in your answer.", "Your answer must contain a colon, as in: this.")),
    Kind(
        "name_twice",
        ('Use the word "{word}" at least twice.', 'The word "{word}" must appear 2 times or more.'),
        _parts("words"),
        lambda rng: {"word": rng.choice(_REQUIRED_WORDS)},
    ),
)
