"""What every comparison needs: the checkpoint, the kernels, and the engine on its device."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.control import forced_tokens
from harness.devices import open_device
from harness.memory import Memory
from harness.model_file import Loader, model_file
from harness.probe import Event
from harness.progress import Progress
from harness.repairs import PREFILL_EOS, apply_repairs
from harness.request import CompareRequest
from harness.result import Kernels, Model
from harness.taps import CONTROL, DECODE, EXECUTION_ORDER, LAYERLESS
from kernels.lift import lift
from port.main import BATCH_SIZE, CHAT_PROMPTS, NUM_BLOCKS, Engine, EngineAbort, run
from reference.checkpoint import Checkpoint, open_checkpoint
from reference.config import EMBED, FINAL_NORM


class Session:
    """One engine on one device, over one checkpoint, for one request.

    Raises the classes of harness.errors for what the request asks and this machine has not.
    """

    def __init__(
        self,
        request: CompareRequest,
        progress: Progress,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.request, self.progress = request, progress
        self.checkpoint = checkpoint or open_checkpoint(request.model, seed=request.seed)
        self.layers = request.check_layers(self.checkpoint.layers)
        self.kernels = apply_repairs(lift(request.kernels), request.repairs)
        self.prompts: Sequence[Sequence[int]] = request.prompt_ids or CHAT_PROMPTS[:BATCH_SIZE]
        self.forced = forced_tokens(request.decode_ids, CHAT_PROMPTS, BATCH_SIZE)
        self.steps = request.steps if DECODE in request.phases else 0
        # Only the host's executor can look at every access, or choose in which order threads run.
        name = "host" if request.races or request.schedules else request.device
        device = open_device(name, self.kernels, races=request.races)
        file = model_file(self.checkpoint)
        self.engine = Engine(
            device,
            self.kernels,
            file,
            prompts=self.prompts,
            wanted=(),
            out=io.StringIO(),
            check_eos_after_prefill=PREFILL_EOS in request.repairs,
        )
        self.loader = Loader(self.engine, file, self.checkpoint)

    def wants_around(self, op: str) -> bool:
        """Ops outside the layers run with all layers, or where --op names them."""
        request = self.request
        return request.selects(op) and (request.all_layers or request.op is not None)

    def ops_inside(self) -> set[str]:
        """The selected ops of a layer, of the phases to run."""
        return {
            op
            for phase in self.request.phases
            for op in EXECUTION_ORDER[phase]
            if op not in LAYERLESS and op not in CONTROL and self.request.selects(op)
        }

    def load(self, ops: Iterable[str], layer: int | None, tokens: Iterable[int] = ()) -> None:
        """Bring to the device what these ops read; `tokens`: the embedding rows for "embed"."""
        ops = set(ops)
        if layer is not None and ops:
            prefix = f"model.layers.{layer}."
            names = self.checkpoint.header()
            self.loader.load([name for name in names if name.startswith(prefix)])
        if "logits" in ops:
            self.loader.load([EMBED])
        if "embed" in ops:
            self.loader.load_embedding_rows(tokens)
        if "final_norm" in ops:
            self.loader.load([FINAL_NORM])

    def poison(self, memory: Memory, events: Sequence[Event], everything: bool = False) -> None:
        """Poison and watch what these events use, with room to spare, or all there is."""
        rows = max((len(event.positions) for event in events), default=BATCH_SIZE)
        blocks = sum(int((event.table >= 0).sum()) for event in events)
        memory.begin(None if everything else rows, min(2 * blocks + 16, NUM_BLOCKS))

    def run(self) -> str | None:
        """The port's whole control flow from its start; the assert that ended it, if any."""
        self.engine.reset(self.prompts)
        left = iter(range(self.steps))
        try:
            run(self.engine, go_on=lambda: next(left, None) is not None)
        except EngineAbort as abort:
            return str(abort)
        return None

    def kernels_record(self) -> Kernels:
        path = self.kernels.path.resolve()
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return Kernels(str(path), self.kernels.sha256)

    def model_record(self) -> Model:
        path = self.checkpoint.path
        return Model(
            kind="synthetic" if path is None else "checkpoint",
            seed=self.request.seed if path is None else None,
            path=None if path is None else str(path),
            layers=self.checkpoint.layers,
        )
