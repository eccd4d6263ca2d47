"""Builds the demo model's tokenizer: byte-level BPE trained on the demo's own texts, with Qwen's special tokens.

Owns the vocabulary's size, the special tokens' order and the chat template file beside it; knows nothing of pictures
or tensors. Every one of the 256 bytes has a token, so any text can be tokenized. Deterministic by seed.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from demo.clips import ask_clip, draw_clip
from demo.questions import ask, rephrase
from demo.scenes import draw_scene
from demo.small_talk import NO_PICTURE, small_talk

NUM_MERGED_TOKENS = 640  # 256 bytes and the merges; the added tokens come after them
PRE_TOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def texts(num_rounds: int = 4000, seed: int = 11) -> Iterator[str]:
    """Questions, answers, roles and time stamps as training shows them."""
    rng = random.Random(seed)
    for _ in range(num_rounds):
        scene, clip = draw_scene(rng), draw_clip(rng)
        for question in (ask(scene, rng), ask(scene, rng), ask(scene, rng), ask_clip(clip, rng)):
            yield f"{rephrase(rng, question.text)}"
            yield question.answer
        _, text, answer = small_talk(rng)
        yield text
        yield answer
        yield "user\n"
        yield "assistant\n"
        yield f"<{rng.uniform(0, 16):.1f} seconds>"
        yield "In the first picture, in the second image: "
    yield from (NO_PICTURE, "system\nYou are a helpful assistant.") * 200


def build() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZE), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_MERGED_TOKENS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    plain = [AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED_TOKENS]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json, vocab.json, merges.txt and special_tokens_map.json, as Qwen ships."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    added = {}
    for token in SPECIAL_TOKENS + PLAIN_ADDED_TOKENS:
        added[str(tokenizer.token_to_id(token))] = {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
    extra = list(SPECIAL_TOKENS[1:])
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": extra,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", config)
    special_map = {"additional_special_tokens": extra, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_json(folder / "special_tokens_map.json", special_map)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
