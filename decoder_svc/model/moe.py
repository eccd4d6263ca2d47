"""The mixture of experts in a decoder layer: a router and the experts' gated MLPs.

Owns routing and the grouping of tokens by expert. Knows nothing of how checkpoints store experts (see weights.py).
Runs in the compute thread. Legend: `T` packed tokens, `H` hidden, `E` experts, `I` an expert's inner size, `k` top-k.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder_svc.model.kernels import Kernels


class Router(nn.Module):
    """Scores the experts: softmax over all, the best k, weights scaled to sum to one (always, as the reference)."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> weights [T, k] in the dtype of `hidden`, and experts [T, k] int64."""
        probabilities = torch.softmax(F.linear(hidden, self.weight), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True)).to(hidden.dtype), experts


def can_group(like: Tensor) -> bool:
    """Whether experts run in grouped products, which need no word from the device about the rows of each.

    On CPU these would visit idle experts too.
    """
    return like.is_cuda and like.dtype == torch.bfloat16


def has_looped_experts(model: nn.Module) -> bool:
    """Whether a step of a model reads back which experts have rows."""
    return any(isinstance(module, Experts) and not can_group(module.down_proj) for module in model.modules())


class Experts(nn.Module):
    """All experts of a layer: gate_up_proj [E, 2*I, H] (gate rows, then up rows) and down_proj [E, H, I]."""

    def __init__(self, num_experts: int, hidden_size: int, inner_size: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, inner_size))
        self.activation = act

    def forward(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Run each expert once, over the tokens that chose it.

        hidden   [T, H]
        weights  [T, k], experts [T, k] int64
        returns  [T, H]
        """
        choices = experts.flatten()
        order = choices.argsort(stable=True)
        # Not bincount, which asks the device for the largest choice.
        experts_in_order = torch.arange(self.down_proj.shape[0], device=choices.device)
        ends = torch.searchsorted(choices[order], experts_in_order, right=True)
        is_grouped = can_group(hidden)
        gathered = hidden[order // experts.shape[1]]
        mixed = (self.grouped if is_grouped else self.looped)(gathered, ends) * weights.flatten()[order, None]
        # Back in the order of tokens and summed there: atomic additions would come in another order each time.
        return torch.empty_like(mixed).index_copy_(0, order, mixed).view(*experts.shape, -1).sum(dim=1)

    def grouped(self, gathered: Tensor, ends: Tensor) -> Tensor:
        """All experts in two products.

        gathered  [T*k, H]  rows in the order of their experts
        ends      [E] int64 behind the last row of each expert
        returns   [T*k, H]
        """
        ends = ends.to(torch.int32)
        gate, up = F.grouped_mm(gathered, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(self.activation(gate) * up, self.down_proj.transpose(1, 2), offs=ends)

    def looped(self, gathered: Tensor, ends: Tensor) -> Tensor:
        """The same, one expert that has rows after the other."""
        out = torch.empty_like(gathered)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                rows = slice(start, end)
                gate, up = F.linear(gathered[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
                out[rows] = F.linear(self.activation(gate) * up, self.down_proj[expert])
                start = end
        return out


class SparseMoeBlock(nn.Module):
    """Router and experts, in place of the dense MLP. `gate` is the router's name in checkpoints."""

    def __init__(self, config: Any, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = Router(config.hidden_size, config.num_experts, config.num_experts_per_tok)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, act)

    def forward(self, hidden: Tensor, _kernels: Kernels) -> Tensor:
        """[T, H] -> [T, H]."""
        out: Tensor = self.experts(hidden, *self.gate(hidden))
        return out
