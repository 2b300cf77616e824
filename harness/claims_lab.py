"""What the claims run: kernels on chosen inputs, and one dry run of the engine."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from harness.bounds import bound_of
from harness.claims import AngleRow
from harness.devices import open_device
from harness.dry_run import DryRun, Stage
from harness.model_file import model_file
from harness.repairs import apply_repairs
from harness.rotation import decode_turn, measure, prefill_turn
from harness.verdict import judge
from kernels.lift import lift
from port import main as engine_main
from port.device import MemcpyKind
from port.host_calls import HostCalls
from port.main import Engine, decode_step, prefill
from reference import ops
from reference.checkpoint import open_checkpoint
from reference.rounding import bf16_bits, round_to_bf16

if TYPE_CHECKING:
    from harness.claims import ClaimsRequest

_STEPS = 34  # so that each slot crosses two page boundaries
_SCORES = 31  # of a row; far fewer than MAX_SEQ_LEN, and no multiple of anything
_HEADS = engine_main.NUM_Q_HEADS
_U = 2.0**-24
_TIMED_STEPS = 10


class Lab:
    """One device with the kernels of the request, and what was run on it.

    Raises the classes of harness.errors for what the request asks and this machine has not.
    """

    def __init__(self, request: ClaimsRequest) -> None:
        self.request = request
        self.kernels = apply_repairs(lift(request.kernels), request.repairs)
        self.device = open_device(request.device, self.kernels)
        self._checkpoint = open_checkpoint(request.model, seed=request.seed, cache_bytes=0)
        self._calls = HostCalls(self.kernels, self.device, io.StringIO())
        self._calls.init_rope_frequencies(
            engine_main.HEAD_DIM, engine_main.MAX_SEQ_LEN, 500000.0, 32.0, 1.0, 4.0, 8192
        )
        self._random = torch.Generator().manual_seed(0)

    # --- the engine without a computation ---

    @cached_property
    def dry(self) -> DryRun:
        run = DryRun(self.kernels, model_file(self._checkpoint))
        run.prefill_all()
        for _ in range(_STEPS):
            run.step()
        return run

    @property
    def ran_dry(self) -> str:
        return (
            f"the port's control flow, prompts 0 and 1 and {_STEPS} decode steps of "
            f"{self.dry.engine.n_layers} layers, every call logged"
        )

    @property
    def steps(self) -> list[Stage]:
        """The decode steps."""
        return [stage for stage in self.dry.stages if stage.phase == "decode"]

    def queued_lengths(self) -> list[int]:
        """Of the prompts that the engine queues by itself."""
        run = DryRun(self.kernels, model_file(self._checkpoint))
        return [len(ids) for ids in run.engine.prompt_queue]

    def argmax_finds(self, places: tuple[int, ...]) -> bool:
        """Whether the port's argmax finds the greatest logit at each of these places."""
        for place in places:
            row = np.full(engine_main.VOCAB_SIZE, 0xBF80, np.uint16)  # all -1
            row[place] = 0x3F80  # 1
            if engine_main.argmax(row) != (1.0, place):
                return False
        return True

    # --- kernels ---

    @cached_property
    def angles(self) -> tuple[AngleRow, ...]:
        """What both RoPE kernels do, index by index."""
        position = self.request.position
        turns = (prefill_turn, decode_turn)
        once = [measure(turn(self.device, self._calls, 1)) for turn in turns]
        there = [measure(turn(self.device, self._calls, position)) for turn in turns]
        llama3 = ops.llama3_inv_freq().numpy()  # (32,)
        difference = there[1].angles - there[0].angles
        difference = np.abs(np.arctan2(np.sin(difference), np.cos(difference)))
        # each kernel's own angle error (bounds.py, rope), and what the measurement leaves open
        own = 2 * (position * llama3 * 8 * _U + 4 * _U)
        allowed = own + there[0].precision + there[1].precision
        return tuple(
            AngleRow(
                index=i,
                prefill_pair=there[0].pairs[i],
                decode_pair=there[1].pairs[i],
                llama3=float(llama3[i]),
                prefill_frequency=float(once[0].angles[i]),
                decode_frequency=float(once[1].angles[i]),
                prefill_angle=float(there[0].angles[i]),
                decode_angle=float(there[1].angles[i]),
                difference=float(difference[i]),
                allowed=float(allowed[i]),
                agrees=bool(difference[i] <= allowed[i]),
            )
            for i in range(len(llama3))
        )

    def softmax_on_layouts(self) -> dict[tuple[str, str], int]:
        """Impossible elements of 32 rows, by (kernel, layout); all else in the buffer is NaN."""
        scores = round_to_bf16(self._normal(_HEADS, 1, _SCORES) * 4)  # (32, 1, 31)
        real = ops.softmax(scores)
        bound = bound_of("softmax", {"scores": scores}, real)
        calls = {"prefill": self._calls.softmax, "decode": self._calls.softmax_decode}
        strides = {"dense": _SCORES, "spread": engine_main.MAX_SEQ_LEN}
        wrong = {}
        for kernel, call in calls.items():
            for layout, stride in strides.items():
                bits = np.full(_HEADS * engine_main.MAX_SEQ_LEN, 0xFFFF, np.uint16)
                at = (np.arange(_HEADS) * stride)[:, None, None] + np.arange(_SCORES)
                bits[at] = bf16_bits(scores)
                x = self._upload(bits, "scores")
                call(x, _SCORES)
                got = self._download(x, bits)
                wrong[kernel, layout] = judge(got[at], real, bound).impossible
        return wrong

    def attention_over(self, told: int) -> int:
        """Impossible elements of attention over 20 cached rows if it is told another length.

        Two pages, in no order; what was not written of them is NaN.
        """
        length, layer, blocks = 20, 3, (5, 2)
        generator = torch.Generator().manual_seed(1)
        q = round_to_bf16(self._normal(1, engine_main.EMBEDDING_LENGTH, generator=generator))
        keys, values = (
            round_to_bf16(self._normal(length, engine_main.KV_DIM, generator=generator))
            for _ in range(2)
        )
        page = engine_main.BLOCK_SIZE * engine_main.KV_DIM
        cache = np.full((8, 2, page), 0xFFFF, np.uint16)  # (blocks, K and V, 16 * 512)
        for side, rows in enumerate((keys, values)):
            for logical, block in enumerate(blocks):
                own = rows[logical * engine_main.BLOCK_SIZE :][: engine_main.BLOCK_SIZE]
                cache[block, side, : own.numel()] = bf16_bits(own).reshape(-1)
        table = np.full((2, engine_main.N_LAYERS, engine_main.MAX_BLOCKS_PER_SEQ), -1, np.int32)
        table[0, layer, : len(blocks)] = blocks
        bits = bf16_bits(q)
        x = self._upload(bits, "q")
        self._calls.paged_attention(
            layer,
            1,
            x,
            self._upload(cache, "kv_cache"),
            self._upload(table, "block_table"),
            self._upload(np.array([told], np.int32), "seq_lens"),
            self._upload(np.zeros(1, np.int32), "active_slots"),
            x,
        )
        real = ops.attention(q, [keys], [values])
        inputs = {"q": q, "keys": [keys], "values": [values]}
        return judge(self._download(x, bits), real, bound_of("attention", inputs, real)).impossible

    def time_table_copies(self) -> tuple[float, float] | None:
        """Microseconds of a step's table copies and of a whole step; None without a GPU."""
        if self.device.name == "host":
            return None
        file = model_file(self._checkpoint)
        engine = Engine(self.device, self.kernels, file, wanted=(), out=io.StringIO())
        for slot in range(engine_main.BATCH_SIZE):
            prefill(engine, slot)
        decode_step(engine)
        step = self._microseconds(lambda: decode_step(engine))

        def copies() -> None:
            for _ in range(engine.n_layers):
                engine.upload_block_table()

        return self._microseconds(copies), step

    def _microseconds(self, work: Callable[[], object]) -> float:
        """Median of some runs, to the end of what each put on the device."""
        times = []
        for _ in range(_TIMED_STEPS):
            self.device.synchronize()
            start = time.perf_counter()
            work()
            self.device.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        return float(np.median(times))

    def _normal(self, *shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=generator or self._random, dtype=torch.float64)

    def _upload(self, data: np.ndarray, name: str) -> int:
        pointer = self.device.malloc(data.nbytes, name)
        self.device.memcpy(pointer, data, data.nbytes, MemcpyKind.HOST_TO_DEVICE)
        return pointer

    def _download(self, pointer: int, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like)
        self.device.memcpy(out, pointer, out.nbytes, MemcpyKind.DEVICE_TO_HOST)
        return out
