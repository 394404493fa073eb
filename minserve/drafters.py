"""Drafters by name, with the parts that ship for SmolLM2: what `Engine(drafter="medusa")` and `--drafter` mean.

    ngram    what followed the last time: no weights, good where answers copy from prompts
    medusa   a few heads on the last hidden state, and a tree of their candidates
    exit     the model's own first layers, and a head trained for them
    draft    a small model

Story    notebooks/11_speculative_decoding.ipynb, notebooks/12_medusa_and_self_speculation.ipynb
"""

from pathlib import Path

from minserve.draft_model import DraftModel, EarlyExit
from minserve.medusa import Medusa
from minserve.model import Model
from minserve.speculation import Drafter, NGram
from minserve.trained import load_part

NAMES = ("ngram", "medusa", "exit", "draft")


def drafter_for(
    name: str, model: Model, k: int | None = None, path: str | Path | None = None, **options
) -> Drafter:
    """A drafter that fits this model. k: the most tokens of a draft, None for its own; path: parts other than shipped.

    Raises ValueError for a name there is not, and where no part was trained for the model: it says what makes one.
    """
    if name not in NAMES:
        raise ValueError(f"no drafter is called {name!r}: use {', '.join(map(repr, NAMES))}")
    options |= {} if k is None else {"k": k}
    if name == "ngram":
        return NGram(**options)
    part = load_part(name, model, path)
    if name == "medusa":
        return Medusa(part, **options)
    held_out = part.about.get("held_out", {}).get("greedy")  # how often each token of a chain was right
    if name == "draft":
        drafter = DraftModel(part, vocabulary=part.vocabulary, **options)
    else:
        layer = options.pop("layer", part.about.get("best", part.layers[0]))
        drafter = EarlyExit(layer, head=part[layer], **options)
        held_out = held_out and held_out[str(layer)]
    if held_out:
        drafter.expected = held_out[0]
    return drafter
