"""What the target thinks of each place of a text, read once: what training needs of it is on disk afterwards.

    ids [B, T]  ->  the target, whole sequences at once  ->  at every place the residual stream after some layers, the
                                                             last hidden state, and the FEW likeliest next tokens

`run` is a model's forward pass with a backward pass (kernels have none) and with the batch dimension that training has.
A place p stands for the guess of token p + 1. Places are flat: conversation c owns starts[c] : starts[c + 1].

Chances    only tokens of the reduced vocabulary, as columns of it, and of those the FEW likeliest, scaled to sum to 1.
           Learning from chances says more than learning from the token that was drawn, and costs FEW numbers
Cost       one prefill of the text, and 2 E bytes a place and layer that is kept, memory-mapped
Story      notebooks/12_medusa_and_self_speculation.ipynb
"""

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from tqdm import tqdm

from minserve.kernels.rope import rope_reference
from minserve.model import Model
from minserve.trained import fingerprint, head_rows

FEW = 32
BATCH = 1024  # places the target reads at once
LAST = "last"
HELD_OUT = 1_000_000  # numbers of conversations: from here on nobody is trained on them


class Conversation(NamedTuple):
    number: int  # it decides the seed, and with it the text
    temperature: float  # of the answer
    begin: int  # tokens[begin:] are the answer, its end token included
    tokens: list[int]


