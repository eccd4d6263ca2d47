"""Memory that processes of a host share: what one wrote another reads, nobody changes it, and nothing stays behind."""

import contextlib
import errno
import gc
import multiprocessing
import os
import resource
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from common import shared_region
from common.errors import ProtocolError
from common.messages import SharedMemory
from common.shared_region import MAX_REGIONS, MappedRegions, SharedRegion, host_id, map_region

pytestmark = pytest.mark.skipif(host_id() is None, reason="this system has no memfd or no /proc")

PAYLOAD = bytes(range(256)) * 1000


def region_of(payload: bytes = PAYLOAD) -> tuple[SharedRegion, memoryview]:
    region = SharedRegion(len(payload))
    region.write(0, memoryview(payload))
    return region, region.seal()


def _own(pipe: Connection) -> None:
    region, view = region_of()
    pipe.send((msgspec.to_builtins(region.place), host_id()))
    pipe.recv()
    del region, view


def test_another_process_reads_what_was_written_also_once_its_owner_was_killed() -> None:
    ours, theirs = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=_own, args=(theirs,), daemon=True)
    owner.start()
    place, host = ours.recv()
    assert host == host_id()
    mapped = map_region(msgspec.convert(place, SharedMemory), len(PAYLOAD))
    owner.kill()
    owner.join()
    assert mapped == PAYLOAD
    with pytest.raises(OSError, match="No such file"):
        map_region(msgspec.convert(place, SharedMemory), len(PAYLOAD))


def test_a_region_is_written_in_parts() -> None:
    region = SharedRegion(len(PAYLOAD))
    for start in range(0, len(PAYLOAD), 1000):
        region.write(start, memoryview(PAYLOAD)[start : start + 1000])
    assert region.seal() == map_region(region.place, len(PAYLOAD)) == PAYLOAD


def test_what_is_sealed_cannot_change() -> None:
    region, view = region_of()
    assert view.readonly
    with pytest.raises(PermissionError):
        region.write(0, memoryview(b"x"))
    for change in (lambda: os.ftruncate(region.place.fd, 1), lambda: os.ftruncate(region.place.fd, 1 << 20)):
        with pytest.raises(PermissionError):
            change()
    assert view == PAYLOAD


def test_what_a_reader_writes_stays_with_it() -> None:
    region, view = region_of()
    mapped = map_region(region.place, len(PAYLOAD))
    mapped[0] = 99
    assert view == map_region(region.place, len(PAYLOAD)) == PAYLOAD


def test_what_may_still_change_is_refused() -> None:
    region = SharedRegion(len(PAYLOAD))
    with pytest.raises(ProtocolError, match="may still change"):
        map_region(region.place, len(PAYLOAD))


@pytest.mark.parametrize("size", [len(PAYLOAD) - 1, len(PAYLOAD) + 1, 1])
def test_another_size_is_refused(size: int) -> None:
    region, _ = region_of()
    with pytest.raises(ProtocolError, match=f"has {len(PAYLOAD)} bytes, expected {size}"):
        map_region(region.place, size)


def test_a_descriptor_of_anything_else_is_refused(tmp_path: Path) -> None:
    region, view = region_of()
    path = tmp_path / "file"
    path.write_bytes(PAYLOAD)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with path.open("rb") as file, socket.socket() as sock:
        waiting = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        other = SharedRegion(len(PAYLOAD))
        try:
            for fd in (file.fileno(), sock.fileno(), waiting, other.place.fd):
                with pytest.raises(ProtocolError, match="no such shared memory"):
                    map_region(msgspec.structs.replace(region.place, fd=fd), len(PAYLOAD))
        finally:
            os.close(waiting)
    assert view == PAYLOAD


def test_a_process_that_is_not_there_is_an_os_error() -> None:
    region, _ = region_of()
    with pytest.raises(OSError, match="No such file") as raised:
        map_region(msgspec.structs.replace(region.place, pid=(1 << 31) - 1), len(PAYLOAD))
    assert raised.value.errno == errno.ENOENT


def test_nothing_is_left_open() -> None:
    def opened() -> set[str]:
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if os.path.islink(link)}

    region, view = region_of()
    name = f"/memfd:{region.place.name} (deleted)"
    assert name in opened()
    mapped = map_region(region.place, len(PAYLOAD))
    with pytest.raises(ProtocolError):
        map_region(region.place, 1)
    del region
    gc.collect()
    assert view == PAYLOAD  # a view alone keeps the memory
    del view
    assert mapped == PAYLOAD
    del mapped
    gc.collect()
    assert name not in opened()


@pytest.mark.parametrize("change", [{"pid": 0}, {"fd": -1}, {"name": "../" * 10}, {"name": "a" * 33}, {"pid": 1 << 31}])
def test_a_place_is_checked_as_it_is_unpacked(change: dict[str, object]) -> None:
    region, _ = region_of()
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(region.place), **change}, SharedMemory)


@contextlib.contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """This process may open none with a number that is not below."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_region_that_was_made_can_be_filled_and_sealed_whatever_runs_out() -> None:
    region = SharedRegion(len(PAYLOAD))
    assert os.fstat(region.place.fd).st_blocks * 512 >= len(PAYLOAD)  # the memory is there, too
    with descriptors(0):
        with pytest.raises(OSError, match="Too many open files"):
            SharedRegion(len(PAYLOAD))
        region.write(0, memoryview(PAYLOAD))
        assert region.seal() == PAYLOAD


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_a_system_that_refuses_is_an_os_error_and_nothing_is_left_open(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(PermissionError):
        SharedRegion(len(PAYLOAD))
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


def test_without_proc_or_memfd_there_is_no_host_to_share_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", missing)
        assert host_id() is None
    with monkeypatch.context() as patch:
        patch.setattr(shared_region, "SEALS", 0)
        assert host_id() is None
    assert host_id() is not None


def test_without_a_descriptor_left_mapping_is_an_os_error() -> None:
    region, _ = region_of()
    with descriptors(0), pytest.raises(OSError, match="Too many open files"):
        map_region(region.place, len(PAYLOAD))


def test_a_region_counts_until_its_last_view_is_gone() -> None:
    mapped = MappedRegions()
    region, view = region_of()
    mapped.add(region.mapping, len(PAYLOAD))
    part = view[10:20]
    del region, view
    gc.collect()
    assert mapped.num_bytes == len(PAYLOAD)
    del part
    gc.collect()
    assert mapped.num_bytes == 0


@pytest.mark.parametrize(("limit", "num_regions"), [(64, 16), (1024, 256), (1 << 15, MAX_REGIONS)])
def test_regions_take_a_share_of_the_descriptors(limit: int, num_regions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    mapped = MappedRegions()
    assert mapped.has_room(num_regions)
    assert not mapped.has_room(num_regions + 1)


def test_regions_that_come_and_go_in_many_threads_are_counted_exactly() -> None:
    mapped, is_over = MappedRegions(), threading.Event()

    def come_and_go() -> None:
        for _ in range(60):
            region = SharedRegion(4096)
            mapped.add(region.mapping, 4096)

    def read() -> None:
        while not is_over.is_set():
            assert 0 <= mapped.num_bytes <= 4 * 2 * 4096

    failed: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, failed.append
    try:
        reader = threading.Thread(target=read)
        threads = [threading.Thread(target=come_and_go) for _ in range(4)]
        for thread in (reader, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        is_over.set()
        reader.join()
    finally:
        threading.excepthook = before
    gc.collect()
    assert not failed
    assert mapped.num_bytes == 0
