"""A stand-in for the model that remembers only through pages: what tests of the scheduler compute with.

It does what a transformer of two layers does, with hashes for arithmetic. Layer 1 writes each token into its slot;
layer 2 writes a digest of what the token sees there; the answer is a digest of what the last token sees in layer 2. It
finds its slots as the real one does, through tables and tokens kept per seat and brought up to date by what `dirty`
says has changed. A stale page, a lost chunk, a wrong `computed`, a copy forgotten: each changes the answer.
"""

from minserve.pages import PagePool
from minserve.request import Request

VOCABULARY = 13


def visible(position: int, window: int | None, sinks: int) -> list[int]:
    first = 0 if window is None else max(0, position - window + 1)
    return [*range(min(sinks, first)), *range(first, position + 1)]


def draw(digest: int, request: Request, made: int) -> int:
    """The request's output number `made`: depends on what was seen, its seed, and nothing else."""
    token = hash((digest, request.seed, made)) % VOCABULARY
    while token in request.stop_ids and made < request.params.min_tokens:
        token = (token + 1) % VOCABULARY
    return token


def alone(request: Request, window: int | None, sinks: int) -> tuple[list[int], str]:
    """All of the request's tokens, and how it ends, computed without pages or company."""
    tokens, first, second = [], [], []
    for token in request.prompt:
        answer = _compute(tokens, first, second, token, window, sinks)
    for made in range(request.max_new_tokens):
        token = draw(answer, request, made)
        if token in request.stop_ids and made >= request.params.min_tokens:
            return tokens, "stop"
        answer = _compute(tokens, first, second, token, window, sinks)
    return tokens, "length"


def _compute(tokens, first, second, token, window, sinks) -> int:
    seen = visible(len(tokens), window, sinks)
    tokens.append(token)
    first.append((len(first), token))
    second.append(hash(tuple(first[j] for j in seen)))
    return hash(tuple(second[j] for j in seen))


class PagedOracle:
    """The stand-in. It holds slots[layer][page][offset], and per seat a table and tokens as a device would."""

    def __init__(self, pool: PagePool, sinks: int):
        self.pool, self.window, self.sinks = pool, pool.window, sinks
        self.slots = [[[None] * pool.page_size for _ in range(pool.num_pages)] for _ in range(2)]
        self.tables: dict[int, dict[int, int]] = {}
        self.tokens: dict[int, dict[int, int]] = {}
        self.copied = 0

    def __call__(self, plan) -> list[int]:
        self._copy()
        for page in self.pool.free:  # what is free is worth nothing
            for layer in self.slots:
                layer[page] = [None] * self.pool.page_size
        for request, _ in plan:
            self._update_seat(request)
        rows = [(r, r.computed, r.computed + n, self._where(r.seat)) for r, n in plan]
        for r, begin, end, where in rows:  # every row writes before any row reads, as in the real one
            for i in range(begin, end):
                self._write(0, where(i), (i, self.tokens[r.seat][i]))
        for _, begin, end, where in rows:
            for i in range(begin, end):
                self._write(1, where(i), self._look(0, i, where))
        return [self._answer(r, end, where) for r, _, end, where in rows]

    def _answer(self, request, end, where) -> int:
        if end < len(request.tokens):
            return -7  # mid-prompt: must be ignored
        token = draw(self._look(1, end - 1, where), request, end - len(request.prompt))
        self.tokens[request.seat][end] = token
        return token

    def _where(self, seat):
        S, table = self.pool.page_size, self.tables[seat]
        return lambda i: (table[i // S], i % S)

    def _write(self, layer, slot, value) -> None:
        page, offset = slot
        assert self.pool.references[page] == 1, f"writes into page {page}, which is not one request's own"
        self.slots[layer][page][offset] = value

    def _look(self, layer, position, where) -> int:
        seen = []
        for j in visible(position, self.window, self.sinks):
            page, offset = where(j)
            assert self.slots[layer][page][offset] is not None, (
                f"reads page {page}, slot {offset}: nothing there"
            )
            seen.append(self.slots[layer][page][offset])
        return hash(tuple(seen))

    def _copy(self) -> None:
        read = [(to, [list(layer[source]) for layer in self.slots]) for source, to in self.pool.copies]
        for to, layers in read:  # all are read before any is written
            for layer, content in zip(self.slots, layers):
                layer[to] = content
        self.copied += len(read)
        self.pool.copies.clear()

    def _update_seat(self, request) -> None:
        """As batch.Packer does: everything when dirty is 0, else only the entries from dirty on."""
        if request.dirty == len(request.pages):
            return
        if request.dirty == 0:
            self.tokens[request.seat] = dict(enumerate(request.tokens))
        table = self.tables.setdefault(request.seat, {})
        table.update({i: request.pages[i] for i in range(request.dirty, len(request.pages))})
        request.dirty = len(request.pages)

    def check_index(self) -> None:
        """Each page in the prefix index holds what its node says."""
        S = self.pool.page_size
        for node in self.pool.index.values():
            depth, parent = 0, node.parent
            while parent is not None:
                depth, parent = depth + 1, parent.parent
            held = self.slots[0][node.page]
            said = [int.from_bytes(node.tokens[8 * j : 8 * j + 8], "little", signed=True) for j in range(S)]
            assert held == [(depth * S + j, token) for j, token in enumerate(said)], (
                f"page {node.page}: not its node"
            )
