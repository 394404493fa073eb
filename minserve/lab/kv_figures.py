"""What a request's keys and values weigh under each choice, and how many users a GPU then holds: arithmetic.

    heads     MHA: as many key/value heads as query heads. GQA: one for a group of them. MQA: a single one
    window    a layer that sees w tokens keeps the last w, and its sinks, whatever the context
    kind      16 bits, int8 and fp8 (the same bytes), int4 in pages of 64, with the open page of each request

    request_bytes(config, context, kind)    what one user holds
    users(config, memory, context, kind)    how many fit beside weights in 16 bits
    users_figure(axes, memories)            users against context: a row per GPU, a column per kind, a line per model

A real server has less: activations, graphs and the framework want their share.
Sources  kv_cache.bytes_per_token; the shapes of config.SHAPES; Mistral 7B (arXiv:2310.06825) has a window of 4,096
Story    notebooks/10_smaller_kv_cache.ipynb, figures/10_users.png
"""

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt

from minserve.config import SHAPES, ModelConfig
from minserve.kv_cache import bytes_per_token, users_that_fit
from minserve.lab import figures
from minserve.lab.layout import INK, log_axis, plain

PAGE, SINKS = 64, 4
KINDS = {"16 bits": None, "int8 or fp8": "int8", "int4": "int4"}
GQA = SHAPES["llama-3.1-8b"]
MISTRAL = replace(
    GQA, family="mistral", vocab_size=32_000, context=32_768, windows=(4_096,) * GQA.num_layers
)  # weights, heads and layers as published
MODELS = {
    "Llama-2-7B: MHA, 32 KV heads": SHAPES["llama-2-7b"],
    "Llama-3.1-8B: GQA, 8": GQA,
    "the same as MQA, 1 (hypothetical)": replace(GQA, num_kv_heads=1),
    "Mistral-7B: GQA, 8; window 4,096 + 4 sinks": MISTRAL,
    "Qwen3-0.6B: GQA, 8": SHAPES["qwen3-0.6b"],
    "SmolLM2-135M: GQA, 3": SHAPES["smollm2-135m"],
}
LOOKS = [(color, marker, "-") for color, _, marker in figures.LINES] + [
    ("#E69F00", "v", "--"),
    ("#56B4E9", "X", ":"),
]


def request_bytes(config: ModelConfig, context: int, kind: str | None = None, sinks: int = SINKS) -> float:
    """Keys and values of one request of `context` tokens, in bytes. `sinks` act on layers with a window."""
    kept = sum(context if w is None else min(context, w + sinks) for w in config.windows)
    shape = 1, config.num_kv_heads, config.head_dim
    open_page = config.num_layers * PAGE * bytes_per_token(*shape) if kind == "int4" else 0
    return kept * bytes_per_token(*shape, kind=kind, page_size=PAGE) + open_page


def users(config: ModelConfig, memory: float, context: int, kind: str | None = None) -> int:
    return users_that_fit(int(memory), 2 * config.num_params, request_bytes(config, context, kind), 1)


def curve(config: ModelConfig, memory: float, kind: str | None) -> tuple[list[int], list[int]]:
    """(contexts, users), in powers of two up to what the model allows, as long as anybody fits."""
    contexts = [2**i for i in range(9, 18) if 2**i <= config.context]
    points = [(context, users(config, memory, context, kind)) for context in contexts]
    return tuple(map(list, zip(*[(context, fit) for context, fit in points if fit]))) or ([], [])


def table(context: int, memory: float, models: dict[str, ModelConfig] = MODELS) -> str:
    """MB of a request and how many fit, model by model, kind by kind."""
    wide = max(map(len, models))
    lines = [f"{'':<{wide}}" + "".join(f"{kind:>20}" for kind in KINDS)]
    for name, config in models.items():
        cells = [f"{'-':>20}"] * len(KINDS)  # beyond what the model allows
        if context <= config.context:
            held = [(request_bytes(config, context, kind), kind) for kind in KINDS.values()]
            cells = [f"{n / 1e6:>10,.1f} MB {users(config, memory, context, kind):>6,}" for n, kind in held]
        lines.append(f"{name:<{wide}}" + "".join(cells))
    return "\n".join(lines)


# ---------------------------------------------------------------- the figure
def users_axes(memories=(80e9, 24e9), width: float = 8.6, height: float = 5.4):
    shape = dict(figsize=(width, height), sharex=True, sharey="row", squeeze=False)
    return plt.subplots(len(memories), len(KINDS), **shape, gridspec_kw=dict(wspace=0.06, hspace=0.12))[1]


def users_figure(axes, memories=(80e9, 24e9)):
    """axes [GPUs][kinds], from users_axes."""
    for row, memory in zip(axes, memories, strict=True):
        for ax, (kind, its) in zip(row, KINDS.items(), strict=True):
            for (color, marker, style), (name, config) in zip(LOOKS, MODELS.items(), strict=True):
                xs, ys = curve(config, memory, its)
                ax.plot(
                    xs,
                    ys,
                    color=color,
                    marker=marker,
                    linestyle=style,
                    markersize=4,
                    linewidth=1.5,
                    label=name,
                )
            log_axis(ax, "x", 400, 2e5, base=4)
            log_axis(ax, "y", 0.7, 3e4)
            text = f"{memory / 1e9:.0f} GB, {kind}"
            ax.text(0.97, 0.95, text, transform=ax.transAxes, ha="right", va="top", fontsize=9, color=INK)
            ax.grid(color="#EEEEEE", zorder=0)
            plain(ax)
        row[0].set_ylabel("users that fit", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("tokens of context of each", fontsize=9)
    lines, names = axes[0][0].get_legend_handles_labels()
    axes[-1][0].legend(
        lines, names, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.24), fontsize=8, frameon=False
    )
    return axes


def finding(memory: float = 80e9, context: int = 4096) -> str:
    """The figure's title."""
    mha, gqa = (users(config, memory, context) for config in list(MODELS.values())[:2])
    small = users(GQA, memory, context, "int4")
    where = f"{context:,} tokens each on {memory / 1e9:.0f} GB"
    return f"{where}: {mha} users with MHA, {gqa} with GQA, {small} with GQA in int4"


def draw(path: Path) -> None:
    axes = users_figure(users_axes())
    figures.save(axes[0][0], path, finding(), "arithmetic: what 16-bit weights leave; a real server has less")
