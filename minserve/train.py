"""A drafter's part for a model, from nothing but the model: text, study, training, what it is worth, a file.

    python -m minserve train medusa|exit|draft [--minutes 20] [--model FOLDER_OR_HUB_ID] [--out FILE] [--work DIR]

    text         the model asks and answers itself                        self_text.py   stays in --work
    study        the target's states and chances at every place of it     study.py       stays in --work
    training     guess, shift, compare                                    training.py    a checkpoint every minute
    acceptance   on conversations that were kept out of all of this

Interrupted, it goes on where it was when it is started again with the same arguments. The file holds what was asked,
the loss curve and the acceptance; the curve is drawn into --work as well.

Story    notebooks/12_medusa_and_self_speculation.ipynb
"""

import argparse
import hashlib
import json
import os
from functools import partial
from math import inf
from pathlib import Path

import torch

from minserve import self_text
from minserve.config import ModelConfig
from minserve.fetch import default_cache, resolve
from minserve.model import Model
from minserve.sources import FULL, FetchError, require_space, say
from minserve.study import HELD_OUT, Study, frequent
from minserve.text import Tokenizer
from minserve.trained import ASSETS, KINDS, build, fingerprint, save_part
from minserve.training import EPOCHS, Training, acceptance, lessons, medusa_ranks, start
from minserve.weights import load

MEASURED_ON = 96  # conversations that are kept out


