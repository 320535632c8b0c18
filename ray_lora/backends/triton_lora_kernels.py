"""The Triton source of `add_lora_`, for NPU and CUDA: one kernel for decode, one for prefill.

Both follow `ray_lora.ops.lora.add_lora_reference_`. One launch serves every adapter and every slice of a layer. A unit
of work is a tile, some rows of one adapter, and one slice of the output: its program computes S once, in float32, and
then walks the slice's columns, so a tile reads each of its pages once. The tiles are cut on the host, once per step
(`ray_lora.backends.lora_plan`); on the device nothing branches, the loops' bounds come from the tables.

    y, x      [num_tokens, N], [num_tokens, K]    rows `stride_y` and `stride_x` elements apart
    pool_a    [num_pages, num_slices, 16, K]      contiguous
    pool_b    [num_pages, 16, N]                  contiguous, the scale folded in
    slices    [num_slices + 1] int32              column offsets
    tiles     [num_tiles, 4] int32                row start, row stop, first and last + 1 entry of `pages`
    pages     [num_page_entries] int32            page ids

`MAX_PAGES`, a power of two, bounds the pages of one adapter. A row's sums run over k and over pages in one order,
whatever else is in its tile, so its result does not depend on its neighbours.
"""

import triton
import triton.language as tl

PAGE_RANK = tl.constexpr(16)


