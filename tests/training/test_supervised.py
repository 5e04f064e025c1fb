"""The supervised warm start: what is trained, and that it is the same every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from toys import llama
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tba.errors import NonFiniteLoss, UserError
from tba.training.cache import supervised_key
from tba.training.supervised import Pair, SupervisedSettings, supervise

EOS = 2


@dataclass
class Ids:
    """A tokenizer of which only the end is asked."""

    eos_token_id: int | None = EOS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raise NotImplementedError


def pairs_of(count: int, seed: int = 0) -> list[Pair]:
    """Ragged: the response repeats the prompt's last token, as often as the first one says."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        prompt = [int(rng.integers(3, 6)), *(int(t) for t in rng.integers(6, 12, rng.integers(1, 5)))]
        pairs.append(Pair(prompt, [prompt[-1]] * (prompt[0] - 2)))
    return pairs


def plain_loss(model: PreTrainedModel, pairs: Sequence[Pair]) -> float:
    """Cross-entropy per token of response and EOS, one pair at a time, without padding."""
    total, tokens = 0.0, 0
    for pair in pairs:
        ids = torch.tensor([[*pair.prompt, *pair.response, EOS]])
        with torch.no_grad():
            log_V = model(input_ids=ids).logits[0].log_softmax(-1)
        for t in range(len(pair.prompt), ids.shape[1]):
            total -= float(log_V[t - 1, ids[0, t]])
            tokens += 1
    return total / tokens


@pytest.mark.parametrize("max_tokens", [10**6, 40, 1])
def test_the_loss_is_the_cross_entropy_of_response_and_eos_whatever_the_padding_and_the_parts(max_tokens: int) -> None:
    pairs = pairs_of(17)
    expected = plain_loss(llama(), pairs)
    settings = SupervisedSettings(steps=1, batch_size=17, max_tokens_per_pass=max_tokens)
    losses = supervise(llama(), Ids(), pairs, settings)
    assert losses.steps == pytest.approx([expected], rel=1e-5)


def test_parts_of_a_batch_give_the_update_of_the_whole() -> None:
    whole, cut = llama(), llama()
    for model, tokens in ((whole, 10**6), (cut, 30)):
        supervise(model, Ids(), pairs_of(20), SupervisedSettings(steps=2, batch_size=20, max_tokens_per_pass=tokens))
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # AdamW divides by gradients near 0


def test_prompts_are_not_trained() -> None:
    model = llama()
    before = plain_loss(model, [Pair([7], [8])])
    pairs = [Pair([9, 10, 11, 7], [8])]
    supervise(model, Ids(), pairs, SupervisedSettings(steps=30, batch_size=1, lr=1e-2))
    with torch.no_grad():
        log_TV = model(input_ids=torch.tensor([[9, 10, 11, 7, 8]])).logits[0].log_softmax(-1)
    assert plain_loss(model, pairs) < 0.1 < before
    assert log_TV[0, 10] < math.log(0.1)  # the prompt's own next tokens are not learned
    assert log_TV[1, 11] < math.log(0.1)


def test_eos_is_learned_also_where_it_is_what_pads() -> None:
    def answers(model: PreTrainedModel) -> set[tuple[int, ...]]:
        """What is said after each prompt, two greedy tokens given the right first one."""
        texts = set()
        for pair in pairs_of(40, seed=9):
            with torch.no_grad():
                logits_TV = model(input_ids=torch.tensor([[*pair.prompt, 15]])).logits[0]
            texts.add(tuple(logits_TV.argmax(-1)[-2:].tolist()))
        return texts

    model = llama()
    model.config.pad_token_id = EOS
    assert (15, EOS) not in answers(model)
    pairs = [Pair(pair.prompt, [15]) for pair in pairs_of(200)]  # of many lengths, so that batches are padded
    supervise(model, Ids(), pairs, SupervisedSettings(steps=40, batch_size=50, lr=1e-2))
    assert answers(model) == {(15, EOS)}


def gpt2_with_dropout() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=None))


@pytest.mark.parametrize("make", [llama, gpt2_with_dropout], ids=["llama", "gpt2 with dropout"])
def test_equal_seeds_give_equal_weights_and_leave_torchs_generator_alone(make: object) -> None:
    assert callable(make)
    models = []
    for noise in (1, 2):
        model = make()
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        supervise(model, Ids(), pairs_of(30), SupervisedSettings(epochs=2, batch_size=8, seed=3))
        assert torch.equal(torch.get_rng_state(), state)
        assert not model.training
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_another_seed_takes_the_pairs_in_another_order() -> None:
    losses = [
        supervise(llama(), Ids(), pairs_of(30), SupervisedSettings(batch_size=8, seed=seed)).steps for seed in (0, 1)
    ]
    assert losses[0] != losses[1]


def test_every_pair_is_seen_once_per_epoch_in_batches_of_similar_length() -> None:
    """The sum over an epoch of loss times tokens, at a learning rate of next to nothing, is that of all pairs."""
    pairs = pairs_of(30)
    seen: list[tuple[int, int, float]] = []
    settings = SupervisedSettings(epochs=1, batch_size=10, lr=1e-12)
    losses = supervise(llama(), Ids(), pairs, settings, lambda *said: seen.append(said))
    assert seen == [(step, 3, loss) for step, loss in enumerate(losses.steps, start=1)]
    by_length = sorted(pairs, key=lambda pair: len(pair.prompt) + len(pair.response))
    lengths = [len(pair.prompt) + len(pair.response) for pair in by_length]
    if lengths[9] < lengths[10] and lengths[19] < lengths[20]:  # no ties at the cuts: the batches are determined
        thirds = [plain_loss(llama(), by_length[i : i + 10]) for i in (0, 10, 20)]
        assert sorted(losses.steps) == pytest.approx(sorted(thirds), rel=1e-5)


