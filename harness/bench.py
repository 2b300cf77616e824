"""Time the engine: each op, a prefill and a decode step, beside transformers on the same weights.

Both run in this process, one after the other, on the same device and as many threads. Figures are
medians over the repeats, with the least and the greatest beside them. On a GPU there is more: the
time that reading the weights once takes at the speed of a copy, measured in the same run, below
which no decode step gets; what a call costs the host; and the block table's uploads.

example:
  python -m harness bench
  python -m harness bench --layers 2 --repeat 3 --format json
  python -m harness bench --device cuda --graph --repeat 30
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import options, prompt
from harness.errors import UsageError
from harness.progress import Progress
from harness.report.output import Output, write_stdout, write_whole

if TYPE_CHECKING:
    from kernels.lift import KernelsFile
    from port.main import Engine
    from port.observer import Observer
    from reference.checkpoint import Checkpoint

SCHEMA = 1
SLOTS = prompt.SLOTS
MOST_REPEATS = 1000  # as many decode steps end no sequence


@dataclass(frozen=True)
class Timing:
    """Times of one thing, in milliseconds. calls: how many a prefill or a step has of it."""

    phase: str
    what: str
    calls: int
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, phase: str, what: str, calls: int, milliseconds: Sequence[float]) -> Timing:
        return cls(
            phase,
            what,
            calls,
            statistics.median(milliseconds),
            min(milliseconds),
            max(milliseconds),
        )


@dataclass(frozen=True)
class Floor:
    """What no decode step gets below: reading each weight once, as fast as a copy reads and writes.

    copy_gb_per_s: 10^9 bytes that a device-to-device copy reads and writes a second.
    """

    weight_bytes: int
    copy_gb_per_s: float
    milliseconds: float


@dataclass(frozen=True)
class TableUploads:
    """The block table's uploads, one a layer: a decode step's median (ms) without those that change
    nothing, and their share of the step with all."""

    step_without: float
    share: float


@dataclass(frozen=True)
class BenchReport:
    """What was measured. ops: each op of the port, summed over the layers; forward: whole prefills
    and decode steps of port and transformers; ratio: the port's median over transformers', by
    phase, and over the floor.

    On the CPU what only a GPU has is None: floor, call_us (microseconds that a call takes to
    return, by kind), block_table, and the figures with graphs, which --graph asks for. Elsewhere
    fiber_switch_ns is: nanoseconds from one CUDA thread to the next at a barrier.
    """

    schema: int
    command: str
    device: str
    threads: int
    layers: int
    prompt_tokens: int
    slots: int
    repeats: int
    ops: tuple[Timing, ...]
    forward: tuple[Timing, ...]
    ratio: dict[str, float | None]
    floor: Floor | None
    call_us: dict[str, float] | None
    block_table: TableUploads | None
    fiber_switch_ns: float | None


@dataclass(frozen=True)
class BenchRequest:
    """What `bench` is asked to do. Raises UsageError for what can not be done."""

    repeats: int = 5
    layers: int = 16
    model: str = options.SYNTHETIC
    seed: int = 0
    device: str = "auto"
    kernels: Path | None = None
    graph: bool = False
    output: Output = field(default_factory=Output)
    command: str = "python -m harness bench"

    def __post_init__(self) -> None:
        if not 1 <= self.repeats <= MOST_REPEATS:
            raise UsageError(f"--repeat must be 1 to {MOST_REPEATS} (got {self.repeats})")
        if not 1 <= self.layers <= 16:
            raise UsageError(f"--layers must be 1 to 16 (got {self.layers})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    group = parser.add_argument_group("what is timed")
    group.add_argument(
        "--repeat",
        type=int,
        default=5,
        metavar="N",
        help="runs of each, after one more (default 5)",
    )
    group.add_argument(
        "--layers", type=int, default=16, metavar="N", help="of the synthetic model (default 16)"
    )
    options.add_graph(parser)
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report. Exit code 0."""
    model, seed = options.model_of(args)
    request = BenchRequest(
        repeats=args.repeat,
        layers=args.layers,
        model=model,
        seed=seed,
        device=args.device,
        kernels=options.kernels_of(args),
        graph=args.graph,
        output=options.output_of(args),
        command=args.command,
    )
    with Progress() as progress:
        report = bench(request, progress)
    text = (
        json.dumps(asdict(report), indent=2) + "\n"
        if request.output.format == "json"
        else as_text(report)
    )
    if request.output.path is None:
        write_stdout(text)
    else:
        write_whole(request.output.path, text)
    return 0


