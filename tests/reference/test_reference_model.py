"""The reference model against transformers, against itself, and against recorded figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_folders import SavedModel, llama_config
from torch import Tensor

from reference import ops
from reference.checkpoint import Checkpoint, open_checkpoint
from reference.model import Cache, Llama, Weights, ideal_and_exact, identity
from reference.rounding import round_to_bf16

ENGINE = json.loads((Path(__file__).parents[1] / "golden" / "engine.json").read_text())
PROMPTS: list[list[int]] = ENGINE["prompts"]

BEFORE_ATTENTION = ["attn_norm", "q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "kv_write"]
AFTER_ATTENTION = [
    *("o_proj", "attn_residual", "mlp_norm", "gate_proj", "up_proj", "swiglu", "down_proj"),
    "mlp_residual",
]
PREFILL = [*BEFORE_ATTENTION, "scores", "mask", "softmax", "attn_v", *AFTER_ATTENTION]
DECODE = [*BEFORE_ATTENTION, "attention", *AFTER_ATTENTION]
FUNCTIONS = {
    **dict.fromkeys(["attn_norm", "mlp_norm", "final_norm"], ops.rms_norm),
    **dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj", "logits"], ops.linear),
    **dict.fromkeys(["gate_proj", "up_proj", "down_proj"], ops.linear),
    **dict.fromkeys(["q_rope", "k_rope"], ops.rope),
    **dict.fromkeys(["attn_residual", "mlp_residual"], ops.residual),
    "kv_write": ops.kv_write,
    "scores": ops.scores,
    "mask": ops.mask,
    "softmax": ops.softmax,
    "attn_v": ops.attn_v,
    "attention": ops.attention,
    "swiglu": ops.swiglu,
    "argmax": ops.argmax,
}
# the tap whose rounded result each activation is; o_proj reads attn_v or attention
WIRING = {
    "attn_norm": {"x": "embed"},
    **{op: {"x": "attn_norm"} for op in ("q_proj", "k_proj", "v_proj")},
    "q_rope": {"x": "q_proj"},
    "k_rope": {"x": "k_proj"},
    "kv_write": {"k": "k_rope", "v": "v_proj"},
    "scores": {"q": "q_rope", "k": "k_rope"},
    "mask": {"scores": "scores"},
    "softmax": {"scores": "mask"},
    "attn_v": {"probs": "softmax", "v": "v_proj"},
    "attention": {"q": "q_rope"},
    "attn_residual": {"x": "embed", "y": "o_proj"},
    "mlp_norm": {"x": "attn_residual"},
    **{op: {"x": "mlp_norm"} for op in ("gate_proj", "up_proj")},
    "swiglu": {"gate": "gate_proj", "up": "up_proj"},
    "down_proj": {"x": "swiglu"},
    "mlp_residual": {"x": "attn_residual", "y": "down_proj"},
}


@dataclass
class Tape:
    """A record that keeps everything."""

    taps: list[tuple[str, dict[str, Any], Tensor]] = field(default_factory=list)

    def __call__(self, op: str, inputs: Mapping[str, Any], real: Tensor) -> None:
        self.taps.append((op, dict(inputs), real))

    @property
    def names(self) -> list[str]:
        return [op for op, _, _ in self.taps]

    def real(self, op: str) -> Tensor:
        (found,) = [real for name, _, real in self.taps if name == op]
        return found


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("synthetic", layers=2)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


# ---- transformers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf(saved_model: SavedModel) -> Any:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        saved_model.sharded, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize("prompt", [PROMPTS[0], [128000], list(range(500, 128000, 3331))])
def test_exact_agrees_with_transformers_in_float32(
    saved_model: SavedModel, hf: Any, prompt: list[int]
):
    model = Llama(open_checkpoint(saved_model.whole), identity)
    with torch.no_grad():
        want = hf(torch.tensor([prompt]), output_hidden_states=True)
    hidden, states = model.embed(prompt), [h[0].double() for h in want.hidden_states]
    assert torch.equal(hidden, states[0])
    hidden = model.prefill_layer(0, hidden, Cache())
    assert relative(hidden, states[1]) < 2e-6
    hidden = model.prefill_layer(1, hidden, Cache())
    tape = Tape()
    logits, token = model.final(hidden, tape, last_only=True)
    assert relative(tape.real("final_norm"), states[2]) < 2e-6  # the last state is normed
    assert relative(logits, want.logits[0].double()) < 2e-6
    assert token.tolist() == [int(want.logits[0, -1].argmax())]


def test_rotation_agrees_with_transformers_at_every_position():
    from transformers.models.llama import modeling_llama

    positions = torch.arange(2048)
    q = torch.from_numpy(np.random.default_rng(0).standard_normal((2048, 2048)))
    k = q[:, :512].flip(0)
    rotary = modeling_llama.LlamaRotaryEmbedding(llama_config())
    cos, sin = rotary(q[None], positions[None])
    heads = [x.unflatten(1, (-1, 64)).transpose(0, 1)[None] for x in (q, k)]
    turned = modeling_llama.apply_rotary_pos_emb(*heads, cos, sin)
    for x, want in zip((q, k), turned, strict=True):
        got = ops.rope(x, positions, ops.llama3_inv_freq())
        want = want[0].transpose(0, 1).flatten(1)
        assert (got - want).abs().max() < 1e-3  # their angles are float32: 2048 * 2^-24
        assert relative(got, want) < 1e-4


# ---- recorded figures ---------------------------------------------------------------------


def test_exact_gives_the_float64_tokens_margins_and_top_5_of_transformers():
    """All 16 layers, all four prompts, 16 greedy tokens each.

    The tokens are fed as part of the prompt, so that one walk answers for all of them; that decode
    gives what prefill gives is tested below.
    """
    count = 16
    model = Llama(open_checkpoint("synthetic"), identity)
    wanted = ENGINE["hf"]["float64"]
    told = [p + want["tokens"][: count - 1] for p, want in zip(PROMPTS, wanted, strict=True)]
    hidden = [model.embed(tokens) for tokens in told]
    for layer in range(16):
        hidden = [model.prefill_layer(layer, h, Cache()) for h in hidden]
    logits, tokens = model.final(torch.cat([h[-count:] for h in hidden]))
    top = logits.topk(5)
    for i, want in enumerate(wanted):
        own = slice(i * count, (i + 1) * count)
        assert tokens[own].tolist() == want["tokens"][:count]
        margins = top.values[own, 0] - top.values[own, 1]
        np.testing.assert_allclose(margins, want["margins"][:count], rtol=0, atol=1e-5)
        assert top.indices[own][0].tolist() == want["top5_ids"]
        np.testing.assert_allclose(top.values[own][0], want["top5_logits"], rtol=0, atol=2e-6)


# ---- the model against itself -------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1,), (2, 1), (3, 17), (15, 16), (19, 30)])
def test_exact_decode_continues_as_a_longer_prefill(
    checkpoint: Checkpoint, lengths: tuple[int, ...]
):
    _, model = ideal_and_exact(checkpoint)
    steps = 3
    texts = [
        [7919 * (i + 1) * (r + 1) % 128256 for i in range(n + steps)] for r, n in enumerate(lengths)
    ]
    whole = [model.embed(text) for text in texts]
    begun = [h[:n] for h, n in zip(whole, lengths, strict=True)]
    later = [
        torch.stack([h[n + t] for h, n in zip(whole, lengths, strict=True)]) for t in range(steps)
    ]
    for layer in range(2):
        full = [Cache() for _ in lengths]
        grown = [Cache() for _ in lengths]
        whole = [model.prefill_layer(layer, h, c) for h, c in zip(whole, full, strict=True)]
        begun = [model.prefill_layer(layer, h, c) for h, c in zip(begun, grown, strict=True)]
        for t in range(steps):
            positions = [n + t for n in lengths]
            later[t] = model.decode_layer(layer, later[t], positions, grown)
        for r, n in enumerate(lengths):
            got = torch.cat([begun[r], *(h[r : r + 1] for h in later)])
            assert relative(got, whole[r]) < 1e-13
            assert len(grown[r]) == n + steps
            assert relative(grown[r].keys, full[r].keys) < 1e-13
            assert relative(grown[r].values, full[r].values) < 1e-13


def test_a_slot_does_not_see_the_other(checkpoint: Checkpoint):
    _, model = ideal_and_exact(checkpoint)
    caches = [Cache(), Cache()]
    for prompt, cache in zip(PROMPTS, caches, strict=False):
        model.prefill_layer(0, model.embed(prompt), cache)
    alone = Cache()
    model.prefill_layer(0, model.embed(PROMPTS[1]), alone)
    both = model.decode_layer(0, model.embed([5, 6]), [17, 14], caches)
    one = model.decode_layer(0, model.embed([6]), [14], [alone])
    assert relative(both[1:], one) < 1e-13


def test_generate_takes_the_greatest_logit_of_each_longer_prompt(checkpoint: Checkpoint):
    _, model = ideal_and_exact(checkpoint)
    tokens = model.generate(PROMPTS[2], 3)
    logits, _ = model.prefill(PROMPTS[2] + tokens[:-1])
    assert logits[-3:].argmax(dim=1).tolist() == tokens


# ---- what is recorded ---------------------------------------------------------------------


def walk(model: Llama, prompts: Sequence[Sequence[int]]) -> tuple[Tape, Tape, Tape]:
    """Records of prefill of prompt 0 (layer 0), of one decode step of all, and of the end."""
    prefill, decode, end = Tape(), Tape(), Tape()
    caches = [Cache() for _ in prompts]
    for i, (prompt, cache) in enumerate(zip(prompts, caches, strict=True)):
        if i == 0:
            hidden = model.embed(prompt, prefill)
            hidden = model.prefill_layer(0, hidden, cache, prefill)
        else:
            model.prefill_layer(0, model.embed(prompt), cache)
    model.final(hidden, end, last_only=True)
    step = model.embed(list(range(len(prompts))), decode)
    model.decode_layer(0, step, [len(p) for p in prompts], caches, decode)
    return prefill, decode, end


@pytest.fixture(scope="module", params=["ideal", "exact"])
def tapes(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> tuple[str, Tape, Tape, Tape]:
    ideal, exact = ideal_and_exact(checkpoint)
    return (request.param, *walk(ideal if request.param == "ideal" else exact, PROMPTS[:2]))


def test_taps_come_in_execution_order(tapes: tuple[str, Tape, Tape, Tape]):
    _, prefill, decode, end = tapes
    assert prefill.names == ["embed", *PREFILL]
    assert decode.names == ["embed", *DECODE]
    assert end.names == ["final_norm", "logits", "argmax"]


def test_taps_have_their_shapes(tapes: tuple[str, Tape, Tape, Tape]):
    _, prefill, decode, end = tapes
    for tape, n in ((prefill, 17), (decode, 2)):
        widths = {op: tuple(real.shape) for op, _, real in tape.taps}
        wide = dict.fromkeys(["embed", "attn_norm", "q_proj", "q_rope", "o_proj"], (n, 2048))
        wide |= dict.fromkeys(["attn_residual", "mlp_norm", "down_proj"], (n, 2048))
        wide |= {"mlp_residual": (n, 2048), "attn_v" if n == 17 else "attention": (n, 2048)}
        wide |= dict.fromkeys(["gate_proj", "up_proj", "swiglu"], (n, 8192))
        wide |= dict.fromkeys(["k_proj", "v_proj", "k_rope"], (n, 512))
        wide |= {"kv_write": (2, n, 512)}
        if n == 17:
            wide |= dict.fromkeys(["scores", "mask", "softmax"], (32, 17, 17))
        assert widths == wide
    assert [tuple(real.shape) for _, _, real in end.taps] == [(17, 2048), (17, 128256), (1,)]


def test_a_tap_can_be_computed_again_from_its_inputs(tapes: tuple[str, Tape, Tape, Tape]):
    for tape in tapes[1:]:
        for op, inputs, real in tape.taps:
            if op == "embed":
                assert torch.equal(inputs["weight"].double(), real)
                assert inputs["tokens"].dtype == torch.int64
            else:
                assert torch.equal(FUNCTIONS[op](**inputs), real), op


def test_each_input_is_what_the_rounding_made_of_the_right_result(
    tapes: tuple[str, Tape, Tape, Tape],
):
    kind, prefill, decode, end = tapes
    rounding = round_to_bf16 if kind == "ideal" else identity
    for tape, wiring in (
        (prefill, WIRING | {"o_proj": {"x": "attn_v"}}),
        (decode, WIRING | {"o_proj": {"x": "attention"}}),
    ):
        for op, inputs, _ in tape.taps[1:]:
            for name, source in wiring[op].items():
                assert torch.equal(inputs[name], rounding(tape.real(source))), (op, name)
    inputs = {op: inputs for op, inputs, _ in end.taps}
    assert torch.equal(inputs["final_norm"]["x"], rounding(prefill.real("mlp_residual")))
    assert torch.equal(inputs["logits"]["x"], rounding(end.real("final_norm")))
    assert torch.equal(inputs["argmax"]["logits"], rounding(end.real("logits"))[-1:])


def test_what_is_recorded_as_real_is_not_rounded(tapes: tuple[str, Tape, Tape, Tape]):
    copies = {"embed"} if tapes[0] == "exact" else {"embed", "kv_write"}
    for tape in tapes[1:]:
        for op, _, real in tape.taps:
            if op not in ("mask", "argmax"):
                assert torch.equal(round_to_bf16(real), real) == (op in copies), op


def test_decode_attention_reads_the_rows_written_so_far(tapes: tuple[str, Tape, Tape, Tape]):
    _, prefill, decode, _ = tapes
    written = decode.real("kv_write")  # (2, 2, 512)
    inputs = next(inputs for op, inputs, _ in decode.taps if op == "attention")
    assert [tuple(k.shape) for k in inputs["keys"]] == [(18, 512), (15, 512)]
    for r in range(2):
        assert torch.equal(inputs["keys"][r][-1], written[0, r])
        assert torch.equal(inputs["values"][r][-1], written[1, r])
    before = prefill.real("kv_write")  # (2, 17, 512)
    assert torch.equal(inputs["keys"][0][:-1], before[0])
    assert torch.equal(inputs["values"][0][:-1], before[1])


def test_ideal_stays_within_bf16s_noise_of_exact(checkpoint: Checkpoint):
    ideal, exact = ideal_and_exact(checkpoint)
    a, b = ideal.embed(PROMPTS[0]), exact.embed(PROMPTS[0])
    for layer in range(2):
        a = ideal.prefill_layer(layer, a, Cache())
        b = exact.prefill_layer(layer, b, Cache())
        assert 2.0**-10 < relative(a, b) < 2.0**-5


# ---- weights and mistakes -----------------------------------------------------------------


class Counting(Checkpoint):
    """A checkpoint that notes what is asked of it."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__({}, inner.config, 0)
        self.inner = inner
        self.asked: list[str] = []

    def tensor(self, name: str) -> Tensor:
        self.asked.append(name)
        return self.inner.tensor(name)

    def rows(self, name: str, indices: Sequence[int] | Tensor) -> Tensor:
        return self.inner.rows(name, indices)


