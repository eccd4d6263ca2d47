"""A tiny random checkpoint with everything that the three services need: weights, tokenizer, template, processors."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import Shards, save_checkpoint, tiny_config, tiny_model
from tests.tiny_tokenizer import CHAT_TEMPLATE, media_token_ids, tiny_tokenizer

PIXEL_LIMITS = {"shortest_edge": 16_384, "longest_edge": 262_144}
VIDEO_LIMITS = {"shortest_edge": 4_096, "longest_edge": 1_572_864}


def save_servable(
    directory: Path,
    *,
    seed: int = 0,
    gain: float = 1.5,
    deepstack_gain: float = 1.0,
    shards: Shards = "by_half",
    **config: Any,
) -> tuple[Path, Any]:
    """Write a checkpoint that `tandem` can serve; returns its folder and transformers' model with the same weights.

    No token ends an answer, so greedy outputs are as long as asked for. `deepstack_gain` makes each DeepStack level
    count so much more than the one before, since later layers are less moved by an addition of the same size.
    """
    tokenizer = tiny_tokenizer()
    ids = media_token_ids(tokenizer)
    text = {"vocab_size": tokenizer.get_vocab_size(), **config.pop("text", {})}
    model = tiny_model(
        tiny_config(
            text=text,
            image_token_id=ids.image_token_id,
            video_token_id=ids.video_token_id,
            vision_start_token_id=ids.vision_start_token_id,
            vision_end_token_id=ids.vision_end_token_id,
            **config,
        ),
        seed=seed,
        gain=gain,
    )
    with torch.no_grad():
        for level, merger in enumerate(model.model.visual.deepstack_merger_list):
            merger.linear_fc2.weight.mul_(deepstack_gain ** (level + 1))
    save_checkpoint(model, directory, shards=shards)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    half = [0.5, 0.5, 0.5]
    common = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": half, "image_std": half}
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    _write(directory / "preprocessor_config.json", {**common, "size": PIXEL_LIMITS})
    _write(directory / "video_preprocessor_config.json", {**common, "size": VIDEO_LIMITS, "fps": 2})
    _write(directory / "generation_config.json", {"do_sample": False})
    return directory, model


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values))
