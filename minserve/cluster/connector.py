"""Keys and values that go from the engine that computed a prompt to the engine that continues it.

    producer   its steps hand out the pages of every request that has a `key`     save_kv_layer, wait_for_save
    link       a thread sends them, paced like a network                          link.py
    consumer   collects them in host memory, then queues the request              start_load_kv, wait_for_layer_load

    whole      one message, when the prompt is computed: it travels while nothing of this prompt computes
    layer      a message per layer and chunk: each leaves while the next one computes, so that after the prompt only
               the last of them is still to come. More messages, so more latency in total

Here                              In vLLM's KVConnectorBase_V1
    attach(engine)                register_kv_caches: whose pages are read and written
    save_kv_layer(layer, batch)   save_kv_layer: a layer of this step lies in its pages
    wait_for_save(batch)          wait_for_save: the step has ended. What no layer told of is copied now
    request_finished(request)     request_finished: -> kv_transfer_params for the other side. There it may also ask for
                                  the pages to be kept until they were fetched; here they were copied, and go back
    start_load_kv(key)            start_load_kv: -> an Arrival, which grows from now on
    Arrival.wait_for_layer_load   wait_for_layer_load; before the request is queued, not while its step runs
    get_finished()                get_finished: keys whose messages have all been sent, all been received

No page waits for a network: the producer copies pages in the step that filled them, the consumer takes pages when
everything is there. So whoever dies, the survivor has lost no page; it waits at most `lease` seconds without news, and
then computes the prompt itself. Messages may come late, twice or never; they are told apart by key and number.

Messages     transfer.py. Transports: inbox.InProcess, file_connector.py, gloo_connector.py
Refused      int4 caches (an unsealed page is not in its page), models whose pages leave a window, another model's,
             another dtype's or page size's pages
Sources      splitting prompts from answers: DistServe, Zhong et al. 2024 (arXiv:2401.09670); layer by layer: Splitwise,
             Patel et al. 2023 (arXiv:2311.18677)
Story        notebooks/14_the_fleet.ipynb
"""

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from minserve.cluster.link import Link, Sender
from minserve.cluster.transfer import Arrival, Part, Shape, checked_key, digest
from minserve.pages import pages_for
from minserve.request import Request, Status

MODES = ("whole", "layer")
ROLES = ("kv_producer", "kv_consumer", "kv_both")


@dataclass
class Sending:
    """How much of one request's prompt has been handed out."""

    request: Request
    prompt: str  # its digest
    tokens: int = 0
    parts: int = 0
    layers: set[int] = field(default_factory=set)  # of the step that runs: those that left already
    step: object = None  # that step's batch
    lost: bool = False  # the link is too far behind, or broken
    completed: float = 0.0  # when

    @property
    def complete(self) -> bool:
        return self.tokens >= len(self.request.prompt) and not self.lost


