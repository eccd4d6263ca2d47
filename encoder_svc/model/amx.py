"""The compiled kernels for processors with AMX: whether they are there and may run, and what their functions take.

Owns the loading of the library, which is optional: it is built at installation where there is a compiler. Knows nothing
of what the kernels are for. Loaded once, called in the compute thread.
"""

import ctypes
import functools
from pathlib import Path

from common.compiled_library import find_compiled_library

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "tandem_attend_segments": [*[_POINTER] * 4, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _INT, _INT, _FLOAT, _INT],
    "tandem_project_qkv": [*[_POINTER] * 3, _FLOAT, *[_POINTER] * 5, *[_SIZE] * 4, _INT],
    "tandem_merge": [*[_POINTER] * 3, _FLOAT, _SIZE, *[_POINTER] * 5, *[_SIZE] * 5, _INT],
    "tandem_finish_block": [*[_POINTER] * 6, _FLOAT, *[_POINTER] * 4, *[_SIZE] * 4, _INT],
}


@functools.cache
def amx_library() -> ctypes.CDLL | None:
    """The kernels, where they were built and the processor and the system let them run."""
    path = find_compiled_library(Path(__file__).parent, "_amx")
    library = None if path is None else ctypes.CDLL(str(path))
    if library is None or not library.tandem_amx_is_there():
        return None
    for function, types in _SIGNATURES.items():
        getattr(library, function).argtypes = types
    return library
