"""What each wire dtype costs in accuracy, on the demo model and its held-out questions.

    python -m benchmarks.wire_accuracy [--share 0.4]

Transformers answers each question greedily in float32, once with the tower's own embeddings and once for each wire
dtype with embeddings that went through it. Prints, for each dtype, the error of the embeddings relative to the norm of
a row's part (main and DeepStack levels), and how many answers changed, and how many of all were right.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from common.int8_rows import pack_rows, unpack_rows
from demo.heldout import Case, cases, is_right, opened
from demo.reference import Reference

Travel = Callable[[Tensor], Tensor]
TRAVELS: dict[str, Travel] = {
    "float32": lambda part: part,
    "float16": lambda part: part.to(torch.float16).float(),
    "bfloat16": lambda part: part.to(torch.bfloat16).float(),
    "int8": lambda part: unpack_rows(pack_rows(part, 0), 0, torch.float32),
}


class Wire:
    """Sends what the tower gives through a wire dtype, part by part, and notes the errors."""

    def __init__(self) -> None:
        self.travel: Travel = TRAVELS["float32"]
        self.errors: list[Tensor] = []

    def __call__(self, module: object, inputs: object, output: object) -> None:
        """A forward hook of the tower."""
        output.pooler_output = self._send(output.pooler_output)  # type: ignore[attr-defined]
        output.deepstack_features = [self._send(level) for level in output.deepstack_features]  # type: ignore[attr-defined]

    def _send(self, part: Tensor) -> Tensor:
        sent = self.travel(part)
        self.errors.append((sent - part).norm(dim=1) / part.norm(dim=1))
        return sent


def answers(reference: Reference, drawn: list[Case]) -> list[str]:
    """An answer to each question."""
    return [
        reference.answer(case.text, [opened(picture) for picture in case.pictures], case.frames, case.fps)
        for case in drawn
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.4, help="share of the 500 cases")
    drawn = [case for case in cases(share=parser.parse_args().share, extra=()) if case.pictures or case.frames]
    reference, wire = Reference(), Wire()
    reference.model.model.visual.register_forward_hook(wire)
    expected: list[str] = []
    for name, wire.travel in TRAVELS.items():
        wire.errors.clear()
        given = answers(reference, drawn)
        expected = expected or given
        errors = torch.cat(wire.errors)
        changed = sum(a != b for a, b in zip(given, expected, strict=True))
        right = sum(is_right(case, answer) for case, answer in zip(drawn, given, strict=True))
        print(
            f"{name:9} error mean {errors.mean():.1e}, largest {errors.max():.1e}; "
            f"{changed} of {len(drawn)} answers changed, {right} right"
        )


if __name__ == "__main__":
    main()
