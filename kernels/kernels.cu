// The eleven kernels of tiny-vllm (commit e25bf19), their host calls and the RoPE tables.
//
// Order, names, parameters, launch shapes and arithmetic follow upstream's src/kernels.cu, so that the
// two files can be read side by side; "kernels.cu:55-94" below means upstream's lines. Upstream's
// faults are kept and marked FAULT: finding them is the harness's task.
//
// How to read the arithmetic: a bf16 (`__nv_bfloat16`) is the upper half of a float. Everything is
// computed in float, and a store to bf16 rounds to nearest, ties to even. nvcc fuses some products into
// the sum that follows (one rounding instead of two). Which ones is written out here with `__fmaf_rn`
// (fused) and `__fmul_rn` (never fused), so that no compiler's choice can change a bit.

#include <cmath>
#include <iostream>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

// --- constants (kernels.cu:8-19) ------------------------------------------------------------------

const int EMBEDDING_LENGTH = 2048;  // width of the residual stream
const int HIDDEN_DIM = 8192;        // width of the MLP
const int HEAD_DIM = 64;
const int NUM_Q_HEADS = 32;
const int GQA_Q_TO_K_RATIO = 4;  // four query heads share one key/value head
const int KV_DIM = 512;          // 8 key/value heads of 64
const int N_LAYERS = 16;
const int MAX_SEQ_LEN = 2048;
const int BLOCK_SIZE = 16;  // tokens in one page of the KV cache
const int MAX_BLOCKS_PER_SEQ = MAX_SEQ_LEN / BLOCK_SIZE;
const int V_OFFSET = BLOCK_SIZE * KV_DIM * 2;  // bytes: a page's K rows come first, then its V rows
const int BLOCK_BYTES = 2 * V_OFFSET;
const float SQRT_HEAD_DIM = 8.0f;

// The RoPE tables in device memory, made once by init_rope_frequencies. d_inv_freq is never read.
static float *d_inv_freq = nullptr;
static float *d_cos = nullptr;
static float *d_sin = nullptr;

// --- embedding (kernels.cu:32-53) -----------------------------------------------------------------

// One block per token. A block has 1024 threads and a row 2048 columns, so each thread copies two:
// neighbouring threads touch neighbouring columns, which the memory system serves in one go.
__global__ void embeddingGatherKernel(int *tokens, __nv_bfloat16 *output, __nv_bfloat16 *embeddings,
                                      int num_tokens) {
    if (threadIdx.x + EMBEDDING_LENGTH * blockIdx.x < EMBEDDING_LENGTH * num_tokens) {
        int token = tokens[blockIdx.x];
        __nv_bfloat16 *row = embeddings + (size_t)token * EMBEDDING_LENGTH;
        __nv_bfloat16 *out = output + blockIdx.x * EMBEDDING_LENGTH;
        out[threadIdx.x] = row[threadIdx.x];
        out[threadIdx.x + 1024] = row[threadIdx.x + 1024];
    }
}

void embeddingGather(int *tokens, __nv_bfloat16 *output, __nv_bfloat16 *embeddings, int num_tokens) {
    embeddingGatherKernel<<<num_tokens, 1024>>>(tokens, output, embeddings, num_tokens);
}

// --- RMS norm (kernels.cu:55-94) ------------------------------------------------------------------

