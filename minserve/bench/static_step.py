"""One decode step whose inputs never leave the device, so that a CUDA graph can hold it.

    token, position  ->  write K, V at position; attend to position + 1 slots; argmax  ->  token, position + 1

The same kernels as kv_cache.KVCache.attend, called with lengths that live in device memory instead of Python.
On a CPU the step runs as it is, which is how it is tested.
Sources  CUDA graphs for decoding: gpt-fast (2023)
"""

import torch

from minserve.kernels.decode_attention import decode_attention
from minserve.kernels.kv_write import kv_write
from minserve.kv_cache import KVCache
from minserve.model import Model


class StaticStep:
    def __init__(self, model: Model, cache: KVCache, max_length: int):
        """max_length: how far the step may ever look; the kernel plans its splits for it.

        Raises ValueError for a model with sliding windows, whose rings this step does not turn.
        """
        if any(window is not None for window in model.config.windows):
            raise ValueError("a static step serves models without sliding windows; this one has them")
        if max_length > cache.capacity:
            raise ValueError(
                f"max_length {max_length:,} is more than the {cache.capacity:,} slots of the cache"
            )
        self.model, self.cache, self.max_length, self.graph = model, cache, max_length, None
        self.token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.made = torch.zeros(cache.capacity + 1, dtype=torch.int64, device=model.device)

    def start(self, token: int, position: int) -> None:
        """Next comes `token`, at `position`; everything before it is in the cache."""
        self.token.fill_(token)
        self.position.fill_(position)

    def step(self) -> None:
        lengths = (self.position + 1).int()

        def attend(layer, q, k, v):
            keys, values = self.cache.k[layer], self.cache.v[layer]
            kv_write(k, v, keys, values, self.position)
            return decode_attention(q, keys[None], values[None], lengths, self.max_length)

        self.token.copy_(self.model(self.token, self.position, attend).argmax(-1))
        self.position.add_(1)
        self.made.index_copy_(0, self.position, self.token)

    def capture(self) -> None:
        """Record the step once; run() replays it from then on. Needs a GPU."""
        self.start(0, 0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile and tune outside the capture
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.start(0, 0)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.graph:
                self.graph.replay()
            else:
                self.step()

    def tokens(self, start: int, count: int) -> list[int]:
        """The tokens made for positions start .. start + count - 1."""
        return self.made[start : start + count].tolist()
