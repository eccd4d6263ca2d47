"""Media in a folder of the gateway's own machine, for `file:` URLs; only where the operator has named the folder.

Owns the rule that nothing outside of it is read: a path is followed to its end, links and all, before it is compared,
and only plain files are opened. Errors name the item, never a path. May run in a thread.
"""

import errno
import os
import stat
import urllib.parse
from pathlib import Path

from common.errors import ConfigError, InvalidRequest, MediaFetchFailed, MediaTooLarge


class MediaFolder:
    """The folder. Raises ConfigError when there is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        if not self._folder.is_dir():
            raise ConfigError(f"--allowed-local-media-path {folder} is not a folder")

    def read(self, url: str, max_bytes: int, param: str) -> bytes:
        """The file behind a `file:` URL. Raises InvalidRequest, MediaTooLarge or MediaFetchFailed, naming `param`."""
        path = self._inside(url, param)
        try:
            data = _read_plain_file(path, max_bytes + 1)
        except OSError as exc:
            raise MediaFetchFailed(f"{param}: there is no such file in the media folder", param=param) from exc
        if len(data) > max_bytes:
            raise MediaTooLarge(
                f"{param}: the file has more than the limit of {max_bytes} bytes for one item: use a smaller file",
                param=param,
            )
        if not data:
            raise MediaFetchFailed(f"{param}: the file is empty", param=param)
        return data

    def _inside(self, url: str, param: str) -> Path:
        try:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
                raise ValueError("not a plain file URL")
            path = Path(urllib.parse.unquote(parts.path, errors="strict")).resolve()
            is_inside = path.is_relative_to(self._folder)
        except (ValueError, OSError, RuntimeError) as exc:
            raise InvalidRequest(f"{param} is not a valid file URL: write file:///folder/name", param=param) from exc
        if not is_inside:
            raise InvalidRequest(
                f"{param} is a file URL that does not lead into the folder for media: send the file as a data URI",
                param=param,
            )
        return path


def _read_plain_file(path: Path, max_bytes: int) -> bytes:
    # No link as the last step, which may have appeared since; and no waiting for a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(descriptor)