// One block per row: out = x / sqrt(mean(x^2) + 1e-5) * weight.
//
// The sum of 2048 squares is a tree in shared memory. Turn by turn the distance i doubles:
//
//     slot   0   1   2   3   4   5   6   7 ...
//     i=1    0+1     2+3     4+5     6+7          threads 0, 2, 4, 6 work
//     i=2    0..3            4..7                 threads 0, 4
//     i=4    0..7                                 thread 0
//
// __syncthreads() between the turns makes every thread wait until all have written theirs. All
// threads of the block must reach it, so it stands outside the `if`.
__global__ void rmsNormKernel(__nv_bfloat16 *input, __nv_bfloat16 *output, __nv_bfloat16 *norm_weights,
                              int num_tokens) {
    __shared__ float rms_vector[1024];
    if (threadIdx.x + EMBEDDING_LENGTH * blockIdx.x < EMBEDDING_LENGTH * num_tokens) {
        // blockIdx is the same for the whole block, so the guard above takes all of it or none
        __nv_bfloat16 *x = input + blockIdx.x * EMBEDDING_LENGTH;
        __nv_bfloat16 *out = output + blockIdx.x * EMBEDDING_LENGTH;
        float first = __bfloat162float(x[threadIdx.x]);
        float second = __bfloat162float(x[threadIdx.x + 1024]);
        rms_vector[threadIdx.x] = __fmaf_rn(first, first, __fmul_rn(second, second));
        __syncthreads();
        for (int i = 1; i < 1024; i *= 2) {
            if (threadIdx.x % (i * 2) == 0) {
                rms_vector[threadIdx.x] = rms_vector[threadIdx.x] + rms_vector[threadIdx.x + i];
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            // 2048.0 and 1e-5 are double, so the division, the sum and the root are, too
            rms_vector[0] = (float)sqrt((double)rms_vector[0] / 2048.0 + 1e-5);
        }
        __syncthreads();
        // Rounded once, at the end. Hugging Face rounds x / rms to bf16 before the weight.
        float w1 = __bfloat162float(norm_weights[threadIdx.x]);
        float w2 = __bfloat162float(norm_weights[threadIdx.x + 1024]);
        out[threadIdx.x] = __float2bfloat16((first / rms_vector[0]) * w1);
        out[threadIdx.x + 1024] = __float2bfloat16((second / rms_vector[0]) * w2);
    }
}

void rmsNorm(__nv_bfloat16 *input, __nv_bfloat16 *output, __nv_bfloat16 *norm_weights, int num_tokens) {
    rmsNormKernel<<<num_tokens, 1024>>>(input, output, norm_weights, num_tokens);
}

// --- RoPE tables, on the host (kernels.cu:96-152) -------------------------------------------------

// Rotary embedding turns pair i of a head at position pos by the angle pos * inv_freq[i]. Llama 3
// slows the low frequencies down by `factor`, blends a band in the middle and keeps the high ones.
// Here that leaves indices 0-14 as they are, blends 15-17 and divides 18-31 by 32.
void init_rope_frequencies(int head_dim, int max_seq_len, float theta, float factor,
                           float low_freq_factor, float high_freq_factor,
                           int original_max_position) {
    int half = head_dim / 2;
    float low_freq_wavelength = original_max_position / low_freq_factor;
    float high_freq_wavelength = original_max_position / high_freq_factor;

    std::vector<float> inv_freq_llama(half);  // (32,)
    for (int i = 0; i < half; i++) {
        float inv_freq = 1.0f / powf(theta, (float)(2 * i) / head_dim);
        // pi and the division in double: a float pi gives another inv_freq[17]
        float wavelength = (float)(2.0 * 3.14159265358979323846 / inv_freq);
        if (wavelength > low_freq_wavelength) {
            inv_freq_llama[i] = inv_freq / factor;
        } else if (wavelength >= high_freq_wavelength) {
            float smooth = (original_max_position / wavelength - low_freq_factor) /
                           (high_freq_factor - low_freq_factor);
            // volatile: two roundings, also where the host compiler likes to fuse (arm64)
            volatile float slow = (1.0f - smooth) * inv_freq / factor;
            volatile float fast = smooth * inv_freq;
            inv_freq_llama[i] = slow + fast;
        } else {
            inv_freq_llama[i] = inv_freq;
        }
    }

    std::vector<float> cos_table((size_t)max_seq_len * head_dim);  // (2048, 64)
    std::vector<float> sin_table((size_t)max_seq_len * head_dim);
    for (int pos = 0; pos < max_seq_len; pos++) {
        for (int i = 0; i < half; i++) {
            float angle = pos * inv_freq_llama[i];
            size_t at = (size_t)pos * head_dim + 2 * i;  // entries 2i and 2i+1 hold the same value
            cos_table[at] = cos_table[at + 1] = cosf(angle);
            sin_table[at] = sin_table[at + 1] = sinf(angle);
        }
    }

    size_t freq_bytes = inv_freq_llama.size() * sizeof(float);
    size_t table_bytes = cos_table.size() * sizeof(float);
    cudaMalloc(&d_inv_freq, freq_bytes);
    cudaMalloc(&d_cos, table_bytes);
    cudaMalloc(&d_sin, table_bytes);
    cudaMemcpy(d_inv_freq, inv_freq_llama.data(), freq_bytes, cudaMemcpyHostToDevice);
    cudaMemcpy(d_cos, cos_table.data(), table_bytes, cudaMemcpyHostToDevice);
    cudaMemcpy(d_sin, sin_table.data(), table_bytes, cudaMemcpyHostToDevice);
}

// --- RoPE in prefill (kernels.cu:173-222) ---------------------------------------------------------

// One block per token, one thread per pair. Llama's weights (in Hugging Face's order) pair element i
// with element i + 32 of the same head: the two halves, not two neighbours.
__global__ void ropeKernel_llama3(__nv_bfloat16 *input, int num_tokens, int dim, int head_dim,
                                  const float *cos_table, const float *sin_table) {
    if (threadIdx.x >= dim / 2) {
        return;
    }
    int head = threadIdx.x / (head_dim / 2);
    int pair = threadIdx.x % (head_dim / 2);
    int base = blockIdx.x * dim + head * head_dim;
    int idx1 = base + pair;
    int idx2 = idx1 + head_dim / 2;

    // in prefill a token's position is its row
    float c = cos_table[blockIdx.x * head_dim + 2 * pair];
    float s = sin_table[blockIdx.x * head_dim + 2 * pair];
    float x1 = __bfloat162float(input[idx1]);
    float x2 = __bfloat162float(input[idx2]);
    input[idx1] = __float2bfloat16(__fmaf_rn(x1, c, -__fmul_rn(x2, s)));
    input[idx2] = __float2bfloat16(__fmaf_rn(x2, c, __fmul_rn(x1, s)));
}

void rope(__nv_bfloat16 *input, int num_tokens, int dim) {
    int threads = dim / 2;
    if (threads > 1024) {
        std::cout << "rope: more than 1024 threads per block";
        return;
    }
    ropeKernel_llama3<<<num_tokens, threads>>>(input, num_tokens, dim, HEAD_DIM, d_cos, d_sin);
}

// --- causal mask (kernels.cu:224-255) -------------------------------------------------------------

// scores is (32 heads, n queries, n keys). One block per (head, query) row, one thread per key.
// A key later than its query becomes -infinity, so that its probability becomes exp(-inf) = 0.
__global__ void causalMaskKernel(__nv_bfloat16 *input, int num_tokens) {
    if (threadIdx.x + blockIdx.x * blockDim.x >= NUM_Q_HEADS * num_tokens * num_tokens) {
        return;
    }
    int row = blockIdx.x % num_tokens;
    int column = threadIdx.x;
    if (column > row) {
        input[blockIdx.x * num_tokens + threadIdx.x] = __float2bfloat16(-INFINITY);
    }
}

void causalMask(__nv_bfloat16 *input, int num_tokens) {
    if (num_tokens > 1024) {
        // FAULT launch-refused: the caller goes on with unmasked scores
        std::cout << "causalMask: more than 1024 threads per block";
        return;
    }
    causalMaskKernel<<<NUM_Q_HEADS * num_tokens, num_tokens>>>(input, num_tokens);
}

// --- softmax in prefill (kernels.cu:257-309) ------------------------------------------------------

// Online softmax as a tree. Each slot carries (m, d): the maximum of its elements and the sum of
// exp(x - m) over them. Two slots a and b merge into one by moving both sums to the common maximum:
//
//     m = max(m_a, m_b)        d = d_a * exp(m_a - m) + d_b * exp(m_b - m)
//
// FAULT softmax-nan: if both slots are fully masked, m_a = m_b = m = -inf, and -inf - -inf is NaN.
// NaN then spreads up the tree, and the whole row is lost. (With one masked slot all is well:
// exp(-inf - m) = 0.) An aligned masked pair exists from 4 tokens on.
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
            m[threadIdx.x] = m_new;
            d[threadIdx.x] = __fmaf_rn(d[threadIdx.x], expf(m_a - m_new),
                                       __fmul_rn(d[threadIdx.x + i], expf(m_b - m_new)));
        }
        __syncthreads();
    }
    input[blockIdx.x * num_tokens + threadIdx.x] = __float2bfloat16(expf(token - m[0]) / d[0]);
}

