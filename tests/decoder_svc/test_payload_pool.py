"""Memory for payloads: used again when nothing looks at it any more, and never before."""

import gc
import threading

import torch

from common.embedding import HUGE_BYTES
from decoder_svc.payload_pool import HUGE_PAGE_BYTES, POOL_BYTES, PayloadPool

SIZE = 2 * HUGE_BYTES


def address(payload: object) -> int:
    return torch.frombuffer(payload, dtype=torch.uint8).data_ptr()


def test_memory_is_used_again_once_nothing_looks_at_it() -> None:
    pool = PayloadPool(4 * SIZE)
    payload = pool.take(SIZE)
    where = address(payload)
    assert address(pool.take(SIZE)) != where
    del payload
    assert pool.idle_bytes == 2 * SIZE
    addresses = {address(first := pool.take(SIZE)), address(second := pool.take(SIZE))}
    assert where in addresses
    assert len(addresses) == 2
    assert len(first) == len(second) == SIZE
    assert pool.idle_bytes == 0


def test_a_slice_of_a_view_or_a_tensor_keeps_the_memory_from_others() -> None:
    pool = PayloadPool(4 * SIZE)
    payload = pool.take(SIZE)
    tensor = torch.frombuffer(payload, dtype=torch.bfloat16).view(2, -1)[1, :10]
    part = memoryview(payload)[5:10]
    del payload
    gc.collect()
    assert pool.idle_bytes == 0
    del tensor
    assert pool.idle_bytes == 0
    del part
    assert pool.idle_bytes == SIZE


def test_a_payload_has_its_own_length_in_a_mapping_that_is_a_little_longer() -> None:
    pool = PayloadPool(4 * SIZE)
    payload = pool.take(SIZE - HUGE_PAGE_BYTES // 2 - 1)
    assert len(payload) == SIZE - HUGE_PAGE_BYTES // 2 - 1
    del payload
    assert pool.idle_bytes == SIZE
    assert len(pool.take(SIZE - HUGE_PAGE_BYTES)) == SIZE - HUGE_PAGE_BYTES
    assert pool.idle_bytes == SIZE


def test_a_payload_never_gets_a_mapping_much_larger_than_itself_nor_a_smaller_one() -> None:
    pool = PayloadPool(8 * SIZE)
    del (payload := [pool.take(2 * SIZE)])[:]
    small = pool.take(SIZE)
    assert pool.idle_bytes == 2 * SIZE
    large = pool.take(3 * SIZE)
    assert pool.idle_bytes == 2 * SIZE
    assert (len(payload), len(small), len(large)) == (0, SIZE, 3 * SIZE)


def test_what_is_idle_is_bounded_and_sizes_that_are_wanted_no_more_go() -> None:
    pool = PayloadPool(3 * SIZE)
    payloads = [pool.take(SIZE) for _ in range(5)]
    payloads.clear()
    assert pool.idle_bytes == 3 * SIZE
    payloads.append(pool.take(2 * SIZE))
    assert pool.idle_bytes == SIZE
    payloads.clear()
    assert pool.idle_bytes == 3 * SIZE


def test_small_payloads_are_not_kept() -> None:
    pool = PayloadPool()
    assert len(pool.take(HUGE_BYTES - 1)) == HUGE_BYTES - 1
    assert pool.idle_bytes == 0


def test_metrics_tell_what_is_used_and_what_is_idle() -> None:
    pool = PayloadPool(2 * SIZE)
    pool.report()

    def reported() -> dict[str, float]:
        return {sample.labels["state"]: sample.value for family in POOL_BYTES.collect() for sample in family.samples}

    first, second = pool.take(SIZE), pool.take(SIZE - 1)
    assert len(second) == SIZE - 1
    assert reported() == {"used": 2 * SIZE, "idle": 0}  # a mapping counts as a whole
    del first
    assert reported() == {"used": SIZE, "idle": SIZE}
    del second
    assert reported() == {"used": 0, "idle": 2 * SIZE}


def test_what_the_pool_has_no_room_for_is_neither_used_nor_idle() -> None:
    pool = PayloadPool(SIZE)
    payloads = [pool.take(SIZE) for _ in range(3)]
    assert pool.used_bytes == 3 * SIZE
    payloads.clear()
    assert (pool.used_bytes, pool.idle_bytes) == (0, SIZE)


def test_threads_that_take_and_drop_never_share_memory() -> None:
    pool = PayloadPool(2 * SIZE)
    mixed: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            payload = memoryview(pool.take(SIZE))
            payload[:8] = payload[-8:] = bytes([number]) * 8
            if payload[:8] != payload[-8:] or payload[0] != number:
                mixed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mixed == []
    assert pool.used_bytes == 0
    assert pool.idle_bytes <= 2 * SIZE
