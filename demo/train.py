"""Trains the demo model from nothing: `python -m demo.train` makes the committed weights with its defaults.

Owns the processes (one of one thread, or several ranks that average gradients with gloo; a data worker beside each),
the losses and the checkpoints; the plan is in plan.py, the maths in fast_forward.py. Takes some two and a half
hours on one core with AMX bfloat16; the same seed, machine and number of ranks give the same weights.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Qwen3VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from demo import checkpoint_files, tokenizer
from demo.batches import BatchMaker
from demo.clips import DIRECTIONS
from demo.fast_forward import TextRun, answer_logits, run_text, run_tower
from demo.optimizer import AdamW, Muon
from demo.plan import ADAM_LR, MUON_LR, STAGES, Step, step_of, total_steps
from demo.scenes import COLOURS, SHAPES
from deploy.local import free_port

DENSE_SIZES = (len(COLOURS) + 1, len(SHAPES) + 1, 10)
MALLOC = {  # keep big freed blocks: mapping them anew at each operation costs a third of the time
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "500000000",
}


class Batches(IterableDataset[dict[str, Tensor]]):
    def __init__(self, maker: BatchMaker, rank: int, first: int) -> None:
        self.maker, self.rank, self.first = maker, rank, first

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.first, total_steps()):
            step = step_of(number)
            yield self.maker.make(number, self.rank, step.kind, step.area, step.rows, *step.guides)


class Trainer:
    """One rank's model, heads and optimisers."""

    def __init__(self, folder: Path, seed: int, rank: int, ranks: int) -> None:
        torch.manual_seed(seed)
        self.folder, self.seed, self.rank, self.ranks, self.number = folder, seed, rank, ranks, 0
        self.tokenizer = tokenizer.build()
        self.model = Qwen3VLForConditionalGeneration(checkpoint_files.build_config(self.tokenizer)).float()
        self.masters = use_bfloat16(self.model)
        self.heads = nn.ModuleList(nn.Linear(192, sum(DENSE_SIZES)) for _ in range(4))
        self.motion_heads = nn.ModuleList(nn.Linear(192, len(DIRECTIONS)) for _ in range(4))
        self.side_head = nn.Linear(192, 4)
        self.picture_head = nn.Linear(192, 2)
        self.text_heads = {"motion": self.motion_heads, "side": self.side_head, "picture": self.picture_head}
        for part in (self.heads, *self.text_heads.values()):
            self.masters |= use_bfloat16(part)
        named = self.model.named_parameters()
        self.query_key_norms = frozenset(p for n, p in named if n.endswith(("q_norm.weight", "k_norm.weight")))
        self.stage = -1

    def batch_maker(self) -> BatchMaker:
        return BatchMaker(self.tokenizer, self.seed)

    def enter(self, stage: int) -> None:
        """Fresh optimisers where a stage trains other parameters than the last: the tower alone, or everything."""
        before, self.stage = self.stage, stage
        if before >= 0 and (STAGES[before].name == "dense") == (STAGES[stage].name == "dense"):
            return
        parts: list[nn.Module] = [self.model.model.visual, self.heads]
        if STAGES[stage].name != "dense":
            parts += [self.model.model.language_model, *self.text_heads.values()]
        named = [(n, p) for part in parts for n, p in part.named_parameters()]
        is_matrix = [p.ndim >= 2 and "embed_tokens" not in n and "pos_embed" not in n for n, p in named]
        heads = {id(p) for part in (self.heads, *self.text_heads.values()) for p in part.parameters()}
        is_matrix = [m and id(p) not in heads for m, (_, p) in zip(is_matrix, named, strict=True)]
        self.trained = [p for _, p in named]
        self.muon = Muon(
            [p for m, (_, p) in zip(is_matrix, named, strict=True) if m], self.masters, self.rank, self.ranks, 0.1
        )
        self.adam = AdamW([p for m, (_, p) in zip(is_matrix, named, strict=True) if not m], self.masters, 0.01)

    def sharpen(self, factor: float) -> None:
        """Scale the query and key norms: attention starts too soft to pick one shape among many tokens."""
        for parameter in self.query_key_norms:
            parameter.data.copy_(self.masters[parameter].mul_(factor))

    def losses(self, batch: dict[str, Tensor], step: Step) -> tuple[Tensor, dict[str, float]]:
        levels = run_tower(self.model.model.visual, batch["patches"], batch["grids"])
        dense = self.dense_loss(levels, batch["dense"])
        if "slot_ids" not in batch:
            return dense, {"dense": dense.item()}
        text = self.model.model.language_model
        run = run_text(text, batch, levels)
        logits, targets = answer_logits(text, run.hidden, batch["labels"])
        loss = F.cross_entropy(logits.float(), targets)
        right = (logits.argmax(-1) == targets).float().mean().item()
        total = loss + step.side * dense
        if step.plan.focus:
            total = total + step.plan.focus * run.focus
        if step.plan.sides and bool((batch["sides"] >= 0).any()):
            sides = self.side_head(run.answers).float().view(-1, 2)
            total = total + step.plan.sides * F.cross_entropy(sides, batch["sides"].flatten(), ignore_index=-100)
        report = {"loss": loss.item(), "dense": dense.item(), "focus": run.focus.item(), "right": right}
        if step.plan.pictures and len(run.seen):
            pictures = self.picture_loss(run, batch)
            total, report["pictures"] = total + step.plan.pictures * pictures, pictures.item()
        return total, report

    def picture_loss(self, run: TextRun, batch: dict[str, Tensor]) -> Tensor:
        """How badly one linear head reads the picture off its tokens, off a question that names one, off an answer.

        One head for all three: what a question asks for then looks like what the tokens hold.
        """
        labels = batch["pictures"][batch["pictures"] >= 0]
        total = F.cross_entropy(self.picture_head(run.seen).float(), labels)
        for held, wanted in ((run.questions, batch["told"]), (run.answers, batch["found"])):
            if bool((wanted >= 0).any()):
                total = total + F.cross_entropy(self.picture_head(held).float(), wanted, ignore_index=-100)
        return total

    def dense_loss(self, levels: list[Tensor], labels: Tensor) -> Tensor:
        """Mean over the levels of how badly a linear head reads colour, shape and region of each token.

        Tokens of shapes count as much as the background, which is most of a picture.
        """
        places = labels[..., 1] != -100
        chosen = labels[places]
        weight = torch.where(chosen[:, 1] == len(SHAPES), 0.2, 1.0)
        total = torch.zeros(())
        for level, head in zip(levels, self.heads, strict=True):
            for index, logits in enumerate(head(level[places]).float().split(DENSE_SIZES, -1)):
                each = F.cross_entropy(logits, chosen[:, index], reduction="none", ignore_index=-100)
                total = total + (each * weight).sum() / weight.sum()
        moving = labels[..., 3] != -100
        if bool(moving.any()):
            for level, head in zip(levels, self.motion_heads, strict=True):
                total = total + F.cross_entropy(head(level[moving]).float(), labels[moving][:, 3])
        return total / len(levels)

    def step(self, batch: dict[str, Tensor], step: Step) -> dict[str, float]:
        if step.stage != self.stage:
            self.enter(step.stage)
            self.sharpen(step.plan.sharpen)
        loss, report = self.losses(batch, step)
        loss.backward()
        if self.ranks > 1:
            self.average()
        self.muon.step(MUON_LR * step.scale)
        self.adam.step(ADAM_LR * step.scale, step.plan.norm_boost, self.query_key_norms)
        for parameter in self.trained:
            parameter.grad = None
        self.number = step.number + 1
        return report

    def average(self) -> None:
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.flatten().float() for p in self.trained])
        dist.all_reduce(flat)
        flat /= self.ranks
        for parameter, part in zip(self.trained, flat.split([p.numel() for p in self.trained]), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)

    def state(self) -> dict[str, Tensor]:
        named = {f"model.{n}": self.masters[p] for n, p in self.model.model.named_parameters()}
        named |= {f"heads.{n}": self.masters[p] for n, p in self.heads.named_parameters()}
        for name, part in self.text_heads.items():
            named |= {f"{name}.{n}": self.masters[p] for n, p in part.named_parameters()}
        named |= {f"muon.{n}": p for n, p in self.muon.state_dict().items()}
        named |= {f"adam.{n}": p for n, p in self.adam.state_dict().items()}
        named["number"] = torch.tensor([self.number])
        return named

    def save(self) -> None:
        """The resumable state and the checkpoint that transformers loads; each replaced whole."""
        state = self.folder / "state.safetensors"
        save_file({n: t.contiguous() for n, t in self.state().items()}, str(state) + ".new")
        os.replace(str(state) + ".new", state)
        checkpoint_files.save(self.model, self.tokenizer, self.folder / "model")

    def resume(self) -> None:
        state = load_file(self.folder / "state.safetensors")
        self.number = int(state["number"])
        self.enter(step_of(self.number - 1).stage)
        groups: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = value
        parts = {"model": self.model.model, "heads": self.heads, **self.text_heads}
        for name, part in parts.items():
            for key, parameter in part.named_parameters():
                parameter.data.copy_(self.masters[parameter].copy_(groups[name][key]))
        self.muon.load_state_dict(groups["muon"])
        self.adam.load_state_dict(groups["adam"])


