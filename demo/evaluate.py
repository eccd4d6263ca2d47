"""Measures the demo model through a running Tandem: `python -m demo.evaluate --url http://127.0.0.1:8000/v1`.

Owns the measurement: 500 held-out first questions asked with the OpenAI client, right answers by kind, and on 50 of
them whether the product's tokens equal transformers' on the same checkpoint. Exits with 1 when a bar is missed.
"""

import argparse
import base64
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from openai import OpenAI
from PIL import Image

from demo.heldout import Case, cases, is_right, opened, table

BAR_ALL, BAR_KIND = 0.95, 0.90
MAX_TOKENS = 48


def video_file(frames: Sequence[Image.Image], fps: float) -> bytes:
    """An MP4 of the frames (H.264); sides are padded to even numbers by repeating the last row or column."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=round(fps))
        stream.width, stream.height = frames[0].width + frames[0].width % 2, frames[0].height + frames[0].height % 2
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "18"}
        for frame in frames:
            pad = ((0, frame.height % 2), (0, frame.width % 2), (0, 0))
            pixels = np.pad(np.asarray(frame), pad, mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def data_uri(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def messages_of(case: Case) -> list[dict[str, object]]:
    """The one user message of a case, pictures or video before the question."""
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": data_uri(data, media_type)}}
        for data, media_type in zip(case.pictures, case.media_types, strict=True)
    ]
    if case.frames:
        uri = data_uri(video_file(case.frames, case.fps), "video/mp4")
        parts.append({"type": "video_url", "video_url": {"url": uri}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": case.text}]}]


def ask(client: OpenAI, model: str, case: Case) -> tuple[str, list[str]]:
    """The product's answer and its tokens' texts, greedy."""
    reply = client.chat.completions.create(
        model=model,
        messages=messages_of(case),
        temperature=0,
        max_tokens=MAX_TOKENS,
        logprobs=True,  # type: ignore[arg-type]
    )
    choice = reply.choices[0]
    tokens = [t.token for t in choice.logprobs.content or []] if choice.logprobs else []
    return choice.message.content or "", [t for t in tokens if t != "<|im_end|>"]


def same_tokens(asked: list[tuple[Case, str, list[str]]], folder: Path) -> tuple[int, list[str]]:
    """How many of the answers equal transformers' token for token, and a line on each that does not."""
    from demo.reference import Reference

    reference, equal, differences = Reference(folder), 0, []
    for case, answer, tokens in asked:
        ids = reference.token_ids(case.text, [opened(p) for p in case.pictures], max_tokens=MAX_TOKENS)
        ends = set(reference.model.generation_config.eos_token_id)
        expected = [reference.tokenizer.decode([i]) for i in ids if i not in ends]
        if tokens == expected:
            equal += 1
        else:
            differences.append(f"{case.text!r}: product {answer!r} {tokens}, transformers {expected}")
    return equal, differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL of a running gateway")
    parser.add_argument("--model", default="tandem-demo")
    parser.add_argument("--share", type=float, default=1.0, help="share of the 500 cases to ask")
    parser.add_argument("--seed", type=int, default=2_000_001, help="of the held-out cases")
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).with_name("model"))
    parser.add_argument("--equal", type=int, default=50, help="cases compared with transformers, 0 for none")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none", max_retries=0, timeout=120)
    drawn = cases(args.seed, args.share)
    asked = [(case, *ask(client, args.model, case)) for case in drawn]
    results = [(case, answer) for case, answer, _ in asked]
    print(table(results))
    for case, answer in results:
        if not is_right(case, answer):
            print(f"wrong  {case.kind}: {case.text!r} expected {case.answer!r}, got {answer!r}")
    stills = [a for a in asked if not a[0].frames]
    chosen = stills[:: max(1, len(stills) // args.equal)][: args.equal] if args.equal else []
    equal, differences = same_tokens(chosen, args.checkpoint) if chosen else (0, [])
    print(f"tokens equal to transformers: {equal} of {len(chosen)}", *differences, sep="\n")
    sys.exit(0 if passes(results) and equal == len(chosen) else 1)


def passes(results: list[tuple[Case, str]]) -> bool:
    scenes = [(c.kind, is_right(c, a)) for c, a in results if c.kind != "talk"]
    kinds = {kind: [right for k, right in scenes if k == kind] for kind, _ in scenes}
    rates = [sum(rights) / len(rights) for rights in kinds.values()]
    return min(rates) >= BAR_KIND and sum(right for _, right in scenes) / len(scenes) >= BAR_ALL


if __name__ == "__main__":
    main()
