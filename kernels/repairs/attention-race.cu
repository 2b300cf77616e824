// Repair attention-race: a barrier at the end of the token loop.
//
// kernels.cu:461-528. All threads read dot_products[0] as the score; without the barrier warp 0 may
// come round and store the next token's sum there before warp 1 has read this token's.

#include <cmath>
#include <cuda_bf16.h>

__global__ void pagedAttentionKernel(int layer, int num_active_slots, __nv_bfloat16 *q,
                                     __nv_bfloat16 *kv_cache, int *block_table, int *seq_lens,
                                     int *active_slots, __nv_bfloat16 *output) {
    const int embedding_length = 2048, head_dim = 64, kv_dim = 512, heads_a_kv_head = 4;
    const int n_layers = 16, max_blocks = 128, block_size = 16;
    const int v_offset = block_size * kv_dim * 2, block_bytes = 2 * v_offset;
    __shared__ float dot_products[2];  // one sum a warp
    int active_slot = blockIdx.x;
    int q_head = blockIdx.y;
    int kv_head = q_head / heads_a_kv_head;
    int slot = active_slots[active_slot];
    int seq_len = seq_lens[active_slot];

    int at = active_slot * embedding_length + q_head * head_dim + threadIdx.x;
    float q_value = __bfloat162float(q[at]);

    float running_max = -INFINITY;
    float d = 0.0f;
    float acc = 0.0f;
    int num_blocks = (seq_len + block_size - 1) / block_size;
    for (int logical_block = 0; logical_block < num_blocks; logical_block++) {
        int physical_block =
            block_table[slot * n_layers * max_blocks + layer * max_blocks + logical_block];
        char *page = (char *)kv_cache + physical_block * block_bytes;
        int tokens_left = seq_len - logical_block * block_size;
        int tokens_here = tokens_left < block_size ? tokens_left : block_size;
        for (int token = 0; token < tokens_here; token++) {
            __nv_bfloat16 *k_row = (__nv_bfloat16 *)(page + token * kv_dim * 2);
            __nv_bfloat16 *v_row = (__nv_bfloat16 *)(page + v_offset + token * kv_dim * 2);

            float product = q_value * __bfloat162float(k_row[kv_head * head_dim + threadIdx.x]);
            for (int offset = 16; offset > 0; offset /= 2) {
                product += __shfl_down_sync(0xffffffff, product, offset);
            }
            if (threadIdx.x % 32 == 0) {
                dot_products[threadIdx.x / 32] = product;
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                dot_products[0] = (dot_products[0] + dot_products[1]) / 8.0f;
            }
            __syncthreads();
            float score = dot_products[0];

            float new_max = score > running_max ? score : running_max;
            float correction = expf(running_max - new_max);
            float e = expf(score - new_max);
            float v_value = __bfloat162float(v_row[kv_head * head_dim + threadIdx.x]);
            d = __fmaf_rn(d, correction, e);
            acc = __fmaf_rn(acc, correction, __fmul_rn(e, v_value));
            running_max = new_max;
            __syncthreads();  // the repair
        }
    }
    output[at] = __float2bfloat16(acc / d);
}
