"""Who holds which KV block, and which blocks may be shared because their content is equal.

Pure: counts and hashes only, no tensors. A block is free, or referenced by sequences. A free block whose content is
known stays findable by its hash until it is given out again, oldest first. Free plus referenced is always total.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq


class BlockManager:
    """Blocks `0 .. num_blocks - 1` of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.num_cached = 0
        """Free blocks whose content is known."""
        self.num_evicted = 0
        """Blocks so far whose known content was given up for another's."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that sequences reference."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def count_cached(self, hashes: Seq[bytes]) -> int:
        """How many leading blocks are present."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._block_of:
                break
            count += 1
        return count

    def share(self, hashes: Seq[bytes]) -> list[int]:
        """Reference the longest run of leading blocks that are present; returns them."""
        blocks = [self._block_of[block_hash] for block_hash in hashes[: self.count_cached(hashes)]]
        for block in blocks:
            self.num_cached -= self._references[block] == 0
            self._references[block] += 1
            self._free.pop(block, None)
        return blocks

    def try_take(self, count: int) -> list[int] | None:
        """Reference `count` blocks of no known content, or None when there are too few."""
        if count > len(self._free):
            return None
        return [self._take_one() for _ in range(count)]

    def give_back(self, blocks: Seq[int]) -> None:
        """Drop one reference of each. The last of a sequence's blocks are reused first: prefixes stay longest."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, "a block was given back twice"
            if self._references[block] == 0:
                self._free[block] = None
                if block in self._hash_of:
                    self.num_cached += 1
                else:
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, block_hash: bytes) -> None:
        """Say what a full, computed block in use holds. The first block of equal content keeps the name."""
        assert self._references[block], "a block that nobody holds was named"
        if block not in self._hash_of and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def unname(self, block: int) -> None:
        """Forget what a block holds: its content is not to be trusted."""
        if block_hash := self._hash_of.pop(block, None):
            del self._block_of[block_hash]
            self.num_cached -= self._references[block] == 0

    def check(self) -> None:
        """Assert the pool's invariants; for tests and for the engine when it is idle."""
        free = set(self._free)
        assert all((count == 0) == (block in free) for block, count in enumerate(self._references))
        assert len(free) + self.num_used == self.num_blocks
        assert {block: h for h, block in self._block_of.items()} == self._hash_of
        assert self.num_cached == len(free & self._hash_of.keys())

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.num_evicted += block in self._hash_of
        self.unname(block)
        self._references[block] = 1
        return block
