// Repair decode-rope-pairing: the pairs of prefill (kernels.cu:173-222), element i with i + 32 of the
// same head, for Llama's weights are made for these halves. Replaces a function of decode-rope.cu.

__device__ int ropeDecodeElement(int thread, int which) {
    int head = thread / 32;
    int pair = thread % 32;
    return head * 64 + pair + 32 * which;
}
