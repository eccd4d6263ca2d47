"""The paged KV cache: one pool of blocks that hold keys and values.

Owns the pool's memory and layout. Knows nothing of sequences: who holds which block is the block manager's.
Written and read by the compute thread alone.

Layout: `[layers, blocks, kv_heads, 2, block_size, head_dim]`, keys then values. What one head reads of a block is one
piece of memory (4 KiB for 16 tokens of 64 dimensions in half precision), so a kernel that walks a block table streams
it, and gathering is one `index_select` of long rows in whatever order the caller wants them.

The kernels for processors with AMX compress blocks that are full, in their place (`kv_blocks_amx.h`): then they alone
write and read the pool.
"""

import torch
from torch import Tensor

TILE_TOKENS = 16  # of one head's keys or values, which are compressed together or not at all
PLAIN, WHOLE = 255, 254  # of `bases`: of a block that is not compressed, and of a tile that did not fit


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
        *,
        compress: bool = False,
    ) -> None:
        """With `compress`, for `NativeKernels.can_compress`, full blocks are compressed."""
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_layers, num_blocks, num_kv_heads, 2, block_size, head_dim)
        # Zeros, not empty: pages are touched on first use, and stale memory could hold NaN.
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self.bases: Tensor | None = None
        """How each tile of 16 tokens is kept, where some are compressed: [layers, blocks, kv_heads, 2, tiles] uint8."""
        if compress:
            tiles = (num_layers, num_blocks, num_kv_heads, 2, block_size // TILE_TOKENS)
            self.bases = torch.full(tiles, PLAIN, dtype=torch.uint8, device=device)
        heads = torch.arange(2 * num_kv_heads, device=device)
        self._units = (heads.view(num_kv_heads, 2) * block_size).flatten()  # first row of each head's keys and values

    @property
    def num_bytes(self) -> int:
        """Memory of the pool, and of what says how its tiles are kept."""
        return self.pool.nbytes + (0 if self.bases is None else self.bases.nbytes)

    def count_tiles(self) -> tuple[int, int]:
        """Tiles of the blocks that were full: how many are compressed, and how many did not fit."""
        if self.bases is None:
            return 0, 0
        return int((self.bases < WHOLE).sum()), int((self.bases == WHOLE).sum())

    @property
    def keys(self) -> Tensor:
        """All keys: a view [layers, blocks, kv_heads, block_size, head_dim]."""
        return self.pool[:, :, :, 0]

    @property
    def values(self) -> Tensor:
        """All values: a view [layers, blocks, kv_heads, block_size, head_dim]."""
        return self.pool[:, :, :, 1]

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of new tokens.

        slot_mapping  [T] int64                    block * block_size + offset, all different
        k, v          [T, kv_heads, head_dim], rounded to the cache's dtype
        """
        self._check_plain()
        block, offset = slot_mapping // self.block_size, slot_mapping % self.block_size
        first = block * (2 * self.num_kv_heads * self.block_size) + offset
        rows = (first[:, None] + self._units).flatten()
        new = torch.stack([k, v], dim=2).view(-1, self.head_dim).to(self.pool.dtype)
        self.pool[layer].view(-1, self.head_dim).index_copy_(0, rows, new)

    def rows_of(self, blocks: Tensor) -> Tensor:
        """Where `gather` finds blocks, to be computed once for all layers of a step.

        blocks   [..., b] int
        returns  int64, flat: for keys, then values, for each of the leading axes, each head, the blocks in order
        """
        kinds = torch.arange(2, device=blocks.device).view(2, *[1] * (blocks.dim() + 1))
        heads = torch.arange(self.num_kv_heads, device=blocks.device)[:, None]
        rows = (blocks.long()[..., None, :] * self.num_kv_heads + heads) * 2
        return (rows + kinds).flatten()

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of whole blocks.

        rows     of `rows_of` for blocks [b], or [d, b]
        returns  keys and values, flat: [d, kv_heads, b * block_size, head_dim] in memory
        """
        self._check_plain()
        found = self.pool[layer].view(-1, self.block_size * self.head_dim).index_select(0, rows)
        keys, values = found.view(2, -1)
        return keys, values

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as [blocks, block_size, kv_heads, head_dim] views, for paged kernels."""
        self._check_plain()
        keys, values = self.pool[layer].unbind(2)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _check_plain(self) -> None:
        assert self.bases is None, "compressed blocks are for the kernels that compress them"
