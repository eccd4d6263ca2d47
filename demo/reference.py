"""Answers with transformers itself: the demo checkpoint loaded unchanged, greedy, in float32.

Owns the reference that the product is compared with; knows nothing of services. Pictures go through transformers'
image processor; a video's frames are sampled and resized as its video processor does. Runs in the caller's thread.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from demo.batches import patches_of, sampled_frames, video_size

MODEL = Path(__file__).with_name("model")
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"


class Reference:
    def __init__(self, folder: Path = MODEL) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, question: str, pictures: int, has_video: bool) -> str:
        parts: list[dict[str, str]] = [{"type": "image"}] * pictures + [{"type": "video"}] * has_video
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def token_ids(
        self,
        question: str,
        pictures: Sequence[Image.Image] = (),
        frames: Sequence[Image.Image] = (),
        fps: float = 0.0,
        max_tokens: int = 48,
    ) -> list[int]:
        """The generated tokens, the end token included."""
        prompt, inputs = self.prompt(question, len(pictures), bool(frames)), {}
        if pictures:
            inputs = dict(self.processor(list(pictures), return_tensors="pt"))
            for grid in inputs["image_grid_thw"]:
                prompt = prompt.replace(IMAGE, "<PAD>" * (int(grid.prod()) // 4), 1)
            prompt = prompt.replace("<PAD>", IMAGE)
        if frames:
            values, grid, stamps = video_inputs(frames, fps)
            run = START + VIDEO * (int(grid[0, 1:].prod()) // 4) + END
            prompt = prompt.replace(VIDEO, "".join(f"<{s:.1f} seconds>{run}" for s in stamps))
            inputs = {"pixel_values_videos": values, "video_grid_thw": grid}
        ids = torch.tensor([self.tokenizer.encode(prompt)])
        kinds = torch.zeros_like(ids)
        kinds[ids == self.model.config.image_token_id] = 1
        kinds[ids == self.model.config.video_token_id] = 2
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=kinds,
                max_new_tokens=max_tokens,
                do_sample=False,
                **inputs,
            )
        return [int(i) for i in output[0, ids.shape[1] :]]

    def answer(
        self, question: str, pictures: Sequence[Image.Image] = (), frames: Sequence[Image.Image] = (), fps: float = 0.0
    ) -> str:
        ids = self.token_ids(question, pictures, frames, fps)
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def video_inputs(frames: Sequence[Image.Image], fps: float) -> tuple[Tensor, Tensor, list[float]]:
    """pixel_values [N, 1536], grid [1, 3] and the time stamp of each pair of sampled frames."""
    wanted = sampled_frames(len(frames), fps)
    height, width = video_size(len(wanted), frames[0].height, frames[0].width)
    pictures = [frames[i].resize((width, height), Image.Resampling.BICUBIC) for i in wanted]
    if len(wanted) % 2:
        wanted, pictures = wanted + wanted[-1:], pictures + pictures[-1:]
    pairs = range(0, len(wanted), 2)
    patches = [torch.from_numpy(patches_of(pictures[i : i + 2])) for i in pairs]
    grid = torch.tensor([[len(patches), height // 16, width // 16]])
    return torch.cat(patches).float() / 127.5 - 1, grid, [(wanted[i] + wanted[i + 1]) / fps / 2 for i in pairs]