void softmax(__nv_bfloat16 *input, int num_tokens) {
    if (num_tokens > 1024) {
        // FAULT launch-refused: the caller goes on with unnormalised scores
        std::cout << "softmax: more than 1024 threads per block";
        return;
    }
    softmaxKernel<<<NUM_Q_HEADS * num_tokens, num_tokens>>>(input, num_tokens);
}

// --- residual (kernels.cu:311-329) ----------------------------------------------------------------

// x += y. bf16's own operator+: float sum, rounded once. There is no guard: the grid is exact.
__global__ void residualKernel(__nv_bfloat16 *input, __nv_bfloat16 *input_embeds) {
    int at = blockIdx.x * EMBEDDING_LENGTH + threadIdx.x;
    input[at] = input[at] + input_embeds[at];
    input[at + 1024] = input[at + 1024] + input_embeds[at + 1024];
}

void residualAdd(__nv_bfloat16 *input, __nv_bfloat16 *input_embeds, int num_tokens) {
    residualKernel<<<num_tokens, 1024>>>(input, input_embeds);
}

// --- SwiGLU (kernels.cu:331-344) ------------------------------------------------------------------

// gate = silu(gate) * up with silu(a) = a / (1 + exp(-a)), in place. Each of the 1024 threads walks
// eight columns, 1024 apart.
__global__ void siluKernel(__nv_bfloat16 *gate, __nv_bfloat16 *up) {
    for (int i = 0; i < HIDDEN_DIM; i += 1024) {
        int at = blockIdx.x * HIDDEN_DIM + threadIdx.x + i;
        float a = __bfloat162float(gate[at]);
        float b = __bfloat162float(up[at]);
        gate[at] = __float2bfloat16(a * (1.0f / (1.0f + expf(-a))) * b);
    }
}

