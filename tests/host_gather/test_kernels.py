"""The text of the CUDA kernels, compiled by g++ and run thread by thread on the CPU: what they read and write."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dejax.host_gather import _kernels, _spec

CXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(CXX is None, reason="no g++")
HERE = Path(__file__).parent
RNG = np.random.default_rng(0)
IDS = np.concatenate([RNG.integers(-3, 40, 300), np.full(200, 7), np.full(90, -1), [36, 0, 37]]).astype(np.int32)

# `run` fills the parameters as the handlers in native/ do. Its argument types: pointer, int, long long (q), float.
GATHER_TYPES = "pqippqippqpqiifpp"
GATHER = """
extern "C" void run(const char* table, long long rows, int row_bytes, const int* ids, const int* perm, long long n,
                    int fan_out, const int* slots, const char* cache, long long cache_bytes, const float* scale,
                    long long scale_count, int align, int clip, float fill_value, const unsigned char* fill,
                    char* out) {
  GatherParams p = {};
  unsigned long long ticket = 0;
  p.table = table, p.table_end = table + rows * row_bytes, p.ids = ids, p.perm = perm, p.slots = slots;
#if PEERS
  p.peers = reinterpret_cast<const unsigned long long*>(cache), p.peer_bytes = cache_bytes;
#endif
  p.cache = cache, p.cache_end = cache + cache_bytes, p.scale = scale, p.scale_count = scale_count, p.out = out;
  p.ticket = &ticket, p.n = n, p.rows = rows, p.row_bytes = row_bytes, p.fan_out = fan_out, p.clip = clip;
  p.fill_value = fill_value;
  std::memcpy(p.fill.bytes, fill, 16);
  const int unit = row_bytes & -row_bytes;
  p.align = align;
  p.chunks = (row_bytes + (unit >= align ? 0 : align - (unit < 16 ? unit : 16)) + 15) / 16;
  if (align == 128) p.chunks = (p.chunks + 7) / 8 * 8;
  p.lanes = p.chunks % 8 == 0 || p.chunks > 32 ? 32 : 32 / p.chunks * p.chunks;
  RunGrid(dejax_gather, p, 3);
}
"""
UPDATE_TYPES = "pqippppqpp"
UPDATE = """
extern "C" void run(char* table, long long rows, int row_bytes, float* first, float* second, const int* ids,
                    const int* perm, long long n, const char* values, const float* hyper) {
  unsigned long long ticket = 0;
  UpdateParams p = {table, first, second, ids, perm, values, hyper, &ticket, n, rows, row_bytes};
  RunGrid(dejax_update, p, 3);
}
"""


CTYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "q": ctypes.c_longlong, "f": ctypes.c_float}


def compiled(folder: Path, file: str, call: str, types: str, **definitions: int | str) -> Callable[..., None]:
    """`run` of `call`, compiled together with the kernels of `file`; it takes numpy arrays for pointers."""
    source = '#include "kernels_on_cpu.h"\n' + _kernels._source(file).replace("#pragma once", "") + call
    (folder / "kernel.cc").write_text(source)
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    library = folder / f"kernel{abs(hash(tuple(options)))}.so"
    flags = "-std=c++17 -shared -fPIC -w -fsanitize=undefined -fno-sanitize-recover=undefined"
    command = [CXX, *flags.split(), f"-I{HERE}", *options, str(folder / "kernel.cc"), "-o", str(library)]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(library)).run
    function.argtypes = [CTYPES[letter] for letter in types]
    return lambda *args: function(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in args))


def gather_kernel(folder: Path, rows: np.ndarray, codes: tuple[int, int], **macros: int) -> Callable[..., None]:
    """`gather.cu` for rows like these, with the element codes of rows and result. Macros that are not given are 0."""
    off = dict.fromkeys(("SORTED", "TICKET", "CACHED", "SPLIT", "PEERS", "SKIP", "MEAN"), 0)
    forms = {
        "ID": "int",
        "UNIT": _spec.store_unit(rows[0].nbytes),
        "SOURCE": codes[0],
        "RESULT": codes[1],
        "POSITION": "int",
    }
    return compiled(folder, "gather.cu", GATHER, GATHER_TYPES, **forms, **{**off, **macros})


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 4096 bytes, between bytes of 0xEE."""
    room = np.full(array.nbytes + 8192, 0xEE, np.uint8)
    start = -room.ctypes.data % 4096
    found = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


