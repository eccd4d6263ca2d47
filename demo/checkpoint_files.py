"""Writes the demo checkpoint's files in the standard layout: configs, processors, chat template and weights.

Owns the model's sizes and limits; knows nothing of training or scenes. Everything that transformers needs to load
`demo/model` unchanged is written here.
"""

import shutil
from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from demo import tokenizer as tokenizer_files

MAX_POSITIONS = 16384
IMAGE_PIXELS = {"shortest_edge": 16384, "longest_edge": 262144}
VIDEO_PIXELS = {"shortest_edge": 4096, "longest_edge": 1572864}
TEXT_CONFIG = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
VISION_CONFIG = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "depth": 6,
    "num_heads": 3,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 192,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [1, 3, 4],
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}


def build_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """The model's configuration, with token ids taken from its tokenizer."""
    ids = {
        name: tokenizer.token_to_id(f"<|{name}|>")
        for name in ("endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end")
    }
    text = dict(
        TEXT_CONFIG,
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=ids["endoftext"],
        eos_token_id=ids["im_end"],
        pad_token_id=ids["endoftext"],
    )
    return Qwen3VLConfig(
        text_config=text,
        vision_config=dict(VISION_CONFIG),
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def processor_config(pixels: dict[str, int]) -> dict[str, object]:
    return {
        "size": dict(pixels),
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }


def save(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the whole checkpoint; weights are rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("endoftext", "im_end")}
    half = Qwen3VLForConditionalGeneration(model.config)
    half.load_state_dict(model.state_dict())
    half = half.bfloat16()
    half.config.dtype = "bfloat16"
    half.generation_config.update(
        do_sample=False,
        bos_token_id=ids["endoftext"],
        pad_token_id=ids["endoftext"],
        eos_token_id=[ids["im_end"], ids["endoftext"]],
        max_new_tokens=None,
    )
    half.save_pretrained(folder)
    tokenizer_files.save(tokenizer, folder, MAX_POSITIONS)
    template = Path(__file__).with_name("chat_template.jinja")
    shutil.copyfile(template, folder / "chat_template.jinja")
    write = tokenizer_files.write_json
    image = dict(processor_config(IMAGE_PIXELS), image_processor_type="Qwen2VLImageProcessorFast")
    write(folder / "preprocessor_config.json", image)
    video = dict(
        processor_config(VIDEO_PIXELS),
        video_processor_type="Qwen3VLVideoProcessor",
        fps=2,
        min_frames=4,
        max_frames=768,
        do_sample_frames=True,
    )
    write(folder / "video_preprocessor_config.json", video)