@triton.jit
def _read_tile(tile):
    """Its rows and its entries of `pages`, each as start and stop."""
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit(do_not_specialize=["num_slices", "num_work"])
def add_lora_decode(
    y, x, pool_a, pool_b, slices, rows, tiles, pages, stride_y, stride_x, K, N, num_slices, num_work,
    MAX_ROWS: tl.constexpr, MAX_PAGES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Few rows per adapter, anywhere in the batch: a tile's rows are the entries of `rows` in its range.

    Each row is a product of vectors, so a tile costs what its own rows cost. On an NPU the vector cores run it and S
    stays in their buffer. A tile without rows moves nothing, so that a captured launch can have more than it needs.

        rows  [num_rows] int32    row indices of x and y
    """
    rank = tl.arange(0, PAGE_RANK)
    entry = tl.arange(0, MAX_ROWS * MAX_PAGES)
    tile_row = tl.arange(0, MAX_ROWS)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        part = work % num_slices
        row_start, row_stop, page_start, page_stop = _read_tile(tiles + work // num_slices * 4)
        n_start = tl.load(slices + part)
        n_stop = tl.where(row_start < row_stop, tl.load(slices + part + 1), n_start)

        s = tl.zeros((MAX_ROWS * MAX_PAGES, PAGE_RANK), tl.float32)
        for p in range(page_start, page_stop):
            lora_a = pool_a + (tl.load(pages + p).to(tl.int64) * num_slices + part) * PAGE_RANK * K
            for k_start in range(0, K, BLOCK_K):
                k = k_start + tl.arange(0, BLOCK_K)
                a = tl.load(lora_a + rank[:, None] * K + k[None, :], mask=k[None, :] < K, other=0).to(tl.float32)
                for r in range(row_start, row_stop):
                    x_row = x + tl.load(rows + r).to(tl.int64) * stride_x
                    inputs = tl.load(x_row + k, mask=k < K, other=0).to(tl.float32)
                    here = entry == (r - row_start) * MAX_PAGES + p - page_start
                    s += tl.where(here[:, None], tl.sum(a * inputs[None, :], 1)[None, :], 0.0)

        for n_block in range(n_start, n_stop, BLOCK_N):
            n = n_block + tl.arange(0, BLOCK_N)
            if MAX_PAGES == 1:
                lora_b = pool_b + tl.load(pages + page_start).to(tl.int64) * PAGE_RANK * N
                b = tl.load(lora_b + rank[:, None] * N + n[None, :], mask=n[None, :] < n_stop, other=0).to(tl.float32)
                for r in range(row_start, row_stop):
                    s_row = tl.sum(tl.where((entry == r - row_start)[:, None], s, 0.0), 0)
                    outputs = y + tl.load(rows + r).to(tl.int64) * stride_y + n
                    _add(outputs, n < n_stop, tl.sum(s_row[:, None] * b, 0))
            else:
                delta = tl.zeros((MAX_ROWS, BLOCK_N), tl.float32)
                for p in range(page_start, page_stop):
                    lora_b = pool_b + tl.load(pages + p).to(tl.int64) * PAGE_RANK * N
                    b = tl.load(lora_b + rank[:, None] * N + n[None, :], mask=n[None, :] < n_stop, other=0)
                    b = b.to(tl.float32)
                    for r in range(row_start, row_stop):
                        here = entry == (r - row_start) * MAX_PAGES + p - page_start
                        s_row = tl.sum(tl.where(here[:, None], s, 0.0), 0)
                        term = tl.sum(s_row[:, None] * b, 0)
                        delta += tl.where((tile_row == r - row_start)[:, None], term[None, :], 0.0)
                for r in range(row_start, row_stop):
                    outputs = y + tl.load(rows + r).to(tl.int64) * stride_y + n
                    added = tl.sum(tl.where((tile_row == r - row_start)[:, None], delta, 0.0), 0)
                    _add(outputs, n < n_stop, added)


@triton.jit
def _add(outputs, mask, delta):
    """Add a float32 delta to outputs, rounding once."""
    result = tl.load(outputs, mask=mask, other=0).to(tl.float32) + delta
    tl.store(outputs, result.to(outputs.dtype.element_ty), mask=mask)


@triton.jit
def _shrink(x_rows, stride_x, lora_a, K, here, MAX_ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """x @ A.T of one page, [MAX_ROWS, 16] in float32; rows that are not `here` are zero."""
    rank, row = tl.arange(0, PAGE_RANK), tl.arange(0, MAX_ROWS)
    s = tl.zeros((MAX_ROWS, PAGE_RANK), tl.float32)
    for k_start in range(0, K, BLOCK_K):
        k = k_start + tl.arange(0, BLOCK_K)
        a = tl.load(lora_a + rank[:, None] * K + k[None, :], mask=k[None, :] < K, other=0)
        inputs = tl.load(x_rows + row[:, None] * stride_x + k[None, :], mask=here[:, None] & (k[None, :] < K), other=0)
        if a.dtype != inputs.dtype:
            a, inputs = a.to(tl.float32), inputs.to(tl.float32)
        s = tl.dot(inputs, tl.trans(a), s, input_precision="ieee")
    return s


@triton.jit
def _expand(s, b, delta):
    """delta + s @ b with all 24 bits of s.

    bfloat16 has the range of float32, so three of them hold s exactly and b is multiplied as it is stored. Other types
    are multiplied in float32.
    """
    if b.dtype == tl.bfloat16:
        high = s.to(tl.bfloat16)
        rest = s - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        delta = tl.dot(high, b, delta)
        delta = tl.dot(middle, b, delta)
        delta = tl.dot(low, b, delta)
    else:
        delta = tl.dot(s, b.to(tl.float32), delta, input_precision="ieee")
    return delta


@triton.jit(do_not_specialize=["num_slices", "num_work"])
def add_lora_prefill(
    y, x, pool_a, pool_b, slices, tiles, pages, stride_y, stride_x, K, N, num_slices, num_work,
    MAX_ROWS: tl.constexpr, MAX_PAGES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Many adjacent rows per adapter: a tile is rows `row start` to `row stop` of x and y themselves.

    Both products are matrix products, on an NPU's cube cores. With one page S goes straight from one to the other;
    with more, the pages' S lie side by side, [MAX_ROWS, MAX_PAGES, 16], and each is picked out by a mask.
    """
    rank, row = tl.arange(0, PAGE_RANK), tl.arange(0, MAX_ROWS)
    slot = tl.arange(0, MAX_PAGES)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        part = work % num_slices
        row_start, row_stop, page_start, page_stop = _read_tile(tiles + work // num_slices * 4)
        n_start, n_stop = tl.load(slices + part), tl.load(slices + part + 1)
        x_rows = x + row_start.to(tl.int64) * stride_x
        y_rows = y + row_start.to(tl.int64) * stride_y
        here = row < row_stop - row_start

        if MAX_PAGES == 1:
            page = tl.load(pages + page_start).to(tl.int64)
            lora_a = pool_a + (page * num_slices + part) * PAGE_RANK * K
            s = _shrink(x_rows, stride_x, lora_a, K, here, MAX_ROWS, BLOCK_K)
        else:
            s = tl.zeros((MAX_ROWS, MAX_PAGES, PAGE_RANK), tl.float32)
            for p in range(page_start, page_stop):
                lora_a = pool_a + (tl.load(pages + p).to(tl.int64) * num_slices + part) * PAGE_RANK * K
                s_page = _shrink(x_rows, stride_x, lora_a, K, here, MAX_ROWS, BLOCK_K)
                s += tl.where((slot == p - page_start)[None, :, None], s_page[:, None, :], 0.0)

        for n_block in range(n_start, n_stop, BLOCK_N):
            n = n_block + tl.arange(0, BLOCK_N)
            delta = tl.zeros((MAX_ROWS, BLOCK_N), tl.float32)
            if MAX_PAGES == 1:
                lora_b = pool_b + tl.load(pages + page_start).to(tl.int64) * PAGE_RANK * N
                b = tl.load(lora_b + rank[:, None] * N + n[None, :], mask=n[None, :] < n_stop, other=0)
                delta = _expand(s, b, delta)
            else:
                for p in range(page_start, page_stop):
                    lora_b = pool_b + tl.load(pages + p).to(tl.int64) * PAGE_RANK * N
                    b = tl.load(lora_b + rank[:, None] * N + n[None, :], mask=n[None, :] < n_stop, other=0)
                    s_page = tl.sum(tl.where((slot == p - page_start)[None, :, None], s, 0.0), 1)
                    delta = _expand(s_page, b, delta)
            outputs = y_rows + row[:, None] * stride_y + n[None, :]
            _add(outputs, here[:, None] & (n[None, :] < n_stop), delta)
