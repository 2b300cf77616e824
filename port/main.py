"""tiny-vllm's `main.cpp` at commit e25bf19, in its own order, with its own names and faults.

Read it beside upstream: every step carries upstream's line range. What C++ has and Python has not
is written out: pointers are integers, `+ offset` counts bytes, `int*` buffers are NumPy int32
arrays on the host side. Five things differ, and nothing else:

- each op stands in `for _ in op(name, layer):`, so that an observer may look at it (observer.py);
- a checkpoint with fewer layers than 16 stops the layer loop early (upstream throws at load);
- weights are copied to the device tensor by tensor, and only those asked for (upstream: one read
  and one copy of the whole file); addresses and bytes are the same;
- `max_seq_len` can end sequences earlier than MAX_SEQ_LEN; strides keep MAX_SEQ_LEN;
- `check_eos_after_prefill` (repair prefill-eos, off by default) looks at prefill's token too.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from kernels.lift import KernelsFile
from port.device import Device, MemcpyKind, Operation, Pointer
from port.host_calls import HostCalls
from port.observer import Observer
from port.weights import ModelFile, WeightsError

# --- main.cpp:12-38: constants ------------------------------------------------------------------

MAX_NEW_TOKENS_GENERATED = 20  # declared and never used
N_LAYERS = 16
EMBEDDING_LENGTH = 2048
HIDDEN_DIM = 8192
KV_DIM = 512
HEAD_DIM = 64
NUM_Q_HEADS = 32
NUM_K_HEADS = 8
NUM_V_HEADS = 8
GQA_Q_TO_K_RATIO = NUM_Q_HEADS // NUM_K_HEADS
GQA_ATTN_SCORES_TO_V_RATIO = NUM_Q_HEADS // NUM_V_HEADS
VOCAB_SIZE = 128256
END_OF_TEXT_TOKEN_ID = 128001
EOT_ID_TOKEN_ID = 128009
MAX_SEQ_LEN = 2048
BATCH_SIZE = 2
MAX_SEQUENCES = BATCH_SIZE
MAX_PROMPT_LEN = 512
MAX_BUFFER_SIZE = max(MAX_PROMPT_LEN, BATCH_SIZE)  # rows of the buffers that both phases share
KV_CACHE_SIZE_BYTES = 2 * 1024 * 1024 * 1024
BLOCK_SIZE = 16  # tokens a page
BF16 = 2  # sizeof(__nv_bfloat16)
INT = 4  # sizeof(int)
V_OFFSET = BLOCK_SIZE * KV_DIM * BF16  # a block is a K page, then a V page
BLOCK_BYTES = 2 * V_OFFSET
NUM_BLOCKS = KV_CACHE_SIZE_BYTES // BLOCK_BYTES  # 65536
MAX_BLOCKS_PER_SEQ = MAX_SEQ_LEN // BLOCK_SIZE  # 128

# main.cpp:583-594: the four hard-coded chat prompts, in the order in which they are queued.
CHAT_PROMPTS: tuple[tuple[int, ...], ...] = (
    (
        128000, 128006, 882, 128007, 271, 3923, 374, 220, 17, 10, 17, 30, 128009,
        128006, 78191, 128007, 271,
    ),
    (
        128000, 128006, 882, 128007, 271, 678, 264, 1933, 13, 128009, 128006, 78191,
        128007, 271,
    ),
    (
        128000, 128006, 882, 128007, 271, 46864, 24748, 13, 128009, 128006, 78191,
        128007, 271,
    ),
    (
        128000, 128006, 882, 128007, 271, 64693, 315, 9822, 30, 128009, 128006, 78191,
        128007, 271,
    ),
)

H2D = MemcpyKind.HOST_TO_DEVICE
D2H = MemcpyKind.DEVICE_TO_HOST
D2D = MemcpyKind.DEVICE_TO_DEVICE
OP_N = Operation.N
OP_T = Operation.T


class EngineAbort(Exception):
    """A C++ assert that failed: upstream's program would abort here."""


