"""Settle what was said about the engine but never run: each claim with its run and its figures.

The claims are those of a public article about tiny-vllm, three of which it left unverified. Nothing
is looked up: the kernels run on chosen inputs, and the port's whole control flow runs on a device
that only takes note of each call. The exit code is 0 if all could be run, whatever they say.

example:
  python -m harness claims
  python -m harness claims --position 2047 --plot angles.png
  python -m harness claims --repair decode-rope-scaling
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness import options, prompt
from harness.errors import UsageError
from harness.repairs import check_repair, parse_repairs
from harness.report.output import Output, check_writable
from harness.result import SCHEMA, Kernels

if TYPE_CHECKING:
    from harness.claims_lab import Lab
    from harness.dry_run import Stage
    from harness.progress import Progress

HOLDS: Final = "holds"
REFUTED: Final = "refuted"
NOT_MEASURABLE: Final = "not measurable here"

Figure = int | float | str


@dataclass(frozen=True)
class ClaimsRequest:
    """What `claims` is asked to do. Checks itself: raises UsageError for what can not be done.

    position: where RoPE's angles are compared. plot: a .png file for them.
    """

    position: int = 1000
    plot: Path | None = None
    repairs: tuple[str, ...] = ()
    model: str = options.SYNTHETIC
    seed: int = 0
    device: str = "auto"
    kernels: Path | None = None
    output: Output = field(default_factory=Output)
    command: str = "python -m harness claims"

    def __post_init__(self) -> None:
        if not 1 <= self.position < prompt.MAX_SEQ_LEN:
            raise UsageError(
                f"--position must be 1 to {prompt.MAX_SEQ_LEN - 1} (got {self.position}); "
                "nothing turns at 0"
            )
        for name in self.repairs:
            check_repair(name)
        if self.plot is not None:
            if self.plot.suffix != ".png":
                raise UsageError(f"--plot must name a .png file (got {str(self.plot)!r})")
            from harness.report.plot import check_available

            check_available()
            check_writable(self.plot, "--plot")


@dataclass(frozen=True)
class Claim:
    """A claim, settled. says: the claim. ran: what was run for it. found: what came out."""

    name: str
    says: str
    verdict: str
    ran: str
    found: str
    figures: dict[str, Figure]


@dataclass(frozen=True)
class AngleRow:
    """One frequency index, as measured: radians a position (at position 1), and the angle at the
    position asked for, in (-pi, pi]. llama3: the frequency as it should be."""

    index: int
    prefill_pair: tuple[int, int]
    decode_pair: tuple[int, int]
    llama3: float
    prefill_frequency: float
    decode_frequency: float
    prefill_angle: float
    decode_angle: float
    difference: float
    allowed: float
    agrees: bool


@dataclass(frozen=True)
class ClaimsReport:
    """All claims, and RoPE's angles."""

    schema: int
    command: str
    device: str
    kernels: Kernels
    repairs: tuple[str, ...]
    position: int
    claims: tuple[Claim, ...]
    angles: tuple[AngleRow, ...]
    seconds: float
    exit_code: int


def claims(request: ClaimsRequest, progress: Progress) -> ClaimsReport:
    """Run all. Raises the classes of harness.errors for a user's mistake."""
    from harness.claims_lab import Lab

    started = time.perf_counter()
    lab = Lab(request)
    settled = []
    for settle in CLAIMS:
        progress.update(settle.__name__.strip("_"))
        settled.append(settle(lab))
    return ClaimsReport(
        schema=SCHEMA,
        command=request.command,
        device=lab.device.name,
        kernels=Kernels(str(lab.kernels.path), lab.kernels.sha256),
        repairs=request.repairs,
        position=request.position,
        claims=tuple(settled),
        angles=lab.angles,
        seconds=time.perf_counter() - started,
        exit_code=0,
    )


# --- the claims ---------------------------------------------------------------------------------


def _verdict(true: bool) -> str:
    return HOLDS if true else REFUTED


def _if(true: bool, found: str) -> str:
    """What came out where the claim holds; where it does not, the figures speak."""
    return found if true else "not so; the figures tell"


def _rope_angles(lab: Lab) -> Claim:
    rows = lab.angles
    agreeing = [row.index for row in rows if row.agrees]
    factor = max(row.decode_frequency / row.prefill_frequency for row in rows)
    pairs = len({row.prefill_pair for row in rows} & {row.decode_pair for row in rows})
    listed = _ranges(agreeing) or "none"
    return Claim(
        "rope-angles",
        "Prefill's scaled table and decode's own recomputation rotate alike.",
        _verdict(len(agreeing) == len(rows)),
        "both RoPE kernels on rows made so that what they leave tells the angle of each pair, at "
        f"positions 1 and {lab.request.position}",
        f"at position {lab.request.position} frequency indices {listed} agree within float32 "
        f"rounding; decode turns up to {factor:.1f} times as fast as prefill",
        {
            "indices that agree": len(agreeing),
            "indices that differ": len(rows) - len(agreeing),
            "greatest factor between the frequencies": round(factor, 2),
            "pairs of elements in common": pairs,
        },
    )


