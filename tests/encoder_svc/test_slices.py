"""A video that is cut between frames gives the embedding of the whole, to the bit of its checksum."""

import numpy as np
import pytest
import torch

from common.embedding import check_payload
from common.tensors import tensor_of
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.runner import TowerItem, TowerRunner
from encoder_svc.slices import Joining, cut
from tests.encoder_svc.embeddings import FINGERPRINT, held, key
from tests.encoder_svc.towers import tiny_tower


@pytest.mark.parametrize("lengths", [(5,), (1, 4), (2, 2, 1), (1, 1, 1, 1, 1)])
async def test_the_slices_of_a_video_give_what_the_whole_gives(lengths: tuple[int, ...]) -> None:
    tower = tiny_tower()
    runner = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype="float32")
    values = np.random.default_rng(3).standard_normal((5 * 4 * 6, tower.patch_width)).astype(np.float32)
    video = TowerItem(key(1), (5, 4, 6), values)
    (whole,) = await runner.run([video])
    joining, first = Joining(video.grid), 0
    joined: HeldEmbedding | None = None
    for length in lengths:
        assert joined is None
        (part,) = await runner.run([cut(video, first, length)])
        joined, first = joining.add(part), first + length
    runner.close()
    assert joined is not None
    check_payload(joined.header, joined.payload)
    assert joined.payload.readonly
    assert (joined.header.key, joined.header.grid, joined.header.rows) == (
        whole.header.key,
        whole.header.grid,
        whole.header.rows,
    )
    got, expected = (tensor_of(one.header, bytearray(one.payload)) for one in (joined, whole))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_slices_are_joined_in_order_whatever_their_lengths() -> None:
    parts = [held(1, 512 * frames, grid=(frames, 2, 2), rows=frames, width=128) for frames in (3, 1, 2)]
    joining = Joining((6, 2, 2))
    assert joining.add(parts[0]) is None
    assert joining.add(parts[1]) is None
    whole = joining.add(parts[2])
    assert whole is not None
    assert whole.payload == b"".join(bytes(part.payload) for part in parts)
    assert whole.header.rows == 6