def bench(request: BenchRequest, progress: Progress) -> BenchReport:
    """Measure the port, then transformers, on the same weights.

    Raises DeviceError where --graph finds no GPU.
    """
    import torch

    from harness.devices import open_device
    from harness.model_file import model_file
    from kernels.lift import lift
    from port.device import DeviceError
    from port.main import CHAT_PROMPTS, Engine
    from reference.checkpoint import open_checkpoint

    tokens = CHAT_PROMPTS[0]
    checkpoint = open_checkpoint(request.model, seed=request.seed, layers=request.layers)
    kernels = lift(request.kernels)
    device = open_device(request.device, kernels)
    if request.graph and device.name != "cuda":
        raise DeviceError("--graph needs a GPU (got none); drop it")
    progress.announce(
        f"bench: {checkpoint.layers} layers, {request.repeats + 1} runs of port and transformers; "
        f"about {0.7 + 0.25 * checkpoint.layers:.0f} GB of memory and "
        f"{10 + 2 * checkpoint.layers} s on two cores"
    )
    progress.update("weights")
    engine = Engine(device, kernels, model_file(checkpoint), prompts=(), out=io.StringIO())
    progress.update("port")
    port = _PortBench(engine, kernels, tokens, request.repeats)
    prefills, steps, ops = port.prefills(), port.steps(), port.ops()
    forward = {
        "prefill": Timing.of("prefill", "port", 1, prefills),
        "decode": Timing.of("decode", "port", 1, steps),
    }
    floor, call_us, block_table, fiber_switch_ns = None, None, None, None
    if device.name == "cuda":
        floor, call_us = port.floor(_weight_bytes(checkpoint)), port.call_microseconds()
        block_table = port.table_uploads()
        if request.graph:
            progress.update("port with graphs")
            forward["decode_graph"] = Timing.of("decode", "port, graphs", 1, port.graph_steps())
    else:
        from kernels.measure import switch_nanoseconds

        fiber_switch_ns = switch_nanoseconds()
    progress.update("transformers")
    hf_prefills, hf_steps = _time_transformers(checkpoint, tokens, request.repeats, device.name)
    theirs = {
        "prefill": Timing.of("prefill", "transformers", 1, hf_prefills),
        "decode": Timing.of("decode", "transformers", 1, hf_steps),
    }
    return BenchReport(
        schema=SCHEMA,
        command=request.command,
        device=device.name,
        threads=torch.get_num_threads(),
        layers=checkpoint.layers,
        prompt_tokens=len(tokens),
        slots=SLOTS,
        repeats=request.repeats,
        ops=ops,
        forward=(*forward.values(), *theirs.values()),
        ratio=_ratios(forward, theirs, floor),
        floor=floor,
        call_us=call_us,
        block_table=block_table,
        fiber_switch_ns=fiber_switch_ns,
    )


def _weight_bytes(checkpoint: Checkpoint) -> int:
    """Of all tensors: a decode step reads each once, the embedding table as the output head."""
    entries = (entry for name, entry in checkpoint.header().items() if name != "__metadata__")
    return sum(end - begin for begin, end in (entry["data_offsets"] for entry in entries))


def _ratios(
    ours: Mapping[str, Timing], theirs: Mapping[str, Timing], floor: Floor | None
) -> dict[str, float | None]:
    """The port's median over transformers', and over the floor; None where there is no figure."""
    prefill, decode = theirs["prefill"].median, theirs["decode"].median
    least = None if floor is None else floor.milliseconds

    def over(what: str, other: float | None) -> float | None:
        return ours[what].median / other if what in ours and other is not None else None

    return {
        "prefill": over("prefill", prefill),
        "decode": over("decode", decode),
        "decode_graph": over("decode_graph", decode),
        "decode_over_floor": over("decode", least),
        "decode_graph_over_floor": over("decode_graph", least),
    }


def _milliseconds(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - start) * 1e3


