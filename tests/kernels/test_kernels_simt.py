"""The CPU executor: what threads of a block do together, and what if they do it wrongly."""

from __future__ import annotations

import multiprocessing
import re
import threading

import numpy as np
import pytest
from kernels_helpers import Bench, bench_of, paged_attention_inputs, recipe

from kernels.errors import KernelsError
from kernels.lift import Launch, lift
from kernels.measure import switch_nanoseconds
from kernels.simt import Executor, GuardDamage, LaunchError, first_difference

SYNC = """
#define FULL 0xffffffff
__device__ float warpSum(float v) {
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(FULL, v, o);
    return v;
}
__global__ void divergent(int *out, int n) {
    if (threadIdx.x < n) {
        __syncthreads();
    } else {
        out[0] = 1;
        __syncthreads();
    }
}
__global__ void early(int *out, int n) {
    __shared__ int box[64];
    if (threadIdx.x >= n) return;
    box[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = box[n - 1 - threadIdx.x];
}
__global__ void lonely(int *out) {
    if (threadIdx.x < 16) {
        out[threadIdx.x] = __shfl_down_sync(FULL, (int)threadIdx.x, 1);
    }
    __syncthreads();
}
__global__ void unnamed(int *out) {
    out[threadIdx.x] = __shfl_sync(0x0000ffff, 1, 0);
}
__global__ void halves(int *out) {
    unsigned mask = threadIdx.x < 16 ? 0x0000ffff : 0xffff0000;
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(mask, (int)threadIdx.x, 1);
    else out[threadIdx.x] = __shfl_up_sync(mask, (int)threadIdx.x, 1);
}
__global__ void votes(unsigned *out) {
    unsigned t = threadIdx.x;
    unsigned ballot = __ballot_sync(FULL, t % 3 == 0);
    out[t] = ballot;
    out[64 + t] = __any_sync(FULL, t == 40) + 2 * __all_sync(FULL, t < 32);
    int odd = __syncthreads_count(t % 2), one = __syncthreads_or(t == 1);
    out[128 + t] = odd + 100 * one + 1000 * __syncthreads_and(t < 64);
    out[192 + t] = __reduce_max_sync(FULL, t);
}
__global__ void sums(float *out, float *in) { out[threadIdx.x] = warpSum(in[threadIdx.x]); }
__global__ void widths(int *out) {
    int t = threadIdx.x;
    out[t] = __shfl_sync(FULL, t, 9, 8);
    out[32 + t] = __shfl_xor_sync(FULL, t, 16, 16);
    out[64 + t] = __shfl_down_sync(FULL, t, 3, 4);
    out[96 + t] = __shfl_up_sync(FULL, t, 2, 8);
}
__global__ void half_warp(float *out) { out[threadIdx.x] = __shfl_down_sync(FULL, 1.0f, 1); }
__global__ void stale(float *out, int write) {
    __shared__ float box[4][8];
    extern __shared__ __align__(16) float dynamic[];
    if (write) { box[1][threadIdx.x] = 5.0f; dynamic[threadIdx.x] = 6.0f; }
    __syncthreads();
    out[threadIdx.x] = box[1][threadIdx.x];
    out[8 + threadIdx.x] = dynamic[threadIdx.x];
}
"""

FAULTS = """
__global__ void far(float *x, long offset) {
    if (blockIdx.x == 3 && threadIdx.x == 5) {
        x[offset] = 1.0f;
    }
}
__global__ void near(float *x, int index) { x[index] = 1.0f; }
__global__ void divide(int *x, int by) { x[0] = 7 / by; }
__global__ void overrun(float *x, int n) {
    __shared__ float box[8];
    for (int i = 0; i < n; i++) {
        box[i] = x[i];
    }
    x[0] = box[0];
}
__global__ void checked(int *x, int n) { assert(n < 4); x[0] = n; }
__global__ void deep(int *x, int n) {
    volatile char frame[30000];
    frame[n] = 1;
    __syncthreads();
    x[threadIdx.x] = frame[n];
}
__device__ int descend(int n) {
    volatile int pad[64];
    pad[0] = n;
    return n ? descend(n - 1) + pad[0] : 0;
}
__global__ void recursive(int *x, int n) { __syncthreads(); x[0] = descend(n); }
__global__ void count(int *x, float *y) {
    atomicAdd(x, 1);
    atomicAdd(y, 0.5f);
    atomicMax(x + 1, (int)blockIdx.x);
}
__global__ void order(int *x) {
    x[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.y + gridDim.x;
}
"""


