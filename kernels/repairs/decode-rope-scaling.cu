// Repair decode-rope-scaling: Llama 3's frequencies, as prefill has them. Replaces a function of
// decode-rope.cu.
//
// The numbers are those of init_rope_frequencies (kernels.cu:96-152) for theta 500000, factor 32,
// low and high factors 1 and 4, and 8192 positions: float32, bit for bit, so that a pair's angle
// (position * frequency in float32) is that of prefill's tables. Pairs 0-14 are as they were,
// 15-17 blended, 18-31 turn 32 times more slowly.

__device__ float ropeDecodeFrequency(int pair) {
    const float frequencies[32] = {
        1.0f, 0.6636013f, 0.44036663f, 0.29222783f,
        0.19392276f, 0.12868738f, 0.0853971f, 0.05666962f,
        0.03760603f, 0.024955409f, 0.01656044f, 0.010989529f,
        0.007292665f, 0.0048394212f, 0.003211446f, 0.001290548f,
        0.0004295567f, 9.708289e-05f, 1.9461639e-05f, 1.29147675e-05f,
        8.570256e-06f, 5.6872323e-06f, 3.7740544e-06f, 2.5044671e-06f,
        1.6619674e-06f, 1.1028836e-06f, 7.3187493e-07f, 4.856731e-07f,
        3.222933e-07f, 2.1387423e-07f, 1.419272e-07f, 9.4183065e-08f,
    };
    return frequencies[pair];
}