class KVConnector(ABC):
    """One end. A transport says how a message gets across: put, take, drop."""

    def __init__(
        self, mode: str = "whole", link: Link | None = None, lease: float = 30.0, role: str = "kv_both"
    ):
        """`lease`: seconds without news after which nobody waits any longer, and what nobody fetched is deleted."""
        if mode not in MODES or not lease > 0 or role not in ROLES:
            raise ValueError(
                f"mode {mode!r}, lease {lease} s, role {role!r}: use mode {' or '.join(map(repr, MODES))}, a lease > 0 "
                f"and role {', '.join(map(repr, ROLES))}"
            )
        self.mode, self.link, self.lease, self.role = mode, link or Link(), lease, role
        self.shape: Shape | None = None  # known once attached
        self.error: Exception | None = None  # why nothing gets across any more
        self.sender: Sender | None = None  # started with the first message
        self.waiting = ThreadPoolExecutor(64, "kv-wait")  # for Arrival.wait(); no thread unless somebody does
        self._sending: dict[str, Sending] = {}
        self._lock = threading.RLock()
        self._finished = deque(maxlen=1024), deque(maxlen=1024)  # keys sent, keys received

    # ------------------------------------------------------------ how a message gets across
    @abstractmethod
    def put(self, part: Part) -> None:
        """Producer, in the sender's thread: one message to the other side."""

    @abstractmethod
    def take(self, key: str, number: int, timeout: float) -> Part | None:
        """Consumer: message `number` of a key, waited for. None: it did not come, or the key was dropped meanwhile."""

    def drop(self, key: str, received: bool = False) -> None:
        """Consumer: nobody waits for this key any longer, and whatever else comes of it is ignored."""
        if received:
            self._finished[1].append(key)

    # ------------------------------------------------------------ the engine's hooks
    def attach(self, engine) -> None:
        """Raises ValueError for an engine whose pages cannot be handed over."""
        S, window = engine.cache.page_size, engine.pages.window
        if getattr(engine.cache, "kind", None) == "int4":
            raise ValueError(
                f"an int4 cache cannot be handed over: the last {S - 1} tokens of a prompt, at most, lie in an open "
                f'page and not in one of its pages of {S}.\n  Use kv_cache_dtype "int8", "fp8" or None.'
            )
        if window is not None:
            raise ValueError(
                f"this model sees {window:,} tokens back, and gives pages that no later token sees back while a longer "
                f"prompt is still computed: they could not be handed over.\n  Serve it with one engine."
            )
        self.shape, self.cache = Shape.of(engine), engine.cache
        if self.mode == "layer" and self.role != "kv_consumer":
            engine.cache.watch = self.save_kv_layer

    def save_kv_layer(self, layer: int, batch) -> None:
        """A layer's keys and values of this step lie in their pages: those of requests with a key leave."""
        for request, num_tokens in batch.plan:
            if request.key is not None:
                self._hand_out(request, num_tokens, batch, [layer])

    def wait_for_save(self, batch) -> None:
        """The step has computed. What has not left yet leaves now: all of it, if no layer was told of."""
        for request, num_tokens in batch.plan:
            if request.key is None:
                continue
            end = min(request.computed + num_tokens, len(request.prompt))
            if self.mode == "layer" or end == len(request.prompt):
                self._hand_out(request, num_tokens, batch, range(self.shape.layers), ends=True)
        self._forget()

    def _hand_out(self, request: Request, num_tokens: int, batch, layers, ends: bool = False) -> None:
        """Copy the pages that this step writes, and those before them that have not left yet: they were cached."""
        with self._lock:
            if request.key not in self._sending:
                self._sending[request.key] = Sending(request, digest(request.prompt))
            sending = self._sending[request.key]
            if sending.request is not request:
                return  # somebody else has that key
            if sending.step is not batch:  # also where a step failed, and runs once more
                sending.step, sending.layers = batch, set()
            S, end = self.shape.page_size, min(request.computed + num_tokens, len(request.prompt))
            layers = [layer for layer in layers if layer not in sending.layers]
            first = sending.tokens // S
            if end > sending.tokens and layers:
                pages = request.pages[first : pages_for(end, S)]
                tensors = [[x.cpu() for x in self.cache.read_pages(layer, pages)] for layer in layers]
                if self.mode == "whole":
                    self._send(sending, 0, first, end, tensors)
                else:
                    for layer, its in zip(layers, tensors):
                        self._send(sending, layer, first, end, [its])
                sending.layers.update(layers)
            if ends and end > sending.tokens:
                sending.tokens, sending.completed = end, time.monotonic()

    def _send(self, sending: Sending, layer: int, first: int, end: int, tensors, failed: str = "") -> None:
        request, sender = sending.request, self.sender
        if sender is None:
            sender = self.sender = Sender(self._put, self.link)
        place = sending.parts, layer, first, end, len(request.prompt)
        part = Part(request.key, *place, sending.prompt, asdict(self.shape), failed, tensors)
        sending.parts += 1
        if self.error:
            sending.lost = True  # the transport has said why
        elif not sending.lost and not sender.send(part, part.nbytes):
            sending.lost = True
            self.say(
                f"{request.key} is not handed over: {sender.waiting_bytes:,} bytes wait for the link already"
            )

    def _put(self, part: Part) -> None:
        try:
            self.put(part)
        except Exception as error:
            if not self.error:
                self.say(f"{part.key} could not be handed over: {error}")
            raise
        if part.end == part.num_tokens and part.layer + len(part.tensors) == self.shape.layers:
            self._finished[0].append(part.key)

    def _forget(self) -> None:
        """Requests that ended before their prompt was computed, and answers that nobody asked about for a lease."""
        old = time.monotonic() - self.lease
        with self._lock:
            for sending in list(self._sending.values()):
                if sending.request.status is Status.FINISHED and not (
                    sending.complete and sending.completed > old
                ):
                    self.request_finished(sending.request)

    # ------------------------------------------------------------ requests
    def request_finished(self, request: Request) -> dict | None:
        """Producer: the kv_transfer_params with which the other side continues. None: it has to start afresh.

        The token goes along, unless it ended the answer or its logprobs are wanted: then the other side draws it again.
        """
        with self._lock:
            sending = self._sending.get(request.key)
            if sending is None or sending.request is not request:
                return None
            del self._sending[request.key]
            if not sending.complete:
                self._send(sending, 0, 0, 0, [], "the request ended before its prompt was computed")
                return None
        again = request.finish_reason == "stop" or request.params.logprobs is not None
        return {
            "do_remote_prefill": True,
            "transfer_id": request.key,
            "token_ids": [] if again else request.outputs,
            "num_tokens": len(request.prompt),
        }

    def start_load_kv(self, key: str, prompt: list[int]) -> Arrival:
        """Consumer: this prompt's keys and values begin to arrive. Arrival.wait() blocks: call it in a thread."""
        return Arrival(self, checked_key(key), prompt)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Keys since the last call: (those that were sent, those that were received)."""
        finished, self._finished = self._finished, (deque(maxlen=1024), deque(maxlen=1024))
        return set(finished[0]), set(finished[1])

    def say(self, what: str) -> None:
        print(f"minserve: {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.waiting.shutdown(wait=False, cancel_futures=True)
        if self.sender:
            self.sender.close()
