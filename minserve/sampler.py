"""Sampling for a whole batch: every row its own parameters, and the token that `sampling.sample` draws for it alone.

    put(seat, ...)             a request is admitted: its parameters and history take the seat's row of the tables
    __call__(logits, seats)    one token per row, and the penalties' counts move on

What each seat costs depends on what it asks for. Plain greedy rows are one argmax. The others are gathered, adjusted
and drawn together, in groups that fit a cache; Python never loops over rows, but for those that want logprobs.
Parameters live on the host, where deciding who needs what is cheap, and travel as one small table per step; the counts
of the penalties, one number per token of the vocabulary, live on the device and are made when first needed.

On a GPU the drawing is `kernels.sample`. Elsewhere it is a radix select: the cutting value of top-k and of top-p is
found 8 bits at a time from histograms, where the definition sorts: O(V) instead of O(V log V), and the
same tokens, because both add integers.

logprobs     of the model's own logits, before bias, penalties and temperature; -9999.0 stands for minus infinity,
             which JSON cannot say
Story        notebooks/07_continuous_batching.ipynb
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from minserve.batch import to_device
from minserve.kernels import on_triton
from minserve.kernels.sample import COOLEST, HOTTEST, ONE, sample, target_of, uniform
from minserve.kernels.verify import verify
from minserve.request import SamplingParams

GROUP = 1 << 18  # logits that are worked on together on a CPU: 1 MB at each step, which a cache can hold
PENALTY, BIAS, STOPS, DRAWN, LOGPROBS, GRAMMAR = 1, 2, 4, 8, 16, 32  # what a seat asks for, as bits
LAST = 0x7FFFFFFF  # behind every key
COLUMNS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


class TokenLogprobs(NamedTuple):
    """The token drawn, and the most likely ones in order; where it is not among them it comes last."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob)


class Sampled(NamedTuple):
    tokens: torch.Tensor  # [B] int64, -1 where bad
    bad: torch.Tensor  # [B] bool: the row's largest logit is not finite (NaN, or all are -inf)
    logprobs: list[TokenLogprobs | None] | None  # None when no row asks for them


class Drafts(NamedTuple):
    """What rows that verify a draft have to know, in the order of the rows."""

    before: list[list[int]]  # the drafts between the last token and each row's own, its own included
    chances: dict[int, tuple]  # row -> the token drafted behind it, and the logits [V] that was drawn from


