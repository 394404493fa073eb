"""The same model in transformers' own class: the same weights in the same memory; only the code differs."""

import time

import torch

from minserve.config import ModelConfig
from minserve.model import Model

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def twin(model: Model):
    """transformers' model around our weights: no copy, whatever the size. SDPA attention, its default."""
    import transformers  # seconds of import that the package's other commands need not pay

    transformers.utils.logging.set_verbosity_error()
    config = as_transformers(model.config, transformers)
    with torch.device("meta"):
        other = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    own = dict(model.named_parameters())
    own["lm_head.weight"] = model.head
    state = {name if name.startswith("lm_head") else f"model.{name}": weight for name, weight in own.items()}
    other.load_state_dict(state, strict=True, assign=True)
    with torch.device(model.device):  # its buffers were on meta
        other.model.rotary_emb = type(other.model.rotary_emb)(config)
    # no end-of-sequence id: every answer has its full length
    other.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return other.eval().requires_grad_(False)


def as_transformers(config: ModelConfig, transformers):
    rope = config.rope
    parameters = dict(rope_type=rope.kind, rope_theta=rope.theta)
    if rope.kind != "default":
        parameters |= dict(factor=rope.factor)
    if rope.kind == "llama3":
        parameters |= dict(
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position_embeddings=rope.original_context,
        )
    return getattr(transformers, CLASSES[config.family] + "Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.context,
        rope_parameters=parameters,
        tie_word_embeddings=config.tied,
        **switches(config),
    )


def switches(config: ModelConfig) -> dict:
    """What only some families know: biases and windows."""
    window = next((w for w in config.windows if w is not None), None)
    if config.family == "llama":
        return dict(attention_bias=config.o_bias, mlp_bias=config.mlp_bias)
    if config.family == "mistral":
        return dict(sliding_window=window)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    more = dict(attention_bias=config.o_bias) if config.family == "qwen3" else {}
    return dict(use_sliding_window=window is not None, sliding_window=window, layer_types=kinds, **more)


class Stamps:
    """A transformers streamer that only looks at the clock: once for the prompt, once per token."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, _) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate_rate(other, prompt: list[int], new: int) -> tuple[float, list[int]]:
    """Tokens per second of decoding (the first token belongs to prefill), and the tokens."""
    ids, stamps = torch.tensor([prompt], device=other.device), Stamps()
    with torch.inference_mode():
        out = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, streamer=stamps)
    times = stamps.times[1:]  # the first call brings the prompt
    if len(times) != new:
        raise RuntimeError(
            f"transformers made {len(times)} tokens where {new} were asked for: not the same work"
        )
    return (new - 1) / (times[-1] - times[0]), out[0, len(prompt) :].tolist()
