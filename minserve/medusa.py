"""Medusa: a few small heads on the last hidden state, each guessing a token one place further ahead than the other.

    x, the state that made the newest token --> head 0 --> its best candidates for the next token
                                            --> head 1 --> ... for the one after that, and so on

No head knows which candidate the ones before it were right with. So the guesses are not a chain but a *tree*: the
best candidates of head 1 below each of the best of head 0. One step verifies the whole tree, in which each node sees
its ancestors and none of their siblings (kernels/paged_attention.py), and the path the target agrees with is kept.

    node       path of ranks             below
    d0         (0,)                      the newest token            rank r: the head's candidate number r
    d1         (0, 0)                    d0
    d2         (1,)                      the newest token            d0 and d2: one position, two guesses

Which nodes    best_tree(): those that are kept most often, by the accuracies that were measured on other texts. Their
               order is that of their gain, so a shorter draft is the best tree of its size
The cache      of the nodes of a draft, the chain of the best candidates comes first: where that is kept, its keys and
               values lie already where they belong
Typical        typical=(epsilon, delta) also keeps candidates that the target finds likely enough, although it drew
               another: more tokens per step, and another distribution. Greedy requests stay exact
Sources        Medusa, Cai et al. 2024 (arXiv:2401.10774); typical acceptance after Hewitt et al. 2022
               (arXiv:2210.15191)
Story          notebooks/12_medusa_and_self_speculation.ipynb
"""

from functools import cache
from heapq import heappop, heappush
from math import prod

import torch
from torch.nn.functional import silu

from minserve.kernels import native
from minserve.request import Draft
from minserve.speculation import MOST_TREE, Drafter
from minserve.trained import MedusaHeads

Path = tuple[int, ...]  # of a node: the rank of each candidate on the way to it


def gain(accuracies: list[list[float]], path: Path) -> float:
    """How often a node is kept: its own candidate and all above it are right."""
    return prod(accuracies[depth][rank] for depth, rank in enumerate(path))


def best_tree(accuracies: list[list[float]], nodes: int) -> list[Path]:
    """The tree of so many nodes whose kept path is longest on average; the best nodes first, parents before children.

    accuracies[h][r]: how often candidate r of head h is the right one. They fall with r.

    The kept path has as many nodes as there are nodes on it, so its expected length is the sum over all nodes of the
    chance that they are on it: all candidates on the way to the node are right. Taken as independent, that is
    the product of their accuracies, gain(). No factor is above 1, so a node's gain is never above its parent's or that
    of the sibling one rank better: the `nodes` largest gains of all are a tree, and no tree has a larger sum.
    Greedily: take the node of the largest gain, then its first child and its next sibling may be taken.
    """
    found: list[Path] = []
    open_: list[tuple[float, Path]] = [(-accuracies[0][0], (0,))]
    while open_ and len(found) < nodes:
        path = heappop(open_)[1]
        found.append(path)
        after = [path[:-1] + (path[-1] + 1,)] if path[-1] + 1 < len(accuracies[len(path) - 1]) else []
        after += [(*path, 0)] if len(path) < len(accuracies) else []
        for candidate in after:
            heappush(open_, (-gain(accuracies, candidate), candidate))
    return found