def use_bfloat16(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Projections to bfloat16, in place; returns the float32 weight of every parameter, which training updates.

    Embeddings and norms stay float32: their gradients are sums over many tokens.
    """
    masters = {p: p.detach().clone() if p.ndim > 1 else p.data for p in module.parameters()}
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv3d) and part is not getattr(module, "lm_head", None):
            for parameter in part.parameters(recurse=False):
                masters[parameter] = parameter.data.float().clone()
                parameter.data = parameter.data.bfloat16()
    return masters


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    if args.ranks > 1:
        dist.init_process_group("gloo", init_method=args.meet, rank=args.rank, world_size=args.ranks)
    trainer = Trainer(args.folder, args.seed, args.rank, args.ranks)
    if args.resume:
        trainer.resume()
    batches = Batches(trainer.batch_maker(), args.rank, trainer.number)
    loader = DataLoader(batches, batch_size=None, num_workers=1, prefetch_factor=6)
    started, means = time.monotonic(), dict[str, float]()
    for number, batch in enumerate(loader, trainer.number):
        report = trainer.step(batch, step_of(number))
        for name, value in report.items():
            means[name] = value if name not in means else means[name] * 0.97 + value * 0.03
        if args.rank == 0 and number % 20 == 19:
            line = " ".join(f"{n} {v:.3f}" for n, v in means.items())
            print(f"{number + 1}/{total_steps()} {time.monotonic() - started:.0f}s {line}", flush=True)
        if args.rank == 0 and (number % 200 == 199 or number + 1 == total_steps()):
            trainer.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("demo/runs"), help="state and checkpoint go here")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's state")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        run_rank(args)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    print(f"{total_steps()} steps, some two and a half hours; the model will be in {args.folder / 'model'}", flush=True)
    meet = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "demo.train", *sys.argv[1:], "--meet", meet]
    environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, "--rank", str(r)], env=environment) for r in range(args.ranks)]
    sys.exit(max(process.wait() for process in ranks))


if __name__ == "__main__":
    main()
