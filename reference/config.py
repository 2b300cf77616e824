"""The widths of Llama-3.2-1B, the only model this project knows, and its tensors' names."""

from dataclasses import dataclass

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True)
class Config:
    """Widths and constants of Llama-3.2-1B's config.json; only the layers' number may vary."""

    layers: int = 16
    vocab: int = 128256
    hidden: int = 2048
    intermediate: int = 8192
    query_heads: int = 32
    kv_heads: int = 8
    head: int = 64
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_factor: float = 32.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_positions: int = 8192

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= 16:
            raise ValueError(f"layers must be 1 to 16 (got {self.layers})")
        if self.query_heads * self.head != self.hidden or self.query_heads % self.kv_heads:
            raise ValueError("query_heads * head must be hidden, and a multiple of kv_heads")

    @property
    def kv(self) -> int:
        """Width of a row of keys or values: kv_heads * head."""
        return self.kv_heads * self.head

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of one layer by its full name, alphabetical as in the file."""
        prefix = f"model.layers.{layer}."
        return {
            prefix + "input_layernorm.weight": (self.hidden,),
            prefix + "mlp.down_proj.weight": (self.hidden, self.intermediate),
            prefix + "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            prefix + "mlp.up_proj.weight": (self.intermediate, self.hidden),
            prefix + "post_attention_layernorm.weight": (self.hidden,),
            prefix + "self_attn.k_proj.weight": (self.kv, self.hidden),
            prefix + "self_attn.o_proj.weight": (self.hidden, self.hidden),
            prefix + "self_attn.q_proj.weight": (self.hidden, self.hidden),
            prefix + "self_attn.v_proj.weight": (self.kv, self.hidden),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the checkpoint by its full name, embedding first, norm last."""
        shapes: dict[str, tuple[int, ...]] = {EMBED: (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes |= self.layer_shapes(layer)
        return shapes | {FINAL_NORM: (self.hidden,)}