# ---------------------------------------------------------------- python -m minserve train
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what to train")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="of training at most; text and study come before it"
    )
    parser.add_argument(
        "--steps", type=int, help="train for so many steps instead: the same result on any day"
    )
    parser.add_argument("--conversations", type=int, default=1024, help="that the model has with itself")
    parser.add_argument("--vocabulary", type=int, default=6144, help="tokens that a draft may name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a model folder or a hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, help="default: what ships with minserve, or a file in --work")
    parser.add_argument("--work", type=Path, help="default: ~/.cache/minserve/train/NAME")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")


def main(args) -> int:
    try:
        check(args)
        folder = resolve(args.model)
        model = load(folder, device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            tokenizer = Tokenizer.load(folder)
        except FileNotFoundError:  # token ids are text enough
            tokenizer = None
        work = args.work or default_cache() / "train" / folder.name
        out = args.out or (
            work / f"{args.kind}.safetensors" if args.model else ASSETS / f"{args.kind}.safetensors"
        )
        print(train(args, model, tokenizer, work, out))
    except (ValueError, FetchError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in FULL
        say(f"train: {f'the disk is full: {error}; what is finished is kept' if full else error}")
        return 2
    except KeyboardInterrupt:
        say("\nstopped. Start it again with the same arguments: it goes on where it was.")
        return 130
    return 0


def check(args) -> None:
    for name, least in (("minutes", 0), ("conversations", 0), ("vocabulary", 1)):
        if not getattr(args, name) > least:
            raise ValueError(f"--{name} is {getattr(args, name)}: it has to be more than {least}")
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps is {args.steps}: it has to be at least 1")
    if args.conversations > HELD_OUT:
        raise ValueError(
            f"--conversations is {args.conversations:,}, and from {HELD_OUT:,} on they are kept for measuring"
        )


# ---------------------------------------------------------------- from text to file
def train(args, model: Model, tokenizer: Tokenizer | None, work: Path, out: Path) -> str:
    """Whatever is not there yet; returns what was made, in words."""
    work.mkdir(parents=True, exist_ok=True)
    numbers = [*range(HELD_OUT, HELD_OUT + MEASURED_ON), *range(args.conversations)]
    text = work / f"text-{fingerprint(model)}-{args.seed}.jsonl"
    told = self_text.write(text, model, tokenizer, numbers, args.seed)
    own, others = ([c for c in told if (c.number < HELD_OUT) == known] for known in (True, False))
    vocabulary, sizes = frequent(model, own, args.vocabulary), sizes_of(args.kind, model.config)
    layers = sizes["layers"] if args.kind == "exit" else ()
    require_space(work, sum(len(c.tokens) for c in told) * 2 * model.config.hidden_size * (1 + len(layers)))
    study, held_out = (Study(model, some, vocabulary, layers, work) for some in (own, others))

    part = build(args.kind, model, vocabulary, sizes)
    if args.kind == "draft":
        start(part)
    training = Training(args.kind, part, study, args.seed)
    checkpoint = work / f"{args.kind}-{settings(args, study)}.pt"
    if checkpoint.is_file():
        training.load(torch.load(checkpoint, map_location=model.device, weights_only=True))
        say(f"goes on after {training.step:,} steps ({checkpoint})")
    keep = partial(save_checkpoint, training, checkpoint)
    try:
        losses = training.run(
            inf if args.steps else args.minutes * 60, args.steps or steps_for(training), keep
        )
    except KeyboardInterrupt:
        keep()
        raise
    draw(losses, f"{args.kind}: cross entropy to the target's chances", work / f"{args.kind}.png")
    part = training.part.to(model.dtype).eval()
    worth = measure(args.kind, part, held_out)
    about = dict(
        sizes=sizes, command=command(args), seed=args.seed, minutes=round(training.seconds / 60, 2),
        steps=training.step, places=int(study.guessed.sum()), losses=losses, torch=torch.__version__,
        device=model.device.type, held_out=worth, **choices(args.kind, part, held_out),
    )  # fmt: skip
    save_part(args.kind, part, model, out, **about)
    keep()  # with the last step: started again, there is nothing left to train
    return f"{summary(args.kind, worth)}\n  {out} ({out.stat().st_size:,} bytes), {work / args.kind}.png"


def steps_for(training: Training) -> int:
    whole, size = lessons(training.kind, training.study)
    return EPOCHS[training.kind] * (len(whole) // size)


def sizes_of(kind: str, config: ModelConfig) -> dict:
    """How large a part is: 4 heads; exits after a tenth, fifth, third and half of the layers; a small Llama."""
    if kind == "medusa":
        return dict(heads=4)
    if kind == "exit":
        return dict(layers=sorted({max(1, config.num_layers // share) for share in (10, 5, 3, 2)}))
    heads = max(1, min(256, config.hidden_size) // config.head_dim)
    hidden = heads * config.head_dim
    return dict(hidden=hidden, layers=2, heads=heads, kv_heads=heads // 2 or 1, intermediate=hidden * 11 // 4)


def settings(args, study: Study) -> str:
    """A name for everything that a checkpoint depends on: other arguments, another checkpoint."""
    asked = [args.minutes, args.steps, args.seed, study.name]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]


def save_checkpoint(training: Training, path: Path) -> None:
    torch.save(training.state_dict(), path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def command(args) -> str:
    words = ["python -m minserve train", args.kind]
    words += [f"--steps {args.steps}"] if args.steps else [f"--minutes {args.minutes:g}"]
    words += [f"--{name} {getattr(args, name)}" for name in ("conversations", "vocabulary", "seed")]
    return " ".join(words + ([f"--model {args.model}"] if args.model else []))


# ---------------------------------------------------------------- what it is worth
def measure(kind: str, part, study: Study) -> dict:
    """{"greedy" | "sampled": acceptance}: half of the answers are greedy, half sampled at temperature 0.7."""
    worth: dict = {"conversations": len(study.conversations)}
    everything = study.guessed.clone()
    for name, greedy in (("greedy", True), ("sampled", False)):
        chosen = torch.tensor([(c.temperature == 0) == greedy for c in study.conversations])
        study.guessed = everything & chosen.repeat_interleave(study.starts.diff())
        if not study.guessed.any():
            continue
        worth[name] = acceptance(kind, part, study)
    study.guessed = everything
    return worth


def choices(kind: str, part, study: Study) -> dict:
    """What a drafter is chosen by: how often a Medusa head's first, second, ... guess is right; the best exit."""
    if kind == "medusa":
        right = medusa_ranks(part, study)  # [n, m, RANKS]
        inside = [right[right[:, h, 0] >= 0, h].float() for h in range(right.shape[1])]
        return {"accuracies": [[round(x, 4) for x in head.mean(0).tolist()] for head in inside]}
    if kind == "exit":
        return {"best": max(part.layers, key=lambda e: gain(study, e, acceptance(kind, part, study)[e]))}
    return {}


def gain(study: Study, layer: int, shares: list[float]) -> float:
    """Tokens per weight read, as multiples of no drafts, at the best chain: (1 + accepted) / (1 + k * cost)."""
    config, R = study.model.config, len(study.vocabulary)
    head = config.vocab_size * config.hidden_size
    layers = (config.num_params_read - head) / config.num_layers
    cost = (layer * layers + R * config.hidden_size) / config.num_params_read
    return max((1 + sum(shares[:k])) / (1 + k * cost) for k in range(1, len(shares) + 1))


def summary(kind: str, worth: dict) -> str:
    lines = [
        f"{kind}, on {worth['conversations']} conversations it has not seen: share of chains that are right"
    ]
    for name in ("greedy", "sampled"):
        rows = worth.get(name, [])
        for where, shares in rows.items() if isinstance(rows, dict) else [("", rows)]:
            after = f" after layer {where}" if where else ""
            numbers = " ".join(f"{x:.3f}" for x in shares)
            lines.append(f"  {name}{after}: {numbers}   {sum(shares[:4]):.2f} of 4 accepted")
    return "\n".join(lines)


def draw(losses: list, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 3.2))
    ax.plot([seconds / 60 for seconds, _, _ in losses], [loss for *_, loss in losses], color="#0072B2")
    ax.set_xlabel("minutes")
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160, bbox_inches="tight")
    plt.close(figure)