def _softmax_strides(lab: Lab) -> Claim:
    wrong = lab.softmax_on_layouts()
    right = {place for place, count in wrong.items() if count == 0}
    agree = all(("prefill", rows) in right and ("decode", rows) in right for _, rows in right)
    listed = " and ".join(
        f"{kernel} on {rows} rows" for kernel, rows in wrong if (kernel, rows) in right
    )
    return Claim(
        "softmax-strides",
        "softmaxKernelDecode's row stride (MAX_SEQ_LEN) and the prefill kernel's (n) agree.",
        _verdict(bool(right) and agree),
        "both softmax kernels on 32 rows of 31 scores, once one after the other, once "
        f"{prompt.MAX_SEQ_LEN} apart",
        f"right are only {listed or 'none'}",
        {f"{k} kernel, {rows} rows: impossible of 992": n for (k, rows), n in wrong.items()},
    )


def _softmax_decode_unused(lab: Lab) -> Claim:
    run = lab.dry
    kernel = lab.kernels.host_calls["softmaxDecode"].kernel
    launches = sum(stage.counts()[kernel] for stage in run.stages)
    total = sum(len(stage.launches) for stage in run.stages)
    return Claim(
        "softmax-decode-unused",
        "The engine never launches softmaxKernelDecode.",
        _verdict(launches == 0),
        lab.ran_dry,
        f"{launches} of {total:,} launches",
        {"launches of it": launches, "launches": total, "decode steps": len(lab.steps)},
    )


def _block_table_copies(lab: Lab) -> Claim:
    table = lab.dry.engine.block_table.nbytes
    counts = {
        sum(entry.what == "host_to_device" and entry.bytes == table for entry in stage.entries)
        for stage in lab.steps
    }
    layers = lab.dry.engine.n_layers
    calls = max(counts)
    figures: dict[str, Figure] = {
        "bytes a copy": table,
        "copies a decode step": calls,
        "bytes a decode step": calls * table,
    }
    timed = lab.time_table_copies()
    if timed is None:
        figures["time"] = "not measured: no GPU"
        cost = "what that costs in time is not measured, for there is no GPU here"
    else:
        copies, step = timed
        figures |= {"copies, us a step": round(copies, 1), "a step, us": round(step, 1)}
        cost = f"{copies:.0f} us of a step's {step:.0f} us, {100 * copies / step:.1f} %"
    return Claim(
        "block-table-copies",
        "Every decode step copies the whole block table to the device once a layer.",
        _verdict(counts == {layers}),
        lab.ran_dry,
        f"{calls} copies of {table:,} bytes a step, {calls * table:,} bytes; {cost}",
        figures,
    )


def _length_plus_one(lab: Lab) -> Claim:
    first = all(_before(stage, "kv_write", "attention") for stage in lab.steps)
    plus_one = all(
        stage.seq_lens == tuple(position + 1 for position in stage.positions) for stage in lab.steps
    )
    with_it, without = lab.attention_over(20), lab.attention_over(19)
    true = first and plus_one and with_it == 0 and without > 0
    return Claim(
        "length-plus-one",
        "The length is current_prompt_len + 1 because this token's K and V are written first.",
        _verdict(true),
        f"{lab.ran_dry}; attention over 20 cached rows, told 20 and told 19",
        _if(
            true,
            "K and V are written before attention in every layer of every step, and the length "
            "that attention is told counts them; told one less, it misses the token itself",
        ),
        {
            "steps with length = position + 1": sum(
                stage.seq_lens == tuple(p + 1 for p in stage.positions) for stage in lab.steps
            ),
            "steps": len(lab.steps),
            "told 20: impossible of 2048": with_it,
            "told 19: impossible of 2048": without,
        },
    )


