"""A payload in memory that processes of one host share: written once, then unchangeable, and mapped by whoever is told.

The memory is a file without a name (memfd) that its owner seals once it is written, and opens to others as a descriptor
of its own process. The kernel then refuses every change, of its bytes as of its size, so that what was checked stays
checked; and it ends with the last process that has it, however that process ends. Knows nothing of what the bytes mean.
"""

import fcntl
import hashlib
import itertools
import mmap
import os
import resource
import secrets
import weakref
from pathlib import Path

from common.errors import ProtocolError
from common.messages import SharedMemory

SEALS = (
    fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    if hasattr(os, "memfd_create")
    else 0
)
O_PATH = getattr(os, "O_PATH", 0)
MAX_REGIONS = 4096
DESCRIPTORS_SHARE = 4  # a region may be mapped for every so many descriptors that this process may have


def host_id() -> str | None:
    """The same text in all processes that can open each other's descriptors; None where there is no shared memory.

    These are processes of one user, in one namespace of process ids, since one start of the machine.
    """
    if not SEALS:
        return None
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat()
    except OSError:  # a container without /proc
        return None
    facts = f"{booted} {namespace.st_dev} {namespace.st_ino} {os.geteuid()}"
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


class SharedRegion:
    """Memory of `num_bytes` that is filled, sealed, and held until the last reference to it or to its view is gone.

    Raises OSError when the system has no memory or descriptor left: now, and not while it is filled or sealed.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._name = secrets.token_hex(16)
        self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd).atexit = False
        os.posix_fallocate(self._fd, 0, num_bytes)
        # A private mapping does not keep the file from being sealed; nobody writes to it, so it shows the file.
        self.mapping = mmap.mmap(self._fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)

    def write(self, start: int, source: memoryview) -> None:
        """Fill `[start, start + len(source))`."""
        while source:
            count = os.pwrite(self._fd, source, start)
            source, start = source[count:], start + count

    def seal(self) -> memoryview:
        """End the writing; gives a read-only view of the bytes."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        return memoryview(self.mapping)

    @property
    def place(self) -> SharedMemory:
        """Where another process of this host finds it."""
        return SharedMemory(pid=os.getpid(), fd=self._fd, name=self._name)


def map_region(place: SharedMemory, num_bytes: int) -> memoryview:
    """The bytes of a sealed region of another process. What is written into the view stays in this process.

    Raises ProtocolError unless there is a sealed region of that name and size, and OSError when it cannot be opened.
    """
    # Without opening it at first: to open a device that somebody names may do something.
    handle = os.open(f"/proc/{place.pid}/fd/{place.fd}", O_PATH | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{handle}") != f"/memfd:{place.name} (deleted)":
            raise ProtocolError("the process that is named has no such shared memory")
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ProtocolError("the shared memory may still change")
        if (size := os.fstat(fd).st_size) != num_bytes:
            raise ProtocolError(f"the shared memory has {size} bytes, expected {num_bytes}")
        return memoryview(mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)


class MappedRegions:
    """The regions that this process has mapped, as long as anybody holds a view of them.

    Each keeps a descriptor open, two in its owner, which is why there may only be so many. Safe to use from several
    threads; a region may end in any of them, at any time.
    """

    def __init__(self) -> None:
        self._bytes_of: dict[int, int] = {}  # by number: each access to it is one step, so no lock can be in the way
        self._numbers = itertools.count()
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_regions = min(MAX_REGIONS, soft_limit // DESCRIPTORS_SHARE)

    def add(self, mapping: object, num_bytes: int) -> None:
        """Count a region until its `mapping`, which its views keep, is gone."""
        number = next(self._numbers)
        self._bytes_of[number] = num_bytes
        weakref.finalize(mapping, self._bytes_of.pop, number).atexit = False

    def has_room(self, num_more: int = 1) -> bool:
        """Whether so many more may be mapped."""
        return len(self._bytes_of) + num_more <= self._max_regions

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(list(self._bytes_of.values()))
