"""The paged KV cache: one pool of blocks for keys and one for values.

Owns the pool's memory and layout. Knows nothing of sequences: who holds which block is the block manager's.
Written and read by the compute thread alone.

Layout: `[layers, kv_heads, blocks, block_size * head_dim]`. Gathering a sequence's blocks is then one
`index_select` with long contiguous rows, the fastest of the layouts tried for decoding on CPU.
"""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_layers, num_kv_heads, num_blocks, block_size * head_dim)
        # Zeros, not empty: pages are touched on first use, and stale memory could hold NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of both pools."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of new tokens.

        slot_mapping  [T] int64                    block * block_size + offset, all different
        k, v          [T, kv_heads, head_dim]
        """
        for pool, new in ((self.keys, k), (self.values, v)):
            slots = pool[layer].view(self.num_kv_heads, -1, self.head_dim)
            slots.index_copy_(1, slot_mapping, new.transpose(0, 1))

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of whole blocks, in order.

        blocks   [b] int
        returns  two of [kv_heads, b * block_size, head_dim]
        """
        shape = (self.num_kv_heads, -1, self.head_dim)
        keys = self.keys[layer].index_select(1, blocks).view(shape)
        return keys, self.values[layer].index_select(1, blocks).view(shape)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Both pools of a layer as [blocks, block_size, kv_heads, head_dim] views, for paged kernels."""
        shape = (self.num_kv_heads, self.num_blocks, self.block_size, self.head_dim)
        return self.keys[layer].view(shape).permute(1, 2, 0, 3), self.values[layer].view(shape).permute(1, 2, 0, 3)