def _before(stage: Stage, one: str, other: str) -> bool:
    """Whether `one` stands before each `other`, turn by turn."""
    names = [name for name, _ in stage.ops if name in (one, other)]
    return names == [one, other] * (len(names) // 2) and bool(names)


def _block_at_offset_0(lab: Lab) -> Claim:
    layers = lab.dry.engine.n_layers
    expected = [layers * sum(p % 16 == 0 for p in stage.positions) for stage in lab.steps]
    popped = [stage.popped for stage in lab.steps]
    return Claim(
        "block-at-offset-0",
        "Decode takes a block off the free list only at offset 0 of a page.",
        _verdict(popped == expected),
        lab.ran_dry,
        _if(
            popped == expected,
            f"{sum(popped)} blocks taken in {len(popped)} steps, all in the "
            f"{sum(map(bool, expected))} steps where a position was a multiple of 16",
        ),
        {
            "blocks taken": sum(popped),
            "blocks taken elsewhere": sum(
                n for n, due in zip(popped, expected, strict=True) if not due
            ),
        },
    )


def _no_mask_in_decode(lab: Lab) -> Claim:
    kernel = lab.kernels.host_calls["causalMask"].kernel
    launches = sum(stage.counts()[kernel] for stage in lab.steps)
    wrong = lab.attention_over(20)
    true = launches == 0 and wrong == 0
    return Claim(
        "no-mask-in-decode",
        "Decode has no causal mask and needs none.",
        _verdict(true),
        f"{lab.ran_dry}; attention over 20 rows, every later row of the page NaN",
        _if(
            true,
            "no mask is launched, and nothing later than the token is read: NaN there does no harm",
        ),
        {"mask launches in decode": launches, "impossible of 2048": wrong},
    )


def _v_not_rotated(lab: Lab) -> Claim:
    names = {lab.kernels.host_calls[call].kernel for call in ("rope", "ropeDecode")}
    engine = lab.dry.engine
    values = (engine.v_proj_temp_buf, engine.v_proj_batched_buffer)
    launches = [launch for s in lab.dry.stages for launch in s.launches if launch.kernel in names]
    ends = [(start, start + 512 * 512 * 2) for start in values]
    on_values = sum(
        any(
            isinstance(a, int) and start <= a < end for a in launch.arguments for start, end in ends
        )
        for launch in launches
    )
    return Claim(
        "v-not-rotated",
        "V is never rotated.",
        _verdict(bool(launches) and on_values == 0),
        lab.ran_dry,
        f"{on_values} of {len(launches):,} RoPE launches are given a buffer of V",
        {"RoPE launches": len(launches), "on V": on_values},
    )


def _argmax_on_the_cpu(lab: Lab) -> Claim:
    vocabulary = lab.dry.engine.embed_proj_cpu.shape[1]
    steps = lab.steps
    copied = {
        sum(e.bytes for e in stage.entries if e.what == "device_to_host") // len(stage.slots)
        for stage in steps
    }
    asked = sum(bool(entries) for s in steps for name, entries in s.ops if name == "argmax")
    found = lab.argmax_finds((0, vocabulary // 2, vocabulary - 1))
    true = copied == {vocabulary * 2} and asked == 0 and found
    return Claim(
        "argmax-on-the-cpu",
        "The argmax scans 128,256 logits a slot on the CPU.",
        _verdict(true),
        f"{lab.ran_dry}; the port's argmax on rows whose greatest logit is first, midway and last",
        _if(
            true,
            f"each step copies {vocabulary:,} logits a slot to the host; the argmax asks nothing "
            "of the device and finds the greatest wherever it is",
        ),
        {
            "logits a slot": vocabulary,
            "bytes copied a slot and step": max(copied),
            "device calls of the argmax": asked,
        },
    )


def _test_lists_unused(lab: Lab) -> Claim:
    lengths = lab.queued_lengths()
    return Claim(
        "test-lists-unused",
        "The decode_test token lists differ from the hard-coded prompts, which alone are used.",
        NOT_MEASURABLE,
        "the port's queue at program start",
        f"the port queues only the hard-coded chat prompts, of {lengths} tokens; upstream's "
        "decode_test lists are no part of the port, so there is nothing here to compare",
        {"prompts queued": len(lengths)},
    )


CLAIMS: Final[tuple[Callable[[Lab], Claim], ...]] = (
    _rope_angles,
    _softmax_strides,
    _softmax_decode_unused,
    _block_table_copies,
    _length_plus_one,
    _block_at_offset_0,
    _no_mask_in_decode,
    _v_not_rotated,
    _argmax_on_the_cpu,
    _test_lists_unused,
)


def _ranges(numbers: list[int]) -> str:
    from harness.report.rows import ranges

    return ranges(numbers)


# --- the verb -----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `claims`."""
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--position",
        type=int,
        default=ClaimsRequest.position,
        metavar="N",
        help=f"where RoPE's angles are compared (default {ClaimsRequest.position})",
    )
    group.add_argument(
        "--plot", metavar="FILE.png", help="draw RoPE's frequencies and angles; needs matplotlib"
    )
    options.add_repair(parser)
    options.add_common(parser)


def from_args(args: argparse.Namespace) -> ClaimsRequest:
    """The request that the parsed options make."""
    model, seed = options.model_of(args)
    return ClaimsRequest(
        position=args.position,
        plot=args.plot and Path(args.plot),
        repairs=parse_repairs(args.repair),
        model=model,
        seed=seed,
        device=args.device,
        kernels=options.kernels_of(args),
        output=options.output_of(args),
        command=args.command,
    )


def run(args: argparse.Namespace) -> int:
    """Settle the claims, report, and give the exit code."""
    request = from_args(args)
    from harness.progress import Progress
    from harness.report.claims import as_json, as_text

    with Progress() as progress:
        report = claims(request, progress)
    if request.plot is not None:
        from harness.report.plot import draw_angles

        draw_angles(report, request.plot)
    request.output.write_either(
        lambda: as_text(report, request.output.verbosity), lambda: as_json(report)
    )
    return report.exit_code
