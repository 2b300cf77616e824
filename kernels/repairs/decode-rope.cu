// What decode-rope-pairing and decode-rope-scaling share: ropeKernelDecode with its two faults taken
// out into a function each. As it stands here it computes what kernels.cu:371-405 computes, to the
// bit; each repair replaces one of the two functions, so that either alone and both are possible.

#include <cmath>
#include <cuda_bf16.h>

// Element `which` (0 or 1) of the pair that `thread` turns.
__device__ int ropeDecodeElement(int thread, int which) { return 2 * thread + which; }

// By what angle a pair (0 to 31 of its head) turns per position.
__device__ float ropeDecodeFrequency(int pair) {
    float exponent = (float)(2 * pair) / 64;
    return (float)(1.0 / pow(500000.0, (double)exponent));
}

__global__ void ropeKernelDecode(__nv_bfloat16 *input, int position, int dim) {
    int thread = threadIdx.x;
    if (2 * thread + 1 < dim) {
        int idx1 = ropeDecodeElement(thread, 0);
        int idx2 = ropeDecodeElement(thread, 1);
        float angle = position * ropeDecodeFrequency(thread % 32);
        float c = cosf(angle);
        float s = sinf(angle);
        float x1 = __bfloat162float(input[idx1]);
        float x2 = __bfloat162float(input[idx2]);
        input[idx1] = __float2bfloat16(__fmaf_rn(-x2, s, __fmul_rn(x1, c)));
        input[idx2] = __float2bfloat16(__fmaf_rn(x2, c, __fmul_rn(x1, s)));
    }
}
