"""Who owns which page of the KV cache. Ids only: no tensor lives here, and no torch is imported.

    free       nobody's, and nothing in it is worth keeping
    in use     in the page table of at least one request; references[page] says of how many
    cached     in no table, but the prefix index knows what it holds: kept until somebody needs the room

                  take                    full, and computed
        free  ----------->  in use  ------------------------->  in use, indexed
         ^                  |    ^                                |
         |     release      |    |  a prompt begins the same way  |  release
         +------------------+    +-------------  cached  <--------+
         ^                                         |
         +-------- least recently used first ------+

A request's page table lists its pages in token order: token j lives in page table[j // page_size], at slot
j % page_size. Pages need not be neighbours, so no memory is lost between requests, and at most one page per request is
partly empty. That is PagedAttention.

The prefix index   A page that is full and computed will never change again, so it may be shared. Its key chains
the whole past: key_i = SHA-256(key_{i-1} + tokens of page i), key_{-1} = SHA-256(salt). Requests with different
salts share nothing. A hit is verified, not believed: the tokens must be equal and the parent must be the very
node that the page before it hit, so even a forced collision of keys gives no wrong page.

Copy on write      fork() gives a child its leader's pages. Whoever writes first into a page that others read gets
a copy of its own; `copies` lists them, to be carried out before the step runs.

Sliding window     With a window on every layer, pages that no later token can see go back early; their entries in
the table stay, stale and never read. Pages that hold attention sinks stay.

Invariants, checked by check()
    free, cached and in use are disjoint and together are all pages
    references[page] is the number of tables that hold it; cached pages have 0, and are in the index
    node and page point at each other; every node in the index is found under its own key
    all or nothing: a grow() or admit() that returns False has changed nothing

Sources  PagedAttention, Kwon et al. 2023 (arXiv:2309.06180), sec. 4; prefix index: automatic prefix caching in vLLM;
         RadixAttention, Zheng et al. 2023 (arXiv:2312.07104) keeps the same chains as a tree
Story    notebooks/05_paged_attention.ipynb, notebooks/06_prefix_caching.ipynb
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import sha256

from minserve.request import Request


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)  # ceil


class Node:
    """What one indexed page holds: its tokens, and the node of the page before it."""

    __slots__ = ("key", "parent", "tokens", "page")

    def __init__(self, key: bytes, parent: "Node | None", tokens: bytes, page: int):
        self.key, self.parent, self.tokens, self.page = key, parent, tokens, page


class PagePool:
    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        window: int | None = None,
        sinks: int = 0,
        prefix_caching: bool = True,
        salt: bytes = b"",
        whole: bool = False,
    ):
        """`window`: the widest of the model's sliding windows, None if any layer sees everything. `whole`: a page that
        is not full yet is never shared, not even with a fork: what is in it lies elsewhere (quantized_cache.py).

        Raises ValueError for a pool without pages or a page size that is not a power of two.
        """
        if num_pages < 1 or page_size < 1 or page_size & (page_size - 1):
            raise ValueError(
                f"{num_pages} pages of {page_size} tokens: a pool needs at least 1 page, of 1, 2, 4, 8, ... tokens"
            )
        self.num_pages, self.page_size, self.prefix_caching = num_pages, page_size, prefix_caching
        self.window, self.sink_pages, self.salt = window, pages_for(sinks, page_size), salt
        self.shared = page_size if whole else 1  # forks share a multiple of so many tokens
        self.free = list(reversed(range(num_pages)))  # a stack: the page freed last is taken first
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.references = [0] * num_pages
        self.nodes: list[Node | None] = [None] * num_pages
        self.index: dict[bytes, Node] = {}
        self.copies: list[tuple[int, int]] = []  # (from, to), to be carried out before the next step
        self.evictions = 0

    # ------------------------------------------------------------ what there is
    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def in_use(self) -> int:
        return self.num_pages - self.available

    def most(self, num_tokens: int, chunk: int) -> int:
        """Pages that a request of so many tokens holds at its fullest, computed at most `chunk` at a time."""
        whole = pages_for(num_tokens, self.page_size)
        if self.window is None:
            return whole
        return min(whole, self.sink_pages + pages_for(self.window + chunk, self.page_size) + 1)

    def promised(self, request: Request, chunk: int) -> int:
        """Pages that a running request has yet to take for tokens it has already: a prompt that is partly computed."""
        missing = pages_for(len(request.tokens), self.page_size) - len(request.pages)
        if missing <= 0:
            return 0
        return max(0, min(missing, self.most(len(request.tokens), chunk) - len(self.held(request))))

    def held(self, request: Request) -> list[int]:
        """The pages of its table that are still its own: all but those that left the window."""
        return request.pages[: self.sink_pages] + request.pages[max(self.sink_pages, request.returned) :]

    # ------------------------------------------------------------ taking
    def admit(self, request: Request, chunk: int, promised: int = 0) -> bool:
        """Pin the longest cached prefix, if the rest of its tokens then has room beside `promised` pages.

        At least one token is left to compute: without it there would be no logits to draw from.
        """
        hits = self.match(request)
        computed = len(hits) * self.page_size
        live = [i for i in range(len(hits)) if i < self.sink_pages or i >= self._first_seen(computed)]
        revived = sum(self.references[hits[i].page] == 0 for i in live)  # available now, not once pinned
        need = max(0, self.most(len(request.tokens), chunk) - len(live))
        if need + promised > self.available - revived:
            return False
        for i in live:
            self._pin(hits[i].page)
        request.pages, request.chain = [node.page for node in hits], hits
        request.computed, request.returned = computed, self._first_seen(computed)
        self._writable(request)
        return True

    def fork(self, child: Request, leader: Request) -> bool:
        """Give `child` the pages of its leader's prompt, the last one shared until either writes into it.

        False, and nothing changed, if the leader no longer holds what the child would need.
        """
        S = self.page_size
        computed = (len(child.tokens) - 1) // self.shared * self.shared
        first = self._first_seen(computed)
        if leader.computed < computed or leader.returned > max(first, self.sink_pages):
            return False
        child.pages = leader.pages[: pages_for(computed, S)]
        child.computed, child.returned, child.chain = computed, first, leader.chain[: computed // S]
        for page in self.held(child):
            self._pin(page)
        self._writable(child)
        leader.writable = min(leader.writable, leader.computed)  # it must ask before it writes again
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Room for `num_tokens` more, none of it shared. All or nothing."""
        first = request.computed // self.page_size
        copy = first < len(request.pages) and self._is_shared(request.pages[first])
        new = pages_for(request.computed + num_tokens, self.page_size) - len(request.pages)
        if max(0, new) + copy > self.available:
            return False
        if copy:
            theirs, own = request.pages[first], self._take()
            self.copies = [
                c for c in self.copies if c[1] != own
            ]  # its last owner gave it back before the step ran
            self.copies.append((theirs, own))
            self._drop(theirs)
            request.pages[first] = own
            request.dirty = min(request.dirty, first)
        request.pages += [self._take() for _ in range(new)]
        self._writable(request)
        return True

    # ------------------------------------------------------------ after a step, and at the end
    def settle(self, request: Request, computed: int | None = None) -> None:
        """Index the pages that are full now, return those out of the window.

        `computed`: how far its tokens are known to be in the cache; all that are, if it is not given.
        """
        computed = request.computed if computed is None else computed
        if self.prefix_caching:
            while (len(request.chain) + 1) * self.page_size <= computed:
                self._register(request)
        if self.window is None:
            return
        first = self._first_seen(computed)
        for i in range(max(request.returned, self.sink_pages), first):
            self._drop(request.pages[i])
        request.returned = max(request.returned, first)

    def release(self, request: Request) -> None:
        """Everything back, last page first: of a chain, the end is evicted before the beginning."""
        for page in reversed(self.held(request)):
            self._drop(page)
        request.pages, request.chain, request.returned, request.writable, request.dirty = [], [], 0, 0, 0

    # ------------------------------------------------------------ the prefix index
    def match(self, request: Request) -> list[Node]:
        """The longest chain of indexed pages that its tokens begin with, the last token excepted."""
        chain: list[Node] = []
        if not self.prefix_caching:
            return chain
        for i in range((len(request.tokens) - 1) // self.page_size):
            node = self._known(request, i, chain[-1] if chain else None)
            if node is None:
                break
            chain.append(node)
        return chain

    def _known(self, request: Request, i: int, parent: Node | None) -> Node | None:
        key, tokens = self._key(request, i)
        node = self.index.get(key)
        return node if node is not None and node.parent is parent and node.tokens == tokens else None

    def _register(self, request: Request) -> None:
        i = len(request.chain)
        parent = request.chain[-1] if request.chain else None
        node = self._known(request, i, parent)
        if node is None:
            key, tokens = self._key(request, i)
            if key in self.index:  # its parent was evicted, or the keys collide: nobody can reach it any more
                self._forget(self.index[key].page)
            node = Node(key, parent, tokens, request.pages[i])
            self.index[key] = self.nodes[node.page] = node
        request.chain.append(node)  # where two computed the same page, the first one stands for both

    def _key(self, request: Request, i: int) -> tuple[bytes, bytes]:
        """Key and tokens of its page i. Tokens are only ever appended, so those of a full page are computed once."""
        keys, S = request.keys, self.page_size
        while len(keys) <= i:
            before = keys[-1][0] if keys else self._hash(self.salt + b"/" + request.salt)
            tokens = array("q", request.tokens[len(keys) * S : (len(keys) + 1) * S]).tobytes()
            keys.append((self._hash(before + tokens), tokens))
        return keys[i]

    @staticmethod
    def _hash(content: bytes) -> bytes:
        return sha256(content).digest()  # not Python's hash(): that one differs from process to process

    # ------------------------------------------------------------ single pages
    def _take(self) -> int:
        if not self.free:
            page = next(iter(self.cached))  # the least recently used
            self._forget(page)
            self.evictions += 1
        page = self.free.pop()
        self.references[page] = 1
        return page

    def _pin(self, page: int) -> None:
        if self.references[page] == 0:
            del self.cached[page]
        self.references[page] += 1

    def _drop(self, page: int) -> None:
        self.references[page] -= 1
        if self.references[page] == 0:
            if self.nodes[page] is None:
                self.free.append(page)
            else:
                self.cached[page] = None

    def _forget(self, page: int) -> None:
        """Take a page out of the index; if nobody uses it, it is free."""
        node = self.nodes[page]
        del self.index[node.key]
        self.nodes[page] = None
        if page in self.cached:
            del self.cached[page]
            self.free.append(page)

    def _is_shared(self, page: int) -> bool:
        return self.references[page] > 1 or self.nodes[page] is not None

    def _first_seen(self, position: int) -> int:
        """Index of the first page (sinks aside) that a query at `position`, or any later one, can see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size

    def _writable(self, request: Request) -> None:
        """How far the request may write without asking: to the end of its pages, unless the next one is shared."""
        first = request.computed // self.page_size
        shared = first < len(request.pages) and self._is_shared(request.pages[first])
        request.writable = request.computed if shared else len(request.pages) * self.page_size

    # ------------------------------------------------------------ the invariants
    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if anything in the module docstring does not hold. `requests`: all that hold pages."""
        tables = [self.held(r) for r in requests]
        used = Counter(page for table in tables for page in table)
        assert all(len(set(table)) == len(table) for table in tables), "a page twice in one table"
        assert sorted([*self.free, *self.cached, *used]) == list(range(self.num_pages)), (
            f"free {sorted(self.free)}, cached {sorted(self.cached)}, in use {sorted(used)}: not all pages, once each"
        )
        for page in range(self.num_pages):
            node = self.nodes[page]
            assert self.references[page] == used[page], (
                f"page {page}: {self.references[page]} references, {used[page]} tables"
            )
            assert node is None or (node.page == page and self.index.get(node.key) is node), (
                f"page {page}: stale node"
            )
            assert page not in self.cached or node is not None, (
                f"page {page} is cached, but nobody can find it"
            )
        assert all(self.nodes[node.page] is node for node in self.index.values()), (
            "an entry for a page that is not its own"
        )
        assert all(self.nodes[page] is None for page in self.free), "a free page is still in the index"


class ReservingPool(PagePool):
    """The baseline that pages replace: from its first step on, a request holds room for its longest possible answer."""

    def __init__(self, *args, longest: int | None = None, **options):
        """`longest`: tokens to keep for each request; None is what the request itself says it may need.

        Raises ValueError if the pool does not hold one such request.
        """
        super().__init__(*args, **options)
        self.longest = longest
        if longest and (need := pages_for(longest, self.page_size)) > self.num_pages:
            raise ValueError(
                f"longest is {longest:,} tokens, {need:,} pages of {self.page_size}, and the whole pool has "
                f"{self.num_pages:,}: no request could ever run.\n  Use a shorter one, or num_pages >= {need:,}."
            )

    def most(self, num_tokens: int, chunk: int) -> int:
        return pages_for(num_tokens, self.page_size)  # also with a window: all of it is held at first

    def admit(self, request: Request, chunk: int, promised: int = 0) -> bool:
        room = pages_for(self.longest or request.most_tokens, self.page_size)
        return room + promised <= self.available and super().admit(request, chunk, promised)

    def grow(self, request: Request, num_tokens: int) -> bool:
        whole = (self.longest or request.most_tokens) - request.computed
        return super().grow(request, max(num_tokens, whole))
