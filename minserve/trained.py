"""Trained parts of a drafter: Medusa heads, early exits, a small draft network; and which model they belong to.

    medusa   m matrices [E, E]: head h turns the last hidden state x into x + silu(W_h x), which the target's own head
             scores as the token h + 2 places behind x's
    exit     for some layers e a norm [E] and a matrix [E, E]: the residual stream after e layers is normed and turned
             into what the target's own head can score as the next token
    draft    a Llama of a few layers and d << E channels, which sees the target's embedding through a matrix [E, d] and
             is scored by the target's head through another

All of them name tokens of a reduced vocabulary only: the R that the model itself writes most. Scoring R rows of the
head instead of V is what makes a draft cheap on a machine that waits for memory; a token outside is never drafted, and
costs a rejection, nothing else. No part holds a table of the vocabulary: rows are taken from the target at load.

File       safetensors, 16 bits; its metadata are JSON: the target's fingerprint, the command and seed, the loss curve
           and the acceptance that was measured
Shapes     x [B, E] -> medusa [B, m, R], exit [B, R]; vocabulary [R] int64, increasing: column -> token id
Refused    a file that is absent, cut short or of another kind; parts trained for another model
Sources    Medusa, Cai et al. 2024 (arXiv:2401.10774); early exits: LayerSkip, Elhoushi et al. 2024 (arXiv:2404.16710);
           the matrix before the head: tuned lens, Belrose et al. 2023 (arXiv:2303.08112)
Story      notebooks/12_medusa_and_self_speculation.ipynb
"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from minserve.config import ModelConfig
from minserve.model import Linear, Model

ASSETS = Path(__file__).parent / "assets"
KINDS = ("medusa", "exit", "draft")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


# ---------------------------------------------------------------- the parts
class MedusaHeads(nn.Module):
    """m heads on the last hidden state. Untrained (W = 0), each repeats what the target's own head says of x."""

    def __init__(self, model: Model, vocabulary, heads: int):
        super().__init__()
        E = model.config.hidden_size
        self.heads = nn.Parameter(torch.zeros(heads, E, E, dtype=model.dtype, device=model.device))
        keep(self, vocabulary=vocabulary, rows=head_rows(model, vocabulary))

    def forward(self, x):
        m, E, _ = self.heads.shape
        turned = linear(x, self.heads.reshape(m * E, E)).view(-1, m, E)  # one product for all heads
        return linear(x[:, None] + silu(turned), self.rows)  # [B, m, R]


class ExitHead(nn.Module):
    """After layer e: scores(x) = rows . adapter . norm(x). Untrained, it is the target's own norm and head."""

    def __init__(self, model: Model, vocabulary):
        super().__init__()
        self.norm = nn.Parameter(model.norm.weight.detach().clone())
        self.adapter = nn.Parameter(torch.eye(len(self.norm), dtype=model.dtype, device=model.device))
        self.eps = model.config.norm_eps
        keep(self, vocabulary=vocabulary, rows=head_rows(model, vocabulary))

    def forward(self, x):
        """x [B, E], the residual stream after e layers -> [B, R]."""
        y = rms_norm(x, self.norm.shape, self.norm, self.eps)
        return linear(linear(y, self.adapter), self.rows)

    scores = forward

    def matrix(self):
        """The adapter folded into the rows, [R, E]: scores(x) = matrix . norm(x), one product instead of two."""
        return (self.rows.float() @ self.adapter.detach().float()).to(self.rows.dtype)


class ExitHeads(nn.Module):
    """Several exits of one model: exits[e] is the ExitHead after e layers."""

    def __init__(self, model: Model, vocabulary, layers):
        super().__init__()
        self.layers = tuple(layers)
        self.exits = nn.ModuleList(ExitHead(model, vocabulary) for _ in self.layers)
        rows = self.exits[0].rows
        for head in self.exits:
            head.rows = rows  # one copy for all
        keep(self, vocabulary=vocabulary)

    def __getitem__(self, layer: int) -> ExitHead:
        if layer not in self.layers:
            raise ValueError(
                f"no exit was trained after layer {layer}; there is one after {', '.join(map(str, self.layers))}"
            )
        return self.exits[self.layers.index(layer)]


class DraftNet(Model):
    """A small Model with the target's vocabulary below and the reduced one above: ids [T] -> logits [T, R].

    `into` and `out_of` [E, d] are what was trained; the two tables they make of the target's are built from them.
    """

    def __init__(self, model: Model, vocabulary, **sizes):
        super().__init__(draft_config(model.config, **sizes))
        E, d = model.config.hidden_size, self.config.hidden_size
        self.into, self.out_of = nn.Parameter(torch.empty(E, d)), nn.Parameter(torch.empty(E, d))
        self.lm_head = Linear(d, len(vocabulary), bias=False)
        self.to(device=model.device, dtype=model.dtype)
        keep(self, vocabulary=vocabulary, rows=head_rows(model, vocabulary))

    @torch.no_grad()
    def materialise(self, model: Model) -> "DraftNet":
        self.embed_tokens.weight = tables(model.embed_tokens.weight, self.into)
        self.lm_head.weight = tables(self.rows, self.out_of)
        return self


