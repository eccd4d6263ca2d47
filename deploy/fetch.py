"""`tandem fetch`: download what one role needs of a hub id into the hub's cache, check every byte, and end.

Owns the check: the hub's cache names each blob by its digest, so a download that was cut, or a disk that rots, is
found before a service loads it. What was checked is remembered beside the cache, for a model takes minutes to read.
The hub's library locks each file, so that pods which share a cache fetch it once. Knows nothing of tensors.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import structlog

from common.checkpoint_names import Role
from common.errors import CheckpointError
from common.hub import resolve_checkpoint
from common.logs import LogFormat, LogLevel, configure_logs
from common.settings import command_line

logger = structlog.get_logger(__name__)

CHECKED_SUFFIX = ".checked"
_READ_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


def fetch(
    *,
    model: str,
    role: Role,
    revision: str | None = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Download one role's files of a hub id into the hub's cache (HF_HOME), and check them.

    Parameters
    ----------
    model
        A hub id. A folder is taken as it is, and nothing is checked.
    role
        Whose files: encoder, decoder or gateway.
    revision
        Revision of the hub id: branch, tag or commit.
    log_level
        Least severe level that is logged.
    log_format
        Lines for people, or JSON for collectors.
    """
    configure_logs("fetch", log_level, log_format)
    folder = resolve_checkpoint(model, role, revision)
    checked = [path for path in blobs_of(folder) if check_blob(path)]
    logger.info("the checkpoint is here", folder=str(folder), role=role, files_checked=len(checked))


def blobs_of(snapshot: Path) -> Iterator[Path]:
    """The blobs that a snapshot of the hub's cache links to; nothing for a folder of plain files."""
    for path in sorted(snapshot.rglob("*")):
        if path.is_symlink():
            yield path.resolve()


def check_blob(blob: Path) -> bool:
    """Whether this call read a blob and found it whole; False when it was checked before or its name is no digest.

    A blob that is not what its name says is removed, so that the next try downloads it anew. Raises CheckpointError.
    """
    status = blob.stat()
    facts = f"{status.st_size} {status.st_mtime_ns}"
    marker = blob.with_name(blob.name + CHECKED_SUFFIX)
    if marker.is_file() and marker.read_text() == facts:
        return False
    if _SHA256.fullmatch(blob.name):
        digest = hashlib.sha256()
    elif _GIT_SHA1.fullmatch(blob.name):
        digest = hashlib.sha1(b"blob %d\0" % status.st_size, usedforsecurity=False)
    else:
        return False
    with blob.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    if digest.hexdigest() != blob.name:
        blob.unlink()
        raise CheckpointError(
            f"the download {blob.name} of {status.st_size} bytes has the digest {digest.hexdigest()} and was removed: "
            "start again to download it anew"
        )
    # Written whole or not at all: pods may share the cache.
    unfinished = marker.with_name(f"{marker.name}.{os.getpid()}")
    unfinished.write_text(facts)
    unfinished.replace(marker)
    return True


app = command_line("fetch", fetch)