class Medusa(Drafter):
    name = "medusa"
    wants_hidden = True

    def __init__(
        self,
        heads: MedusaHeads,
        k: int = 8,
        *,
        tree: list[Path] | None = None,
        top: int = 10,
        typical: tuple[float, float] | None = None,
    ):
        """A tree of k nodes, the best by the accuracies that came with the heads; or this `tree`, parents first.

        top      candidates of each head
        typical  (epsilon, delta) keeps a candidate x where p(x) > min(epsilon, delta exp(-entropy of p)), although it
                 was not drawn. This CHANGES THE DISTRIBUTION of requests that sample. The paper's: (0.09, 0.3)

        Raises ValueError for a tree that these heads cannot fill, or that one step cannot verify.
        """
        if typical and not (0 < typical[0] <= 1 and typical[1] > 0):
            raise ValueError(
                f"medusa: typical is {typical}; it is (epsilon, delta), 0 < epsilon <= 1 and delta > 0"
            )
        self.heads, self.top, self.typical = heads, top, typical
        accuracies = heads.about["accuracies"] if tree is None else None
        self.paths = (
            best_tree([ranks[:top] for ranks in accuracies], k) if tree is None else list(map(tuple, tree))
        )
        self._check(len(heads.heads), len(heads.vocabulary))
        self.gains = [gain(accuracies, path) for path in self.paths] if tree is None else None
        self.k, self.branches = len(self.paths), any(map(any, self.paths))

    def _check(self, heads: int, rows: int) -> None:
        most = min(self.top, rows)
        if not 1 <= len(self.paths) <= MOST_TREE:
            raise ValueError(
                f"medusa: a tree of {len(self.paths)} nodes; a step verifies 1 to {MOST_TREE}: each is one of 63 bits, "
                f"and the newest token is the first"
            )
        for i, path in enumerate(self.paths):
            if not 1 <= len(path) <= heads:
                raise ValueError(
                    f"medusa: node {path} lies {len(path)} deep, and each of the {heads} heads serves one depth: use a "
                    f"tree of depth 1 to {heads}"
                )
            if not 0 <= min(path) <= max(path) < most:
                raise ValueError(
                    f"medusa: node {path} asks for candidate {max(path, key=abs)}; each head gives {most}, 0 to "
                    f"{most - 1}: use a larger `top` (at most {rows}), or smaller ranks"
                )
            if path in self.paths[:i] or (len(path) > 1 and path[:-1] not in self.paths[:i]):
                raise ValueError(
                    f"medusa: node {path} comes twice, or before its parent {path[:-1]}: list each node once, parents "
                    f"first"
                )

    def attach(self, engine) -> None:
        model, seats = engine.model, len(engine.packer.tokens)
        if self.heads.rows.shape[1] != model.config.hidden_size:
            raise ValueError(
                f"medusa: the heads read {self.heads.rows.shape[1]:,} channels, and the model has "
                f"{model.config.hidden_size:,}: use heads that were trained for it"
            )
        if not engine.cache.branches:  # a chain, then: the best candidates of all
            depth = max(map(len, self.paths))
            self.paths, self.gains, self.branches = [(0,) * d for d in range(1, depth + 1)], None, False
            self.k = len(self.paths)
        self.hidden = torch.zeros(seats, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.owner: list[tuple[int, int] | None] = [None] * seats
        self.shape, self.ops = cache(self._shape), None
        if isinstance(self.heads, MedusaHeads) and model.device.type == "cpu" and native.usable() is None:
            self.ops = native.Native() if model.dtype in (torch.float32, torch.bfloat16) else None

    def _shape(self, n: int) -> tuple[list[Path], list[int] | None]:
        """The first n nodes, as they are drafted: the chain of the best candidates, then the others; and parents."""
        paths = sorted(self.paths[:n], key=any)
        parents = [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]
        return paths, None if parents == list(range(-1, n - 1)) else parents

    def observe(self, requests, hidden) -> None:
        self.hidden[[r.seat for r in requests]] = hidden.to(self.hidden.dtype)
        for r in requests:
            self.owner[r.seat] = r.id, r.preemptions

    def scores(self, x):
        """heads(x), in the matmul that reads weights fastest for few rows."""
        if self.ops is None or len(x) > 4:
            return self.heads(x)
        m, E, _ = self.heads.heads.shape
        turned = self.ops.linear(x, self.heads.heads.view(m * E, E)).view(-1, m, E)
        ahead = (x[:, None] + silu(turned)).view(-1, E)
        return self.ops.linear(ahead, self.heads.rows).view(-1, m, len(self.heads.rows))

    @torch.inference_mode()
    def propose(self, plan):
        able = [r for r, _ in plan if r.granted and self.owner[r.seat] == (r.id, r.preemptions)]
        if not able:
            return [None] * len(plan)
        logits = self.scores(self.hidden[[r.seat for r in able]])  # [B, m, R]
        ranked = logits.topk(1 + max(map(max, self.paths))).indices
        best = self.heads.vocabulary[ranked].tolist()  # [B][m][ranks]
        drafts = {}
        for request, its in zip(able, best):
            paths, parents = self.shape(min(request.granted, self.k))
            drafts[request] = Draft([its[len(path) - 1][path[-1]] for path in paths], parents)
        return [drafts.get(r) for r, _ in plan]

    def accepts(self, logits, temperature, tokens):
        """Typical acceptance: logits [n, V] after all adjustments, temperature [n], tokens [n] -> [n] bool."""
        epsilon, delta = self.typical
        log_p = (logits / temperature[:, None]).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)  # 0 log 0 = 0
        return log_p.gather(1, tokens[:, None])[:, 0].exp() > (delta * (-entropy).exp()).clamp(max=epsilon)
