// Repair softmax-nan: two slots that are both fully masked merge into a fully masked one.
//
// kernels.cu:257-309. With m_a = m_b = -inf the difference m_a - m_new is -inf - -inf = NaN. Nothing
// is in either slot, so nothing is to be added up: leave the maximum at -inf and do not touch the sum.
// A row's first key is never masked, so at the root the maximum is finite, and the rest of such a
// slot's sum is multiplied by exp(-inf - m) = 0.

#include <cmath>
#include <cuda_bf16.h>

__global__ void softmaxKernel(__nv_bfloat16 *input, int num_tokens) {
    __shared__ float m[1024];
    __shared__ float d[1024];
    float token = __bfloat162float(input[blockIdx.x * num_tokens + threadIdx.x]);
    m[threadIdx.x] = token;
    d[threadIdx.x] = 1.0f;
    __syncthreads();
    for (int i = 1; i < num_tokens; i *= 2) {
        if (threadIdx.x % (i * 2) == 0 && threadIdx.x + i < num_tokens) {
            float m_a = m[threadIdx.x];
            float m_b = m[threadIdx.x + i];
            float m_new = fmaxf(m_a, m_b);
            if (m_new != -INFINITY) {  // the repair
                m[threadIdx.x] = m_new;
                d[threadIdx.x] = __fmaf_rn(d[threadIdx.x], expf(m_a - m_new),
                                           __fmul_rn(d[threadIdx.x + i], expf(m_b - m_new)));
            }
        }
        __syncthreads();
    }
    input[blockIdx.x * num_tokens + threadIdx.x] = __float2bfloat16(expf(token - m[0]) / d[0]);
}
