"""Muon for the matrices and AdamW for the rest, shared over the ranks of a gloo group.

Owns the update rule only: gradients come averaged. Matrices of one shape are orthogonalised together, each rank takes
its share of them and the updates are summed, so every rank applies the same numbers. Runs in the training process.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz in bfloat16 towards the nearest orthogonal matrix; stack [M, rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x = stack.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if is_tall else x
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return (x.transpose(1, 2) if is_tall else x).float()


class Muon:
    """Momentum, orthogonalised; a convolution kernel counts as a matrix of its output channels.

    `masters` holds the float32 weight of each parameter, which itself may be bfloat16.
    """

    def __init__(
        self, matrices: list[nn.Parameter], masters: dict[nn.Parameter, Tensor], rank: int, ranks: int, decay: float
    ) -> None:
        self.masters, self.rank, self.ranks, self.decay = masters, rank, ranks, decay
        groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for matrix in matrices:
            groups.setdefault((matrix.shape[0], matrix[0].numel()), []).append(matrix)
        self.groups = groups
        self.momentum = {shape: torch.zeros(len(g), *shape) for shape, g in groups.items()}

    def step(self, lr: float) -> None:
        updates = {}
        for shape, group in self.groups.items():
            grads = torch.stack([p.grad.view(shape) for p in group]).float()
            momentum = self.momentum[shape].lerp_(grads, 0.05)
            updates[shape] = self.share(grads.lerp_(momentum, 0.95))
        if self.ranks > 1:
            flat = torch.cat([u.flatten() for u in updates.values()])
            dist.all_reduce(flat)
            parts = flat.split([u.numel() for u in updates.values()])
            updates = {s: part.view(u.shape) for (s, u), part in zip(updates.items(), parts, strict=True)}
        for shape, group in self.groups.items():
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, update in zip(group, updates[shape], strict=True):
                master = self.masters[parameter].mul_(1 - lr * self.decay)
                parameter.data.copy_(master.add_(update.view(parameter.shape), alpha=-scale))

    def share(self, stack: Tensor) -> Tensor:
        """This rank's matrices orthogonalised, the others' zero."""
        if self.ranks == 1:
            return orthogonalise(stack)
        mine = torch.arange(len(stack)) % self.ranks == self.rank
        result = torch.zeros_like(stack)
        if bool(mine.any()):
            result[mine] = orthogonalise(stack[mine])
        return result

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{rows}x{columns}": value for (rows, columns), value in self.momentum.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for (rows, columns), value in self.momentum.items():
            value.copy_(state[f"{rows}x{columns}"])


class AdamW:
    """Adam with decoupled decay for embeddings, norms and biases."""

    def __init__(self, parameters: list[nn.Parameter], masters: dict[nn.Parameter, Tensor], decay: float) -> None:
        self.parameters, self.masters, self.decay, self.count = parameters, masters, decay, 0
        self.mean = [torch.zeros_like(masters[p]) for p in parameters]
        self.square = [torch.zeros_like(masters[p]) for p in parameters]

    def step(self, lr: float, boost: float = 1.0, boosted: frozenset[nn.Parameter] = frozenset()) -> None:
        """One update; the boosted parameters move `boost` times as fast."""
        self.count += 1
        root = (1 - 0.98**self.count) ** 0.5
        for parameter, mean, square in zip(self.parameters, self.mean, self.square, strict=True):
            if parameter.grad is None:
                continue
            rate = lr * boost if parameter in boosted else lr
            grad = parameter.grad.float()
            mean.lerp_(grad, 0.1)
            square.mul_(0.98).addcmul_(grad, grad, value=0.02)
            master = self.masters[parameter].mul_(1 - rate * self.decay)
            master.addcdiv_(mean, square.sqrt().div_(root).add_(1e-8), value=-rate / (1 - 0.9**self.count))
            parameter.data.copy_(master)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"count": torch.tensor([self.count])}
        for index, (mean, square) in enumerate(zip(self.mean, self.square, strict=True)):
            state[f"mean.{index}"], state[f"square.{index}"] = mean, square
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.count = int(state["count"])
        for index in range(len(self.mean)):
            self.mean[index].copy_(state[f"mean.{index}"])
            self.square[index].copy_(state[f"square.{index}"])
