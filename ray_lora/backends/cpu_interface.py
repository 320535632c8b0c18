"""The C functions of `kernels/cpu/api.cpp` and `all_reduce.cpp`: their arguments, and what their errors mean."""

import ctypes

LEVELS = ("portable", "avx2", "avx512")
"""Instruction sets in rising order, as `kernels/cpu/api.cpp` numbers them."""

ERRORS = {
    1: "segments: row_starts and page_starts must rise from 0 to the end of rows and pages",
    2: "segments.rows names a row outside x and y",
    3: "segments.pages names a page outside the pool",
    4: "tables: query_starts must rise from 0 to the number of tokens, and context_lens hold a sequence's queries "
    "within its block table",
    5: "tables.block_tables names a block outside the cache",
    6: "tables.positions names a position outside cos and sin",
    7: "tables.slot_mapping names a slot outside the cache",
}

_pointer, _int, _float, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64

_ARGUMENTS = {
    "rl_add_lora": [_pointer, _size, _pointer, _size, _size, _int, _pointer, _pointer, _int],
    "rl_paged_attention": [_pointer, _pointer, _size, _size, _pointer, _pointer, _float, _size, _int, _int],
    "rl_rotary_and_cache": [
        *(_pointer, _size, _size, _pointer, _pointer, _float),
        *(_pointer, _pointer, _size, _pointer, _pointer, _int, _int),
    ],
    "rl_linear": [_pointer, _pointer, _size, _size, _pointer, _pointer, _size, _size, _int, _int],
    "rl_linear_lora": [
        *(_pointer, _pointer, _size, _size, _pointer, _pointer, _size, _size, _int),
        *(_pointer, _pointer, _int),
    ],
    "rl_rms_norm": [_pointer, _pointer, _size, _pointer, _size, _pointer, _size, _size, _float, _int, _int],
    "rl_silu_and_mul": [_pointer, _pointer, _size, _size, _size, _int, _int],
    "rl_all_reduce_bytes": [_size, _size],
    "rl_all_reduce": [_pointer, _pointer, *[_size] * 4, _pointer, ctypes.c_double],
    "rl_panel_size": [],
    "rl_best_level": [],
    "rl_set_level": [_int],
}


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes how to call the functions of a library of kernels.

    Raises:
        AttributeError: it lacks one, so it was built from other sources.
    """
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.rl_rms_norm.restype = library.rl_silu_and_mul.restype = library.rl_linear.restype = None
    library.rl_all_reduce_bytes.restype = _size
