"""The lifter on our own file, on awkward ones, and on those that it must refuse."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from kernels.errors import KernelsError
from kernels.lift import HOST_CALLS, KernelsFile, Launch, Refusal, lift, lift_text

OWN = Path(__file__).parents[2] / "kernels" / "kernels.cu"


def of(text: str) -> KernelsFile:
    return lift_text(text, Path("user.cu"))


def launch(text: str, *values: int | float, **globals: int) -> Launch:
    file = of(text)
    made = file.call(next(iter(file.host_calls)), *values, globals=globals)
    assert isinstance(made, Launch)
    return made


# --- our own file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "kernel", "grid", "block"),
    [
        ("embeddingGather", (1, 2, 3, 5), "embeddingGatherKernel", (5, 1, 1), 1024),
        ("rmsNorm", (1, 2, 3, 17), "rmsNormKernel", (17, 1, 1), 1024),
        ("rope", (1, 17, 512), "ropeKernel_llama3", (17, 1, 1), 256),
        ("causalMask", (1, 17), "causalMaskKernel", (544, 1, 1), 17),
        ("softmax", (1, 512), "softmaxKernel", (16384, 1, 1), 512),
        ("residualAdd", (1, 2, 3), "residualKernel", (3, 1, 1), 1024),
        ("silu", (1, 2, 3), "siluKernel", (3, 1, 1), 1024),
        ("embeddingGatherDecode", (1, 2, 3, 4), "embeddingGatherKernelDecode", (2, 1, 1), 1024),
        ("ropeDecode", (1, 9, 2048), "ropeKernelDecode", (1, 1, 1), 1024),
        ("softmaxDecode", (1, 33), "softmaxKernelDecode", (32, 1, 1), 33),
        ("pagedAttention", (7, 2, 3, 4, 5, 6, 7, 8), "pagedAttentionKernel", (2, 32, 1), 64),
    ],
)
def test_own_host_calls_launch_as_upstream_does(
    name: str, values: tuple[int, ...], kernel: str, grid: tuple[int, ...], block: int
) -> None:
    made = lift().call(name, *values, globals={"cos": 100, "sin": 200})
    assert isinstance(made, Launch)
    assert (made.kernel, made.grid, made.block) == (kernel, grid, (block, 1, 1))
    assert made.shared == 0


def test_own_arguments_arrive_in_the_kernels_order() -> None:
    file = lift()
    made = file.call("rope", 4096, 17, 512, globals={"cos": 100, "sin": 200})
    assert isinstance(made, Launch)
    assert made.arguments == (4096, 17, 512, 64, 100, 200)
    gather = file.call("embeddingGatherDecode", 11, 2, 33, 44)
    assert isinstance(gather, Launch)
    assert gather.arguments == (11, 2, 33, 44)
    assert dict(file.host_calls["rope"].globals) == {"d_cos": "cos_table", "d_sin": "sin_table"}


def test_own_file_in_parts() -> None:
    file = lift()
    assert set(file.host_calls) == set(HOST_CALLS)
    assert len(file.kernels) == 11
    assert file.constants["MAX_BLOCKS_PER_SEQ"] == 128
    assert file.constants["BLOCK_BYTES"] == 32768
    kernel = file.kernels["ropeKernel_llama3"]
    assert [p.ctype for p in kernel.parameters] == [
        "__nv_bfloat16*",
        "int",
        "int",
        "int",
        "const float*",
        "const float*",
    ]
    line = OWN.read_text().splitlines()[kernel.line - 1]
    assert line.startswith("__global__ void ropeKernel_llama3(")
    assert kernel.text.startswith("__global__ void ropeKernel_llama3(")
    assert file.host_calls["causalMask"].guards == ("num_tokens > 1024",)
    assert file.host_calls["causalMask"].grid == "NUM_Q_HEADS * num_tokens"


def test_device_text_keeps_lines_and_drops_host_code() -> None:
    file = lift()
    body = file.device_text.split("#line 1 ", 1)[1].split("\n")[1:]
    own = OWN.read_text().split("\n")
    assert len(body) == len(own)
    for kernel in file.kernels.values():
        assert kernel.name in body[kernel.line - 1]
        assert 'extern "C" __global__' in body[kernel.line - 1]
    for word in ("<<<", "#include <cuda_runtime.h>", "cudaMalloc", "std::vector", "d_cos"):
        assert word not in "\n".join(body)


def test_pack_gives_the_addresses_of_typed_values() -> None:
    packed = lift().kernels["ropeKernelDecode"].pack((0x1234567890, 7, 512))
    assert ctypes.cast(packed.pointers[0], ctypes.POINTER(ctypes.c_uint64))[0] == 0x1234567890
    assert ctypes.cast(packed.pointers[1], ctypes.POINTER(ctypes.c_int))[0] == 7
    assert ctypes.cast(packed.pointers[2], ctypes.POINTER(ctypes.c_int))[0] == 512
    with pytest.raises(KernelsError, match=r"takes 3 arguments \(got 2\)"):
        lift().kernels["ropeKernelDecode"].pack((1, 2))


# --- awkward files --------------------------------------------------------------------------------

AWKWARD = """
#pragma once
#include "kernels.cuh"
#ifndef HEADS
#define HEADS 32   // query heads
#endif
#if HEADS == 32 && defined(__CUDACC__)
#define ROWS(n) ((n) * HEADS)
#else
#define ROWS(n) nonsense(n
#endif
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
#define CHECK(call) do { cudaError_t e = (call); if (e != cudaSuccess) { \\
    fprintf(stderr, "%s at %s:%d", cudaGetErrorString(e), __FILE__, __LINE__); exit(1); } \\
    } while (0)
