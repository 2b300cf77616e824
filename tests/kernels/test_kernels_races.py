"""The race detector: it finds each race under the schedule that hides it, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kernels_helpers import Bench, paged_attention_inputs, recipe, rope_tables

from kernels.lift import lift, lift_text, own_path
from kernels.replace import replace_function
from kernels.simt import Executor, LaunchError

OWN = own_path().read_text()
BARRIER = "__syncthreads();"
BARRIERS = [m.start() for m in re.finditer(re.escape(BARRIER), OWN)]
NO_RACE: set[object] = set()


def watched(text: str) -> Bench:
    return Bench(Executor(lift_text(text, Path("user.cu")), races=True))


def found(bench: Bench) -> set[tuple[str, str, str, str]]:
    """(kernel, array, the two sides' lines and what they do) of what was found."""
    return {
        (r.kernel, r.array, f"{a.kind} at {a.place}", f"{b.kind} at {b.place}")
        for r in bench.executor.take_races()
        for a, b in [sorted((r.first, r.second), key=lambda side: (str(side.place), side.kind))]
    }


def line_of(text: str, words: str, nth: int = 0) -> int:
    at = [m.start() for m in re.finditer(re.escape(words), text)][nth]
    return text.count("\n", 0, at) + 1


# --- the eleven kernels ---------------------------------------------------------------------------


def run_norm(bench: Bench) -> None:
    x = bench.put(recipe("x", (2, 2048), 1.0), "x")
    bench.call("rmsNorm", x, bench.new((2, 2048)), bench.put(recipe("w", (2048,), 1.0)), 2)


def run_softmax(bench: Bench) -> None:
    bench.call("softmax", bench.put(recipe("s", (32, 33, 33), 1.0), "scores"), 33)


def run_softmax_decode(bench: Bench) -> None:
    bench.call("softmaxDecode", bench.put(recipe("s", (32, 2048), 1.0), "scores"), 20)


def run_attention(bench: Bench) -> None:
    q, *rest = (bench.put(values) for values in paged_attention_inputs((2, 17)))
    bench.call("pagedAttention", 7, 2, q, *rest, q)  # output in q's own buffer, as upstream has it


def run_the_rest(bench: Bench) -> None:
    n = 17
    x, y = (bench.put(recipe(name, (n, 2048), 1.0), name) for name in "xy")
    tokens, out = bench.put(np.arange(n, dtype=np.int32)), bench.new((n, 2048))
    bench.call("embeddingGather", tokens, out, x, n)
    bench.call("embeddingGatherDecode", tokens, 2, out, x)
    bench.call("residualAdd", x, y, n)
    wide = [bench.put(recipe(name, (n, 8192), 1.0), name) for name in ("gate", "up")]
    bench.call("silu", *wide, n)
    tables = dict(zip(("inv_freq", "cos", "sin"), map(bench.put, rope_tables()), strict=True))
    bench.call("rope", x, n, 2048, globals=tables)
    bench.call("rope", x, n, 512, globals=tables)
    bench.call("ropeDecode", x, 257, 2048)
    bench.call("causalMask", bench.put(recipe("s", (32, n, n), 1.0)), n)


ALL_RUNS = (run_norm, run_softmax, run_softmax_decode, run_the_rest)


def test_the_attention_race_is_found_under_the_benign_schedule() -> None:
    bench = Bench(Executor(lift(), races=True))
    run_attention(bench)
    (race,) = bench.executor.take_races()
    read = line_of(OWN, "float score = dot_products[0];")
    write = line_of(OWN, "dot_products[threadIdx.x / 32] = product;")
    assert race.sentence == (
        "pagedAttentionKernel races on shared memory dot_products[0]: thread 32 reads it at line "
        f"{read}, thread 0 writes it at line {write}, and nothing orders the two."
    )
    assert race.remedy == (
        "no barrier orders the two accesses to dot_products: put a __syncthreads() after line "
        f"{read}, before the loop comes round to line {write}."
    )
    assert race.line == write
    assert bench.executor.take_races() == []


def test_nothing_is_found_in_the_ten_other_kernels() -> None:
    bench = Bench(Executor(lift(), races=True))
    for run in ALL_RUNS:
        run(bench)
    assert found(bench) == NO_RACE


@pytest.mark.parametrize("schedule", ["benign", "ahead", "ahead-reversed", "random:3"])
def test_nothing_is_found_once_attention_has_its_barrier(schedule: str) -> None:
    repair = own_path().parent / "repairs" / "attention-race.cu"
    file = replace_function(lift(), repair)
    bench = Bench(Executor(file, schedule, races=True))
    run_attention(bench)
    assert found(bench) == NO_RACE


def test_a_race_in_a_repairs_file_is_told_with_that_files_name(tmp_path: Path) -> None:
    text = (own_path().parent / "repairs" / "attention-race.cu").read_text()
    (tmp_path / "mine.cu").write_text(text.replace("__syncthreads();  // the repair", ""))
    bench = Bench(Executor(replace_function(lift(), tmp_path / "mine.cu"), races=True))
    run_attention(bench)
    (race,) = bench.executor.take_races()
    assert f"line {line_of(text, 'float score =')} of mine.cu" in race.sentence
    assert race.line is None


def test_watching_changes_no_result() -> None:
    plain, seen = Bench(Executor(lift())), Bench(Executor(lift(), races=True))
    results = []
    for bench in (plain, seen):
        out = bench.new((2, 2048))
        pointers = [bench.put(v) for v in paged_attention_inputs((20, 33))]
        bench.call("pagedAttention", 7, 2, *pointers, out)
        gate, up = (bench.put(recipe(name, (2, 8192), 1.0)) for name in ("g", "u"))
        bench.call("silu", gate, up, 2)
        results.append((bench.get(out, (2, 2048)), bench.get(gate, (2, 8192))))
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


SERVED_BY = {
    "rmsNormKernel": run_norm,
    "softmaxKernel": run_softmax,
    "softmaxKernelDecode": run_softmax_decode,
    "pagedAttentionKernel": run_attention,
}


def _kernel_at(at: int) -> str:
    return re.findall(r"__global__ void (\w+)", OWN[:at])[-1]


@pytest.mark.parametrize("at", BARRIERS, ids=lambda at: f"line {OWN.count(chr(10), 0, at) + 1}")
def test_the_race_behind_each_removed_barrier_is_found(at: int) -> None:
    kernel = _kernel_at(at)
    bench = watched(OWN[:at] + OWN[at + len(BARRIER) :])
    SERVED_BY[kernel](bench)
    known = {
        (
            "pagedAttentionKernel",
            "dot_products",
            f"writes at line {line_of(OWN, 'dot_products[threadIdx.x / 32] = product;')}",
            f"reads at line {line_of(OWN, 'float score = dot_products[0];')}",
        )
    }
    new = found(bench) - known
    assert new
    assert {race[0] for race in new} == {kernel}


def test_there_are_nine_barriers() -> None:
    assert len(BARRIERS) == 9
    assert {_kernel_at(at) for at in BARRIERS} == set(SERVED_BY)


def test_unguarded_adds_of_the_norm_race() -> None:
    # P26 of the collected faults; the guard left keeps the sum inside the array
    text = OWN.replace("if (threadIdx.x % (i * 2) == 0) {", "if (threadIdx.x + i < 1024) {", 1)
    assert text != OWN
    bench = watched(text)
    run_norm(bench)
    add = f"at line {line_of(OWN, 'rms_vector[threadIdx.x] + rms_vector[threadIdx.x + i];')}"
    assert found(bench) == {("rmsNormKernel", "rms_vector", f"reads {add}", f"writes {add}")}


def test_p26_itself_is_found_though_it_also_leaves_the_array() -> None:
    text = OWN.replace("if (threadIdx.x % (i * 2) == 0) {", "{", 1)
    bench = watched(text)
    with pytest.raises(LaunchError, match="index 1024 is outside the array"):
        run_norm(bench)
    assert {race[:2] for race in found(bench)} == {("rmsNormKernel", "rms_vector")}


def test_a_barrier_that_one_warp_only_reaches_is_a_fault_with_its_line() -> None:
    second = [at for at in BARRIERS if _kernel_at(at) == "pagedAttentionKernel"][1]
    bench = watched(OWN[:second] + "if (threadIdx.x < 32) " + OWN[second:])
    with pytest.raises(LaunchError, match="different barriers") as caught:
        run_attention(bench)
    assert caught.value.line == OWN.count("\n", 0, second) + 1


# --- what is no race ------------------------------------------------------------------------------

CLEAN = """
#define FULL 0xffffffff
struct Pair { float a, b; };
__device__ float warpSum(float v) {
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(FULL, v, o);
    return v;
}
__device__ float blockSum(float v) {
    __shared__ float part[32];
    v = warpSum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32) v = warpSum(v);
    if (threadIdx.x == 0) part[0] = v;
    __syncthreads();
    v = part[0];
    __syncthreads();
    return v;
}
__global__ void twice(float *out, const float *in) {
    float a = blockSum(in[threadIdx.x]);
    float b = blockSum(in[threadIdx.x] + a);
    out[blockIdx.x * blockDim.x + threadIdx.x] = a + b;
}
__global__ void warps_alone(float *out) {
    __shared__ float box[4][32];
    int w = threadIdx.x / 32, t = threadIdx.x % 32;
    box[w][t] = t;
    __syncwarp();
    float v = box[w][31 - t];
    __syncwarp();
    box[w][t] = v + 1;
    out[threadIdx.x] = box[w][t];
}
__global__ void half_warps(float *out) {
    __shared__ float box[32];
    unsigned t = threadIdx.x, mask = t < 16 ? 0x0000ffffu : 0xffff0000u;
    for (int i = 0; i < 3; i++) {
        box[t] = t + i;
        __syncwarp(mask);
        float v = box[t ^ 15];
        __syncwarp(mask);
        out[t] = v;
    }
    __syncwarp();
    out[t] = box[31 - t];
}
__global__ void chain(int *out) {
    // lane 0 -> lane 1 -> lane 2, by two pairs' meetings: order passes on
    __shared__ int box;
    unsigned t = threadIdx.x;
    if (t == 0) box = 7;
    if (t <= 1) __syncwarp(3u);
    if (t == 1 || t == 2) __syncwarp(6u);
    if (t == 2) { out[0] = box; box = 8; }
}
__global__ void guarded(int *out, int n) {
    __shared__ int total, seen[64];
    if (threadIdx.x >= n) return;
    seen[threadIdx.x] = threadIdx.x;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (threadIdx.x == 5) for (int i = 0; i < n; i++) total += seen[i];
    __syncthreads();
    out[threadIdx.x] = total + seen[0] + seen[n - 1];
}
__global__ void counts(int *histogram, const int *in, int *sum) {
    __shared__ int local[4];
    if (threadIdx.x < 4) local[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&local[in[threadIdx.x] % 4], 1);
    __syncthreads();
    if (threadIdx.x < 4) atomicAdd(&histogram[threadIdx.x], local[threadIdx.x]);
    atomicMax(sum, in[threadIdx.x]);
}
__global__ void last_block(float *parts, unsigned *done, float *out) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = blockIdx.x;
        __threadfence();
        last = atomicInc(done, gridDim.x) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x < gridDim.x) out[threadIdx.x] = parts[threadIdx.x];
}
__global__ void neighbours(unsigned char *bytes, __nv_bfloat16 *halves, Pair *pairs) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    bytes[t] = t;
    bytes[t] += 1;
    halves[t] = __float2bfloat16(1.0f + t);
    pairs[t] = Pair{1.0f, 2.0f};
    Pair copy = pairs[t];
    pairs[t].b = copy.a;
}
__global__ void local_memory(int *out, int n) {
    int own[32];
    for (int i = 0; i < 32; i++) own[i] = i * n;
    __syncthreads();
    int *p = own + n % 32;
    *p += 1;
    out[threadIdx.x] = own[(n + threadIdx.x) % 32];
}
__global__ void ping_pong(float *out, int n) {
    extern __shared__ float2 both[];
    float2 *from = both, *to = both + blockDim.x;
    from[threadIdx.x] = make_float2(threadIdx.x, 1.0f);
    for (int i = 0; i < n; i++) {
        __syncthreads();
        to[threadIdx.x] = from[(threadIdx.x + 1) % blockDim.x];
        float2 *swap = from; from = to; to = swap;
    }
    out[threadIdx.x] = from[threadIdx.x].x;
}
__global__ void voted(int *out) {
    __shared__ int flags[64];
    flags[threadIdx.x] = threadIdx.x % 7 == 0;
    int sum = __syncthreads_count(flags[threadIdx.x]);
    out[threadIdx.x] = sum + flags[63 - threadIdx.x];
}
__global__ void through_device_memory(float *x) {
    x[blockIdx.x * 64 + threadIdx.x] = threadIdx.x;
    __syncthreads();
    float v = x[blockIdx.x * 64 + 63 - threadIdx.x];
    __syncthreads();
    memcpy(&x[blockIdx.x * 64 + threadIdx.x], &v, sizeof v);
}
__global__ void vectors(float4 *x) { float4 v = x[threadIdx.x]; v.x += 1; x[threadIdx.x] = v; }
void unused() { vectors<<<1, 1>>>(0); }
"""


@pytest.fixture(scope="module")
def clean() -> Bench:
    return watched(CLEAN)


CLEAN_RUNS: dict[str, Callable[[Bench], None]] = {
    "a block's sum, twice": lambda b: b.run(
        "twice", 3, 128, b.new((384,), np.float32), b.put(np.ones(128, np.float32))
    ),
    "__syncwarp between lanes": lambda b: b.run("warps_alone", 1, 128, b.new((128,), np.float32)),
    "halves of a warp": lambda b: b.run("half_warps", 1, 32, b.new((32,), np.float32)),
    "order that is passed on": lambda b: b.run("chain", 1, 32, b.new((4,), np.int32)),
    "one writer, early returns": lambda b: b.run("guarded", 1, 64, b.new((64,), np.int32), 50),
    "atomics": lambda b: b.run(
        "counts", 4, 96, *(b.put(np.arange(96, dtype=np.int32)) for _ in range(3))
    ),
    "the last block": lambda b: b.run(
        "last_block", 9, 32, b.new((9,)), b.put(np.zeros(1, np.uint32)), b.new((32,), np.float32)
    ),
    "neighbouring bytes": lambda b: b.run(
        "neighbours", 2, 70, b.new((140,), np.uint8), b.new((140,)), b.new((280,), np.float32)
    ),
    "a thread's own arrays": lambda b: b.run("local_memory", 1, 64, b.new((64,), np.int32), 9),
    "dynamic shared memory": lambda b: b.run(
        "ping_pong", 1, 64, b.new((64,), np.float32), 5, shared=1024
    ),
    "a voting barrier": lambda b: b.run("voted", 1, 64, b.new((64,), np.int32)),
    "device memory within a block": lambda b: b.run(
        "through_device_memory", 3, 64, b.new((192,), np.float32)
    ),
    "vectors": lambda b: b.run("vectors", 1, 32, b.put(np.ones(128, np.float32))),
}


@pytest.mark.parametrize("name", CLEAN_RUNS)
def test_no_race_is_seen_in(name: str, clean: Bench) -> None:
    CLEAN_RUNS[name](clean)
    assert found(clean) == NO_RACE


# --- what is one ----------------------------------------------------------------------------------

RACY = """
struct Pair { float a, b; };
__global__ void warp_synchronous(float *out) {
    __shared__ volatile float box[32];
    box[threadIdx.x] = 1;
    box[threadIdx.x] += box[(threadIdx.x + 16) % 32];
    out[threadIdx.x] = box[threadIdx.x];
}
__global__ void wrong_mask(int *out) {
    __shared__ int box[32];
    box[threadIdx.x] = 1;
    __syncwarp(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
    out[threadIdx.x] = box[(threadIdx.x + 16) % 32];
}
__global__ void warp_barrier_only(int *out) {
    __shared__ int box[64];
    box[threadIdx.x] = 1;
    __syncwarp();
    out[threadIdx.x] = box[63 - threadIdx.x];
}
__global__ void all_store(int *out) {
    __shared__ int winner;
    winner = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = winner;
}
__global__ void blocks_meet(float *total) {
    if (threadIdx.x == 0 && blockIdx.x == 1) total[0] = total[3];
    if (threadIdx.x == 0 && blockIdx.x == 0) total[3] = 1.0f;
}
__global__ void blocks_overlap(float *x) { x[blockIdx.x * 31 + threadIdx.x] = 1.0f; }
__global__ void not_all_atomic(int *out) {
    __shared__ int sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, 1);
    if (threadIdx.x == 33) out[0] = sum;
}
__global__ void one_byte(unsigned char *bytes) {
    bytes[threadIdx.x / 2] = 1;
}
__global__ void copied(float *x, int n) {
    extern __shared__ Pair tile[];
    memcpy(tile + threadIdx.x, x + 2 * threadIdx.x, n);
    memcpy(x + 2 * threadIdx.x, tile + 1, n);
}
__global__ void no_fence(float *parts, unsigned *done, float *out) {
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = 1.0f;
        if (atomicInc(done, gridDim.x) == gridDim.x - 1) out[0] = parts[0];
    }
}
__global__ void read_then_written(int *out) {
    __shared__ int box[2];
    if (threadIdx.x < 2) box[threadIdx.x] = 5;
    __syncthreads();
    int seen = box[1];
    if (threadIdx.x == 7) box[1] = 6;
    out[threadIdx.x] = seen;
}
__global__ void deserted(int *out, int n) {
    __syncthreads();
    if (threadIdx.x >= n) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}
void unused() { one_byte<<<1, 1>>>(0); }
"""


@pytest.fixture(scope="module")
def racy() -> Bench:
    return watched(RACY)


def ints(bench: Bench, name: str = "out") -> int:
    return bench.put(np.zeros(256, np.int32), name)


def at(words: str, what: str, nth: int = 0) -> str:
    return f"{what} at line {line_of(RACY, words, nth)}"


SUM, STORED = "box[threadIdx.x] += box", "box[threadIdx.x] = 1;"


@pytest.mark.parametrize(
    ("kernel", "grid", "block", "array", "sides"),
    [
        ("warp_synchronous", 1, 32, "box", {at(SUM, "reads"), at(STORED, "writes")}),
        (
            "wrong_mask",
            1,
            32,
            "box",
            {at("box[(threadIdx.x + 16) % 32];", "reads", 1), at(STORED, "writes", 1)},
        ),
        (
            "warp_barrier_only",
            1,
            64,
            "box",
            {at("box[63 - threadIdx.x]", "reads"), at(STORED, "writes", 2)},
        ),
        ("all_store", 1, 2, "winner", {at("winner = threadIdx.x;", "writes")}),
        ("all_store", 1, 64, "winner", {at("winner = threadIdx.x;", "writes")}),
        (
            "blocks_meet",
            2,
            32,
            "out",
            {at("total[0] = total[3];", "reads"), at("total[3] = 1.0f;", "writes")},
        ),
        ("blocks_overlap", 3, 32, "out", {at("x[blockIdx.x * 31", "writes")}),
        (
            "not_all_atomic",
            1,
            64,
            "sum",
            {at("atomicAdd(&sum, 1)", "updates atomically"), at("out[0] = sum", "reads")},
        ),
        ("one_byte", 1, 8, "out", {at("bytes[threadIdx.x / 2]", "writes")}),
        (
            "read_then_written",
            1,
            32,
            "box",
            {at("int seen = box[1];", "reads"), at("box[1] = 6;", "writes")},
        ),
    ],
)
def test_races_are_found_with_their_lines(
    racy: Bench, kernel: str, grid: int, block: int, array: str, sides: set[str]
) -> None:
    racy.run(kernel, grid, block, ints(racy))
    races = found(racy)
    assert races
    assert {race[1] for race in races} == {array}
    assert sides in [set(race[2:]) for race in races]


def test_two_blocks_are_told_as_such(racy: Bench) -> None:
    racy.run("blocks_overlap", 2, 32, ints(racy, "sums"))
    (race,) = racy.executor.take_races()
    assert (race.first.block, race.second.block) == ((0, 0, 0), (1, 0, 0))
    assert (race.array, race.shared, race.offset, race.element) == ("sums", False, 124, None)
    assert "sums at byte 124: thread 31 of block (0, 0, 0) writes it at line" in race.sentence
    assert "nothing orders two blocks of one launch" in race.remedy


def test_copies_by_memcpy_are_seen_in_dynamic_shared_memory(racy: Bench) -> None:
    racy.run("copied", 1, 4, racy.put(np.ones(64, np.float32), "x"), 8, shared=4096)
    races = racy.executor.take_races()
    assert {(r.array, r.shared, r.element) for r in races} == {("tile", True, 1)}


def test_an_atomic_without_a_fence_publishes_nothing(racy: Bench) -> None:
    parts, out = (racy.put(np.zeros(8, np.float32), name) for name in ("parts", "out"))
    racy.run("no_fence", 3, 32, parts, racy.put(np.zeros(1, np.uint32)), out)
    assert {race[1] for race in found(racy)} == {"parts"}


def test_a_thread_that_ends_before_a_later_barrier_is_reported(racy: Bench) -> None:
    out = ints(racy)
    racy.run("deserted", 1, 64, out, 64)
    with pytest.raises(LaunchError, match="only 40 of the block's 64 threads reach") as caught:
        racy.run("deserted", 1, 64, out, 40)
    assert caught.value.line == line_of(RACY, "__syncthreads();", 4)


def test_what_one_launch_did_is_no_race_with_the_next(racy: Bench) -> None:
    out = ints(racy)
    for _ in range(3):
        racy.run("blocks_meet", 1, 32, out)
    assert found(racy) == NO_RACE


def test_memory_that_was_freed_and_given_out_again_is_watched_anew(racy: Bench) -> None:
    for _ in range(3):
        out = ints(racy)
        racy.run("blocks_overlap", 1, 32, out)
        assert found(racy) == NO_RACE
        racy.run("blocks_overlap", 2, 32, out)
        assert found(racy) != NO_RACE
        racy.executor.free(out)


def test_objects_that_are_watched_have_a_place_of_their_own_in_the_cache() -> None:
    plain, seen = Executor(lift()), Executor(lift(), races=True)
    assert plain.path != seen.path
    assert Executor(lift(), races=True).path == seen.path
    assert plain.take_races() == []
