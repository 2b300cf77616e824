"""Faults of the kernels, as public reports and bug-fix commits tell them, as edits of kernels.cu.

To add one: an entry with its edits and the (phase, op) pairs that must be blamed. `blamed` lists
every op that the kernel serves and the fault can show in; nothing else may be blamed.
"""

from __future__ import annotations

from dataclasses import dataclass

from plant import Edit


@dataclass(frozen=True)
class KernelFault:
    name: str
    edits: tuple[Edit, ...]
    blamed: frozenset[tuple[str, str]]


def _at(phase: str, *ops: str) -> frozenset[tuple[str, str]]:
    return frozenset((phase, op) for op in ops)


_NORMS = _at("prefill", "attn_norm", "mlp_norm") | _at("decode", "attn_norm", "mlp_norm")
_ROPES = _at("prefill", "q_rope", "k_rope")
_SWIGLU = _at("prefill", "swiglu") | _at("decode", "swiglu")
_ROOT = "sqrt((double)rms_vector[0] / 2048.0 + 1e-5)"
_ROW = "int row = blockIdx.x % num_tokens;"
_MASKED = "input[blockIdx.x * num_tokens + threadIdx.x] = __float2bfloat16(-INFINITY);"
_TABLE = "cos_table[blockIdx.x * head_dim + 2 * pair]"
_SINES = "sin_table[blockIdx.x * head_dim + 2 * pair]"
_SILU = "a * (1.0f / (1.0f + expf(-a))) * b"
_SECOND = "        out[threadIdx.x + 1024] = __float2bfloat16((second / rms_vector[0]) * w2);\n"

KERNEL_FAULTS = (
    KernelFault(
        "H01 mask: row and address wrong",
        (
            Edit(_ROW, "int row = blockIdx.x / NUM_Q_HEADS;"),
            Edit(_MASKED, _MASKED.replace("blockIdx.x * num_tokens", "blockIdx.x")),
        ),
        _at("prefill", "mask"),
    ),
    KernelFault(
        "H01 mask: row wrong",
        (Edit(_ROW, "int row = blockIdx.x / NUM_Q_HEADS;"),),
        _at("prefill", "mask"),
    ),
    KernelFault(
        "H01 mask: address wrong",
        (Edit(_MASKED, _MASKED.replace("blockIdx.x * num_tokens", "blockIdx.x")),),
        _at("prefill", "mask"),
    ),
    KernelFault(
        "H02 every pair turns one radian a position",
        (
            Edit(_TABLE, "cosf((float)blockIdx.x)"),
            Edit(_SINES, "sinf((float)blockIdx.x)"),
        ),
        _ROPES,
    ),
    KernelFault("H04 second half of the row not written", (Edit(_SECOND, ""),), _NORMS),
    KernelFault(
        "H06 squares summed in bf16",
        (
            Edit(
                "__shared__ float rms_vector[1024];", "__shared__ __nv_bfloat16 rms_vector[1024];"
            ),
            Edit(
                "rms_vector[threadIdx.x] = __fmaf_rn(first, first, __fmul_rn(second, second));",
                "rms_vector[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x] + "
                "x[threadIdx.x + 1024] * x[threadIdx.x + 1024];",
            ),
            Edit(
                "rms_vector[0] = (float)" + _ROOT,
                "rms_vector[0] = __float2bfloat16((float)"
                "sqrt((double)__bfloat162float(rms_vector[0]) / 2048.0 + 1e-5))",
            ),
            Edit("(first / rms_vector[0]) * w1", "(first / __bfloat162float(rms_vector[0])) * w1"),
            Edit(
                "(second / rms_vector[0]) * w2", "(second / __bfloat162float(rms_vector[0])) * w2"
            ),
        ),
        _NORMS,
    ),
    KernelFault("P20 eps 1e-6", (Edit(_ROOT, _ROOT.replace("1e-5", "1e-6")),), _NORMS),
    KernelFault("P20 no eps", (Edit(_ROOT, _ROOT.replace(" + 1e-5", "")),), _NORMS),
    KernelFault(
        "P21 eps outside the root",
        (Edit(_ROOT, "(sqrt((double)rms_vector[0] / 2048.0) + 1e-5)"),),
        _NORMS,
    ),
    KernelFault("P23 sum for mean", (Edit(_ROOT, _ROOT.replace(" / 2048.0", "")),), _NORMS),
    KernelFault(
        "P38 comparison reversed",
        (Edit("if (column > row) {", "if (column < row) {"),),
        _at("prefill", "mask"),
    ),
    KernelFault(
        "P64 GELU for SiLU",
        (
            Edit(
                _SILU,
                "0.5f * a * (1.0f + tanhf(0.79788456f * (a + 0.044715f * a * a * a))) * b",
            ),
        ),
        _SWIGLU,
    ),
    KernelFault("P64 ReLU for SiLU", (Edit(_SILU, "fmaxf(a, 0.0f) * b"),), _SWIGLU),
)
