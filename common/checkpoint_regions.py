"""Where checkpoint tensors go in parameters, also in those of a process that holds only a share of each.

Owns the arithmetic from ranges of a whole parameter to slices of the stored tensors that fill it. Knows nothing of
files or modules. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

Region = tuple[int | slice, ...]


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint tensor goes: a region of a parameter, its last two axes swapped when `is_transposed`.

    `region` holds one index or slice for each leading axis that is not taken whole.
    """

    parameter: str
    region: Region = ()
    is_transposed: bool = False

    def view(self, parameter: Tensor) -> Tensor:
        """The part of `parameter` that has the shape of the stored tensor."""
        part = parameter[self.region] if self.region else parameter
        return part.transpose(-1, -2) if self.is_transposed else part


@dataclass(frozen=True)
class Owned:
    """The share of a parameter: along one axis, these ranges `(first, end)` of the whole, one after the other."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Length of the share along its axis."""
        return sum(end - first for first, end in self.ranges)


def pieces_of(
    destination: Destination, shape: tuple[int, ...], owned: Owned
) -> Iterator[tuple[tuple[slice, ...], Destination]]:
    """What to read of a stored tensor, and where in the share each piece goes.

    destination  of the tensor in the whole parameter, which has `shape`
    returns      an index for each axis of the stored tensor, and the destination of what it selects
    """
    region: list[int | slice] = [*destination.region, *[slice(None)] * (len(shape) - len(destination.region))]
    held = region[owned.axis]
    assert isinstance(held, slice), "a parameter is not shared along an axis that a tensor takes one index of"
    start, stop, _ = held.indices(shape[owned.axis])
    offset = 0
    for first, end in owned.ranges:
        low, high = max(first, start), min(end, stop)
        if low < high:
            region[owned.axis] = slice(offset + low - first, offset + high - first)
            source = [slice(None)] * len(shape)
            source[owned.axis] = slice(low - start, high - start)
            yield _stored_index(source, destination), _moved(destination, tuple(region))
        offset += end - first


def _stored_index(source: list[slice], destination: Destination) -> tuple[slice, ...]:
    """Of an index into the whole parameter's axes, the part for the axes that the stored tensor has, in its order."""
    taken = [isinstance(part, int) for part in destination.region]
    kept = [part for axis, part in enumerate(source) if axis >= len(taken) or not taken[axis]]
    if destination.is_transposed:
        kept[-2:] = kept[:-3:-1]
    return tuple(kept)


def _moved(destination: Destination, region: Region) -> Destination:
    return Destination(destination.parameter, region, destination.is_transposed)