@pytest.mark.parametrize(
    ("width", "dtype", "out", "sort", "ticket", "cached", "clip"),  # cached: 2 for a split table, 3 for one of blocks
    [
        pytest.param(128, np.float32, None, False, False, False, False, marks=pytest.mark.slow),
        (100, np.float32, None, True, True, False, False),
        pytest.param(12, np.float32, None, True, True, False, False, marks=pytest.mark.slow),
        pytest.param(250, np.float32, None, False, False, False, False, marks=pytest.mark.slow),
        pytest.param(25, np.float32, None, True, True, False, True, marks=pytest.mark.slow),
        (129, np.float32, None, True, True, True, True),
        (33, np.int8, None, False, True, True, False),
        (33, np.int8, None, False, True, 3, False),
        pytest.param(37, np.int8, ml_dtypes.bfloat16, True, True, False, False, marks=pytest.mark.slow),
        pytest.param(1, np.float32, np.float16, False, False, False, True, marks=pytest.mark.slow),
        pytest.param(64, np.int8, np.float32, True, True, False, False, marks=pytest.mark.slow),
        pytest.param(
            48, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, False, False, True, False, marks=pytest.mark.slow
        ),
        pytest.param(12, np.float32, np.float16, False, True, False, True, marks=pytest.mark.slow),
        pytest.param(6, np.float64, np.float16, False, False, False, False, marks=pytest.mark.slow),
        pytest.param(4, np.float32, np.float32, False, False, False, False, marks=pytest.mark.slow),
        pytest.param(128, np.float32, None, True, True, 2, False, marks=pytest.mark.slow),
        (25, np.float32, None, False, False, 2, True),
        pytest.param(80, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, True, True, 2, False, marks=pytest.mark.slow),
    ],
)
def test_gather(
    tmp_path: Path, width: int, dtype: type, out: type | None, sort: bool, ticket: bool, cached: int, clip: bool
) -> None:
    rows = aligned(RNG.integers(-100, 100, (37, width)).astype(dtype))
    result = np.dtype(out or dtype)
    codes = (_spec.ELEMENT_CODES[rows.dtype.name], _spec.RESULT_CODES[result.name]) if out else (-1, -1)
    split, peers = int(cached) // 2, 2 * (cached == 3)
    macros = {"SORTED": int(sort), "TICKET": int(ticket), "CACHED": int(cached > 0), "SPLIT": split, "PEERS": peers}
    run = gather_kernel(tmp_path, rows, codes, **macros)
    order = np.argsort(IDS, kind="stable").astype(np.int32) if sort else np.arange(len(IDS), dtype=np.int32)
    slots = np.full(37, -1, np.int32)
    slots[[0, 7, 36]] = [2, 0, 1]
    cache = aligned(rows[[7, 36, 0]])
    cache_bytes = cache.nbytes
    if peers:  # row i is row i // 2 of block i % 2
        blocks = [aligned(cache[[0, 2]]), aligned(cache[[1, 1]])]
        cache, cache_bytes = np.array([block.ctypes.data for block in blocks], np.uint64), blocks[0].nbytes
    table = rows
    if split:
        slots[slots < 0] = ~np.arange(34, dtype=np.int32)
        table = aligned(rows[slots < 0])
    got = np.full((len(IDS) + 1, width), 111, result)  # the row after the last one must stay as it is
    fill, nothing = np.full(16, 9, np.uint8), np.zeros(1, np.float32)
    align = 128 if rows[0].nbytes >= 256 and rows[0].nbytes % 128 else 16
    run(
        table,
        37,
        rows[0].nbytes,
        IDS[order],
        order,
        len(IDS),
        1,
        slots,
        cache,
        cache_bytes,
        nothing,
        0,
        align,
        int(clip),
        3,
        fill,
        got,
    )
    inside = (IDS >= 0) & (IDS < 37) | clip
    filler = np.asarray(3).astype(result) if out else np.frombuffer(fill.tobytes(), result)[0]
    want = np.where(inside[:, None], rows[np.clip(IDS, 0, 36)].astype(result), filler)
    np.testing.assert_array_equal(got[:-1].astype(np.float64), want.astype(np.float64))
    assert (got[-1].astype(np.float64) == 111).all()


