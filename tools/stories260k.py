#!/usr/bin/env python3
"""Write the tests' pretrained model: stories260K of llama2.c, as a Hugging Face folder and as a GGUF file.

    python tools/stories260k.py stories260K.bin tok512.bin tests/fixtures/stories260K

The two are written from the .bin file independently: Hugging Face's rotary embedding turns the two halves of a head,
llama2.c's and GGUF's turn neighbours, so queries and keys have their rows in another order. Needs the package gguf.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")
EPS, THETA = 1e-5, 10000.0


def main(weights: Path, pieces: Path, out: Path) -> None:
    """Read both files of llama2.c and write the folder and the GGUF file."""
    header = struct.unpack("<7i", weights.read_bytes()[:28])
    dim, hidden, layers, heads, kv_heads, vocab, positions = header
    values = np.fromfile(weights, np.float32, offset=28)
    sizes = {
        "token_embd": (vocab, dim), "attn_norm": (layers, dim), "attn_q": (layers, dim, dim),
        "attn_k": (layers, dim * kv_heads // heads, dim), "attn_v": (layers, dim * kv_heads // heads, dim),
        "attn_output": (layers, dim, dim), "ffn_norm": (layers, dim), "ffn_gate": (layers, hidden, dim),
        "ffn_down": (layers, dim, hidden), "ffn_up": (layers, hidden, dim), "output_norm": (dim,),
    }  # fmt: skip
    found, start = {}, 0
    for name, shape in sizes.items():
        count = int(np.prod(shape))
        found[name] = values[start : start + count].reshape(shape)
        start += count
    assert len(values) - start == positions * (dim // heads), "what is left are the rotary embedding's tables"
    texts, scores = read_pieces(pieces, vocab)
    out.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers, head_dim=dim // heads,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=positions, rms_norm_eps=EPS,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": THETA}, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(huggingface_names(found, layers, heads, kv_heads), strict=False)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer(texts, scores).save_pretrained(out)
    write_gguf(out / "stories260K.gguf", found, config, texts, scores)


def read_pieces(path: Path, vocab: int) -> tuple[list[str], list[float]]:
    """The vocabulary as sentencepiece wrote it: a blank is U+2581."""
    raw, place = path.read_bytes(), 4
    texts, scores = [], []
    for number in range(vocab):
        score, length = struct.unpack_from("<fi", raw, place)
        text = raw[place + 8 : place + 8 + length].decode()
        place += 8 + length
        texts.append(SPECIAL[number] if number < 3 else text.replace(" ", "▁"))
        scores.append(score)
    return texts, scores


def huggingface_names(found: dict[str, Any], layers: int, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Tensors by the names that transformers gives them."""
    ours = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj", "ffn_up": "mlp.up_proj",
    }  # fmt: skip
    state = {"model.embed_tokens.weight": found["token_embd"], "model.norm.weight": found["output_norm"]}
    for name, theirs in ours.items():
        for layer in range(layers):
            tensor = found[name][layer]
            if name in ("attn_q", "attn_k"):
                tensor = halves(tensor, heads if name == "attn_q" else kv_heads)
            state[f"model.layers.{layer}.{theirs}.weight"] = tensor
    return {name: torch.from_numpy(tensor.copy()) for name, tensor in state.items()}


def halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head: pairs of neighbours become a first and a second half."""
    rows, width = tensor.shape
    return tensor.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def tokenizer(texts: list[str], scores: list[float]) -> PreTrainedTokenizerFast:
    """Byte-pair encoding with the merges that the scores stand for, bytes for what it does not know."""
    vocabulary = {text: number for number, text in enumerate(texts)}
    merges = []
    for text in texts:
        splits = [(text[:i], text[i:]) for i in range(1, len(text))]
        merges += [
            (-scores[vocabulary[text]], *pair) for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary
        ]
    ranked = [(left, right) for _, left, right in sorted(merges, key=lambda merge: merge[0])]
    made = Tokenizer(models.BPE(vocabulary, ranked, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def write_gguf(path: Path, found: dict[str, Any], config: LlamaConfig, texts: list[str], scores: list[float]) -> None:
    """The same in llama.cpp's format, float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("stories260K")
    writer.add_license("MIT")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(len(texts))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    normal, unknown, control, byte = 1, 2, 3, 6
    writer.add_token_types([unknown, control, control] + [byte] * 256 + [normal] * (len(texts) - 259))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, tensor in found.items():
        if name in ("token_embd", "output_norm"):
            writer.add_tensor(f"{name}.weight", tensor)
        else:
            for layer, part in enumerate(tensor):
                writer.add_tensor(f"blk.{layer}.{name}.weight", part.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
