"""Time the engine: each op, a prefill and a decode step, beside transformers on the same weights.

Both run in this process, one after the other, on the same device and as many threads. Figures are
medians over the repeats, with the least and the greatest beside them.

example:
  python -m harness bench
  python -m harness bench --layers 2 --repeat 3 --format json
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import options, prompt
from harness.errors import UsageError
from harness.progress import Progress
from harness.report.output import Output, write_stdout, write_whole

if TYPE_CHECKING:
    from port.main import Engine
    from reference.checkpoint import Checkpoint

SCHEMA = 1
SLOTS = prompt.SLOTS


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
class BenchReport:
    """What was measured. ops: each op of the port, summed over the layers; forward: whole prefills
    and decode steps of port and transformers; ratio: the port's median over transformers', by
    phase."""

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
    ratio: dict[str, float]


@dataclass(frozen=True)
class BenchRequest:
    """What `bench` is asked to do. Raises UsageError for what can not be done."""

    repeats: int = 5
    layers: int = 16
    model: str = options.SYNTHETIC
    seed: int = 0
    device: str = "auto"
    kernels: Path | None = None
    output: Output = field(default_factory=Output)
    command: str = "python -m harness bench"

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"--repeat must be 1 or more (got {self.repeats})")
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
    """Measure the port, then transformers, on the same weights."""
    import torch

    from harness.devices import open_device
    from harness.model_file import model_file
    from kernels.lift import lift
    from port.main import CHAT_PROMPTS, Engine
    from reference.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(request.model, seed=request.seed, layers=request.layers)
    kernels = lift(request.kernels)
    device = open_device(request.device, kernels)
    progress.announce(
        f"bench: {checkpoint.layers} layers, {request.repeats + 1} runs of port and transformers; "
        f"about {0.7 + 0.25 * checkpoint.layers:.0f} GB of memory and "
        f"{10 + 2 * checkpoint.layers} s on two cores"
    )
    tokens = CHAT_PROMPTS[0]
    progress.update("weights")
    engine = Engine(device, kernels, model_file(checkpoint), prompts=(), out=io.StringIO())
    progress.update("port")
    prefills, steps, ops = _time_port(engine, tokens, request.repeats)
    progress.update("transformers")
    hf_prefills, hf_steps = _time_transformers(checkpoint, tokens, request.repeats, device.name)
    forward = (
        Timing.of("prefill", "port", 1, prefills),
        Timing.of("prefill", "transformers", 1, hf_prefills),
        Timing.of("decode", "port", 1, steps),
        Timing.of("decode", "transformers", 1, hf_steps),
    )
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
        forward=forward,
        ratio={
            "prefill": forward[0].median / forward[1].median,
            "decode": forward[2].median / forward[3].median,
        },
    )


def _milliseconds(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def _time_port(
    engine: Engine, tokens: Sequence[int], repeats: int
) -> tuple[list[float], list[float], tuple[Timing, ...]]:
    """Prefills of one prompt, decode steps of two slots, and every op in a run of its own.

    The first run of each is thrown away.
    """
    from port.main import decode_step, prefill
    from port.observer import Observer

    synchronize = engine.device.synchronize

    def fill() -> list[float]:
        engine.reset([tokens] * SLOTS)
        return [_milliseconds(partial(prefill, engine, s), synchronize) for s in range(SLOTS)]

    engine.observer = Observer()
    prefills = [fill() for _ in range(repeats + 1)][1:]
    steps = [_milliseconds(lambda: decode_step(engine), synchronize) for _ in range(repeats + 1)]

    # Timing each op means waiting for it, so ops have runs of their own.
    ops: list[Timing] = []
    for phase, go in (("prefill", fill), ("decode", lambda: decode_step(engine))):
        watches = []
        for _ in range(repeats + 1):
            engine.observer = watch = _stopwatch(synchronize)
            go()
            watches.append(watch)
        runs = SLOTS if phase == "prefill" else 1
        for op, calls in watches[0].calls.items():
            times = [watch.times[op] / runs for watch in watches[1:]]
            ops.append(Timing.of(phase, op, calls // runs, times))
    engine.observer = Observer()
    return [time for pair in prefills for time in pair], steps[1:], tuple(ops)


def _stopwatch(synchronize: Callable[[], object]) -> Any:
    """An observer that adds up each op's milliseconds and calls."""
    from port.observer import Observer

    class Stopwatch(Observer):
        def __init__(self) -> None:
            self.times: dict[str, float] = {}
            self.calls: dict[str, int] = {}

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
        past = model(one.repeat(SLOTS, 1), use_cache=True).past_key_values
        row = torch.tensor([[tokens[-1]]] * SLOTS, device=where)
        steps = [
            _milliseconds(lambda: model(row, past_key_values=past, use_cache=True), synchronize)
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
    lines.append("")
    lines += [
        f"{phase}: the port takes {ratio:.2f} times transformers' time"
        for phase, ratio in report.ratio.items()
    ]
    return "\n".join(lines) + "\n"
