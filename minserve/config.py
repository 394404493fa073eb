"""What a model is made of, read once from its `config.json` and frozen. Plain Python: no tensor, no torch.

    config.json + generation_config.json  --from_hf-->  ModelConfig

One dataclass describes every family minserve runs (Llama 2/3.x, SmolLM2, Qwen2/2.5, Qwen3, Mistral), because
they are one architecture with four switches: biases on the projections, a norm on queries and keys, a sliding
window on some layers, and a rescaled RoPE. What does not fit is refused here by name, so that no setting of a
checkpoint is ever silently ignored.

Sources  Llama 2, Touvron et al. 2023 (arXiv:2307.09288); Qwen3 technical report (arXiv:2505.09388); Mistral 7B,
         Jiang et al. 2023 (arXiv:2310.06825); the field names are those of Hugging Face `transformers`, in the
         spelling of its version 4 (`rope_theta`, `torch_dtype`) and version 5 (`rope_parameters`, `dtype`).
Story    notebooks/01_one_forward_pass.ipynb
"""

from dataclasses import dataclass

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED = "Llama 2/3.x and SmolLM2 (llama), Mistral (mistral), Qwen2 and Qwen2.5 (qwen2), Qwen3 (qwen3)"


@dataclass(frozen=True)
class RopeConfig:
    """How fast each pair of channels turns with position; `kind` says how long contexts were stretched."""

    theta: float
    kind: str = "default"  # "default" | "linear" | "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        if self.kind not in ("default", "linear", "llama3"):
            raise ValueError(
                f"RoPE scaling '{self.kind}' is not supported: a model run with the wrong rotation answers well at "
                "first and derails later.\n  Supported: default, linear, llama3."
            )
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(
                f"RoPE needs theta > 0 and factor > 0, got theta {self.theta}, factor {self.factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. Sizes are counts of numbers; `windows` has one entry per layer, None = sees all."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    context: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} attention windows for {self.num_layers} layers")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a model needs at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly "
                f"({self.num_heads} / {self.num_kv_heads} = {self.num_heads / self.num_kv_heads:.2f})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE turns channels in pairs and needs it even")

    @classmethod
    def from_hf(cls, config: dict, generation: dict | None = None) -> "ModelConfig":
        """Read a parsed `config.json` (v4 or v5 spelling) and, if there is one, `generation_config.json`.

        Raises ValueError for an architecture, activation or RoPE variant that minserve does not compute, and for a
        key that is missing.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(
                f"model_type is {family!r}, which minserve does not run.\n  It runs: {SUPPORTED}."
            )
        _refuse_what_we_do_not_compute(config)
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            attention_bias = bool(config.get("attention_bias", False))
            return cls(
                family=family,
                vocab_size=config["vocab_size"],
                hidden_size=hidden,
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=_head_dim(config),
                norm_eps=config.get("rms_norm_eps", 1e-6),
                rope=_rope(config),
                context=config["max_position_embeddings"],
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=family == "qwen2" or (family != "mistral" and attention_bias),
                o_bias=family in ("llama", "qwen3") and attention_bias,
                mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
                qk_norm=family == "qwen3",
                windows=_windows(config),
                dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
                bos_token_id=config.get("bos_token_id"),
                eos_token_ids=_eos(config, generation or {}),
            )
        except KeyError as missing:
            raise ValueError(
                f"config.json has no {missing}; a {family} model cannot be built without it"
            ) from None

    @property
    def num_params(self) -> int:
        """Every weight once; a tied output head is the embedding table and counts once."""
        return self.num_params_read + (0 if self.tied else self.vocab_size * self.hidden_size)

    @property
    def num_params_read(self) -> int:
        """Weights that one decoded token has to read: all of them, but only one row of an untied embedding table."""
        E, I, D = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * D, self.num_kv_heads * D
        attention = E * (q + 2 * kv) + q * E + self.qkv_bias * (q + 2 * kv) + self.o_bias * E
        mlp = 3 * E * I + self.mlp_bias * (2 * I + E)
        norms = 2 * E + self.qk_norm * 2 * D
        return self.num_layers * (attention + mlp + norms) + E + self.vocab_size * E


def _head_dim(config: dict) -> int:
    """Declared where the file declares it (Qwen3's is not hidden / heads), else hidden / heads, which must divide."""
    if config.get("head_dim"):
        return config["head_dim"]
    if config["model_type"] == "qwen3":
        return 128  # the family's own default when its file leaves the key out
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not a multiple of {heads} heads, and no head_dim is declared"
        )
    return hidden // heads


def _rope(config: dict) -> RopeConfig:
    """v5 keeps one dict `rope_parameters`; v4 keeps `rope_theta` beside an optional `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", 10_000.0))
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor is not 1: minserve turns every channel of a head or none")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, scaling["factor"])
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            scaling["factor"],
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        )
    return RopeConfig(theta, kind)  # refuses the kind by name


def _windows(config: dict) -> tuple[int | None, ...]:
    """One sliding window per layer. Mistral slides everywhere; Qwen only where, and if, its file says so."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if config["model_type"] == "llama":
        return (None,) * layers
    if config["model_type"] == "mistral":
        return (window,) * layers
    if not config.get("use_sliding_window") or window is None:
        return (None,) * layers
    if kinds := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    full = config.get("max_window_layers", 28)  # in this family the first layers see everything
    return tuple(window if layer >= full else None for layer in range(layers))


def _eos(config: dict, generation: dict) -> tuple[int, ...]:
    """The union of both files: each may hold one id, a list, or nothing, and a model may emit any of them."""
    ids: list[int] = []
    for source in (generation, config):
        eos = source.get("eos_token_id")
        ids += [] if eos is None else eos if isinstance(eos, list) else [eos]
    return tuple(dict.fromkeys(ids))


def _refuse_what_we_do_not_compute(config: dict) -> None:
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {act!r}; minserve's MLP computes silu(gate) * up and nothing else")


def _llama(
    vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, context, theta, tied, **more
) -> ModelConfig:
    rope = more.pop("rope", RopeConfig(theta))
    return ModelConfig(
        more.pop("family", "llama"),
        vocab,
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        head_dim,
        more.pop("norm_eps", 1e-5),
        rope,
        context,
        tied,
        **more,
    )


_LLAMA_31 = RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
_LLAMA_32 = RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)

# Published shapes, for arithmetic and for benchmarks on random weights. Source: each model's own config.json.
SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": _llama(49_152, 576, 1_536, 30, 9, 3, 64, 8_192, 100_000.0, tied=True),
    "qwen3-0.6b": _llama(
        151_936,
        1_024,
        3_072,
        28,
        16,
        8,
        128,
        40_960,
        1e6,
        tied=True,
        family="qwen3",
        qk_norm=True,
        norm_eps=1e-6,
    ),
    "llama-3.2-1b": _llama(128_256, 2_048, 8_192, 16, 32, 8, 64, 131_072, 5e5, tied=True, rope=_LLAMA_32),
    "llama-3.1-8b": _llama(128_256, 4_096, 14_336, 32, 32, 8, 128, 131_072, 5e5, tied=False, rope=_LLAMA_31),
    "llama-2-7b": _llama(32_000, 4_096, 11_008, 32, 32, 32, 128, 4_096, 1e4, tied=False, dtype="float16"),
    "llama-2-70b": _llama(32_000, 8_192, 28_672, 80, 64, 8, 128, 4_096, 1e4, tied=False, dtype="float16"),
}