# --- main.cpp:64-147: weights -------------------------------------------------------------------


@dataclass(frozen=True)
class LayerWeights:
    """Device pointers to one layer's tensors, each stored [out, in]."""

    input_layernorm: Pointer
    down_proj: Pointer
    gate_proj: Pointer
    up_proj: Pointer
    post_attention_layernorm: Pointer
    k_proj: Pointer
    o_proj: Pointer
    q_proj: Pointer
    v_proj: Pointer


@dataclass(frozen=True)
class Weights:
    """One device allocation, and pointers into it."""

    base: Pointer
    starts: dict[str, int]  # tensor name -> offset in bytes
    embed_tokens: Pointer  # the output head too: the two are tied
    norm: Pointer
    layers: tuple[LayerWeights, ...]


def load_weights(
    device: Device, model_file: ModelFile, wanted: Collection[str] | None = None
) -> Weights:
    """main.cpp:79-147. `wanted`: names of the tensors to copy (None: all); the rest stays poison.

    Raises WeightsError where a tensor is missing.
    """
    # 88-107: each tensor's start, and the greatest end.
    starts: dict[str, int] = {}
    total = 0
    for name, entry in model_file.header().items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        starts[name] = begin
        total = max(total, end)

    # 109-117: ONE device allocation of that many bytes, filled from the file.
    base = device.malloc(total, "weights")

    # 119-146: pointers = base + offset.
    def at(name: str) -> Pointer:
        if name not in starts:
            raise WeightsError(f"tensor {name} must be in the model file (got none); use another")
        return base + starts[name]

    layers: list[LayerWeights] = []
    while len(layers) < N_LAYERS and f"model.layers.{len(layers)}.input_layernorm.weight" in starts:
        prefix = f"model.layers.{len(layers)}."
        layers.append(
            LayerWeights(
                input_layernorm=at(prefix + "input_layernorm.weight"),
                down_proj=at(prefix + "mlp.down_proj.weight"),
                gate_proj=at(prefix + "mlp.gate_proj.weight"),
                up_proj=at(prefix + "mlp.up_proj.weight"),
                post_attention_layernorm=at(prefix + "post_attention_layernorm.weight"),
                k_proj=at(prefix + "self_attn.k_proj.weight"),
                o_proj=at(prefix + "self_attn.o_proj.weight"),
                q_proj=at(prefix + "self_attn.q_proj.weight"),
                v_proj=at(prefix + "self_attn.v_proj.weight"),
            )
        )
    weights = Weights(
        base=base,
        starts=starts,
        embed_tokens=at("model.embed_tokens.weight"),
        norm=at("model.norm.weight"),
        layers=tuple(layers),
    )
    copy_weights(device, model_file, weights, starts if wanted is None else wanted)
    return weights


def copy_weights(
    device: Device, model_file: ModelFile, weights: Weights, names: Collection[str]
) -> None:
    """Copy the tensors `names` to their places on the device."""
    for name in names:
        data = model_file.read(name)
        device.memcpy(weights.base + weights.starts[name], data, data.nbytes, H2D)


# --- main.cpp:555-693: the engine's state, which upstream keeps in main's local variables --------


