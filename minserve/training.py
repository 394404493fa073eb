"""Train a drafter's part to guess what the target will say: one loop, one loss, three kinds.

Guess, shift, compare. Place p of a text stands for the guess of token p + 1; what a part sees there, and the place
whose chances (what the target thinks comes next) its guess is compared with:

    medusa   sees the last hidden state at p                head h is compared with place p + 1 + h
    exit     sees the residual stream after e layers at p   with place p
    draft    sees the tokens up to p                        with place p

    loss = cross entropy(softmax(guess), chances), over answers only: nobody drafts questions

The learning rate falls as a half cosine of the time that is allowed, or of EPOCHS times the text; AdamW does the rest.
Acceptance is measured on text nobody trained on. No draft is run for that: as long as a chain is right, it is the text.

Invariant  a batch is decided by the seed and its number, so a resumed training goes on as if nothing had happened
Cost       6 flops a weight and place, 4 for a row of the head, which is not trained; fp32 weights, bf16 products
Sources    Medusa-1, Cai et al. 2024 (arXiv:2401.10774); distillation for drafts: DistillSpec (arXiv:2310.08461)
Story      notebooks/12_medusa_and_self_speculation.ipynb
"""

import math
import time

import torch
from torch.nn.functional import linear
from tqdm import tqdm

from minserve.study import LAST, Study, run
from minserve.trained import weights_of

RATES = {"medusa": 2e-3, "exit": 5e-3, "draft": 3e-3}  # learning rates, at their highest
EPOCHS = {"medusa": 2, "exit": 3, "draft": 24}  # more time than that needs more text
DECAY = 0.1  # of weights: a part has enough of them to learn a text by heart
BATCH = {"medusa": 512, "exit": 512, "draft": 8}  # places, or conversations
WARMUP = 0.02  # of the training
LONGEST = 8  # drafts of a chain whose acceptance is measured
RANKS = 10  # guesses of a Medusa head whose acceptance is measured


# ---------------------------------------------------------------- guess, shift, compare
def compare(logits, study: Study, places, inside=None):
    """Cross entropy of guesses [..., R] to the target's chances at `places` [...]; the mean of those `inside`."""
    places = places.clamp_max(len(study.tokens) - 1)
    ids, chances = study.to(places, study.ids).long(), study.to(places, study.chances)  # [..., FEW]
    logits = logits.float()
    each = logits.logsumexp(-1) - (logits.gather(-1, ids) * chances).sum(-1)
    return (each if inside is None else each[inside.to(each.device)]).mean()


def seen(part, study: Study, key, places):
    """What the part sees at these places, [n, E] in the dtype of its weights."""
    return study.to(places, study.states[key]).to(next(part.parameters()).dtype)


def medusa_loss(part, study: Study, places):
    logits = part(seen(part, study, LAST, places))  # [n, m, R]
    shifted = places[:, None] + 1 + torch.arange(logits.shape[1])  # [n, m]
    inside = shifted + 1 < study.ends[places][:, None]  # an answer's last tokens have no m successors
    return compare(logits, study, shifted, inside)


def exit_loss(part, study: Study, places):
    losses = [compare(part[e](seen(part, study, e, places)), study, places) for e in part.layers]
    return sum(losses) / len(losses)


def draft_loss(part, study: Study, conversations):
    logits, places = draft_logits(part, study, conversations)
    return compare(logits, study, places)


def draft_logits(part, study: Study, conversations):
    """The draft's logits at every place of these conversations' answers [n, R], and the places [n]."""
    ids, dtype = study.padded(conversations.tolist()), part.into.dtype
    x = linear(study.model.embed_tokens(ids).to(dtype), part.into.T).to(
        dtype
    )  # autocast rounds; the residual must not
    last, _ = run(part, x)  # [B, T, d]
    places = study.starts[conversations][:, None] + torch.arange(ids.shape[1])  # [B, T]
    own = places < study.starts[conversations + 1][:, None]
    own &= study.guessed[places.clamp_max(len(study.guessed) - 1)]
    return linear(last[own.to(last.device)], part.rows @ part.out_of), places[own]


LOSSES = {"medusa": medusa_loss, "exit": exit_loss, "draft": draft_loss}


def lessons(kind: str, study: Study):
    """All that batches are made of, and the size of one: conversations for a draft, else places."""
    whole = torch.arange(len(study.conversations)) if kind == "draft" else study.guessed.nonzero().flatten()
    return whole, min(BATCH[kind], len(whole))


def batches(kind: str, study: Study, seed: int, step: int):
    """Endless batches from number `step` on; every epoch is a permutation of its own."""
    whole, size = lessons(kind, study)
    each = len(whole) // size
    while True:
        epoch, at = divmod(step, each)
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        yield whole[order[at * size : (at + 1) * size]]
        step += 1