void silu(__nv_bfloat16 *gate, __nv_bfloat16 *up, int num_tokens) {
    siluKernel<<<num_tokens, 1024>>>(gate, up);
}

// --- decode: embedding (kernels.cu:347-369) -------------------------------------------------------

// In decode, row r of every buffer is the r-th active slot, and each row holds one token.
__global__ void embeddingGatherKernelDecode(int *last_tokens, int num_active_slots,
                                            __nv_bfloat16 *output, __nv_bfloat16 *embeddings) {
    if (threadIdx.x + EMBEDDING_LENGTH * blockIdx.x < EMBEDDING_LENGTH * num_active_slots) {
        int token = last_tokens[blockIdx.x];
        __nv_bfloat16 *row = embeddings + (size_t)token * EMBEDDING_LENGTH;
        __nv_bfloat16 *out = output + blockIdx.x * EMBEDDING_LENGTH;
        out[threadIdx.x] = row[threadIdx.x];
        out[threadIdx.x + 1024] = row[threadIdx.x + 1024];
    }
}

void embeddingGatherDecode(int *last_tokens, int num_active_slots, __nv_bfloat16 *output,
                           __nv_bfloat16 *embeddings) {
    embeddingGatherKernelDecode<<<num_active_slots, 1024>>>(last_tokens, num_active_slots, output,
                                                            embeddings);
}