class Engine:
    """Everything that lives from program start to end; `prefill` and `decode_step` work on it.

    prompts: what is queued, a list of token ids each. max_seq_len: where a sequence ends.
    wanted: names of the tensors to load (None: all). out: where upstream writes to stdout.
    check_eos_after_prefill: what upstream forgets: an end token of prefill ends the sequence.
    Raises WeightsError where the model file lacks a tensor, DeviceError where memory is short.
    """

    def __init__(
        self,
        device: Device,
        kernels: KernelsFile,
        model_file: ModelFile,
        *,
        prompts: Sequence[Sequence[int]] = CHAT_PROMPTS,
        max_seq_len: int = MAX_SEQ_LEN,
        observer: Observer | None = None,
        wanted: Collection[str] | None = None,
        out: TextIO | None = None,
        check_eos_after_prefill: bool = False,
    ) -> None:
        self.device = device
        self.out = out if out is not None else sys.stdout
        self.observer = observer if observer is not None else Observer()
        self.max_seq_len = max_seq_len
        self.check_eos_after_prefill = check_eos_after_prefill
        self.calls = HostCalls(kernels, device, self.out)
        malloc = device.malloc

        # 40-62: the GPU's figures; then the file.
        for line in device.describe():
            print(line, file=self.out)
        self.weights = load_weights(device, model_file, wanted)
        self.n_layers = len(self.weights.layers)

        # 572: 500000 is theta, 32 the factor, 1 and 4 the low and high frequency factors.
        self.calls.init_rope_frequencies(HEAD_DIM, MAX_SEQ_LEN, 500000.0, 32.0, 1.0, 4.0, 8192)

        # 574-581: the cache, never initialised, and its book-keeping. The table's device twin is
        # only allocated here; its first upload is at the end of the first prefill (552).
        self.kv_cache = malloc(KV_CACHE_SIZE_BYTES, "kv_cache")
        self.gpu_block_table = malloc(
            MAX_SEQUENCES * N_LAYERS * MAX_BLOCKS_PER_SEQ * INT, "block_table"
        )
        self.reset(prompts)

        # 607-693: device buffers, allocated once.
        self.gpu_active_slots = malloc(BATCH_SIZE * INT, "gpu_active_slots")
        self.gpu_seq_lens = malloc(BATCH_SIZE * INT, "gpu_seq_lens")
        self.gpu_last_tokens = malloc(BATCH_SIZE * INT, "gpu_last_tokens")
        self.gpu_input_tokens = malloc(MAX_PROMPT_LEN * INT, "gpu_input_tokens")
        self.input_embeddings = malloc(
            MAX_PROMPT_LEN * EMBEDDING_LENGTH * BF16, "input_embeddings"
        )
        rows_2048 = MAX_BUFFER_SIZE * EMBEDDING_LENGTH * BF16
        self.hidden_state = malloc(rows_2048, "hidden_state")
        self.rms_norms = malloc(rows_2048, "rms_norms")
        self.buf_2048_1 = malloc(rows_2048, "buf_2048_1")
        self.buf_2048_2 = malloc(rows_2048, "buf_2048_2")
        self.q_proj = self.attn_scores_v = self.buf_2048_1  # aliases, as upstream's
        self.o_proj = self.down = self.buf_2048_2
        self.k_proj_temp_buf = malloc(MAX_PROMPT_LEN * KV_DIM * BF16, "k_proj_temp_buf")
        self.v_proj_temp_buf = malloc(MAX_PROMPT_LEN * KV_DIM * BF16, "v_proj_temp_buf")
        self.prefill_attn_scores = malloc(
            NUM_Q_HEADS * MAX_PROMPT_LEN * MAX_PROMPT_LEN * BF16, "prefill_attn_scores"
        )
        self.gate = malloc(MAX_BUFFER_SIZE * HIDDEN_DIM * BF16, "gate")
        self.up = malloc(MAX_BUFFER_SIZE * HIDDEN_DIM * BF16, "up")
        self.embed_proj = malloc(MAX_BUFFER_SIZE * VOCAB_SIZE * BF16, "embed_proj")
        self.embed_proj_cpu = np.empty((MAX_BUFFER_SIZE, VOCAB_SIZE), np.uint16)
        self.k_proj_batched_buffer = malloc(BATCH_SIZE * KV_DIM * BF16, "k_proj_batched_buffer")
        self.v_proj_batched_buffer = malloc(BATCH_SIZE * KV_DIM * BF16, "v_proj_batched_buffer")

    def reset(self, prompts: Sequence[Sequence[int]]) -> None:
        """The host's state at program start (576-605); device memory stays as it is."""
        self.free_blocks = list(range(NUM_BLOCKS))  # a stack: the back is handed out first
        self.block_table = np.full((MAX_SEQUENCES, N_LAYERS, MAX_BLOCKS_PER_SEQ), -1, np.int32)
        self.prompt_queue = deque(list(prompt) for prompt in prompts)
        self.is_slot_free = [True] * BATCH_SIZE
        self.generated_tokens: list[list[int]] = [[] for _ in range(BATCH_SIZE)]
        self.last_generated_tokens = [0] * BATCH_SIZE
        self.current_prompt_len = [0] * BATCH_SIZE

    def upload_block_table(self) -> None:
        self.device.memcpy(self.gpu_block_table, self.block_table, self.block_table.nbytes, H2D)

    def gemm(
        self,
        transa: Operation,
        transb: Operation,
        m: int,
        n: int,
        k: int,
        a: Pointer,
        lda: int,
        b: Pointer,
        ldb: int,
        c: Pointer,
        ldc: int,
        alpha: float = 1.0,
    ) -> None:
        """One cublasGemmEx: column-major bf16, float32 accumulation, beta 0, the status ignored.

        A weight stored [out, in] goes first with OP_T and lda = in, the activation [rows, in]
        second with OP_N and ldb = in; the result [rows, out] comes out row-major, ldc = out.
        """
        self.device.gemm_ex(transa, transb, m, n, k, alpha, a, lda, b, ldb, 0.0, c, ldc)


