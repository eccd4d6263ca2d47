"""bench-vl, the checkpoint that the benchmarks run: a small Qwen3-VL's shapes, random weights, and pictures for it.

    python -m benchmarks.bench_vl FOLDER

Owns the shapes and the files around them: what is written loads unchanged in transformers, in Tandem and in vLLM. The
tokenizer is the demo model's, filled up with words that are never read, only written. Deterministic by seed. Runs in
a few seconds, on the CPU.
"""

import argparse
import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
LINEAR_STD, EMBEDDING_STD = 0.05, 0.5  # with less, every token is the same
VOCAB_SIZE = 8192
PIXEL_LIMITS = {"shortest_edge": 65_536, "longest_edge": 1_048_576}
VIDEO_PIXEL_LIMITS = {"shortest_edge": 4_096, "longest_edge": 16_777_216}
TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
VISION_CONFIG: dict[str, Any] = {
    "depth": 12,
    "hidden_size": 384,
    "num_heads": 6,
    "intermediate_size": 1536,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 512,
    "deepstack_visual_indexes": [3, 6, 9],
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}


def bench_config() -> Qwen3VLConfig:
    """The configuration, with the token ids of the demo model's tokenizer."""
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    ids = {key: demo[key] for key in demo if key.endswith("_token_id")}
    text = TEXT_CONFIG | {key: demo["text_config"][key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Qwen3VLConfig(text_config=text, vision_config=dict(VISION_CONFIG), tie_word_embeddings=True, **ids)


def bench_model(dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> Any:
    """transformers' model with the random weights, `Qwen3VLForConditionalGeneration` in eval mode."""
    model = Qwen3VLForConditionalGeneration(bench_config()).float()
    return _randomised(model, seed).to(dtype).eval().requires_grad_(False)


def build(folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write the checkpoint and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    bench_model(dtype, seed=seed).save_pretrained(folder)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(DEMO_MODEL / name, folder / name)
    for name, limits in (
        ("preprocessor_config.json", PIXEL_LIMITS),
        ("video_preprocessor_config.json", VIDEO_PIXEL_LIMITS),
    ):
        settings = json.loads((DEMO_MODEL / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"size": limits}))
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    # Added tokens keep their ids only when the model's own vocabulary leaves no gap before them.
    vocab.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    vocab.update({f"Ġw{idx}": idx for idx in range(len(vocab), VOCAB_SIZE)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return folder


def jpeg(width: int, height: int, seed: int = 0) -> bytes:
    """A photograph's stand-in: smooth colours with some noise, at quality 90."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 64 + 1, width // 64 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@contextlib.contextmanager
def checkpoint(given: Path | None) -> Iterator[Path]:
    """The given checkpoint, or bench-vl in a folder that goes afterwards."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="bench-vl-") as folder:
        yield build(Path(folder))


def _randomised(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_embedding = "embed" in name and "patch_embed" not in name
            if "norm" in name:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.05 * noise)
            else:
                parameter.copy_(noise * (EMBEDDING_STD if is_embedding else LINEAR_STD))
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(build(parser.parse_args().folder))