// --- decode: RoPE (kernels.cu:371-405) ------------------------------------------------------------

// One row, one thread per pair.
// FAULT decode-rope-pairing: it rotates neighbours (2i, 2i+1), prefill rotates halves (i, i+32).
// FAULT decode-rope-scaling: it computes plain 500000^(-2i/64) and skips Llama 3's scaling.
__global__ void ropeKernelDecode(__nv_bfloat16 *input, int position, int dim) {
    int idx1 = 2 * threadIdx.x;
    int idx2 = idx1 + 1;
    if (idx2 < dim) {
        float double_i = 2 * (threadIdx.x % (HEAD_DIM / 2));
        // the exponent is a float, the power and the division are double, the result is a float
        float theta = (float)(1.0 / pow(500000.0, (double)(double_i / HEAD_DIM)));
        float angle = position * theta;
        float c = cosf(angle);
        float s = sinf(angle);
        float x1 = __bfloat162float(input[idx1]);
        float x2 = __bfloat162float(input[idx2]);
        // not the contraction of prefill: here the first product is the one left unfused
        input[idx1] = __float2bfloat16(__fmaf_rn(-x2, s, __fmul_rn(x1, c)));
        input[idx2] = __float2bfloat16(__fmaf_rn(x2, c, __fmul_rn(x1, s)));
    }
}

void ropeDecode(__nv_bfloat16 *input, int position, int dim) {
    int threads = dim / 2;
    if (threads > 1024) {
        std::cout << "ropeDecode: more than 1024 threads per block";
        return;
    }
    ropeKernelDecode<<<1, threads>>>(input, position, dim);
}

// --- decode: softmax (kernels.cu:408-458), never called -------------------------------------------

// The tree of softmaxKernel over one row a head; rows lie MAX_SEQ_LEN apart.
__global__ void softmaxKernelDecode(__nv_bfloat16 *input, int len) {
    __shared__ float m[1024];
    __shared__ float d[1024];
    float token = __bfloat162float(input[blockIdx.x * MAX_SEQ_LEN + threadIdx.x]);
    m[threadIdx.x] = token;
    d[threadIdx.x] = 1.0f;
    __syncthreads();
    for (int i = 1; i < len; i *= 2) {
        if (threadIdx.x % (i * 2) == 0 && threadIdx.x + i < len) {
            float m_a = m[threadIdx.x];
            float m_b = m[threadIdx.x + i];
            float m_new = fmaxf(m_a, m_b);
            m[threadIdx.x] = m_new;
            d[threadIdx.x] = __fmaf_rn(d[threadIdx.x], expf(m_a - m_new),
                                       __fmul_rn(d[threadIdx.x + i], expf(m_b - m_new)));
        }
        __syncthreads();
    }
    input[blockIdx.x * MAX_SEQ_LEN + threadIdx.x] = __float2bfloat16(expf(token - m[0]) / d[0]);
}

void softmaxDecode(__nv_bfloat16 *input, int len) {
    if (len > 1024) {
        std::cout << "softmaxDecode: more than 1024 threads per block";
        return;
    }
    softmaxKernelDecode<<<NUM_Q_HEADS, len>>>(input, len);
}

// --- decode: paged attention (kernels.cu:461-528) -------------------------------------------------

