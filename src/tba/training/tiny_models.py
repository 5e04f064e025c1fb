"""Small untrained models: a Llama from a few sizes and a seed, a tokenizer of characters or from texts.

Invariant: equal settings and seed give equal weights, equal texts an equal tokenizer, and decoding what was encoded
gives the text back. A character that a tokenizer of characters does not have is an error, never a silent unknown token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tba.errors import UserError
from tba.fields import as_declared

EOS = "<eos>"
PAD = "<pad>"


@dataclass(frozen=True)
@as_declared
class ScratchModel:
    """The sizes of a Llama-type model. The defaults have 0.36 M parameters with a vocabulary of 16. Raises `UserError`
    when a field makes no sense.
    """

    hidden_size: int = 96  # width; divisible by twice the number of heads
    layers: int = 3  # decoder layers
    heads: int = 4  # attention heads
    kv_heads: int | None = None  # key-value heads; None: as many as heads
    ff_size: int = 288  # width of the feed-forward layers
    max_positions: int = 512  # most tokens of prompt and completion
    tie_embeddings: bool = True  # input and output embeddings share one matrix
    seed: int = 0  # seed of the weights

    def __post_init__(self) -> None:
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        if min(self.hidden_size, self.layers, self.heads, kv_heads, self.ff_size, self.max_positions) < 1:
            raise UserError(f"{self} has a size below 1; give positive sizes")
        if self.hidden_size % (2 * self.heads) or self.heads % kv_heads:
            raise UserError(
                f"a model of hidden size {self.hidden_size} cannot have {self.heads} heads and {kv_heads} key-value "
                "heads; each head needs an even share of the hidden size, each key-value head as many heads"
            )

    def start(self, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
        """Returns a new float32 model for this tokenizer, in evaluation mode. Leaves torch's generator as it was."""
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads if self.kv_heads is None else self.kv_heads,
            intermediate_size=self.ff_size,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=self.tie_embeddings,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return LlamaForCausalLM(config).to(torch.float32).eval()


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Returns a Hugging Face tokenizer of len(alphabet) + 2 tokens: the characters in order, then EOS, then padding.

    Raises `UserError` for an empty alphabet or a character that stands in it twice.
    """
    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise UserError(f"a character tokenizer has the alphabet {alphabet!r}: give each character exactly once")
    vocabulary = {token: number for number, token in enumerate([*alphabet, EOS, PAD])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # has no unknown token, so an unknown character raises
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with <eos> and <pad> on `texts`; every digit is a token of its own.

    Has fewer than `vocab_size` tokens when the texts do not yield as many. Raises `UserError` for a size below 258,
    which is one token for each byte and the two special ones.
    """
    if vocab_size < 258:
        raise UserError(f"a byte-level tokenizer cannot have {vocab_size} tokens; give 258 or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