class _PortBench:
    """Prefills of one prompt and decode steps of two slots; the first runs of each do not count."""

    def __init__(
        self, engine: Engine, kernels: KernelsFile, tokens: Sequence[int], repeats: int
    ) -> None:
        self._engine = engine
        self._kernels = kernels
        self._tokens = tokens
        self._repeats = repeats
        engine.observer = _no_end(tokens[-1])
        # On a GPU a sequence of calls becomes a graph when it comes a third time.
        self._unmeasured = 4 if engine.device.name == "cuda" else 1

    def _fill(self) -> list[float]:
        """Milliseconds of the prefill of each slot."""
        from port.main import prefill

        engine = self._engine
        engine.reset([self._tokens] * SLOTS)
        engine.out = io.StringIO()
        synchronize = engine.device.synchronize
        return [_milliseconds(partial(prefill, engine, slot), synchronize) for slot in range(SLOTS)]

    def prefills(self) -> list[float]:
        """Milliseconds of each prefill; afterwards both slots are ready for `steps`."""
        runs = [self._fill() for _ in range(self._repeats + 1)]
        return [time for run in runs[1:] for time in run]

    def steps(self) -> list[float]:
        """Milliseconds of each decode step, from where the slots are."""
        from port.main import decode_step

        engine = self._engine
        times = [
            _milliseconds(partial(decode_step, engine), engine.device.synchronize)
            for _ in range(self._unmeasured + self._repeats)
        ]
        return times[self._unmeasured :]

    def ops(self) -> tuple[Timing, ...]:
        """Every op. Timing one means waiting for it, so ops have runs of their own."""
        from port.main import decode_step

        engine = self._engine
        before = engine.observer
        made: list[Timing] = []
        for phase, go in (("prefill", self._fill), ("decode", lambda: decode_step(engine))):
            watches = []
            for _ in range(self._repeats + 1):
                engine.observer = watch = _stopwatch(engine.device.synchronize, before)
                go()
                watches.append(watch)
            runs = SLOTS if phase == "prefill" else 1
            for op, calls in watches[0].calls.items():
                times = [watch.times[op] / runs for watch in watches[1:]]
                made.append(Timing.of(phase, op, calls // runs, times))
        engine.observer = before
        return tuple(made)

    # --- on a GPU -------------------------------------------------------------------------------

    def floor(self, weight_bytes: int) -> Floor:
        from harness.device_costs import copy_bytes_per_second

        speed = copy_bytes_per_second(self._engine.device)
        return Floor(weight_bytes, speed / 1e9, weight_bytes / speed * 1e3)

    def call_microseconds(self) -> dict[str, float]:
        from harness.device_costs import call_microseconds

        return call_microseconds(self._engine, self._kernels)

    def table_uploads(self) -> TableUploads:
        """From steps at the same positions, with and without."""
        from harness.device_costs import without_table_uploads

        self._fill()
        every = statistics.median(self.steps())
        self._fill()
        with without_table_uploads(self._engine):
            fewer = statistics.median(self.steps())
        return TableUploads(fewer, 1 - fewer / every)

    def graph_steps(self) -> list[float]:
        """The same decode steps through CUDA graphs."""
        from port.cuda_device import CudaDevice
        from port.cuda_graph import GraphDevice

        engine, device, calls = self._engine, self._engine.device, self._engine.calls
        assert isinstance(device, CudaDevice)
        engine.device = graphs = GraphDevice(device)
        engine.calls = calls.with_kernels(self._kernels, graphs)
        try:
            self._fill()
            return self.steps()
        finally:
            graphs.synchronize()
            engine.device, engine.calls = device, calls


def _no_end(token: int) -> Observer:
    """An observer that feeds `token`, whatever the logits say, so that no sequence ends."""
    from port.observer import Observer

    class NoEnd(Observer):
        def token(self, slot: int, _: int) -> int:
            return token

    return NoEnd()


def _stopwatch(synchronize: Callable[[], object], other: Observer) -> Any:
    """An observer that adds up each op's milliseconds and calls, and feeds what `other` does."""
    from port.observer import Observer

    class Stopwatch(Observer):
        def __init__(self) -> None:
            self.times: dict[str, float] = {}
            self.calls: dict[str, int] = {}

        def token(self, slot: int, token: int) -> int:
            return other.token(slot, token)

        def op(self, names: str | tuple[str, ...], layer: int | None) -> Iterable[None]:
            return self._timed(names if isinstance(names, str) else " + ".join(names))

        def _timed(self, name: str) -> Iterator[None]:
            synchronize()
            start = time.perf_counter()
            yield
            synchronize()
            spent = (time.perf_counter() - start) * 1e3
            self.times[name] = self.times.get(name, 0.0) + spent
            self.calls[name] = self.calls.get(name, 0) + 1

    return Stopwatch()


def _time_transformers(
    checkpoint: Checkpoint, tokens: Sequence[int], repeats: int, device: str
) -> tuple[list[float], list[float]]:
    """The same prefill (one prompt) and decode step (two rows) by transformers' bf16 Llama."""
    import torch

    where = "cuda" if device == "cuda" else "cpu"

    def synchronize() -> None:
        if where == "cuda":
            torch.cuda.synchronize()

    model = transformers_model(checkpoint).to(where)
    one = torch.tensor([list(tokens)], device=where)
    with torch.no_grad():
        prefills = [
            _milliseconds(lambda: model(one, use_cache=True), synchronize)
            for _ in range(repeats + 1)
        ]
        # newer versions have another name for it, and warn of the old one
        known = signature(model.forward).parameters
        name = "cache" if "cache" in known else "past_key_values"
        past = {name: getattr(model(one.repeat(SLOTS, 1), use_cache=True), name)}
        row = torch.tensor([[tokens[-1]]] * SLOTS, device=where)
        steps = [
            _milliseconds(lambda: model(row, **past, use_cache=True), synchronize)
            for _ in range(repeats + 1)
        ]
    return prefills[1:], steps[1:]


def transformers_model(checkpoint: Checkpoint) -> Any:
    """transformers' LlamaForCausalLM in bf16, eager attention, with the checkpoint's tensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = checkpoint.config
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.query_heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.head,
                rms_norm_eps=config.norm_eps,
                max_position_embeddings=131072,
                tie_word_embeddings=True,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": config.rope_theta,
                    "factor": config.rope_factor,
                    "low_freq_factor": config.rope_low_freq_factor,
                    "high_freq_factor": config.rope_high_freq_factor,
                    "original_max_position_embeddings": config.rope_original_positions,
                },
            )
        )
    model.set_attn_implementation("eager")  # as upstream computes it: no fused attention
    weights = {name: checkpoint.tensor(name) for name in checkpoint.header()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    # The rotary table is a buffer that no checkpoint holds: it was made on "meta", make it again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval()


def as_text(report: BenchReport) -> str:
    """The report as a table."""
    lines = [
        f"device {report.device}, {report.threads} threads, {report.layers} layers, "
        f"prompt of {report.prompt_tokens} tokens, decode of {report.slots} slots, "
        f"{report.repeats} repeats",
        "",
        f"{'phase':8} {'what':16} {'calls':>5} {'median ms':>10} {'least':>10} {'most':>10}",
    ]
    lines += [
        f"{timing.phase:8} {timing.what:16} {timing.calls:5} {timing.median:10.3f} "
        f"{timing.least:10.3f} {timing.most:10.3f}"
        for timing in (*report.ops, *report.forward)
    ]
    lines += ["", *_ratio_lines(report), *_cost_lines(report)]
    return "\n".join(lines) + "\n"


def _ratio_lines(report: BenchReport) -> Iterator[str]:
    for what, ratio in report.ratio.items():
        if ratio is None:
            continue
        name = what.removesuffix("_over_floor").replace("_graph", " with graphs")
        whose = "the floor" if what.endswith("_over_floor") else "transformers' time"
        yield f"{name}: the port takes {ratio:.2f} times {whose}"


def _cost_lines(report: BenchReport) -> Iterator[str]:
    """What the device and its calls cost."""
    if report.floor is not None:
        floor = report.floor
        yield (
            f"floor: {floor.weight_bytes / 1e9:.2f} GB of weights read once at "
            f"{floor.copy_gb_per_s:.0f} GB/s, which copies read and write: "
            f"{floor.milliseconds:.3f} ms"
        )
    if report.call_us is not None:
        spent = ", ".join(f"{kind} {us:.1f}" for kind, us in report.call_us.items())
        yield f"host, microseconds a call: {spent}"
    if report.block_table is not None:
        table = report.block_table
        yield (
            f"block table uploads: {100 * table.share:.0f} % of a decode step "
            f"({table.step_without:.3f} ms without those that change nothing)"
        )
    if report.fiber_switch_ns is not None:
        yield (
            f"executor: {report.fiber_switch_ns:.1f} ns from one CUDA thread to the next at a "
            "barrier"
        )