def test_a_layer_is_converted_once_for_all_sequences_phases_and_judges(checkpoint: Checkpoint):
    counting = Counting(checkpoint)
    models = ideal_and_exact(counting)
    hidden = {m: [m.embed(p) for p in PROMPTS[:2]] for m in models}
    for layer in range(2):
        for m in models:
            caches = [Cache(), Cache()]
            hidden[m] = [
                m.prefill_layer(layer, h, c) for h, c in zip(hidden[m], caches, strict=True)
            ]
            m.decode_layer(layer, m.embed([1, 2]), [17, 14], caches)
    layers = [checkpoint.config.layer_shapes(layer) for layer in range(2)]
    assert sorted(counting.asked) == sorted([*layers[0], *layers[1]])


def test_only_one_layer_is_held(checkpoint: Checkpoint):
    weights = Weights(checkpoint)
    first = weights.of_layer(0, "mlp.up_proj")
    assert weights.of_layer(0, "mlp.up_proj") is first
    weights.of_layer(1, "mlp.up_proj")
    assert weights.of_layer(0, "mlp.up_proj") is not first


def test_a_second_prefill_into_one_cache_is_refused(checkpoint: Checkpoint):
    model, cache = Llama(checkpoint), Cache()
    hidden = model.embed([1, 2, 3])
    model.prefill_layer(0, hidden, cache)
    with pytest.raises(ValueError, match=r"cache must be empty before prefill \(got 3 rows\)"):
        model.prefill_layer(0, hidden, cache)


def test_a_position_that_is_not_the_caches_length_is_refused(checkpoint: Checkpoint):
    model, cache = Llama(checkpoint), Cache()
    model.prefill_layer(0, model.embed([1, 2, 3]), cache)
    with pytest.raises(ValueError, match=r"positions must be the caches' lengths \[3\] \(got \[4"):
        model.decode_layer(0, model.embed([1]), [4], [cache])
