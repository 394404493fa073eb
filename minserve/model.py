"""One forward pass of a Llama-family model: token ids in, logits out. One class for every family.

    x = embed[tokens]
    for each layer:
        q, k, v = W_qkv norm(x)              project
        q, k    = rope(q, k, positions)      turn by position
        x      += W_o attend(q, k, v)        look at the past        <- the only line that knows other tokens
        x      += W_down (silu(W_gate norm(x)) * W_up norm(x))
    logits = W_head norm(x)

Tokens are flat: `tokens [T]` may be one prompt, one token, or (in later notebooks) pieces of many requests. What
binds them is `attend`, a function handed in by whoever owns the past: no cache, a contiguous cache, pages. The
model itself keeps no state between calls and knows neither requests nor caches.

Shapes   T tokens, E hidden, H query heads, G key/value heads, D channels of a head, I intermediate, V vocabulary
Cost     2 flops per weight and token, plus 4 * H * D flops per pair (query, visible key) and layer
Names    parameters are called as in a Hugging Face checkpoint, without its leading `model.`
Sources  Llama 2 (arXiv:2307.09288); RoPE, Su et al. 2021 (arXiv:2104.09864); grouped queries, Ainslie et al. 2023
         (arXiv:2305.13245); llama3 RoPE scaling: the Llama 3.1 model card's reference code
Story    notebooks/01_one_forward_pass.ipynb
"""

import math

import torch
from torch import nn
from torch.nn.functional import linear

from minserve.config import ModelConfig, RopeConfig
from minserve.kernels.rms_norm import add_rms_norm, rms_norm
from minserve.kernels.rope import rope
from minserve.kernels.silu_mul import silu_mul


def rope_frequencies(config: RopeConfig, head_dim: int):
    """Angle per position of each channel pair, fp32 [D/2]: theta^(-2i/D), rescaled where the context was stretched.

    "linear" slows every pair by `factor`. "llama3" leaves pairs that turn often within the original context alone,
    slows those that turn less than `low_freq_factor` times by `factor`, and blends in between.
    """
    pairs = (
        torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
    )  # [D/2], real also under device("meta")
    frequencies = 1.0 / config.theta**pairs
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        turns = config.original_context * frequencies / (2 * math.pi)  # within the original context
        low, high = config.low_freq_factor, config.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow it fully, 1: leave it alone
        return keep * frequencies + (1 - keep) * frequencies / config.factor
    return frequencies


class Linear(nn.Linear):
    """Weights are always loaded: filling them with random numbers first would cost a second at every start."""

    def reset_parameters(self):
        pass


class Embedding(nn.Embedding):
    def reset_parameters(self):
        pass


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        E, H, G, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = H, G, D
        self.q_proj = Linear(E, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(E, G * D, bias=config.qkv_bias)
        self.v_proj = Linear(E, G * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, E, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(D, config.norm_eps)
            self.k_norm = RMSNorm(D, config.norm_eps)

    def forward(self, x, cos, sin, attend):
        T, D = len(x), self.head_dim
        q = self.q_proj(x).view(T, self.heads, D)  # [T, H, D]
        k = self.k_proj(x).view(T, self.kv_heads, D)  # [T, G, D]
        v = self.v_proj(x).view(T, self.kv_heads, D)
        if hasattr(self, "q_norm"):  # Qwen3: each head is normalised before it turns
            q = self.q_norm(q.reshape(-1, D)).view_as(q)
            k = self.k_norm(k.reshape(-1, D)).view_as(k)
        q, k = rope(q, k, cos, sin)
        return self.o_proj(attend(self.layer, q, k, v).reshape(T, -1))  # [T, E]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        E, I = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(E, I, bias=config.mlp_bias)
        self.up_proj = Linear(E, I, bias=config.mlp_bias)
        self.down_proj = Linear(I, E, bias=config.mlp_bias)

    def forward(self, x):
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)


class Model(nn.Module):
    """Call it with tokens [T], their positions [T] and `attend`; get logits [T, V], or [len(rows), V]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        # Not a parameter and not a buffer: it must stay fp32 whatever .to() does to the weights.
        self.frequencies = rope_frequencies(config.rope, config.head_dim)

    @classmethod
    def random(cls, config: ModelConfig, dtype=torch.float32, device="cpu", seed: int = 0) -> "Model":
        """Random weights in a real shape: what speed benchmarks and tests need when there is no checkpoint."""
        with torch.device("meta"):
            model = cls(config)
        model.to(dtype).to_empty(device=device)
        generator = torch.Generator(device).manual_seed(seed)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(weight)
            else:
                nn.init.normal_(weight, std=0.02, generator=generator)
        return model.eval().requires_grad_(False)

    @property
    def device(self):
        return self.embed_tokens.weight.device

    @property
    def dtype(self):
        return self.embed_tokens.weight.dtype

    @property
    def head(self):
        """The output head's weight [V, E]: its own, or the embedding table when the two are tied."""
        return self.embed_tokens.weight if self.config.tied else self.lm_head.weight

    def rotations(self, positions):
        """cos and sin of every angle, fp32 [T, D/2], computed once a step and shared by all layers."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions.float()[:, None] * self.frequencies
        return angles.cos(), angles.sin()

    @torch.inference_mode()
    def forward(self, tokens, positions, attend, rows=None):
        """attend(layer, q [T, H, D], k [T, G, D], v [T, G, D]) -> [T, H, D]; `rows` gets logits, all if None."""
        return self.scores(self.states(tokens, positions, attend, rows))

    @torch.inference_mode()
    def states(self, tokens, positions, attend, rows=None):
        """All but the head: what the last norm leaves of each row, [len(rows), E]."""
        eps = self.config.norm_eps
        cos, sin = self.rotations(positions)
        residual = self.embed_tokens(tokens)  # [T, E]
        x = rms_norm(residual, self.layers[0].input_layernorm.weight, eps)
        for i, layer in enumerate(self.layers):
            x = layer.self_attn(x, cos, sin, attend)
            x, residual = add_rms_norm(x, residual, layer.post_attention_layernorm.weight, eps)
            x = layer.mlp(x)
            after = self.norm if i + 1 == len(self.layers) else self.layers[i + 1].input_layernorm
            x, residual = add_rms_norm(x, residual, after.weight, eps)
        return x if rows is None else x[rows]  # a 49,152-row head for every prompt token would be thrown away

    @torch.inference_mode()
    def scores(self, x):
        """The head: logits [rows, V] of states [rows, E]."""
        return linear(x, self.head) if self.config.tied else self.lm_head(x)
