"""What travels from engine to engine: some pages as they are, and a header that says whose.

    Part       one message. In bytes, it is a safetensors file whose metadata are the header: nothing to execute
    Shape      what has to be equal on both sides, for a page of one to mean the same to the other
    Arrival    the messages of one key as they come in; complete, it is the `kv` of Engine.make

Cost       whole pages: pages_for(prompt, S) * S * bytes_per_token, the unused end of the last page included
Story      notebooks/14_the_fleet.ipynb
"""

import json
import re
from dataclasses import asdict, dataclass, field
from hashlib import sha256

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from minserve.kv_cache import bytes_per_token
from minserve.pages import pages_for
from minserve.trained import fingerprint

KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it may become the name of a file


def checked_key(key) -> str:
    """Raises ValueError for what is no key."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ValueError(
            f"transfer_id is {key!r:.80}; it must be 1 to 64 letters, digits, underscores or hyphens"
        )
    return key


def digest(tokens: list[int]) -> str:
    return sha256(json.dumps(list(tokens)).encode()).hexdigest()


# ---------------------------------------------------------------- one message
@dataclass
class Part:
    """Whole pages of one layer, or of all."""

    key: str
    number: int  # 0, 1, 2, ... of this key
    layer: int  # the first one it holds
    first_page: int  # of the request
    end: int  # tokens that lie in these pages and in those before them
    num_tokens: int  # of the prompt
    prompt: str  # its digest
    shape: dict  # whose pages these are
    failed: str = ""  # why there will be no more
    tensors: list[list[torch.Tensor]] = field(
        default_factory=list
    )  # of each layer: keys, values, scales [n, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for its in self.tensors for x in its)

    def to_bytes(self) -> bytes:
        header = {name: its for name, its in vars(self).items() if name != "tensors"}
        named = {f"{i}.{j}": x.contiguous() for i, its in enumerate(self.tensors) for j, x in enumerate(its)}
        return save(named, {"part": json.dumps(header)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Part":
        """Raises ValueError for what is not a whole message."""
        try:
            named = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["part"]
            part = cls(**json.loads(header))
            layers = len({name.split(".")[0] for name in named})
            pools = range(len(named) // max(1, layers))
            part.tensors = [[named[f"{i}.{j}"] for j in pools] for i in range(layers)]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{len(data):,} bytes that are no message of keys and values: {error}") from None
        return part


@dataclass(frozen=True)
class Shape:
    """Whose pages they are."""

    model: str  # trained.fingerprint
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str  # of what is computed around the cache
    kv_cache_dtype: str | None

    @classmethod
    def of(cls, engine) -> "Shape":
        c, cache = engine.model.config, engine.cache
        dtype, kind = str(cache.example.dtype).removeprefix("torch."), getattr(cache, "kind", None)
        sizes = c.num_layers, c.num_kv_heads, c.head_dim, cache.page_size
        return cls(fingerprint(engine.model), *sizes, dtype, kind)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, in all layers together."""
        heads, itemsize = (self.kv_heads, self.head_dim), getattr(torch, self.dtype).itemsize
        return int(self.page_size * bytes_per_token(self.layers, *heads, itemsize, self.kv_cache_dtype))

    def check(self, theirs: dict) -> None:
        """Raises ValueError unless their pages are like these."""
        ours = asdict(self)
        if wrong := [name for name, its in ours.items() if theirs.get(name) != its]:
            there, here = (", ".join(f"{name} {its.get(name)}" for name in wrong) for its in (theirs, ours))
            raise ValueError(
                f"keys and values of another engine do not fit: {there} there, {here} here.\n  A page here: "
                f"{self.layers} layers x {self.page_size} tokens x {self.kv_heads} heads x {self.head_dim} channels, "
                f"{self.page_bytes:,} bytes. Start both with the same model, dtype, kv_cache_dtype and page_size."
            )


# ---------------------------------------------------------------- what has arrived
class Arrival:
    """Keys and values on their way into host memory."""

    def __init__(self, connector, key: str, prompt: list[int]):
        self.connector, self.key, self.num_tokens, self._prompt = connector, key, len(prompt), digest(prompt)
        self.parts: list[Part] = []
        self._here: set[int] = set()  # layers that are complete

    def wait(self) -> bool:
        """True when all of it is here. False: it never will be, or for a whole lease there was no news of it."""
        try:
            done = all(map(self.wait_for_layer_load, range(self.connector.shape.layers)))
            if done:
                self.check(self.connector.cache)
        except Exception as error:
            self.connector.say(f"keys and values of {self.key} are of no use: {error}")
            done = False
        self.connector.drop(self.key, done)
        return done

    def wait_for_layer_load(self, layer: int) -> bool:
        while layer not in self._here:
            part = self.connector.take(self.key, len(self.parts), self.connector.lease)
            if part is None:
                return False
            self._add(part)
        return True

    def _add(self, part: Part) -> None:
        if part.failed:
            raise ValueError(part.failed)
        self.connector.shape.check(part.shape)
        if (part.prompt, part.num_tokens) != (self._prompt, self.num_tokens):
            raise ValueError(f"they are of another prompt, of {part.num_tokens:,} tokens")
        self.parts.append(part)
        if part.end == part.num_tokens:
            self._here.update(range(part.layer, part.layer + len(part.tensors)))

    def check(self, cache) -> None:
        """Raises ValueError unless every page of the prompt is here, for this cache."""
        held = [set() for _ in cache.k]
        for part in self.parts:
            for layer, tensors in enumerate(part.tensors, part.layer):
                expected = [(pool[layer].shape[1:], pool[layer].dtype) for pool in cache.pools]
                if [(x.shape[1:], x.dtype) for x in tensors] != expected:
                    raise ValueError(f"layer {layer} came in pages of another shape than this cache has")
                held[layer].update(range(part.first_page, part.first_page + len(tensors[0])))
        need = pages_for(self.num_tokens, cache.page_size)
        for layer, pages in enumerate(held):
            if len(pages) < need:
                raise ValueError(
                    f"of layer {layer}, {len(pages)} pages have arrived, and the prompt has {need}"
                )

    def load(self, cache, pages: list[int], computed: int = 0) -> None:
        """Write them into a request's pages, but for those of its first `computed` tokens: they were cached."""
        first = computed // cache.page_size
        for part in self.parts:  # in order: a page that was sent twice was fuller the second time
            skip = max(0, first - part.first_page)
            targets = pages[part.first_page + skip :]
            for layer, tensors in enumerate(part.tensors, part.layer):
                contents = [x[skip : skip + len(targets)] for x in tensors]
                if len(contents[0]):
                    cache.write_pages(layer, targets[: len(contents[0])], contents)