@pytest.fixture(scope="module")
def sync() -> Bench:
    return bench_of(SYNC + "void unused() { early<<<1, 1>>>(0, 1); }")


@pytest.fixture(scope="module")
def faults() -> Bench:
    return bench_of(FAULTS + "void unused() { order<<<1, 1>>>(0); }")


def line_of(text: str, words: str, nth: int = 0) -> int:
    at = [m.start() for m in re.finditer(re.escape(words), text)][nth]
    return text.count("\n", 0, at) + 1


# --- barriers and shuffles ------------------------------------------------------------------------


def test_divergent_barriers_are_reported_with_both_lines(sync: Bench) -> None:
    out = sync.new((64,), np.int32)
    with pytest.raises(LaunchError, match="different barriers") as caught:
        sync.run("divergent", 1, 64, out, 10)
    first = line_of(SYNC, "        __syncthreads();")
    assert caught.value.line == first
    assert caught.value.kernel == "divergent"
    assert f"line {first + 3}" in str(caught.value)
    fresh = sync.new((64,), np.int32)
    sync.run("divergent", 1, 64, fresh, 64)  # still usable, and fine when all take one branch
    assert sync.get(fresh, (1,), np.int32)[0] == -1


def test_threads_that_returned_count_as_arrived(sync: Bench) -> None:
    # as on sm_70 and later: a barrier waits for the threads that have not exited
    out = sync.new((64,), np.int32)
    sync.run("early", 1, 64, out, 40)
    assert sync.get(out, (40,), np.int32).tolist() == list(range(39, -1, -1))


def test_a_shuffle_that_not_all_named_lanes_reach_is_reported(sync: Bench) -> None:
    out = sync.new((64,), np.int32)
    with pytest.raises(
        LaunchError, match="never completed: its mask 0xffffffff names lane 16"
    ) as e:
        sync.run("lonely", 1, 64, out)
    assert e.value.line == line_of(SYNC, "__shfl_down_sync(FULL, (int)threadIdx.x, 1);")
    with pytest.raises(LaunchError, match="does not name it") as e:
        sync.run("unnamed", 1, 32, out)
    assert e.value.line == line_of(SYNC, "__shfl_sync(0x0000ffff, 1, 0)")
    sync.run("lonely", 1, 16, out)  # lanes that do not exist need not come


def test_two_halves_of_a_warp_may_shuffle_apart(sync: Bench) -> None:
    out = sync.new((32,), np.int32)
    sync.run("halves", 1, 32, out)
    got = sync.get(out, (32,), np.int32)
    assert got[:15].tolist() == list(range(1, 16))
    assert got[17:].tolist() == list(range(16, 31))
    assert got[15] == -1  # lane 16 is not in the mask: poison


def test_votes_and_reductions(sync: Bench) -> None:
    out = sync.new((256,), np.uint32)
    sync.run("votes", 1, 64, out)
    got = sync.get(out, (4, 64), np.uint32)
    assert got[0, 0] == sum(1 << t for t in range(32) if t % 3 == 0)
    assert got[0, 32] == sum(1 << t for t in range(32) if (32 + t) % 3 == 0)
    assert (got[1, :32] == 2).all()
    assert (got[1, 32:] == 1).all()
    assert (got[2] == 1132).all()
    assert (got[3, :32] == 31).all()
    assert (got[3, 32:] == 63).all()


