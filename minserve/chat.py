"""`python -m minserve chat`: talk to the model in a terminal, token by token.

Each turn renders the whole conversation again, and the engine's prefix cache has seen most of it: only the rest is
computed. Ctrl-C stops the answer and keeps the program; Ctrl-D, an empty pipe or
/quit end it. Piped input works: each line is a turn, only answers go to standard output, and everything else goes to
standard error.
"""

import argparse
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass

from minserve.drafters import NAMES
from minserve.engine import Engine
from minserve.fetch import FetchError, resolve
from minserve.model import Model
from minserve.pages import pages_for
from minserve.quantized_cache import KINDS, page_for
from minserve.request import SamplingParams
from minserve.text import Tokenizer
from minserve.weights import DTYPES, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="ask this one question, print the answer, and exit")
    parser.add_argument("--system", help="a system message for the whole conversation")
    parser.add_argument("--model", help="a model folder or a hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument(
        "--kv-cache-dtype", choices=list(KINDS), help="a smaller KV cache; default: the model's own"
    )
    parser.add_argument(
        "--drafter",
        choices=NAMES,
        help="speculative decoding: who proposes tokens; the answers stay the same",
    )
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
    steps: int = 0  # in that time: fewer than tokens where drafts were right

    def __str__(self) -> str:
        rate = (
            f"{(self.tokens - 1) / self.decoding:.1f} tok/s"
            if self.tokens > 1 and self.decoding
            else "one token"
        )
        return (
            f"[{self.prompt} prompt tokens, {self.reused} of them from the cache | "
            f"first token {self.ttft * 1e3:.0f} ms | {self.tokens} tokens in {1 + self.steps} steps, {rate} | "
            f"{self.reason}]"
        )


class Conversation:
    """The messages so far, and an engine of one seat whose prefix cache has seen most of them."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        messages: list[dict] | None = None,
        kv_cache_dtype: str | None = None,
        drafter: str | None = None,
    ):
        self.tokenizer, self.messages = tokenizer, messages or []
        page = page_for(kv_cache_dtype)
        self.engine = Engine(
            model, tokenizer, num_pages=pages_for(model.config.context, page), max_running=1,
            kv_cache_dtype=kv_cache_dtype, drafter=drafter,
        )  # fmt: skip

    def ask(self, question: str, params: SamplingParams, emit, stopped=lambda: False) -> Answer:
        """Answer one message, calling emit(text) as it becomes certain, until stopped() between two tokens.

        Raises ValueError for a conversation that no longer fits; the messages stay as they were.
        """
        start = time.perf_counter()
        messages = [*self.messages, {"role": "user", "content": question}]
        ids = self.tokenizer.chat(messages)
        (output,) = self.engine.add(ids, params)
        answer = Answer(prompt=len(ids))
        while not output.finished:
            answer.steps += bool(output.tokens)  # those that decode
            news = self.engine.abort([output]) if stopped() else self.engine.step()
            now = time.perf_counter()
            for _, delta in news:
                answer.ttft = answer.ttft or now - start
                answer.decoding = now - start - answer.ttft
                if delta:
                    emit(delta)
        if output.error:
            raise output.error
        answer.text, answer.tokens, answer.reused = (
            output.text,
            len(output.tokens),
            output.request.cached_tokens,
        )
        answer.reason = "interrupted" if output.finish_reason == "abort" else output.finish_reason
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


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
    return Conversation(model, Tokenizer.load(folder), messages, args.kv_cache_dtype, args.drafter)


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