# ---------------------------------------------------------------- a forward pass one can differentiate
def run(model: Model, x, layers=()):
    """Embedded tokens x [B, T, E] -> last hidden state [B, T, E], {e: the residual stream after e of `layers`}.

    Plain PyTorch, causal, each sequence from position 0; what stands behind a sequence's end cannot reach it.
    """
    cos, sin = model.rotations(torch.arange(x.shape[1], device=x.device))  # [T, D/2]
    norm = lambda x, of: rms_norm(x, of.weight.shape, of.weight.to(x.dtype), of.eps)
    kept = {}
    for i, layer in enumerate(model.layers):
        x = x + attention(layer.self_attn, norm(x, layer.input_layernorm), cos, sin, model.config.windows[i])
        y, mlp = norm(x, layer.post_attention_layernorm), layer.mlp
        x = x + mlp.down_proj(silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        if i + 1 in layers:
            kept[i + 1] = x
    return norm(x, model.norm), kept


def attention(own, x, cos, sin, window: int | None):
    """x [B, T, E] through one layer's attention (`own`)."""
    B, T, _ = x.shape
    split = lambda y, heads: y.view(B, T, heads, own.head_dim)
    q, k = split(own.q_proj(x), own.heads), split(own.k_proj(x), own.kv_heads)  # [B, T, heads, D]
    v = split(own.v_proj(x), own.kv_heads)
    if hasattr(own, "q_norm"):
        q, k = (rms_norm(y, n.weight.shape, n.weight.to(y.dtype), n.eps)
                for y, n in ((q, own.q_norm), (k, own.k_norm)))  # fmt: skip
    q, k = rope_reference(q, k, cos, sin)
    mask = None
    if window is not None and window < T:
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().triu(1 - window)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    return own.o_proj(out.transpose(1, 2).reshape(B, T, -1))


# ---------------------------------------------------------------- the text, place by place
def frequent(model: Model, conversations: list[Conversation], size: int):
    """The `size` tokens that answers hold most, increasing, [R] int64; low ids, which are frequent, break ties."""
    counts = Counter(t for c in conversations for t in c.tokens[c.begin :])
    by_count = sorted(range(model.config.vocab_size), key=lambda t: (-counts[t], t))
    chosen = list(dict.fromkeys([*model.config.eos_token_ids, *by_count]))[:size]
    return torch.tensor(sorted(chosen), device=model.device)


class Study:
    """A text, and what the target thinks of it: states {e or LAST: [N, E]}, ids and chances [N, FEW]."""

    def __init__(
        self, model: Model, conversations: list[Conversation], vocabulary, layers, work: Path | None
    ):
        self.model, self.conversations, self.vocabulary = model, conversations, vocabulary
        lengths = torch.tensor([len(c.tokens) for c in conversations])
        self.starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        self.tokens = torch.tensor([t for c in conversations for t in c.tokens])  # [N]
        self.ends = self.starts[1:].repeat_interleave(lengths)  # [N]: where the place's conversation ends
        begins = torch.tensor([c.begin for c in conversations])
        place = torch.arange(len(self.tokens))
        self.guessed = place >= (self.starts[:-1] + begins - 1).repeat_interleave(
            lengths
        )  # of an answer's token
        self.guessed &= place + 1 < self.ends
        self.guided = set(layers)
        self._read(work)

    def _read(self, work: Path | None) -> None:
        N, E = len(self.tokens), self.model.config.hidden_size
        text = hashlib.sha256(
            self.tokens.numpy().tobytes() + self.vocabulary.cpu().numpy().tobytes()
        ).hexdigest()
        self.name = f"{fingerprint(self.model)[:8]}-{text[:8]}"
        shapes = {key: ((N, E), torch.bfloat16) for key in (*sorted(self.guided), LAST)}
        few = min(FEW, len(self.vocabulary))
        shapes |= {"ids": ((N, few), torch.int32), "chances": ((N, few), torch.float32)}
        held, absent = {}, []
        for key, (shape, dtype) in shapes.items():
            if work is None:
                held[key] = torch.zeros(shape, dtype=dtype)
                absent.append(key)
                continue
            path = work / f"{self.name}-{key}.bin"
            if not path.is_file():
                absent.append(key)
                path = path.with_suffix(".part")
            held[key] = torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=dtype).view(
                shape
            )
        if absent:
            self._think(held, absent)
            for key in absent if work else ():
                os.replace(work / f"{self.name}-{key}.part", work / f"{self.name}-{key}.bin")
        self.ids, self.chances = held.pop("ids"), held.pop("chances")
        self.states = held

    @torch.inference_mode()
    def _think(self, held: dict, absent: list) -> None:
        """Read what was not read, longest first, so that a batch's sequences are about equally long.

        A new file holds zeros: a conversation whose last place has a value in every file was read before.
        """
        model, rows = self.model, head_rows(self.model, self.vocabulary)
        order = sorted(range(len(self.conversations)), key=lambda c: -len(self.conversations[c].tokens))
        order = [c for c in order if not all(held[k][self.starts[c + 1] - 1].any() for k in absent)]
        total = sum(len(self.conversations[c].tokens) for c in order)
        with tqdm(total=total, desc="the model reads", unit="token") as bar:
            while order:
                size = max(1, BATCH // len(self.conversations[order[0]].tokens))
                batch, order = order[:size], order[size:]
                last, kept = run(model, model.embed_tokens(self.padded(batch)), self.guided)
                for row, c in enumerate(batch):
                    own = slice(self.starts[c], self.starts[c + 1])
                    n = len(self.conversations[c].tokens)
                    for key, x in {**kept, LAST: last}.items():
                        held[key][own] = x[row, :n].bfloat16().cpu()
                    chances = linear(last[row, :n], rows).float().softmax(-1)
                    chances, ids = chances.topk(held["ids"].shape[1])
                    held["ids"][own] = ids.int().cpu()
                    held["chances"][own] = (chances / chances.sum(-1, keepdim=True)).cpu()
                bar.update(sum(len(self.conversations[c].tokens) for c in batch))

    def padded(self, batch: list[int]):
        """The tokens of some conversations [B, T], zeros behind their ends."""
        rows = [torch.tensor(self.conversations[c].tokens) for c in batch]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.model.device)

    def to(self, places, what):
        """Rows of one of the tensors, on the model's device."""
        return what[places].to(self.model.device)
