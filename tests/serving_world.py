"""A server to test against: a tiny model with a real tokenizer, served in a thread or as a process of its own.

tiny_folder(path)                    a checkpoint folder: random weights, a tokenizer trained here, a chat template
serve_in_thread(engine or folder)    uvicorn in this process: .url, .engine, .serving
serve_process(folder, *arguments)    `python -m minserve serve`: .url, .process
"""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minserve.async_engine import AsyncEngine
from minserve.cluster.front import HTTP
from minserve.engine import Engine
from minserve.server import create_app
from minserve.text import Tokenizer as Text
from minserve.weights import load

PATIENCE = 60  # seconds: the longest anything here waits
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAID = (
    "the sky is blue because the air scatters blue light more than red light, said the teacher to the user. "
    * 8
)


def tiny_folder(path: Path | str, *, context: int = 1024, seed: int = 0) -> Path:
    """A Llama of 2 layers and about 330 tokens. Its texts are noise, and each prompt has its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SAID], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            dict(
                tokenizer_class="PreTrainedTokenizerFast",
                eos_token="<|im_end|>",
                pad_token="<|endoftext|>",
                additional_special_tokens=SPECIALS[:2],
                chat_template=TEMPLATE,
            )
        )
    )
    eos = tokenizer.token_to_id("<|im_end|>")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.2,
        bos_token_id=None, eos_token_id=eos, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_engine(folder: Path | str, **options) -> Engine:
    """An engine for it: 96 pages of 8 tokens and 4 seats, unless told otherwise."""
    chosen = dict(num_pages=96, page_size=8, token_budget=64, max_running=4, max_waiting=16) | options
    return Engine(load(folder), Text.load(folder), **chosen)


@contextmanager
def serve_in_thread(
    engine: Engine | Path | str, *, model_name: str = "tiny", running: dict | None = None, **options
):
    """Serve it from a thread of this process on a free port; `running` go to AsyncEngine, `options` to create_app.
    Yields .url .engine .serving .app .call: call(coroutine) runs it on the server's event loop. Afterwards no page may
    be missing."""
    engine = engine if isinstance(engine, Engine) else tiny_engine(engine)
    serving = AsyncEngine(engine, **(running or {}))
    app = create_app(serving, engine.tokenizer, model_name, **options)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5, lifespan="on", **HTTP
    )
    server, ready = _Server(config), threading.Event()
    server.ready = ready
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert ready.wait(PATIENCE) and server.started, "the server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]

        def call(coroutine):
            import asyncio

            return asyncio.run_coroutine_threadsafe(coroutine, server.loop).result(PATIENCE)

        yield SimpleNamespace(
            url=f"http://127.0.0.1:{port}",
            port=port,
            engine=engine,
            serving=serving,
            app=app,
            call=call,
            loop=server.loop,
            server=server,
        )
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive(), "the server did not stop"
    assert engine.pages.in_use == 0 and not engine.outputs, "pages or outputs are left"


class _Server(uvicorn.Server):
    ready: threading.Event

    async def startup(self, sockets=None):
        import asyncio

        self.loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        finally:
            self.ready.set()


@contextmanager
def serve_process(folder: Path | str, *arguments: str):
    """Start the real command on a free port and wait until it answers. Yields .url .process; killed at the end."""
    command = [sys.executable, "-m", "minserve", "serve", "--model", str(folder), "--port", "0", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    said: list[str] = []
    drain = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    drain.start()
    try:
        yield SimpleNamespace(url=_announced(process, said), process=process, errors=said)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
        process.wait(PATIENCE)
        drain.join(PATIENCE)
        process.stdout.close()
        process.stderr.close()


def _announced(process: subprocess.Popen, said: list[str]) -> str:
    line, got = "", threading.Event()

    def read():
        nonlocal line
        line = process.stdout.readline()
        got.set()

    threading.Thread(target=read, daemon=True).start()
    if not got.wait(2 * PATIENCE) or " at " not in line:
        raise AssertionError(f"the server did not start: {line!r}\n{''.join(said)}")
    return line.rsplit(" at ", 1)[1].strip()
