"""Where the installation put a compiled library, if it could build it. Knows nothing of what is in it."""

import importlib.machinery
from pathlib import Path


def find_compiled_library(folder: Path, name: str) -> Path | None:
    """The library `name` in a folder, under any of the endings that this Python gives to extensions."""
    paths = (folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)