using bf16 = __nv_bfloat16;
typedef unsigned int u32;
enum { WARP = 32, TILE = WARP * 2 };
namespace mine { constexpr int kThreads{256}; }
static constexpr float kScale = 1.0f / 8, kHalf = kScale / 2.f;
static const char *kName = "a string with { braces } and <<<launch>>>";
/* __global__ void commented_out(int *x) { */
template <typename T> __device__ T twice(T x) { return x + x; }
__device__ __forceinline__ float helper(float x) { return twice(x) * kScale; }
extern "C" {
__global__ void __launch_bounds__(mine::kThreads)
    first(const bf16 *__restrict__ x, float y[], u32 n) {
    if (threadIdx.x < n) y[threadIdx.x] = helper(x[0]);
}
}
static __global__ __launch_bounds__(64, 2) void second(int *x, float scale) { x[0] = (int)scale; }
std::vector<std::vector<int>> unused{{1, 2}, {3}};
static int ceil_div(int a, int b) { return (a + b - 1) / b; }
"""


def test_awkward_file_is_read() -> None:
    file = of(
        AWKWARD
        + """
void go(bf16 *x, float *y, int n) {
    // a comment with <<<1, 2>>> in it
    if (n <= 0) return;
    dim3 block(mine::kThreads), grid;   /* two locals */
    grid = dim3(CEIL_DIV(n, TILE), std::max(n / 100, 1));
    grid.y += 1;
    size_t bytes = block.x * sizeof(float);
    cudaStream_t stream = 0;
    first <<< grid , /* threads */ block,
              bytes, stream >>> (x, y + 4, static_cast<u32>(n));
    CHECK(cudaGetLastError());
}
void other(int *x, int n) { second<<<ROWS(n) + ceil_div(n, 4), n > 8 ? 64 : 32>>>(x, n * kScale); }
""".replace("\n", "\r\n")
    )
    assert file.constants["TILE"] == 64
    assert file.constants["kHalf"] == 0.0625
    assert [p.ctype for p in file.kernels["first"].parameters] == [
        "const __nv_bfloat16*",
        "float*",
        "unsigned",
    ]
    assert file.call("go", 16, 32, 130) == Launch(
        "first", (3, 2, 1), (256, 1, 1), (16, 48, 130), shared=1024
    )
    assert file.call("go", 16, 32, 0) == Refusal("")
    assert file.call("other", 8, 9) == Launch("second", (291, 1, 1), (64, 1, 1), (8, 1.125))
    assert "commented_out" not in file.kernels
    for word in ("twice", "helper", "kScale", "first", "second", "bf16"):
        assert word in file.device_text
    for word in ("unused", "ceil_div(int", "kName", "namespace mine"):
        assert word not in file.device_text


KERNEL = "__global__ void k(int *x, int n) { x[0] = n; }\n"


def test_c_arithmetic() -> None:
    text = KERNEL + "void go(int *x, int n) { k<<<(n - 9) / 2 + 10, -n % 4 + 8>>>(x, VALUE); }"
    assert launch(text.replace("VALUE", "n"), 1, 4) == Launch("k", (8, 1, 1), (8, 1, 1), (1, 4))
    for expression, value in {
        "7 / 2 * 2": 6,
        "-7 / 2": -3,
        "1 << 4 | 3": 19,
        "n == 4 ? 5 : 6": 5,
        "(int)(n * 0.3f)": 1,
        "(int)3.99": 3,
        "0x1F": 31,
        "010": 8,
        "1'000": 1000,
        "!n || n && 3": 1,
        "sizeof(float) * n": 16,
        "(int)ceilf(n / 3.0f)": 2,
    }.items():
        assert launch(text.replace("VALUE", expression), 1, 4).arguments[1] == value


def test_loops_and_guards_in_a_host_call() -> None:
    text = KERNEL + (
        "void go(int *x, int n) {\n"
        "  int threads = 1; while (threads < n) threads *= 2;\n"
        '  if (threads > 1024) { printf("%d threads, at most %d\\n", threads, 1024); return; }\n'
        "  for (int i = 0; i < 3; i++) n++;\n"
        "  k<<<n, threads>>>(x, n);\n}"
    )
    assert launch(text, 1, 33) == Launch("k", (36, 1, 1), (64, 1, 1), (1, 36))
    assert of(text).call("go", 1, 1025) == Refusal("2048 threads, at most 1024\n")
    streamed = text.replace(
        'printf("%d threads, at most %d\\n", threads, 1024)',
        'std::cerr << "threads " << threads << std::endl',
    )
    assert of(streamed).call("go", 1, 1025) == Refusal("threads 2048\n")


def test_pointer_arithmetic_steps_by_elements() -> None:
    text = (
        "__global__ void k(float *x) {}\n"
        "void go(__nv_bfloat16 *x) { k<<<1,1>>>((float *)(x + 3) + 1); }"
    )
    assert launch(text, 100).arguments == (110,)


def test_file_scope_variables_come_from_the_caller() -> None:
    text = (
        "static float *g_cosine, *g_sine;\n"
        "__global__ void k(int *x, const float *cos_table, const float *sin_table) {}\n"
        "void go(int *x) { k<<<1, 1>>>(x, g_cosine, g_sine + 2); }"
    )
    assert launch(text, 1, cos=1000, sin=2000).arguments == (1, 1000, 2008)
    assert launch(text, 1, g_cosine=1, g_sine=2).arguments == (1, 1, 10)
    assert dict(of(text).host_calls["go"].globals) == {
        "g_cosine": "cos_table",
        "g_sine": "sin_table",
    }
    with pytest.raises(KernelsError, match=r"user\.cu:3: go uses the variable g_cosine"):
        launch(text, 1, tan=5)


def test_constants_can_be_replaced_for_one_evaluation() -> None:
    file = of("const int HEADS = 32;\n" + KERNEL + "void go(int *x) { k<<<HEADS, 1>>>(x, 1); }")
    made = file.host_calls["go"].evaluate(1, constants={"HEADS": 8})
    assert isinstance(made, Launch)
    assert made.grid == (8, 1, 1)


def test_extra_kernels_that_no_host_call_needs_are_left_out() -> None:
    text = OWN.read_text() + (
        "\n#include <mma.h>\n__global__ void tensorCores(float *x) { wmma::fragment<A> a; }\n"
        "template <int N> __global__ void sized(float *x) { x[0] = N; }\n"
    )
    file = lift_text(text, Path("user.cu"), HOST_CALLS)
    assert "tensorCores" not in file.kernels
    assert "wmma" not in file.device_text


def test_byte_order_mark_and_odd_bytes_in_comments_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "kernels.cu"
    path.write_bytes(b"\xef\xbb\xbf// caf\xe9\r\n" + OWN.read_bytes().replace(b"\n", b"\r\n"))
    file = lift(path)
    assert file.kernels["rmsNormKernel"].line == lift().kernels["rmsNormKernel"].line + 1


# --- refusals -------------------------------------------------------------------------------------


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(KernelsError, match=r"cannot read .*no\.cu: No such file"):
        lift(tmp_path / "no.cu")
    with pytest.raises(KernelsError, match="cannot read"):
        lift(tmp_path)
    (tmp_path / "x.cu").write_bytes(b"\x7fELF\0\0")
    with pytest.raises(KernelsError, match="not a text file"):
        lift(tmp_path / "x.cu")


def test_lacking_host_calls_and_kernels_are_named() -> None:
    own = OWN.read_text()
    with pytest.raises(KernelsError, match=r"lacks the host calls softmax, silu"):
        lift_text(
            own.replace("void silu(", "void silu2(").replace("void softmax(", "void softmax2("),
            Path("user.cu"),
            HOST_CALLS,
        )
    broken = own.replace("__global__ void siluKernel", "__global__ void siluKernel2")
    line = own[: own.index("siluKernel<<<")].count("\n") + 1
    with pytest.raises(KernelsError, match=rf"^user\.cu:{line}: silu launches siluKernel, which"):
        lift_text(broken, Path("user.cu"), HOST_CALLS)
    with pytest.raises(KernelsError, match=r"rope must take \(pointer, int, int\) \(got"):
        lift_text(
            own.replace(
                "void rope(__nv_bfloat16 *input, int num_tokens, int dim)", "void rope(int dim)"
            ),
            Path("user.cu"),
            HOST_CALLS,
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "void go(int *x) { k<<<HEADS, 1>>>(x, 1); }",
            r"user\.cu:2: HEADS has no value known here",
        ),
        ("void go(int *x) { k<<<1, 1>>>(x, LIMIT); }", r"user\.cu:2: LIMIT is not defined"),
        ("void go(int *x) { k<<<1>>>(x, 1); }", r"user\.cu:2: <<<>>> takes 2 to 4 values"),
        ("void go(int *x) { nope<<<1, 1>>>(x, 1); }", r"user\.cu:2: go launches nope"),
        ("void go(int *x) { k<<<1, 1>>>(x); }", r"user\.cu:2: k takes 2 arguments \(got 1\)"),
        (
            "void go(int *x) {\n k<<<1, 1>>>(x, 1);\n k<<<1, 1>>>(x, 1); }",
            r"user\.cu:4: go launches a s",
        ),
        ("void go(int *x) { k<<<1, 1>>>(x, x[0]); }", r"user\.cu:2: '\[' is not understood"),
        ("void go(int *x) { k<<<width(), 1>>>(x, 1); }", r"user\.cu:2: call of width"),
        ("void go(int *x) { k<<<1 / 0, 1>>>(x, 1); }", r"user\.cu:2: division by zero"),
        (
            "void go(int *x) { k<<<1, 0 - 1>>>(x, 1); }",
            r"user\.cu:2: -1 does not fit into unsigned",
        ),
        ("void go(int *x) { k<<<1, 1>>>(x, 3000000000); }", r"does not fit into int"),
        ("void go(int *x) { switch (1) { } k<<<1, 1>>>(x, 1); }", r"user\.cu:2: 'switch'"),
        ("void go(int *x) { while (1) {} k<<<1, 1>>>(x, 1); }", r"does not end within"),
        ("void go(int *x) { assert(0); k<<<1, 1>>>(x, 1); }", r"user\.cu:2: this assert fails"),
        ("void go(int *x) { static int n = 1; k<<<n, 1>>>(x, 1); }", r"user\.cu:2: a static local"),
        ("void go(int *x) {\n k<<<1, 1>>>(x, 1);", r"user\.cu:2: '\{' is never closed"),
        ("/* open", r"user\.cu:2: unterminated comment"),
        ("#if 1\n", r"user\.cu:2: #if without #endif"),
        ("#if __SOMETHING__\n#endif", r"user\.cu:2: #if asks for __SOMETHING__"),
        ("#error no\n", r"user\.cu:2: #error no"),
        ("__global__ void k(int *x, int n) {}", r"user\.cu:2: kernel k is defined twice"),
        ("}", r"user\.cu:2: '\}' without '\{'"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(KernelsError, match=message) as caught:
        launch(KERNEL + text, 1)
    assert "\n" not in str(caught.value)


def test_wrong_number_of_values_and_unknown_call() -> None:
    with pytest.raises(KernelsError, match=r"softmax takes 2 values \(got 3\)"):
        lift().call("softmax", 1, 2, 3)
    with pytest.raises(KernelsError, match="has no host call dance"):
        lift().call("dance", 1)
