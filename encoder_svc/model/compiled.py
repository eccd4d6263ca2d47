"""The tower's layers compiled by torch.compile, where an operator asks for it: the same arithmetic in fewer kernels.

Owns what is compiled, which is what treats each row alone: what is before and behind the attention of a block, and the
mergers. All blocks share one graph, whose number of rows is free, so that no batch has a size of its own to be compiled
for. Attention is a kernel already. Knows nothing of images. Compiles in the compute thread, at the first calls.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor

from common.errors import ConfigError
from common.metrics import Counter, Gauge
from encoder_svc.model.blocks import PatchMerger, VisionBlock, enter_block, leave_block, merge_rows
from encoder_svc.model.vision import VisionTower

logger = structlog.get_logger(__name__)

COMPILED = Gauge("tandem_encoder_tower_compiled", "1 where the tower's layers run as torch.compile made them")
COMPILATIONS = Counter("tandem_encoder_compilations_total", "Graphs of the tower that were compiled")

Graph = Callable[..., Any]
Compiler = Callable[[torch.fx.GraphModule, Sequence[Tensor]], Graph]


def compile_tower(tower: VisionTower, compiler: Compiler | None = None) -> None:
    """Let torch.compile make the tower's layers, at their first call; its weights must not have been packed.

    A graph that cannot be compiled raises from that call, and nothing runs uncompiled instead. `compiler` is torch's
    inductor, unless a test gives another.
    """

    def counted(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        began = time.monotonic()
        compiled = (compiler or _inductor)(graph, inputs)
        COMPILATIONS.inc()
        logger.info("a part of the tower was compiled", seconds=round(time.monotonic() - began, 2))
        return compiled

    def compiled(function: Graph) -> Graph:
        # Without `fullgraph` what cannot be compiled, or was too often, would run uncompiled and say nothing.
        made: Graph = torch.compile(function, backend=counted, dynamic=True, fullgraph=True)
        return made

    enter, leave, merge = compiled(enter_block), compiled(leave_block), compiled(merge_rows)
    for module in tower.modules():
        if isinstance(module, VisionBlock):
            module.enter, module.leave = enter, leave
        elif isinstance(module, PatchMerger):
            module.merge = merge
    COMPILED.set(1)


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
    made: Graph = torch._dynamo.lookup_backend("inductor")(graph, list(inputs))
    return made


def run_all_graphs(tower: VisionTower) -> None:
    """Compile every graph that a forward may need; raises ConfigError, which says why one could not be compiled.

    One row is a size that torch compiles apart, which a merger may have and no block.
    """
    side = tower.config.spatial_merge_size
    try:
        for grid in ((1, 4 * side, 4 * side), (1, side, side)):
            tower(torch.zeros(grid[1] * grid[2], tower.patch_width), [grid])
    except Exception as exc:
        cause = getattr(exc, "inner_exception", exc)  # torch wraps what its compiler raises
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        raise ConfigError(
            f"--compile-tower: the tower could not be compiled here ({reason}); install "
            "a C++ compiler, and Triton for a GPU, or leave the setting out"
        ) from exc