# --- main.cpp:150-553: prefill ------------------------------------------------------------------


def prefill(e: Engine, slot: int) -> None:
    """One prompt from the queue into `slot`. n tokens are n rows of every buffer."""
    op = e.observer.op
    call = e.calls
    copy = e.device.memcpy

    # 152-155: pop the prompt, take the slot.
    prompt = e.prompt_queue.popleft()
    n = len(prompt)
    e.is_slot_free[slot] = False

    # 157-163: tokens to the device, their embeddings, and a copy that becomes the hidden state.
    copy(e.gpu_input_tokens, np.array(prompt, np.int32), n * INT, H2D)
    e.observer.prefill_begins(e, slot, n)
    for _ in op("embed", None):
        call.embedding_gather(e.gpu_input_tokens, e.input_embeddings, e.weights.embed_tokens, n)
        copy(e.hidden_state, e.input_embeddings, n * EMBEDDING_LENGTH * BF16, D2D)

    for layer in range(e.n_layers):  # 164-493
        w = e.weights.layers[layer]

        # 166: attention norm.
        for _ in op("attn_norm", layer):
            call.rms_norm(e.hidden_state, e.rms_norms, w.input_layernorm, n)

        # 177-240: Q, K, V.
        for _ in op("q_proj", layer):
            e.gemm(OP_T, OP_N, EMBEDDING_LENGTH, n, EMBEDDING_LENGTH,
                   w.q_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.q_proj, EMBEDDING_LENGTH)  # (n, 2048)
        for _ in op("k_proj", layer):
            e.gemm(OP_T, OP_N, KV_DIM, n, EMBEDDING_LENGTH,
                   w.k_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.k_proj_temp_buf, KV_DIM)  # (n, 512)
        for _ in op("v_proj", layer):
            e.gemm(OP_T, OP_N, KV_DIM, n, EMBEDDING_LENGTH,
                   w.v_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.v_proj_temp_buf, KV_DIM)  # (n, 512)

        # 244-245: RoPE in place, half-split pairs, scaled tables; V is not rotated.
        for _ in op("q_rope", layer):
            call.rope(e.q_proj, n, EMBEDDING_LENGTH)
        for _ in op("k_rope", layer):
            call.rope(e.k_proj_temp_buf, n, KV_DIM)

        # 251-288: scatter K and V rows into pages of 16 tokens, one block a span.
        for _ in op("kv_write", layer):
            for token in range(0, n, BLOCK_SIZE):
                num_tokens_to_copy = min(BLOCK_SIZE, n - token)  # the last span: what remains
                logical_block = token // BLOCK_SIZE
                if e.block_table[slot, layer, logical_block] != -1:
                    raise EngineAbort(
                        f"assert: the block table's entry for slot {slot}, layer {layer}, logical "
                        f"block {logical_block} must be -1 before a prefill "
                        f"(got {e.block_table[slot, layer, logical_block]})"
                    )
                physical_block = e.free_blocks.pop()
                e.block_table[slot, layer, logical_block] = physical_block
                block = e.kv_cache + physical_block * BLOCK_BYTES
                row = token * KV_DIM * BF16
                num_bytes = num_tokens_to_copy * KV_DIM * BF16
                copy(block, e.k_proj_temp_buf + row, num_bytes, D2D)
                copy(block + V_OFFSET, e.v_proj_temp_buf + row, num_bytes, D2D)

        # 301-327: scores, q head h against k head h/4, from the temporary K: prefill's attention
        # never reads the cache. The result is dense: [32, n, n] for this prompt's own n.
        for _ in op("scores", layer):
            for head in range(NUM_Q_HEADS):
                k_head = head // GQA_Q_TO_K_RATIO
                e.gemm(OP_T, OP_N, n, n, HEAD_DIM,
                       e.k_proj_temp_buf + k_head * HEAD_DIM * BF16, KV_DIM,
                       e.q_proj + head * HEAD_DIM * BF16, EMBEDDING_LENGTH,
                       e.prefill_attn_scores + head * n * n * BF16, n,
                       alpha=1.0 / 8.0)  # (n queries, n keys)

        # 329: causal mask, -infinity above the diagonal, in place.
        for _ in op("mask", layer):
            call.causal_mask(e.prefill_attn_scores, n)

        # 331: softmax in place. Merging two fully masked nodes of its tree gives NaN.
        for _ in op("softmax", layer):
            call.softmax(e.prefill_attn_scores, n)

        # 343-371: weighted sum of V, v head h/4; the result takes Q's buffer.
        for _ in op("attn_v", layer):
            for head in range(NUM_Q_HEADS):
                v_head = head // GQA_ATTN_SCORES_TO_V_RATIO
                e.gemm(OP_N, OP_N, HEAD_DIM, n, n,
                       e.v_proj_temp_buf + v_head * HEAD_DIM * BF16, KV_DIM,
                       e.prefill_attn_scores + head * n * n * BF16, n,
                       e.attn_scores_v + head * HEAD_DIM * BF16, EMBEDDING_LENGTH)  # (n, 64)

        # 377-396: output projection.
        for _ in op("o_proj", layer):
            e.gemm(OP_T, OP_N, EMBEDDING_LENGTH, n, EMBEDDING_LENGTH,
                   w.o_proj, EMBEDDING_LENGTH, e.attn_scores_v, EMBEDDING_LENGTH,
                   e.o_proj, EMBEDDING_LENGTH)  # (n, 2048)

        # 399: residual.
        for _ in op("attn_residual", layer):
            call.residual_add(e.hidden_state, e.o_proj, n)

        # 401: MLP norm.
        for _ in op("mlp_norm", layer):
            call.rms_norm(e.hidden_state, e.rms_norms, w.post_attention_layernorm, n)

        # 413-453: gate and up.
        for _ in op("gate_proj", layer):
            e.gemm(OP_T, OP_N, HIDDEN_DIM, n, EMBEDDING_LENGTH,
                   w.gate_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.gate, HIDDEN_DIM)  # (n, 8192)
        for _ in op("up_proj", layer):
            e.gemm(OP_T, OP_N, HIDDEN_DIM, n, EMBEDDING_LENGTH,
                   w.up_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.up, HIDDEN_DIM)  # (n, 8192)

        # 459: SwiGLU, in place in gate.
        for _ in op("swiglu", layer):
            call.silu(e.gate, e.up, n)

        # 470-489: down.
        for _ in op("down_proj", layer):
            e.gemm(OP_T, OP_N, EMBEDDING_LENGTH, n, HIDDEN_DIM,
                   w.down_proj, HIDDEN_DIM, e.gate, HIDDEN_DIM,
                   e.down, EMBEDDING_LENGTH)  # (n, 2048)

        # 492: residual.
        for _ in op("mlp_residual", layer):
            call.residual_add(e.hidden_state, e.down, n)

    # 494: final norm.
    for _ in op("final_norm", None):
        call.rms_norm(e.hidden_state, e.rms_norms, e.weights.norm, n)

    # 509-529: logits for ALL n rows, and all of them to the host.
    for _ in op("logits", None):
        e.gemm(OP_T, OP_N, VOCAB_SIZE, n, EMBEDDING_LENGTH,
               e.weights.embed_tokens, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
               e.embed_proj, VOCAB_SIZE)  # (n, 128256)
        copy(e.embed_proj_cpu, e.embed_proj, n * VOCAB_SIZE * BF16, D2H)

    # 533-543: argmax over the LAST row. That the token may be an end token is not looked at.
    token = 0
    for _ in op("argmax", None):
        max_token, token = argmax(e.embed_proj_cpu[n - 1])
        print_token(e, max_token, token)
    token = e.observer.token(slot, token)

    # 546-548
    e.generated_tokens[slot].append(token)
    e.last_generated_tokens[slot] = token
    e.current_prompt_len[slot] = n

    # 552: the whole block table to the device.
    e.upload_block_table()
    if e.check_eos_after_prefill and token in (END_OF_TEXT_TOKEN_ID, EOT_ID_TOKEN_ID):
        e.generated_tokens[slot].pop()  # as in decode, an end token is not kept
        free_slot(e, slot)
    e.observer.prefill_ends(e, slot)