// One block per (active row, query head), one thread per dimension of the head (64 = two warps).
// The block walks the sequence token by token:
//   1. each thread multiplies its element of q and k; the products are summed over the block, first
//      within each warp by shuffles (a thread reads a register of the thread `offset` further on),
//      then over the two warps through shared memory;
//   2. each thread folds exp(score) * v into its running, rescaled sum (online softmax).
// A sequence's keys and values live in pages of 16 tokens, anywhere in kv_cache; block_table says which
// page holds which 16 tokens: [slot][layer][logical block] -> physical block.
__global__ void pagedAttentionKernel(int layer, int num_active_slots, __nv_bfloat16 *q,
                                     __nv_bfloat16 *kv_cache, int *block_table, int *seq_lens,
                                     int *active_slots, __nv_bfloat16 *output) {
    __shared__ float dot_products[2];  // one sum a warp
    int active_slot = blockIdx.x;      // the row; not the slot, once another slot has ended
    int q_head = blockIdx.y;
    int kv_head = q_head / GQA_Q_TO_K_RATIO;
    int slot = active_slots[active_slot];
    int seq_len = seq_lens[active_slot];

    int at = active_slot * EMBEDDING_LENGTH + q_head * HEAD_DIM + threadIdx.x;
    float q_value = __bfloat162float(q[at]);  // before the store below: output may be q's own buffer

    float running_max = -INFINITY;
    float d = 0.0f;
    float acc = 0.0f;
    int num_blocks = (seq_len + BLOCK_SIZE - 1) / BLOCK_SIZE;
    for (int logical_block = 0; logical_block < num_blocks; logical_block++) {
        int physical_block = block_table[slot * N_LAYERS * MAX_BLOCKS_PER_SEQ +
                                         layer * MAX_BLOCKS_PER_SEQ + logical_block];
        // int arithmetic: block 65535 is the last one whose byte offset fits
        char *page = (char *)kv_cache + physical_block * BLOCK_BYTES;
        int tokens_left = seq_len - logical_block * BLOCK_SIZE;
        int tokens_here = tokens_left < BLOCK_SIZE ? tokens_left : BLOCK_SIZE;
        for (int token = 0; token < tokens_here; token++) {
            __nv_bfloat16 *k_row = (__nv_bfloat16 *)(page + token * KV_DIM * 2);
            __nv_bfloat16 *v_row = (__nv_bfloat16 *)(page + V_OFFSET + token * KV_DIM * 2);

            float product = q_value * __bfloat162float(k_row[kv_head * HEAD_DIM + threadIdx.x]);
            for (int offset = 16; offset > 0; offset /= 2) {
                product += __shfl_down_sync(0xffffffff, product, offset);
            }
            if (threadIdx.x % 32 == 0) {
                dot_products[threadIdx.x / 32] = product;
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                dot_products[0] = (dot_products[0] + dot_products[1]) / SQRT_HEAD_DIM;
            }
            __syncthreads();
            float score = dot_products[0];

            float new_max = score > running_max ? score : running_max;
            float correction = expf(running_max - new_max);  // 0 at the first token: exp(-inf)
            float e = expf(score - new_max);
            float v_value = __bfloat162float(v_row[kv_head * HEAD_DIM + threadIdx.x]);
            d = __fmaf_rn(d, correction, e);
            acc = __fmaf_rn(acc, correction, __fmul_rn(e, v_value));
            running_max = new_max;
            // FAULT attention-race: no barrier here. Warp 0 may write dot_products[0] for the next
            // token before warp 1 has read it for this one.
        }
    }
    output[at] = __float2bfloat16(acc / d);
}

void pagedAttention(int layer, int num_active_slots, __nv_bfloat16 *q, __nv_bfloat16 *kv_cache,
                    int *block_table, int *seq_lens, int *active_slots, __nv_bfloat16 *output) {
    dim3 grid(num_active_slots, NUM_Q_HEADS);
    pagedAttentionKernel<<<grid, HEAD_DIM>>>(layer, num_active_slots, q, kv_cache, block_table, seq_lens,
                                             active_slots, output);
}