def test_shuffles_inside_a_device_function_and_by_width(sync: Bench) -> None:
    values = np.arange(64, dtype=np.float32)
    out = sync.new((64,), np.float32)
    sync.run("sums", 1, 64, out, sync.put(values))
    assert sync.get(out, (64,), np.float32).tolist() == [496.0] * 32 + [1520.0] * 32
    out = sync.new((4, 32), np.int32)
    sync.run("widths", 1, 32, out)
    lanes = np.arange(32)
    got = sync.get(out, (4, 32), np.int32)
    assert np.array_equal(got[0], lanes // 8 * 8 + 1)
    # earlier groups can be read, later ones cannot (own value), as CUDA's guide has it
    assert np.array_equal(got[1], np.where(lanes < 16, lanes, lanes - 16))
    assert np.array_equal(got[2], np.where(lanes % 4 == 0, lanes + 3, lanes))
    assert np.array_equal(got[3], np.where(lanes % 8 < 2, lanes, lanes - 2))


def test_a_lane_that_does_not_exist_gives_poison(sync: Bench) -> None:
    out = sync.new((16,), np.float32)
    sync.run("half_warp", 1, 16, out)
    got = sync.get(out, (16,), np.float32)
    assert (got[:15] == 1).all()
    assert np.isnan(got[15])


def test_shared_memory_is_poisoned_for_every_block(sync: Bench) -> None:
    out = sync.new((2, 8), np.float32)
    sync.run("stale", 1, 8, out, 1, shared=32)
    assert sync.get(out, (2, 8), np.float32).tolist() == [[5.0] * 8, [6.0] * 8]
    sync.run("stale", 2, 8, out, 0, shared=32)
    assert np.isnan(sync.get(out, (2, 8), np.float32)).all()


# --- schedules and OS threads ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", ["benign", "reversed", "ahead", "ahead-reversed", "random:1", "random:2"]
)
def test_no_schedule_changes_the_race_free_kernels(schedule: str) -> None:
    bench = Bench(Executor(lift(), schedule))
    plain = Bench(Executor(lift(), threads=1))
    results = []
    for b in (bench, plain):
        out = b.new((4, 2048))
        x = b.put(recipe("x", (4, 2048), 1.0))
        b.call("rmsNorm", x, out, b.put(recipe("w", (2048,), 0.1, 1.0)), 4)
        scores = b.put(recipe("s", (32, 19, 19), 2.0))
        b.call("causalMask", scores, 19)
        b.call("softmax", scores, 19)
        gate = b.put(recipe("g", (4, 8192), 1.0))
        b.call("silu", gate, b.put(recipe("u", (4, 8192), 1.0)), 4)
        parts = ((out, (4, 2048)), (scores, (32, 19, 19)), (gate, (4, 8192)))
        results.append([b.get(p, shape) for p, shape in parts])
    for got, want in zip(*results, strict=True):
        assert np.array_equal(got, want)


def _attention(schedule: str, threads: int | None = None) -> np.ndarray:
    bench = Bench(Executor(lift(), schedule, threads))
    out = bench.new((2, 2048))
    pointers = [bench.put(v) for v in paged_attention_inputs((20, 33))]
    bench.call("pagedAttention", 7, 2, *pointers, out)
    return bench.get(out, (2, 2048)).reshape(2, 32, 64)


def test_the_attention_race_shows_when_warp_0_runs_ahead() -> None:
    benign = _attention("benign")
    assert np.array_equal(benign, _attention("benign", threads=1))
    assert np.array_equal(benign, _attention("ahead-reversed"))
    ahead = _attention("ahead")
    assert np.array_equal(benign[..., :32], ahead[..., :32])
    assert (benign[..., 32:] != ahead[..., 32:]).mean() > 0.3
    assert not np.array_equal(benign, _attention("random:7"))
    assert np.array_equal(_attention("random:7"), _attention("random:7", threads=1))


def test_a_schedule_must_be_known() -> None:
    for wrong in ("fast", "random", "random:x", "ahead:1"):
        with pytest.raises(KernelsError, match="schedule must be"):
            Executor(lift(), wrong)


def test_blocks_and_threads_know_where_they_are(faults: Bench) -> None:
    out = faults.new((4, 8), np.int32)
    faults.executor.launch(Launch("order", (4, 1, 1), (8, 1, 1), (out,)))
    assert (faults.get(out, (32,), np.int32) == 4).all()


STYLES = """
#define SYNC() __syncthreads()
#define WIDTH 16
constexpr int kRows = 2;
struct Pair { float a, b; };
__constant__ float weights[3] = {1.0f, 2.0f, 3.0f};
template <int N> __device__ float total(const float *x) {
    __shared__ float part[N];
    part[threadIdx.x] = x[threadIdx.x];
    SYNC();
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) sum += part[i];
    return sum;
}
extern "C" __global__ void __launch_bounds__(WIDTH)
styles(float *out, const float *__restrict__ x) {
#if WIDTH == 16
    volatile __shared__ float box[kRows][WIDTH], other
        [WIDTH];
#else
    this is not C++ {
#endif
    __shared__ alignas(16) Pair pairs[WIDTH];
    extern __shared__ float2 dynamic[];
    const int t = threadIdx.x;
    box[1][t] = x[t]; other[t] = 1.0f;
    pairs[t] = Pair{x[t], weights[t % 3]};
    dynamic[t] = make_float2(x[t], -1.0f);
    SYNC();
    out[t] = box[1][WIDTH - 1 - t] + other[t] + pairs[0].b + dynamic[(t + 1) % WIDTH].y;
    out[WIDTH + t] = total<WIDTH>(x);
}
"""