def tables(target, projection) -> nn.Parameter:
    made = (target.float() @ projection.float()).to(target.dtype)
    return nn.Parameter(made, requires_grad=False)


def draft_config(
    target: ModelConfig, *, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int
):
    return replace(
        target, family="llama", hidden_size=hidden, intermediate_size=intermediate, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, windows=(None,) * layers, tied=False,
        qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
    )  # fmt: skip


def keep(module: nn.Module, **tensors) -> None:
    """What comes from the target: it moves with the module, and no file of the part holds it."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor, persistent=False)


def head_rows(model: Model, vocabulary):
    """The rows of the target's output head that score the reduced vocabulary, [R, E] in the model's dtype."""
    head = getattr(model, "lm_head", None)
    whole = head.dequantize() if hasattr(head, "dequantize") else model.head
    return whole.detach()[vocabulary].to(model.dtype)


# ---------------------------------------------------------------- whose they are
def fingerprint(model: Model) -> str:
    """The same for one checkpoint in any dtype and with any quantized linears: its sizes, and some of its embedding."""
    sizes = [getattr(model.config, name) for name in SIZES]
    table = model.embed_tokens.weight
    some = table[:: max(1, len(table) // 64)].detach().bfloat16().cpu().contiguous()
    return hashlib.sha256(repr(sizes).encode() + some.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def shape_of(config: ModelConfig) -> str:
    return f"{config.num_layers} layers of {config.hidden_size:,} channels, {config.vocab_size:,} tokens"


# ---------------------------------------------------------------- files
def save_part(kind: str, part: nn.Module, model: Model, path: Path, **meta) -> None:
    """Write the part's own weights in bf16, whole or not at all, and what is known of them."""
    about = {"kind": kind, "target": shape_of(model.config), "fingerprint": fingerprint(model)} | meta
    held = {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in weights_of(part).items()}
    held["vocabulary"] = part.vocabulary.int().cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(held, made, {"minserve": json.dumps(about)})
    made.chmod(0o644)
    os.replace(made, path)


def weights_of(part: nn.Module) -> dict[str, torch.Tensor]:
    """What was trained: everything but the tables that a DraftNet makes from the target's."""
    made = ("embed_tokens.weight", "lm_head.weight") if isinstance(part, DraftNet) else ()
    return {name: tensor for name, tensor in part.state_dict().items() if name not in made}


def load_part(kind: str, model: Model, path: str | Path | None = None):
    """MedusaHeads, ExitHeads or DraftNet of this model, in its dtype and on its device; .about is the metadata.

    `path` None is what ships with minserve. Raises FileNotFoundError, and ValueError for what is not this model's.
    """
    path = Path(path or ASSETS / f"{kind}.safetensors")
    about, tensors = read_part(kind, path)
    if about["fingerprint"] != fingerprint(model):
        why = "" if about["target"] != shape_of(model.config) else ", and other weights in them"
        raise ValueError(
            f"{path} was trained for another model: {about['target']}; this one has {shape_of(model.config)}{why}.\n"
            f"  Train them for this one: python -m minserve train {kind} --model FOLDER --out FILE"
        )
    part = build(kind, model, tensors.pop("vocabulary").long().to(model.device), about["sizes"])
    wanted, found = ({n: list(t.shape) for n, t in held.items()} for held in (weights_of(part), tensors))
    if wanted != found:
        wrong = sorted(n for n in wanted | found if wanted.get(n) != found.get(n))
        raise ValueError(
            f"{path}: {wrong[0]} is {found.get(wrong[0], 'absent')}, its metadata say {wanted.get(wrong[0])}"
        )
    with torch.no_grad():
        part.load_state_dict(tensors, strict=False)
    if kind == "draft":
        part.materialise(model)
    part.about = about
    return part.eval().requires_grad_(False)


def build(kind: str, model: Model, vocabulary, sizes: dict):
    """An untrained part. sizes: {"heads": m}, {"layers": [e, ...]}, or those of a draft (see draft_config)."""
    made = {"medusa": MedusaHeads, "exit": ExitHeads, "draft": DraftNet}
    return made[kind](model, vocabulary, **sizes)


def read_part(kind: str, path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """(metadata, tensors) of a file that is whole and of this kind. Raises FileNotFoundError, ValueError."""
    if kind not in KINDS:
        raise ValueError(f"no trained part is called {kind!r}: use {', '.join(KINDS)}")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there: `python -m minserve train {kind} --out {path}` makes it"
        )
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("minserve", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({path.stat().st_size:,} bytes): {error}.\n"
            f"  It was probably cut short: `python -m minserve train {kind} --out {path}` makes it again."
        ) from None
    if about.get("kind") != kind:
        raise ValueError(
            f"{path} holds {about.get('kind', 'no trained part')}, and what was asked for is {kind}"
        )
    return about, tensors