@pytest.mark.parametrize("sort", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gather_that_skips_ids_out_of_range(tmp_path: Path, sort: bool) -> None:
    rows = aligned(RNG.standard_normal((37, 25)).astype(np.float32))
    run = gather_kernel(tmp_path, rows, (-1, -1), SORTED=int(sort), TICKET=int(sort), SKIP=1)
    order = np.argsort(IDS, kind="stable").astype(np.int32) if sort else np.arange(len(IDS), dtype=np.int32)
    got, fill, nothing = np.full((len(IDS), 25), 111, np.float32), np.full(16, 9, np.uint8), np.zeros(1, np.float32)
    none = np.zeros(0, np.int32)
    run(rows, 37, 100, IDS[order], order, len(IDS), 1, none, none, 0, nothing, 0, 16, 0, 3, fill, got)
    inside = (IDS >= 0) & (IDS < 37)
    np.testing.assert_array_equal(got, np.where(inside[:, None], rows[np.clip(IDS, 0, 36)], np.float32(111)))


@pytest.mark.parametrize("width", [5, pytest.param(32, marks=pytest.mark.slow)])
def test_mean(tmp_path: Path, width: int) -> None:
    rows = aligned(RNG.integers(-100, 100, (37, width)).astype(np.float32))
    run = gather_kernel(tmp_path, rows, (0, 0), MEAN=1)
    ids = IDS[:300].reshape(50, 6).copy()
    ids[3] = -1
    got, nothing = np.full((51, width), 111, np.float32), np.zeros(4, np.float32)
    run(
        rows,
        37,
        rows[0].nbytes,
        ids,
        nothing,
        50,
        6,
        nothing,
        nothing,
        0,
        nothing,
        0,
        16,
        0,
        3,
        np.zeros(16, np.uint8),
        got,
    )
    inside = ((ids >= 0) & (ids < 37))[..., None]
    count = inside.sum(1)
    want = np.where(count > 0, (rows[np.clip(ids, 0, 36)] * inside).sum(1) / np.maximum(count, 1), 3)
    np.testing.assert_allclose(got[:-1], want, rtol=1e-5)
    assert (got[-1] == 111).all()


UPDATES = [(1, 100, "float32"), (4, 24, "bfloat16")]
MORE = [
    (3, 7, "float32"),
    (0, 7, "float32"),
    (3, 32, "float32"),
    (3, 10, "float16"),
    (4, 64, "float32"),
    (4, 5, "float32"),
    (4, 7, "float16"),
]
UPDATES += [pytest.param(*case, marks=pytest.mark.slow) for case in [*MORE, (4, 2, "bfloat16")]]


@pytest.mark.parametrize(("op", "width", "dtype"), UPDATES)
def test_update(tmp_path: Path, op: int, width: int, dtype: str) -> None:
    """Rows and state of every alignment; what no id names stays."""
    rows = aligned(RNG.standard_normal((37, width)).astype(getattr(ml_dtypes, dtype, dtype)))
    before = rows.astype(np.float32)
    first, second = (aligned(np.full((37, width), x, np.float32)) for x in (0.5, 0.25))
    kind = -1 if op == 0 else _spec.RESULT_CODES[dtype]
    run = compiled(
        tmp_path,
        "update.cu",
        UPDATE,
        UPDATE_TYPES,
        ID="int",
        UNIT=_spec.store_unit(rows[0].nbytes),
        OP=op,
        TABLE=kind,
        VALUES=-1 if op == 0 else 0,
    )
    values = RNG.standard_normal((len(IDS), width)).astype(np.float32)
    order = np.argsort(IDS, kind="stable").astype(np.int32)
    hyper = np.array([0.1, 0.9, 0.99, 1e-3, 0.5, 0.25, 0], np.float32)
    run(rows, 37, rows[0].nbytes, first, second, IDS[order], order, len(IDS), values, hyper)
    inside = (IDS >= 0) & (IDS < 37)
    want, sums, named = before.copy(), np.zeros_like(before), np.isin(np.arange(37), IDS)[:, None]
    np.add.at(sums, IDS[inside], values[inside])
    moments = [np.full_like(before, 0.5), np.full_like(before, 0.25)]
    if op == 0:
        for i in np.flatnonzero(inside):
            want[IDS[i]] = values[i]
    elif op == 1:
        want += sums
    elif op == 3:
        moments[0] += sums**2
        want -= 0.1 * sums / (np.sqrt(moments[0]) + 1e-3)
    else:
        changed = [0.9 * 0.5 + 0.1 * sums, 0.99 * 0.25 + 0.01 * sums**2]
        moments = [np.where(named, new, old) for new, old in zip(changed, moments, strict=True)]
        step = 0.1 * moments[0] / 0.5 / (np.sqrt(moments[1] / 0.25) + 1e-3)
        want -= np.where(named, step, 0)
    tolerance = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(rows.astype(np.float32), want, rtol=tolerance, atol=tolerance)
    for got, new in zip((first, second), moments, strict=True):
        np.testing.assert_allclose(got, new, rtol=1e-4, atol=1e-6)
