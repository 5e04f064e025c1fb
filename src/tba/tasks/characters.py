"""A tokenizer of single characters, for tasks whose alphabet is a handful of them.

Invariant: one token per character, decoding joins them without spaces, and a character outside the alphabet is an
error, never a silent unknown token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS, PAD = "<eos>", "<pad>"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer of len(alphabet) + 2 tokens: the characters in order, then EOS, then padding.

    Raises `UserError` for an empty alphabet or a character that stands in it twice.
    """
    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise UserError(f"a character tokenizer has the alphabet {alphabet!r}: give each character exactly once")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*alphabet, EOS, PAD])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # has no unknown token, so an unknown character raises
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