def argmax(row: np.ndarray) -> tuple[float, int]:
    """main.cpp:533-542: the greatest logit and its index. row: bf16 bits, uint16 (128256,).

    Starts from index 0 and moves only on strictly greater, so NaN never wins and a row of NaN
    gives index 0. Upstream walks the row; a NumPy pass finds the same element.
    """
    # Positive numbers are in the order of their bits, up to infinity's; the rest take a walk.
    bits = row.view(np.int16)
    max_index = int(np.argmax(bits))
    if (row[0] & 0x7FFF) > 0x7F80:  # NaN
        max_index = 0
    elif not 0 < bits[max_index] <= 0x7F80:
        logits = (row.astype(np.uint32) << 16).view(np.float32)
        greater = np.flatnonzero(logits > logits[0])
        max_index = int(greater[np.argmax(logits[greater])]) if greater.size else 0
    max_token = (row[max_index, None].astype(np.uint32) << 16).view(np.float32)
    return float(max_token[0]), max_index


def print_token(e: Engine, max_token: float, token: int) -> None:
    """C++ prints a float with 6 significant digits."""
    print(f"Output token: {max_token:.6g}, token index: {token}", file=e.out)


# --- main.cpp:720-1039: one turn of the decode loop ---------------------------------------------


def decode_step(e: Engine) -> bool:
    """Refill free slots, then one token for every active slot. False: nothing was left to do.

    Row r of every decode buffer is the r-th active slot, in slot order; m rows.
    """
    op = e.observer.op
    call = e.calls
    copy = e.device.memcpy

    # 722-737: a free slot takes the next prompt, if there is one, and joins this very step.
    active_slots: list[int] = []
    last_tokens: list[int] = []
    for slot in range(BATCH_SIZE):
        if e.is_slot_free[slot] and e.prompt_queue:
            e.generated_tokens[slot].clear()
            prefill(e, slot)
        if e.is_slot_free[slot]:
            continue
        active_slots.append(slot)
        last_tokens.append(e.last_generated_tokens[slot])

    # 738-746
    m = len(active_slots)
    if m == 0:
        # Upstream stops here: its queue is empty then, for what prefill took in stays active.
        return decode_step(e) if e.prompt_queue else False

    # 749-757: lengths count this token, because its K/V is written before attention.
    seq_lens = [e.current_prompt_len[slot] + 1 for slot in active_slots]
    copy(e.gpu_last_tokens, np.array(last_tokens, np.int32), m * INT, H2D)
    copy(e.gpu_active_slots, np.array(active_slots, np.int32), m * INT, H2D)
    copy(e.gpu_seq_lens, np.array(seq_lens, np.int32), m * INT, H2D)
    e.observer.step_begins(e, active_slots)

    # 759
    for _ in op("embed", None):
        call.embedding_gather_decode(e.gpu_last_tokens, m, e.hidden_state, e.weights.embed_tokens)

    for layer in range(e.n_layers):  # 760-972
        w = e.weights.layers[layer]

        # 762: attention norm.
        for _ in op("attn_norm", layer):
            call.rms_norm(e.hidden_state, e.rms_norms, w.input_layernorm, m)

        # 765-842: Q, K, V; one gemm each for all slots.
        for _ in op("q_proj", layer):
            e.gemm(OP_T, OP_N, EMBEDDING_LENGTH, m, EMBEDDING_LENGTH,
                   w.q_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.q_proj, EMBEDDING_LENGTH)  # (m, 2048)
        for _ in op("k_proj", layer):
            e.gemm(OP_T, OP_N, KV_DIM, m, EMBEDDING_LENGTH,
                   w.k_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.k_proj_batched_buffer, KV_DIM)  # (m, 512)
        for _ in op("v_proj", layer):
            e.gemm(OP_T, OP_N, KV_DIM, m, EMBEDDING_LENGTH,
                   w.v_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.v_proj_batched_buffer, KV_DIM)  # (m, 512)

        # 844-849: RoPE slot by slot: adjacent pairs and unscaled frequencies, unlike prefill's.
        for _ in op(("q_rope", "k_rope"), layer):
            for row, slot in enumerate(active_slots):
                position = e.current_prompt_len[slot]
                call.rope_decode(
                    e.q_proj + row * EMBEDDING_LENGTH * BF16, position, EMBEDDING_LENGTH
                )
                call.rope_decode(e.k_proj_batched_buffer + row * KV_DIM * BF16, position, KV_DIM)

        # 851-873: this token's K and V rows into the slot's page; a new block at each multiple
        # of 16, without looking at the old entry.
        for _ in op("kv_write", layer):
            for row, slot in enumerate(active_slots):
                position = e.current_prompt_len[slot]
                logical_block = position // BLOCK_SIZE
                token_in_block_idx = position % BLOCK_SIZE
                if token_in_block_idx == 0:
                    e.block_table[slot, layer, logical_block] = e.free_blocks.pop()
                physical_block = int(e.block_table[slot, layer, logical_block])
                target = (
                    e.kv_cache
                    + physical_block * BLOCK_BYTES
                    + token_in_block_idx * KV_DIM * BF16
                )
                source = row * KV_DIM * BF16
                copy(target, e.k_proj_batched_buffer + source, KV_DIM * BF16, D2D)
                copy(target + V_OFFSET, e.v_proj_batched_buffer + source, KV_DIM * BF16, D2D)

        # 876: the WHOLE block table to the device, in every layer.
        e.upload_block_table()

        # 878: attention over the pages; it writes its own input: each block reads its q head
        # before it writes it.
        for _ in op("attention", layer):
            call.paged_attention(
                layer, m, e.q_proj, e.kv_cache, e.gpu_block_table, e.gpu_seq_lens,
                e.gpu_active_slots, e.attn_scores_v,
            )

        # 881-900: output projection.
        for _ in op("o_proj", layer):
            e.gemm(OP_T, OP_N, EMBEDDING_LENGTH, m, EMBEDDING_LENGTH,
                   w.o_proj, EMBEDDING_LENGTH, e.attn_scores_v, EMBEDDING_LENGTH,
                   e.o_proj, EMBEDDING_LENGTH)  # (m, 2048)

        # 902: residual.
        for _ in op("attn_residual", layer):
            call.residual_add(e.hidden_state, e.o_proj, m)

        # 904: MLP norm.
        for _ in op("mlp_norm", layer):
            call.rms_norm(e.hidden_state, e.rms_norms, w.post_attention_layernorm, m)

        # 907-946: gate and up.
        for _ in op("gate_proj", layer):
            e.gemm(OP_T, OP_N, HIDDEN_DIM, m, EMBEDDING_LENGTH,
                   w.gate_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.gate, HIDDEN_DIM)  # (m, 8192)
        for _ in op("up_proj", layer):
            e.gemm(OP_T, OP_N, HIDDEN_DIM, m, EMBEDDING_LENGTH,
                   w.up_proj, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
                   e.up, HIDDEN_DIM)  # (m, 8192)

        # 948: SwiGLU.
        for _ in op("swiglu", layer):
            call.silu(e.gate, e.up, m)

        # 951-969: down.
        for _ in op("down_proj", layer):
            e.gemm(OP_T, OP_N, EMBEDDING_LENGTH, m, HIDDEN_DIM,
                   w.down_proj, HIDDEN_DIM, e.gate, HIDDEN_DIM,
                   e.down, EMBEDDING_LENGTH)  # (m, 2048)

        # 971: residual.
        for _ in op("mlp_residual", layer):
            call.residual_add(e.hidden_state, e.down, m)

    # 974: final norm.
    for _ in op("final_norm", None):
        call.rms_norm(e.hidden_state, e.rms_norms, e.weights.norm, m)

    # 976-996: logits, m rows, to the host.
    for _ in op("logits", None):
        e.gemm(OP_T, OP_N, VOCAB_SIZE, m, EMBEDDING_LENGTH,
               e.weights.embed_tokens, EMBEDDING_LENGTH, e.rms_norms, EMBEDDING_LENGTH,
               e.embed_proj, VOCAB_SIZE)  # (m, 128256)
        copy(e.embed_proj_cpu, e.embed_proj, m * VOCAB_SIZE * BF16, D2H)

    # 998-1014: the same argmax and print, slot by slot.
    tokens = [0] * m
    for _ in op("argmax", None):
        for row in range(m):
            max_token, tokens[row] = argmax(e.embed_proj_cpu[row])
            print_token(e, max_token, tokens[row])

    for row, slot in enumerate(active_slots):
        token = e.observer.token(slot, tokens[row])
        if (
            token in (END_OF_TEXT_TOKEN_ID, EOT_ID_TOKEN_ID)
            or e.current_prompt_len[slot] == e.max_seq_len - 1
        ):
            free_slot(e, slot)  # the token is not appended, whichever condition held
        else:
            # 1032-1037
            e.last_generated_tokens[slot] = token
            e.generated_tokens[slot].append(token)
            e.current_prompt_len[slot] += 1
    e.observer.step_ends(e, active_slots)
    return True


def free_slot(e: Engine, slot: int) -> None:
    """main.cpp:1015-1031: blocks go back layer by layer, logical block by logical block."""
    e.is_slot_free[slot] = True
    for layer in range(N_LAYERS):
        for logical_block in range(MAX_BLOCKS_PER_SEQ):
            physical_block = int(e.block_table[slot, layer, logical_block])
            if physical_block != -1:
                e.free_blocks.append(physical_block)
                e.block_table[slot, layer, logical_block] = -1
    e.upload_block_table()


# --- main.cpp:695-1044: main --------------------------------------------------------------------


def run(e: Engine, go_on: Callable[[], bool] = lambda: True) -> int:
    """main.cpp:695-1043: prefill, decode until nothing is left, and return 0.

    `go_on` is asked before each step and may end the run early (upstream's own limit,
    MAX_NEW_TOKENS_GENERATED, is never used).
    """
    # 695-708: prefill each free slot while the queue has prompts.
    for slot in range(BATCH_SIZE):
        if e.is_slot_free[slot] and e.prompt_queue:
            prefill(e, slot)

    # 720-1039
    while go_on() and decode_step(e):
        pass

    # 1040-1043
    print("\nGoodbye!", file=e.out)
    e.device.synchronize()
    return 0