def test_epochs_have_an_effect_only_where_no_number_of_updates_is_given() -> None:
    by_steps, by_epochs = SupervisedSettings(steps=7), SupervisedSettings(batch_size=10)
    assert (by_steps.unused, by_epochs.unused) == ({"epochs": "steps None"}, {})
    assert [replace(by_steps, epochs=e).updates(100) for e in (1.0, 3.0)] == [7, 7]
    assert [replace(by_epochs, epochs=e).updates(100) for e in (1.0, 3.0)] == [10, 30]


def test_pairs_held_out_are_measured_and_not_trained() -> None:
    pairs = [Pair(pair.prompt, [15]) for pair in pairs_of(40)]  # equally long responses: pairs weigh the same
    settings = SupervisedSettings(epochs=1, batch_size=32, lr=1e-12, held_out=0.25)
    losses = supervise(llama(), Ids(), pairs, settings)
    assert len(losses.steps) == 1  # of the 30 that are trained
    assert losses.held_out is not None
    assert 0.25 * losses.held_out + 0.75 * losses.steps[0] == pytest.approx(plain_loss(llama(), pairs), rel=1e-5)
    learned = supervise(llama(), Ids(), pairs, replace(settings, lr=1e-2, epochs=30))
    assert learned.steps[0] == losses.steps[0]  # the same pairs are held out
    assert learned.held_out is not None
    assert learned.held_out < 0.1 * losses.held_out
    assert supervise(llama(), Ids(), pairs, SupervisedSettings(steps=1)).held_out is None


def test_pairs_that_are_too_long_are_left_out_and_counted() -> None:
    short, long = pairs_of(9), Pair([5] * 10, [6] * 10)  # 21 tokens with EOS
    settings = SupervisedSettings(epochs=1, batch_size=20, max_length=20)
    losses = supervise(llama(), Ids(), [*short, long], settings)
    assert losses.too_long == 1
    assert losses.steps == pytest.approx([plain_loss(llama(), short)], rel=1e-5)
    with_it = supervise(llama(), Ids(), [*short, long], replace(settings, max_length=21))
    assert with_it.too_long == 0
    assert with_it.steps == pytest.approx([plain_loss(llama(), [*short, long])], rel=1e-5)


def test_a_pair_ends_in_its_own_token_and_another_end_is_another_warm_start() -> None:
    """What ends a turn in a chat template, where that is not EOS; the tokenizer needs none then."""
    pairs = [replace(pair, end=9) for pair in pairs_of(17)]
    total = tokens = 0.0
    for pair in pairs:
        ids = torch.tensor([[*pair.prompt, *pair.response, 9]])
        with torch.no_grad():
            log_V = llama()(input_ids=ids).logits[0].log_softmax(-1)
        learnt = range(len(pair.prompt), ids.shape[1])
        total -= sum(float(log_V[t - 1, ids[0, t]]) for t in learnt)
        tokens += len(learnt)
    settings = SupervisedSettings(steps=1, batch_size=17)
    for tokenizer in (Ids(), Ids(None)):
        assert supervise(llama(), tokenizer, pairs, settings).steps == pytest.approx([total / tokens], rel=1e-5)
    plain = pairs_of(17)
    assert supervised_key([settings], plain) != supervised_key([settings], pairs)


def test_what_cannot_be_trained_on_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="no EOS token"):
        supervise(llama(), Ids(None), pairs_of(3), SupervisedSettings())
    with pytest.raises(UserError, match="none of the 1 pairs can be trained on"):
        supervise(llama(), Ids(), [Pair([], [3])], SupervisedSettings())
    with pytest.raises(UserError, match="none of the 2 pairs"):
        supervise(llama(), Ids(), pairs_of(2), SupervisedSettings(max_length=2))
    for field, value in (("epochs", 0.0), ("steps", 0), ("batch_size", 0), ("held_out", 1.0), ("warmup", -0.1)):
        with pytest.raises(UserError):
            SupervisedSettings(**{field: value})


def test_pairs_longer_than_the_model_has_positions_for_are_left_out_and_tokens_that_it_does_not_know_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=None))
    long = Pair([5] * 4, [6] * 4)  # with its end 9 tokens
    assert supervise(model, Ids(), [long, Pair([5] * 3, [6] * 4)], SupervisedSettings(steps=1)).too_long == 1
    with pytest.raises(UserError, match="at most 8 tokens"):
        supervise(model, Ids(), [long], SupervisedSettings(steps=1))
    with pytest.raises(UserError, match="the token 32, and the model has embeddings of 32"):
        supervise(model, Ids(), [Pair([5], [32])], SupervisedSettings(steps=1))


def test_a_loss_that_is_not_finite_ends_the_warm_start() -> None:
    model = llama()
    with torch.no_grad():
        next(model.parameters())[5] = math.nan
    with pytest.raises(NonFiniteLoss, match="loss is nan at step 1 of 1"):
        supervise(model, Ids(), [Pair([5], [5])], SupervisedSettings())


def test_the_rate_rises_over_the_warm_up_and_falls_to_nothing() -> None:
    for schedule, middle in (("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)):
        settings = SupervisedSettings(lr=2.0, warmup=0.1, schedule=schedule)
        rates = settings.optimizer(100).schedule
        assert rates(5) == pytest.approx(0.5)
        assert rates(56) == pytest.approx(middle, abs=0.01)
        assert settings.optimizer(1).schedule(1) == 1.0
