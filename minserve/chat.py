"""`python -m minserve chat`: talk to the model in a terminal, token by token.

The conversation's cache stays between turns: each turn renders the whole conversation again, finds how much of it the
cache has seen, and prefills only the rest. Ctrl-C stops the answer and keeps the program; Ctrl-D, an empty pipe or
/quit end it. Piped input works: each line is a turn, only answers go to standard output, and everything else goes to
standard error.
"""

import argparse
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

from minserve.fetch import FetchError, resolve
from minserve.kv_cache import KVCache
from minserve.prefill_decode import generate
from minserve.request import SamplingParams
from minserve.text import Detokenizer, Tokenizer
from minserve.weights import DTYPES, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="ask this one question, print the answer, and exit")
    parser.add_argument("--system", help="a system message for the whole conversation")
    parser.add_argument("--model", help="a model folder or a hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument(
        "--max-tokens", type=int, help="longest answer, in tokens; default: until the model stops"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest; 0 is no limit")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw among the likeliest that hold this probability"
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same answers; default: a fresh one")
    parser.add_argument(
        "--stats", action="store_true", help="after each answer: time to first token, tokens/s, cache"
    )


@dataclass
class Answer:
    text: str = ""
    reason: str = ""  # "stop" | "length" | "interrupted"
    tokens: int = 0
    reused: int = 0  # prompt tokens the cache held already
    prompt: int = 0
    ttft: float = 0.0  # seconds from the question to the first token
    decoding: float = 0.0  # seconds from the first token to the last

    def __str__(self) -> str:
        rate = (
            f"{(self.tokens - 1) / self.decoding:.1f} tok/s"
            if self.tokens > 1 and self.decoding
            else "one token"
        )
        return (
            f"[{self.prompt} prompt tokens, {self.reused} of them from the cache | "
            f"first token {self.ttft * 1e3:.0f} ms | {self.tokens} tokens, {rate} | {self.reason}]"
        )


@dataclass
class Conversation:
    """The messages so far, and one cache that has seen most of them."""

    model: object
    tokenizer: Tokenizer
    messages: list[dict] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)  # the ids whose keys and values the cache holds
    cache: KVCache | None = None

    def ask(self, question: str, params: SamplingParams, emit, stopped=lambda: False) -> Answer:
        """Answer one message, calling emit(text) as it becomes certain, until stopped() between two tokens.

        Raises ValueError for a conversation that no longer fits; the messages stay as they were.
        """
        start = time.perf_counter()
        messages = [*self.messages, {"role": "user", "content": question}]
        ids = self.tokenizer.chat(messages)
        rest = self._prefill_from(ids)
        answer = Answer(prompt=len(ids), reused=len(ids) - len(rest), reason="interrupted")
        stream, detokenizer, made = (
            generate(self.model, rest, params, self.cache),
            Detokenizer(self.tokenizer),
            [],
        )
        while not stopped():
            try:
                made.append(next(stream))
            except StopIteration as end:
                answer.reason = end.value
                break
            now = time.perf_counter()
            if len(made) == 1:
                answer.ttft = now - start
            answer.decoding = now - start - answer.ttft
            self._say(answer, detokenizer.push(made[-1]), emit)
        self._say(answer, detokenizer.flush(), emit)
        answer.tokens = len(made)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.seen = (ids + made)[: self.cache.length]  # the newest token is known, but not yet computed
        return answer

    def _say(self, answer: Answer, delta: str, emit) -> None:
        if delta:
            answer.text += delta
            emit(delta)

    def _prefill_from(self, ids: list[int]) -> list[int]:
        """Wind the cache back to what it shares with `ids`; return the ids it has not seen (at least the last one)."""
        if self.cache is None:
            config = self.model.config
            self.cache = KVCache(config, config.context, self.model.dtype, self.model.device)
        shared = 0
        while (
            shared < min(len(self.seen), self.cache.length, len(ids) - 1) and self.seen[shared] == ids[shared]
        ):
            shared += 1
        try:
            self.cache.truncate(shared)
        except ValueError:  # a sliding window has overwritten what was shared
            self.cache.truncate(shared := 0)
        return ids[shared:]


def main(args) -> int:
    try:
        params = SamplingParams(args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed)
        conversation = start(args)
    except (ValueError, FetchError, FileNotFoundError) as error:
        print(f"chat: {error}", file=sys.stderr)
        return 2
    if args.prompt is not None:
        return 0 if turn(conversation, args.prompt, params, args.stats) else 2
    talking = sys.stdin.isatty()
    if talking:
        print("Ctrl-C stops an answer, Ctrl-D or /quit ends the conversation.\n", file=sys.stderr)
    failed = False
    while (question := read(talking)) is not None:
        if question.strip():
            failed |= not turn(conversation, question, params, args.stats)
    return 2 if failed and not talking else 0


def start(args) -> Conversation:
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = resolve(args.model)
    model = load(folder, DTYPES[args.dtype] if args.dtype else None, device)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    return Conversation(model, Tokenizer.load(folder), messages)


def turn(conversation: Conversation, question: str, params: SamplingParams, stats: bool) -> bool:
    """One question, its answer streamed to standard output. A bad question is reported; the conversation goes on."""
    try:
        with ctrl_c_noted() as stopped:
            answer = conversation.ask(
                question, params, lambda delta: print(delta, end="", flush=True), stopped
            )
    except ValueError as error:
        print(f"chat: {error}", file=sys.stderr)
        return False
    print(flush=True)
    if stats:
        print(answer, file=sys.stderr)
    return True


@contextmanager
def ctrl_c_noted():
    """Within, a first Ctrl-C is only noted (a step of the model is never cut in half); a second one acts as usual."""
    noted = []

    def note(*_):
        noted.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


def read(talking: bool) -> str | None:
    """The next question, or None at the end. Ctrl-C at the prompt clears the line, as in a shell."""
    while True:
        try:
            if talking:
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        return None if not line or line.strip() == "/quit" else line.rstrip("\n")