def test_styles_of_writing_kernels() -> None:
    bench = bench_of(STYLES + "void go(float *o, float *x) { styles<<<1, 16, 128>>>(o, x); }")
    x = np.arange(16, dtype=np.float32)
    out = bench.new((2, 16), np.float32)
    bench.call("go", out, bench.put(x))
    got = bench.get(out, (2, 16), np.float32)
    assert np.array_equal(got[0], 15 - x + 1)
    assert (got[1] == 120).all()


def test_atomics_add_up(faults: Bench) -> None:
    counter = faults.put(np.zeros(2, np.int32))
    total = faults.put(np.zeros(1, np.float32))
    faults.run("count", 100, 512, counter, total)
    assert faults.get(counter, (2,), np.int32).tolist() == [51200, 99]
    assert faults.get(total, (1,), np.float32)[0] == 25600


def test_launches_from_several_python_threads_take_turns(sync: Bench) -> None:
    failed: list[int] = []

    def go(seed: int) -> None:
        out = sync.new((64,), np.float32)
        values = np.full(64, seed, np.float32)
        source = sync.put(values)
        for _ in range(50):
            sync.run("sums", 1, 64, out, source)
            if not (sync.get(out, (64,), np.float32) == 32 * seed).all():
                failed.append(seed)

    threads = [threading.Thread(target=go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def _child(connection: object) -> None:
    connection.send(_attention("benign").tobytes())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_launch_after_fork_does_not_hang() -> None:
    here = _attention("benign").tobytes()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs,))
    child.start()
    assert ours.poll(30), "the child hangs"
    assert ours.recv() == here
    child.join(30)
    assert child.exitcode == 0
    assert _attention("benign").tobytes() == here


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_an_illegal_access_names_who_and_where(threads: int) -> None:
    bench = bench_of(FAULTS + "void unused() { order<<<1, 1>>>(0); }", threads=threads)
    x = bench.new((1024,), np.float32, "activations")
    bytes_past = 3 << 19  # beyond the guard, within the zone without access
    with pytest.raises(LaunchError) as caught:
        bench.run("far", 64, 1024, x, 1024 + bytes_past // 4)
    error = caught.value
    assert error.kernel == "far"
    assert (error.block, error.thread) == ((3, 0, 0), (5, 0, 0))
    assert error.address == x + 4096 + bytes_past
    assert f"{bytes_past} bytes past the end of activations (4096 bytes)" in str(error)
    assert error.line in (None, line_of(FAULTS, "x[offset] = 1.0f;"))
    bench.run("far", 64, 1024, x, 7)  # still usable
    assert bench.get(x, (8,), np.float32)[7] == 1
    with pytest.raises(LaunchError, match="bytes before the start of activations"):
        bench.run("far", 64, 1024, x, -(bytes_past // 4))


def test_signal_handlers_are_put_back(faults: Bench) -> None:
    # SIGFPE outside a launch must still be Python's business
    import signal

    before = signal.getsignal(signal.SIGSEGV)
    x = faults.new((4,), np.int32)
    with pytest.raises(LaunchError, match="division by zero"):
        faults.run("divide", 1, 1, x, 0)
    assert signal.getsignal(signal.SIGSEGV) == before
    faults.run("divide", 1, 1, x, 2)
    assert faults.get(x, (1,), np.int32)[0] == 3


def test_an_overrun_of_a_shared_array_is_reported(faults: Bench) -> None:
    x = faults.put(np.ones(16, np.float32))
    faults.run("overrun", 1, 1, x, 8)
    with pytest.raises(
        LaunchError, match=r"index 8 is outside the array of type 'float ?\[8\]'"
    ) as e:
        faults.run("overrun", 1, 1, x, 9)
    assert e.value.line == line_of(FAULTS, "box[i] = x[i];")


def test_a_failed_assert_is_reported(faults: Bench) -> None:
    x = faults.new((1,), np.int32)
    with pytest.raises(LaunchError, match="assertion failed: n < 4") as caught:
        faults.run("checked", 1, 1, x, 4)
    assert caught.value.line == line_of(FAULTS, "assert(n < 4)")


def test_stacks_hold_a_large_frame_and_their_overflow_is_reported(faults: Bench) -> None:
    x = faults.new((1024,), np.int32)
    faults.run("deep", 1, 1024, x, 29999)
    assert (faults.get(x, (1024,), np.int32) == 1).all()
    with pytest.raises(LaunchError, match="illegal access"):
        faults.run("recursive", 1, 32, x, 100_000)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        ((1, 1, 1), (1025, 1, 1), 0, "1 to 1024 threads"),
        ((1, 1, 1), (0, 1, 1), 0, "1 to 1024 threads"),
        ((1, 1, 1), (1, 1, 65), 0, "1 to 1024 threads"),
        ((0, 1, 1), (1, 1, 1), 0, "a grid must be"),
        ((1, 70000, 1), (1, 1, 1), 0, "a grid must be"),
        ((1, 1, 1), (1, 1, 1), 300_000, "dynamic shared memory"),
    ],
)
def test_shapes_that_cuda_refuses(
    faults: Bench,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    message: str,
) -> None:
    with pytest.raises(LaunchError, match=message):
        faults.executor.launch(Launch("order", grid, block, (4096,), shared))


def test_an_unknown_kernel_is_a_users_mistake(faults: Bench) -> None:
    with pytest.raises(KernelsError, match=r"user\.cu has no kernel dance"):
        faults.run("dance", 1, 1)


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_poison_aligned_and_lazy(faults: Bench) -> None:
    size = 2 << 30
    address = faults.executor.allocate(size, "cache")
    assert address % 256 == 0
    for offset in (0, 12345678, size - 4):
        assert faults.get(address + offset, (4,), np.uint8).tolist() == [255] * 4
    with open("/proc/self/statm") as about:
        resident = int(about.read().split()[1]) * 4096
    assert resident < 2 << 30
    faults.executor.free(address)
    with pytest.raises(ValueError, match="not the start of an allocation"):
        faults.executor.free(address)
    with pytest.raises(ValueError, match="size must be at least 1 byte"):
        faults.executor.allocate(0)


def test_guard_damage_is_found_named_and_repaired(faults: Bench) -> None:
    executor = faults.executor
    x = executor.allocate(1000, "x")
    executor.allocate(1000, "y")
    assert executor.damaged_guards() == []
    for index, damage in (
        (250, GuardDamage("x", "after", 1000)),
        (-1, GuardDamage("x", "before", -4)),
        (1200, GuardDamage("x", "after", 4800)),
    ):
        faults.run("near", 1, 1, x, index)
        assert executor.damaged_guards() == [damage]
        assert executor.damaged_guards() == []
    for index in (250 + 200_000, -200_000):  # further off: found by the full check
        faults.run("near", 1, 1, x, index)
        assert executor.damaged_guards() == []
        (found,) = executor.damaged_guards(full=True)
        assert found == GuardDamage("x", "after" if index > 0 else "before", 4 * index)
        assert executor.damaged_guards(full=True) == []


def test_writes_inside_leave_the_guards_alone(faults: Bench) -> None:
    x = faults.executor.allocate(1000, "x")
    faults.run("near", 1, 1, x, 249)
    faults.run("near", 1, 1, x, 0)
    assert faults.executor.damaged_guards(full=True) == []


def test_measuring_the_executor() -> None:
    assert 0.5 < switch_nanoseconds(turns=30) < 5000


def test_first_difference() -> None:
    a = np.zeros(1_000_003, np.uint8)
    b = a.copy()
    assert first_difference(a.ctypes.data, b.ctypes.data, a.nbytes) is None
    assert first_difference(a.ctypes.data, b.ctypes.data, 0) is None
    for at in (1_000_002, 777_777, 4096, 1, 0):
        b[at] = 1
        assert first_difference(a.ctypes.data, b.ctypes.data, a.nbytes) == at
    assert first_difference(a.ctypes.data + 1, b.ctypes.data + 1, 4095) == 0