# ---------------------------------------------------------------- the loop
class Training:
    """A part, its optimizer and how far they are; state_dict() and load() make it last."""

    def __init__(self, kind: str, part, study: Study, seed: int):
        self.kind, self.part, self.study, self.seed = kind, part.float(), study, seed
        names = weights_of(part)
        weights = [p for name, p in part.named_parameters() if name in names]
        self.optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=DECAY)
        self.step, self.seconds, self.losses = (
            0,
            0.0,
            [],
        )  # losses: [seconds, step, mean loss since the last one]

    def run(self, seconds: float, steps: float = math.inf, each_minute=lambda: None, progress: bool = True):
        """Train until `seconds` of training are over or `steps` are done, whichever is first. Returns the losses."""
        began, saved, recent = time.monotonic() - self.seconds, time.monotonic(), []
        source, device = batches(self.kind, self.study, self.seed, self.step), self.study.model.device.type
        done = lambda: max(self.step / steps, self.seconds / seconds)
        with tqdm(total=100, unit="%", disable=not progress, desc=self.kind) as bar:
            while done() < 1:
                recent.append(self._learn(next(source), done(), device))
                self.step, self.seconds = self.step + 1, time.monotonic() - began
                if done() * 100 >= len(self.losses) + 1:
                    mean = sum(recent) / len(recent)
                    self.losses.append([round(self.seconds, 1), self.step, round(mean, 4)])
                    bar.set_postfix(loss=f"{mean:.3f}")
                    recent = []
                bar.update(min(100, int(done() * 100)) - bar.n)
                if time.monotonic() - saved > 60:
                    each_minute()
                    saved = time.monotonic()
        return self.losses

    def _learn(self, batch, done: float, device: str) -> float:
        rate = min(1.0, (done + 1e-3) / WARMUP) * 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = RATES[self.kind] * rate
        with torch.autocast(device, torch.bfloat16):
            loss = LOSSES[self.kind](self.part, self.study, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state_dict(self) -> dict:
        progress = dict(step=self.step, seconds=self.seconds, losses=self.losses)
        return progress | dict(part=weights_of(self.part), optimizer=self.optimizer.state_dict())

    def load(self, state: dict) -> None:
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]
        self.part.load_state_dict(state["part"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])


def start(part) -> None:
    """Where a draft begins: the target's embedding through its principal directions, small random layers."""
    generator = torch.Generator(part.rows.device).manual_seed(0)
    with torch.no_grad():
        for name, weight in part.named_parameters():
            if name.startswith("layers") and weight.ndim == 2:
                weight.normal_(std=0.02, generator=generator)
        directions = torch.linalg.svd(part.rows.float(), full_matrices=False).Vh[: part.config.hidden_size].T
        part.into.copy_(directions)
        part.out_of.copy_(directions)


# ---------------------------------------------------------------- what it is worth
@torch.no_grad()
def acceptance(kind: str, part, study: Study):
    """How often a chain of drafts is right, on a study's own text: [share whose first 1, 2, ... tokens all are].

    For exits {e: shares}. Every place of an answer counts once, also those that a chain would have jumped over.
    """
    places, vocabulary = study.guessed.nonzero().flatten(), study.vocabulary.cpu()
    if kind == "medusa":
        return shares(medusa_ranks(part, study, places)[..., 0])
    if kind == "exit":
        scores = {e: lambda at, e=e: part[e](seen(part, study, e, at)) for e in part.layers}
        return {e: shares(_chains(study, places, _best(f, places, vocabulary))) for e, f in scores.items()}
    guesses = []
    for batch in torch.arange(len(study.conversations)).split(BATCH["draft"]):
        logits, its = draft_logits(part, study, batch)
        guesses.append(vocabulary[logits.argmax(-1).cpu()])
    return shares(_chains(study, places, torch.cat(guesses)))


@torch.no_grad()
def medusa_ranks(part, study: Study, places=None):
    """right [n, m, RANKS]: whether head h's guess number r is the token it should be; -1 behind an answer's end."""
    places = study.guessed.nonzero().flatten() if places is None else places
    rows = []
    for at in places.split(BATCH["medusa"]):
        logits = part(seen(part, study, LAST, at))
        best = study.vocabulary.cpu()[logits.topk(RANKS).indices.cpu()]  # [n, m, RANKS]
        place = at[:, None] + 2 + torch.arange(best.shape[1])  # where the token of head h stands
        truth = study.tokens[place.clamp_max(len(study.tokens) - 1)]
        right = (best == truth[..., None]).char()
        right[place >= study.ends[at][:, None]] = -1
        rows.append(right)
    return torch.cat(rows)


def _best(scores, places, vocabulary):
    return torch.cat([vocabulary[scores(at).argmax(-1).cpu()] for at in places.split(BATCH["exit"])])


def _chains(study: Study, places, guesses):
    """right [n, LONGEST]: of the chain that starts at a place, whether draft i is right; -1 behind the end."""
    right = torch.full((len(study.tokens) + LONGEST,), -1, dtype=torch.int8)
    right[places] = (guesses == study.tokens[places + 1]).char()
    return right[places[:, None] + torch.arange(LONGEST)]


def shares(right) -> list[float]:
    """right [n, k], 1 or 0, -1 where the text ends -> share of chains whose first 1 .. k are all right."""
    found = []
    for i in range(1, right.shape[1] + 1):
        chains = right[(right[:, :i] >= 0).all(-1), :i]
        found.append(round((chains == 1).all(-1).float().mean().item(), 4) if len(chains) else 0.0)
    return found
