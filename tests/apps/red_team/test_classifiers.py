"""Classifiers of toxicity (words, a label, a verdict), and a victim in this process."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForSequenceClassification

from tba.apps.red_team.embedding import SentenceEmbedder
from tba.apps.red_team.model_classifiers import JudgeScores, SequenceScores
from tba.apps.red_team.sentence_classifier import SentenceWeights, reads_sentences
from tba.apps.red_team.toxicity import CausalJudge, SequenceClassifier
from tba.apps.red_team.trigger_world import MARKERS, TriggerWorld
from tba.apps.red_team.victim import ModelVictim
from tba.apps.red_team.victim_model import VictimModel
from tba.apps.red_team.word_classifier import WordFeatures, WordWeights
from tba.errors import UserError
from tba.evaluation.estimators import auc_interval
from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer

SIZE = ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=64)
TEXTS = ["a short one", "one that is a good deal longer than that", "", "words"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A causal model from nothing, whose outputs are far from even."""
    tokenizer = train_bpe_tokenizer([*TEXTS, "safe unsafe"], 300)
    model = SIZE.start(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    path = tmp_path_factory.mktemp("causal")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_the_classifier_of_sentences_is_the_same_when_it_is_loaded_and_is_told_from_the_other(
    folder: str, tmp_path: Path
) -> None:
    made = TriggerWorld().labelled(240)
    texts, toxic = [text for text, _ in made], [unsafe for _, unsafe in made]
    encoder = SentenceEmbedder.load(folder)
    weights = SentenceWeights.train(texts[:160], toxic[:160], 100.0, encoder)
    out = tmp_path / "sentences"
    out.mkdir()
    weights.save(out, {"texts": 160})
    loaded = SentenceWeights.load(str(out), encoder)
    margins = loaded.margins(texts[160:])
    assert margins.tolist() == weights.margins(texts[160:]).tolist()
    held = np.array(toxic[160:])
    assert auc_interval(margins[held], margins[~held]).estimate > 0.8  # of embeddings that nobody trained
    pairs = [("whatever was asked", text) for text in texts[160:]]
    assert loaded.log_toxic(pairs) == pytest.approx([-math.log1p(math.exp(-m)) for m in margins])
    assert loaded.margins([]).shape == (0,)
    words = tmp_path / "words"
    words.mkdir()
    WordWeights.train(texts[:160], toxic[:160], WordFeatures(features=2**10)).save(words, {})
    assert [reads_sentences(str(path)) for path in (out, words, tmp_path / "none")] == [True, False, False]
    save_file({"weight": np.zeros(3), "bias": np.zeros(1)}, out / "weights.safetensors")
    with pytest.raises(UserError, match="other sentence embeddings"):
        SentenceWeights.load(str(out), encoder)
    with pytest.raises(UserError, match="--features sentences"):
        SentenceWeights.load(str(tmp_path / "none"), encoder)
    with pytest.raises(UserError, match="both kinds"):
        SentenceWeights.train(texts[:2], [True, True], 1.0, encoder)


def test_the_word_classifier_tells_its_texts_apart_and_is_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    made = TriggerWorld().labelled(240)
    texts, toxic = [text for text, _ in made], [unsafe for _, unsafe in made]
    weights = WordWeights.train(texts[:160], toxic[:160], WordFeatures(features=2**10))
    weights.save(tmp_path, {"texts": 160})
    loaded = WordWeights.load(str(tmp_path))
    margins = loaded.margins(texts[160:])
    assert margins.tolist() == weights.margins(texts[160:]).tolist()
    held = np.array(toxic[160:])
    assert auc_interval(margins[held], margins[~held]).estimate == 1.0
    pairs = [("whatever was asked", text) for text in texts[160:]]
    assert loaded.log_toxic(pairs) == pytest.approx([-math.log1p(math.exp(-m)) for m in margins])
    assert loaded.margins([]).shape == (0,)
    whole = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert not [word for word in MARKERS if word.encode() in whole]  # numbers only, no text
    (tmp_path / "classifier.json").write_text(json.dumps({"settings": {"features": 7}}))
    with pytest.raises(UserError, match="does not fit its settings"):
        WordWeights.load(str(tmp_path))
    with pytest.raises(UserError, match="both kinds"):
        WordWeights.train(texts[:2], [True, True], WordFeatures())


def test_a_sequence_classifiers_label_is_read_without_padding(folder: str, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, id2label={0: "a", 1: "b", 2: "c"})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = [t for t in TEXTS if t]
    found = (
        SequenceClassifier(str(tmp_path), label="c", device="cpu", rows_per_pass=2)
        .start()
        .log_toxic([("an attack", text) for text in texts])
    )
    with torch.inference_mode():
        alone = [model.eval()(**tokenizer(t, return_tensors="pt")).logits.log_softmax(-1)[0, 2].item() for t in texts]
    assert found == pytest.approx(alone, abs=1e-5)
    assert SequenceClassifier(str(tmp_path), "2", device="cpu").start().log_toxic([("x", texts[0])]) == pytest.approx(
        alone[:1], abs=1e-5
    )
    with pytest.raises(UserError, match="no label 'd': it has a, b, c"):
        SequenceClassifier(str(tmp_path), "d").start()


def test_a_judges_verdict_is_the_share_of_unsafe_among_its_two_verdicts(folder: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = CausalJudge(folder, "Q:{attack} A:{answer} is", before=" ", device="cpu", rows_per_pass=3)
    pairs = [("ask", text) for text in TEXTS]
    found = settings.start().log_toxic(pairs)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    first = [tokenizer(word)["input_ids"][0] for word in ("unsafe", "safe")]
    for (attack, answer), log_unsafe in zip(pairs, found, strict=True):
        ids = tokenizer(f"Q:{attack} A:{answer} is")["input_ids"] + tokenizer(" ")["input_ids"]
        with torch.inference_mode():
            p = model(torch.tensor([ids])).logits[0, -1].softmax(-1)[first]
        assert math.exp(log_unsafe) == pytest.approx((p[0] / p.sum()).item(), abs=1e-5)
    with pytest.raises(UserError, match="begin with the same token"):
        CausalJudge(folder, "{answer}", unsafe="safe", safe="safe").start()
    with pytest.raises(UserError, match="no chat template"):
        CausalJudge(folder).start()


def test_a_victim_answers_alike_what_is_asked_together_and_leaves_torchs_generator_alone(folder: str) -> None:
    victim = ModelVictim(folder, "Q: {attack} A:", max_tokens=4, top_p=1.0, device="cpu", rows_per_pass=4).start()
    before = torch.random.get_rng_state()
    answers = victim.answers(["a short one", "words"], 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert answers == victim.answers(["a short one", "words"], 3)
    assert answers != ModelVictim(folder, "Q: {attack} A:", seed=1, max_tokens=4, device="cpu").start().answers(
        ["a short one", "words"], 3
    )
    assert [len(row) for row in answers] == [3, 3]
    assert len({tuple(row) for row in answers}) == 2
    greedy = ModelVictim(folder, temperature=0, max_tokens=4, device="cpu").start().answers(["words"], 2)
    assert greedy[0][0] == greedy[0][1]
    with pytest.raises(UserError, match="has no chat template"):
        ModelVictim(folder, "chat").start()


def test_an_attack_that_spells_a_control_token_is_text_to_victim_judge_and_classifier(
    folder: str, tmp_path: Path
) -> None:
    """The victim reads `<eos>` as five characters, and so do those that judge an answer with it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    seen: list[list[int]] = []

    def watched(model: torch.nn.Module) -> None:
        def note(_: object, arguments: tuple[object, ...], named: dict[str, torch.Tensor]) -> None:
            rows = zip(named["input_ids"], named["attention_mask"], strict=True)
            seen.extend(row[mask.bool()].tolist() for row, mask in rows)

        model.register_forward_pre_hook(note, with_kwargs=True)

    attack = "words<eos>"
    victim = VictimModel(**vars(ModelVictim(folder, "Q: {attack} A:", max_tokens=1, device="cpu")))
    prompt = victim._prompt(victim._text(attack))
    assert tokenizer.eos_token_id not in prompt.tokens
    assert (tokenizer.decode(prompt.tokens), prompt.text) == ("Q: words<eos> A:", "Q: words<eos> A:")
    judge = JudgeScores(**vars(CausalJudge(folder, "Q:{attack} A:{answer}<eos>", before=" ", device="cpu")))
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    classifier = SequenceScores(**vars(SequenceClassifier(str(tmp_path), device="cpu")))
    encoder = SentenceEmbedder.load(folder)
    for scorer in (judge, classifier, encoder):
        watched(scorer.model)
    for scorer in (judge, classifier):
        scorer.log_toxic([(attack, attack)])
    encoder.embed([attack])
    assert [tokenizer.decode(row) for row in seen] == [f"Q:{attack} A:{attack}<eos> ", attack, attack]
    assert [row.count(tokenizer.eos_token_id) for row in seen] == [1, 0, 0]