class Sampler:
    def __init__(self, seats: int, vocab: int, device: torch.device | str = "cpu"):
        self.seats, self.vocab, self.device = seats, vocab, torch.device(device)
        self.asks = np.zeros(seats, np.uint8)
        self.numbers = np.zeros((seats, len(COLUMNS)))
        self.whole = np.zeros((seats, 2), np.int64)  # top_k, seed
        self.min_tokens = np.zeros(seats, np.int64)
        self.alternatives = np.zeros(seats, np.int64)
        self.bias = _Ragged(seats)
        self.stops = _Ragged(seats)
        self.constraints: list = [None] * seats  # structured.Constraint
        self.times = None  # [N, V] int32: how often each token is in the seat's answer
        self.prompted = None  # [N, V] bool: is it in the prompt?

    def put(
        self,
        seat: int,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        outputs: Sequence[int],
        stop_ids: Iterable[int],
        constraint=None,
    ) -> None:
        """A request takes the seat. After an interruption it does so again, with the outputs it has by then."""
        stops = {*stop_ids, *params.stop_token_ids} if params.min_tokens else ()
        asks = {
            PENALTY: params.penalises,
            BIAS: params.logit_bias,
            STOPS: stops,
            DRAWN: not params.greedy,
            LOGPROBS: params.logprobs is not None,
            GRAMMAR: constraint is not None,
        }
        self.asks[seat] = sum(bit for bit, asked in asks.items() if asked)
        temperature = 0.0 if params.greedy else min(params.temperature, HOTTEST)
        self.numbers[seat] = (
            temperature, params.top_p, params.min_p,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        self.whole[seat] = min(params.top_k, self.vocab), (seed + 2**63) % 2**64 - 2**63
        self.min_tokens[seat] = params.min_tokens
        self.alternatives[seat] = params.logprobs or 0
        self.bias.put(seat, params.logit_bias)
        self.stops.put(seat, dict.fromkeys(stops, 0.0))
        self.constraints[seat] = constraint
        if params.penalises:
            self._remember(seat, prompt, outputs)

    def wishes(self, owners, made) -> tuple:
        """What the rows' draws need, on the host: temperature, top_p, min_p [B, 3]; top_k, seed, position [B, 3]."""
        seats = np.fromiter((r.seat for r in owners), np.int64, len(owners))
        return self.numbers[seats, :3], np.column_stack((self.whole[seats], made))

    def __call__(self, logits, seats, positions, drawn: tuple | None = None) -> Sampled:
        """Draw one token per row, and note it. Arguments: see draw()."""
        tokens = self.draw(logits, seats, positions, drawn)
        self.note(seats, tokens)
        return Sampled(tokens, tokens < 0, self.logprobs(logits, tokens, seats))

    def draw(self, logits, seats, positions, drawn: tuple | None = None, drafts: "Drafts | None" = None):
        """Draw one token per row, [B] int64. logits: [B, V]; seats, positions: [B], best where the host can read them.

        A position is the number of tokens the request has made before this one.
        drawn: tokens [B] that somebody has drawn already, and which wishes he knew of: 0 (greedy rows), DRAWN.
        drafts: of rows that verify some. What a seat's penalties count then includes the drafts before the row.
        """
        seats, positions = _on_host(seats), _on_host(positions)
        asks = self._asked(seats, positions)
        tokens, known = drawn or (None, 0)
        special = np.flatnonzero(asks & ~np.uint8(LOGPROBS | known))
        if tokens is not None:
            pass
        elif len(special) < len(seats):
            tokens = _best(logits)
        else:
            tokens = torch.empty(len(seats), dtype=torch.int64, device=logits.device)
        size = max(1, GROUP // self.vocab) if logits.device.type == "cpu" else len(seats)
        for start in range(0, len(special), size):
            rows = special[start : start + size]
            where = self._send(rows)
            x = logits.index_select(0, where).float()
            self._adjust(x, seats[rows], asks[rows], drafts and [drafts.before[i] for i in rows])
            judged = [i for i in range(len(rows)) if rows[i] in drafts.chances] if drafts else []
            theirs = self._judge(x, rows, judged, seats, positions, drafts) if judged else None
            tokens[where] = self._choose(x, seats[rows], positions[rows], asks[rows])  # x is used up
            if judged:
                tokens[where[judged]] = theirs
        return tokens

    def note(self, seats, tokens) -> None:
        """These tokens [B] are out: from now on the penalties of their seats [B] count them."""
        seats = _on_host(seats)
        if (penalised := np.flatnonzero(self.asks[seats] & PENALTY)).size:
            made = tokens[self._send(penalised)]
            where = self._send(seats[penalised]), made.clamp(min=0)
            self.times.index_put_(where, (made >= 0).int(), accumulate=True)

    # ---------------------------------------------------------------- before the draw
    def adjusted(self, logits, seats, positions, before=None):
        """Logits [R, V] after bias, penalties and min_tokens, in fp32. before: drafts in front of each row."""
        seats, positions, x = _on_host(seats), _on_host(positions), logits.float().clone()
        self._adjust(x, seats, self._asked(seats, positions), before)
        return x

    def _asked(self, seats, positions):
        """What each row asks for, [B]: its stop ids are kept out only until it has made min_tokens."""
        asks = self.asks[seats]
        return np.where(positions < self.min_tokens[seats], asks, asks & ~np.uint8(STOPS))

    def _adjust(self, x, seats, asks, before=None) -> None:
        """Bias, penalties and min_tokens, into x [R, V], as `sampling.adjusted` does for one row; then grammars."""
        if (rows := np.flatnonzero(asks & BIAS)).size:
            ids, values = (self._send(a) for a in self.bias.of(seats[rows]))
            where = self._send(rows)[:, None]
            x[where, ids] = x[where, ids] + values
        if (rows := np.flatnonzero(asks & PENALTY)).size:
            where = self._send(rows)
            x[where] = self._penalised(x[where], seats[rows], before and [before[i] for i in rows])
        if (rows := np.flatnonzero(asks & STOPS)).size:
            x[self._send(rows)[:, None], self._send(self.stops.of(seats[rows])[0])] = -torch.inf
        for row in np.flatnonzero(asks & GRAMMAR):
            self.constraints[seats[row]].mask(x[row])

    def _penalised(self, x, seats, before=None):
        where = self._send(seats)
        repetition, presence, frequency = self._send(self.numbers[seats, 3:]).float().T[:, :, None]
        times = self.times[where]  # [R, V], a copy
        for row, drafted in enumerate(before or ()):
            times[row] += torch.bincount(self._send(np.array(drafted, np.int64)), minlength=self.vocab)
        made = times > 0
        seen = made | self.prompted[where]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        return torch.where(made, x - presence - frequency * times, x)

    def _remember(self, seat, prompt, outputs) -> None:
        if self.times is None:
            with torch.inference_mode(False):  # so that they can be changed inside that mode and outside
                self.times = torch.zeros(self.seats, self.vocab, dtype=torch.int32, device=self.device)
                self.prompted = torch.zeros(self.seats, self.vocab, dtype=torch.bool, device=self.device)
        ids = lambda tokens: torch.tensor(list(tokens), dtype=torch.int64, device=self.device)
        self.prompted[seat] = False
        self.prompted[seat, ids(prompt)] = True
        self.times[seat] = torch.bincount(ids(outputs), minlength=self.vocab)

    # ---------------------------------------------------------------- the draw
    def _choose(self, x, seats, positions, asks):
        """One token for each row of x [R, V], or -1."""
        numbers = self._send(self.numbers[seats, :3])
        top_k, seeds = self._send(self.whole[seats]).T.contiguous()
        temperature, (top_p, min_p) = numbers[:, 0].float(), numbers[:, 1:].T.contiguous()
        if on_triton(x):
            return sample(x, temperature, top_k, top_p, min_p, seeds, self._send(positions))
        drawn = asks & DRAWN > 0
        if not drawn.any():
            return _best(x)
        u = self._send(uniform(self.whole[seats, 1], positions))
        if drawn.all():
            return draw(x, temperature, top_k, top_p, min_p, u)
        tokens = _best(x)
        rows = self._send(np.flatnonzero(drawn))
        tokens[rows] = draw(x[rows], *(a[rows] for a in (temperature, top_k, top_p, min_p, u)))
        return tokens

    def _judge(self, x, rows, judged, seats, positions, drafts):
        """Tokens for those of the rows of x whose drafts were drawn."""
        mine = rows[judged]
        numbers, (top_k, seeds) = (
            self._send(self.numbers[seats[mine], :3]),
            self._send(self.whole[seats[mine]]).T,
        )
        temperature, (top_p, min_p) = numbers[:, 0].float(), numbers[:, 1:].T.contiguous()
        chances = torch.stack([drafts.chances[i][1] for i in mine])
        drawn = self._send(np.array([drafts.chances[i][0] for i in mine]))
        cuts = temperature, top_k.contiguous(), top_p, min_p, seeds.contiguous(), self._send(positions[mine])
        return verify(x[judged].contiguous(), chances, drawn, *cuts)

    def logprobs(self, logits, tokens, seats, places: Sequence[int] | None = None):
        """TokenLogprobs of each token [B] whose seat asks for them, None for the others; None if nobody asks.

        places: the rows of the logits that made the tokens, if not all of them in order
        """
        seats = _on_host(seats)
        rows = np.flatnonzero(self.asks[seats] & LOGPROBS)
        if not rows.size:
            return None
        found: list[TokenLogprobs | None] = [None] * len(seats)
        for row, token in zip(rows.tolist(), tokens[self._send(rows)].tolist()):
            if token >= 0:
                place = row if places is None else places[row]
                found[row] = logprobs_of(logits[place], token, int(self.alternatives[seats[row]]))
        return found

    def _send(self, array):
        return to_device(np.ascontiguousarray(array), self.device)


def logprobs_of(logits, token: int, alternatives: int) -> TokenLogprobs:
    """What the model thought of a token and of the most likely ones. logits: [V]."""
    all_of_them = logits.float().log_softmax(-1).clamp(min=-9999.0)
    best = all_of_them.topk(alternatives)
    top = sorted(zip(best.indices.tolist(), best.values.tolist()), key=lambda pair: (-pair[1], pair[0]))
    own = float(all_of_them[token])
    return TokenLogprobs(token, own, tuple(top) if any(i == token for i, _ in top) else (*top, (token, own)))


# ---------------------------------------------------------------- pieces
def _best(logits):
    """The first of the largest logits, [B]; -1 where it is not finite. NaN counts as the largest of all."""
    if logits.device.type == "cpu":  # NumPy's argmax is vectorised, PyTorch's is not: ten times faster
        tokens = torch.from_numpy(logits.float().numpy().argmax(-1))
    else:
        tokens = logits.argmax(-1)
    return torch.where(logits.gather(1, tokens[:, None])[:, 0].isfinite(), tokens, -1)


def draw(x, temperature, top_k, top_p, min_p, u):
    """`kernels.sample` for rows that draw, without a sort. x [R, V] is used up."""
    R, V = x.shape
    best = x.amax(-1, keepdim=True)
    d = torch.sub(best, x, out=x)  # [R, V]: how far behind
    key = d.view(torch.int32)  # the bits of floats >= 0 are in the order of the floats
    weight = (d / -temperature.clamp(COOLEST, HOTTEST)[:, None]).exp_().mul_(ONE).floor_()  # [R, V]

    limited = (top_k > 0) & (top_k < V)
    if limited.any():
        limit = torch.where(limited, top_k, 1)[:, None]
        edge = d.topk(int(limit.max()), largest=False).values.gather(1, limit - 1).view(torch.int32)
        edge[~limited] = LAST
        place = (key == edge).flatten().nonzero()[:, 0]
        _cut(weight, key, edge, place, torch.ones_like(place), limit[:, 0] - (key < edge).sum(-1))
    if (top_p < 1).any():
        total = weight.sum(-1, dtype=torch.float64)
        # Whatever weighs less than half of (1 - top_p) / V of all lies behind the edge: look among the others.
        least = ((1 - top_p) * total / (2 * V)).clamp(min=1.0).float()
        place = (weight >= least[:, None]).flatten().nonzero()[:, 0]
        need = torch.where(top_p < 1, (top_p * total).ceil(), torch.inf)
        _cut(weight, key, *_edge(key.flatten()[place], place, weight.flatten()[place], need, V))
    if min_p.any():
        weight.mul_(weight >= (min_p * ONE).ceil().float()[:, None])

    reached = weight.cumsum(-1, dtype=torch.float64)  # [R, V]
    target = target_of(reached[:, -1].nan_to_num(1.0).long(), u).double()
    token = torch.searchsorted(reached, target[:, None], right=True)[:, 0]
    return torch.where(best[:, 0].isfinite(), token, -1)


def _edge(key, place, amount, need, width: int):
    """Where each row, in order of (key, place), just reaches `need` [R] of the amounts: a radix select.

    Returns what `_cut` takes: the key of the last element needed, and the elements that have this very key, with what
    is still needed of their amounts.
    """
    amount, bits_left = amount.double(), 31
    edge = torch.zeros(len(need), dtype=torch.int32, device=key.device)
    for bits in (8, 8, 8, 7):
        bits_left -= bits
        row, digit = place // width, key >> bits_left & (1 << bits) - 1
        mass = torch.bincount((row << bits) + digit, amount, len(need) << bits).view(-1, 1 << bits)
        reached = mass.cumsum(-1)  # [R, digits]
        first = (reached < need[:, None]).sum(-1).clamp(max=(1 << bits) - 1)
        need = need - (reached - mass).gather(1, first[:, None])[:, 0]
        edge |= first.int() << bits_left
        open_ = (digit == first[row]).nonzero()[:, 0]
        key, place, amount = key[open_], place[open_], amount[open_]
    return edge[:, None], place, amount, need


def _cut(weight, key, edge, place, amount, need) -> None:
    """Take the weight of all behind the edge [R, 1], and of those on it (`place`) that are not needed any more."""
    weight.mul_(key <= edge)
    row = place // key.shape[1]
    own = torch.bincount(row, amount.double(), len(need)).long()  # fp64 holds a row's sum, int64 the group's
    before = amount.long().cumsum(0) - amount.long() - (own.cumsum(0) - own)[row]
    weight.view(-1)[place[before >= need[row]]] = 0.0


class _Ragged:
    """A few (token id, value) pairs per seat in a rectangle [N, W]: short rows repeat their first pair."""

    def __init__(self, seats: int):
        self.ids, self.values = np.zeros((seats, 1), np.int64), np.zeros((seats, 1), np.float32)

    def put(self, seat: int, pairs: dict[int, float]) -> None:
        if not pairs:
            return
        if len(pairs) > self.ids.shape[1]:
            more = ((0, 0), (0, len(pairs) - self.ids.shape[1]))
            self.ids, self.values = (np.pad(a, more, mode="edge") for a in (self.ids, self.values))
        self.ids[seat], self.values[seat] = next(iter(pairs.items()))
        self.ids[seat, : len(pairs)], self.values[seat, : len(pairs)] = list(pairs), list(pairs.values())

    def of(self, seats):
        return self.ids[seats], self.values[seats]


def _on_host(x):
    return x.cpu().numpy() if torch.is_tensor(x) else np.asarray(x, np.int64)
