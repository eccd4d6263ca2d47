"""What the ranks of a decoder tell each other before they compute: devices, setup, and how much KV all can hold."""

import socket
import threading

import pytest
import torch

from common.errors import ConfigError, ModelFailure
from decoder_svc.tensor_parallel import Channel, RankSetup, agree_on_blocks, rank_device

SETUP = RankSetup(
    rank=1,
    size=2,
    checkpoint_dir="/models/m",
    dtype="bfloat16",
    device="cpu",
    block_size=16,
    kv_cache_bytes=0,
    threads=4,
    compile_layers=False,
    kv_dtype="bfloat16",
    meeting_file="/tmp/x/ranks",
    log_level="info",
    log_format="json",
)


def channel_pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def test_a_rank_hears_what_it_is() -> None:
    ours, theirs = channel_pair()
    ours.send_setup(SETUP)
    assert theirs.receive_setup() == SETUP


def test_a_rank_hears_that_rank_0_is_gone_also_in_the_middle_of_a_message() -> None:
    ours, theirs = channel_pair()
    ours.send(b"1234")
    ours.close()
    with pytest.raises(EOFError, match="gone"):
        theirs.receive(8)


def test_a_rank_that_left_something_unread_is_gone_all_the_same() -> None:
    ours, theirs = channel_pair()
    ours.send(b"1234")
    theirs.close()
    with pytest.raises(EOFError, match="gone"):
        ours.receive(8)
    with pytest.raises(EOFError, match="gone"):
        ours.send_number(1)


def test_a_rank_that_ends_while_it_loads_ends_the_start() -> None:
    ours, theirs = channel_pair()
    theirs.close()
    with pytest.raises(ModelFailure, match="ended while it loaded"):
        agree_on_blocks(100, [ours])


def test_all_ranks_have_as_many_blocks_as_the_one_with_least_room() -> None:
    pairs = [channel_pair() for _ in range(3)]
    agreed: list[int] = []

    def follow(channel: Channel, own: int) -> None:
        channel.send_number(own)
        agreed.append(channel.receive_number())

    threads = [
        threading.Thread(target=follow, args=(theirs, own))
        for (_, theirs), own in zip(pairs, (90, 70, 80), strict=True)
    ]
    for thread in threads:
        thread.start()
    assert agree_on_blocks(100, [ours for ours, _ in pairs]) == 70
    for thread in threads:
        thread.join()
    assert agreed == [70, 70, 70]


def test_ranks_have_the_devices_that_follow_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [rank_device(name, 1) for name in ("auto", "cuda", "cuda:2", "cpu")] == ["cuda:1", "cuda:1", "cuda:3", "cpu"]
    with pytest.raises(ConfigError, match="no device cuda:4"):
        rank_device("cuda:3", 1)
