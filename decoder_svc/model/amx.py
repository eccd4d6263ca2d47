"""The kernels for processors with AMX: whether they are there and may run, and what their functions take.

Owns the loading of what the library has for such processors; the library is optional: it is built at installation where
there is a compiler. Knows nothing of what the kernels are for. Loaded once, called in the compute thread.
"""

import ctypes
import functools
from pathlib import Path

from common.compiled_library import find_compiled_library

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# Of those that return something; the others return nothing.
_RESULTS = {
    "tandem_linear_amx": _INT,
    "tandem_attend_prefill_amx": _INT,
    "tandem_run_layers": _INT,
    "tandem_layers_scratch": _SIZE,
    "tandem_max_compressed_block": _SIZE,
}
_SIGNATURES = {
    "tandem_linear_amx": [*[_POINTER] * 4, *[_SIZE] * 3, _INT],
    "tandem_max_compressed_block": [],
    "tandem_rms_norm_amx": [*[_POINTER] * 4, _SIZE, _SIZE, ctypes.c_float, _INT],
    "tandem_silu_gate_amx": [*[_POINTER] * 2, _SIZE, _SIZE, _INT],
    "tandem_store_heads_compressed": [*[_POINTER] * 9, *[_SIZE] * 5, ctypes.c_float, _INT],
    "tandem_attend_decode_amx": [*[_POINTER] * 5, _SIZE, *[_POINTER] * 3, *[_SIZE] * 5, _INT],
    "tandem_attend_prefill_amx": [*[_POINTER] * 5, _SIZE, *[_POINTER] * 3, *[_SIZE] * 5, _INT],
    "tandem_layers_scratch": [_POINTER, _SIZE],
    "tandem_run_layers": [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER],
}


@functools.cache
def amx_library() -> ctypes.CDLL | None:
    """The kernels, where they were built and the processor and the system let them run."""
    path = find_compiled_library(Path(__file__).parent, "_kernels")
    library = None if path is None else ctypes.CDLL(str(path))
    if library is None or not library.tandem_amx_is_there():
        return None
    for function, types in _SIGNATURES.items():
        getattr(library, function).argtypes = types
        getattr(library, function).restype = _RESULTS.get(function)
    return library
