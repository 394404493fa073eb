"""A quantized model becomes a Hugging Face folder that transformers, vLLM and minserve load, whole or not at all.

    python -m minserve quantize OUT --method rtn|gptq|awq --bits 8|4 [--group 64] [--model FOLDER_OR_HUB_ID]

The folder is the model's own, tokenizer and all, with other weights and a `quantization_config`. It is made beside
OUT under another name, its config.json last, and renamed when it is whole: a full disk or Ctrl-C leaves nothing that
loads.

    4 bits                 pack-quantized: groups of inputs share a scale. The group must divide every layer's inputs,
                           for no other program reads a shorter last one
    8 bits                 int-quantized: one scale per output, read everywhere; others then round the inputs to 8 bits
                           as well, which is what they know this form for
    8 bits with --group    pack-quantized: the inputs stay as they are everywhere; vLLM has no CPU kernel for it

The head is in 8 bits unless told otherwise. One that was tied to the embedding is untied for that.

Sources  https://github.com/vllm-project/compressed-tensors
Story    notebooks/09_quantization.ipynb
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from minserve.calibration import HEAD, TOKENS, UNCALIBRATED, WINDOW, calibration_text, quantize_model
from minserve.fetch import resolve
from minserve.model import Model
from minserve.quantization import QuantLinear, Scheme, pack
from minserve.sources import FULL, FetchError, require_space, say
from minserve.text import Tokenizer
from minserve.weights import load, load_config

GROUPS = (128, 64, 32)
COPIED = (".json", ".jinja", ".txt", ".model")  # suffixes of what tells a tokenizer and a chat from another
REPLACED = ("config.json", "model.safetensors.index.json", "minserve.json")


# ---------------------------------------------------------------- python -m minserve quantize
def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = lambda text: None if text == "row" else int(text)
    parser.add_argument("out", type=Path, help="the folder to make; it must not exist yet")
    parser.add_argument("--model", help="a model folder or a hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--method", choices=("rtn", "gptq", "awq"), required=True, help="how to round")
    parser.add_argument("--bits", type=int, choices=(8, 4), required=True)
    parser.add_argument("--group", type=group, default=0, help="inputs that share a scale, or `row`: all of them; "
                        "default: the largest of 128, 64, 32 that fits for 4 bits, row for 8")  # fmt: skip
    parser.add_argument("--asymmetric", action="store_true", help="with zero points; transformers then needs "
                        "--head 16 and CompressedTensorsConfig(dequantize=True)")  # fmt: skip
    parser.add_argument("--head", type=int, choices=(8, 16), default=8, help="bits of the head; default: 8")
    parser.add_argument("--act-order", action="store_true", help="refused: no file holds its order any more")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of calibration; default: {TOKENS:,}")
    parser.add_argument("--text", type=Path, help="a text to calibrate on; default: Python's own manual")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")


def main(args) -> int:
    try:
        folder, scheme = prepare(args)
        model = load(folder, device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        batches = ()
        if args.method not in UNCALIBRATED:
            text = args.text and args.text.read_text(encoding="utf-8")
            window = min(WINDOW, model.config.context)
            batches = calibration_text(Tokenizer.load(folder), args.tokens, window, text)
        report = quantize_model(model, args.method, scheme, batches, HEAD if args.head == 8 else None)
        write(model, folder, args.out)
    except (ValueError, FetchError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in FULL
        say(f"quantize: {f'the disk is full: {error}; nothing is left of {args.out}' if full else error}")
        return 2
    except KeyboardInterrupt:
        say(f"\nstopped. Nothing is left of {args.out}.")
        return 130
    print(report)
    if 8 in (args.bits, args.head):
        print("  in 8 bits per row transformers and vLLM round the inputs to 8 bits, too; minserve does not")
    print(f"  python -m minserve chat --model {args.out}")
    return 0


def prepare(args) -> tuple[Path, Scheme]:
    """Everything that can be refused before any work is done."""
    if args.out.exists():
        raise ValueError(f"{args.out} exists already: remove it, or choose another name")
    if args.act_order:
        raise ValueError(
            "act-order scatters a group's inputs over the row, and compressed-tensors no longer has files for that "
            "(nor has vLLM).\n  Leave --act-order out; in memory it is quantize_model(..., act_order=True)."
        )
    if args.asymmetric and args.bits == 8:
        raise ValueError("8 bits are symmetric: vLLM reads no zero points of theirs. Leave --asymmetric out.")
    folder = resolve(args.model)
    config = load_config(folder)
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config"):
        raise ValueError(f"{folder} is quantized already: start from the checkpoint that it was made from")
    where = args.out.absolute().parent
    where.mkdir(parents=True, exist_ok=True)
    require_space(where, config.num_params * args.bits // 8)
    inputs = {config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size}
    return folder, Scheme(args.bits, group_for(sorted(inputs), args.bits, args.group), not args.asymmetric)


def group_for(inputs: list[int], bits: int, asked: int | None) -> int | None:
    """`asked` checked, or, where it is 0, chosen; None is the whole row."""
    if asked:
        for k in inputs:
            refuse_remainder("a layer", k, asked)
    if asked != 0 or bits == 8:
        return asked or None
    fits = [group for group in GROUPS if not any(k % group for k in inputs)]
    if not fits:
        raise ValueError(
            f"none of {', '.join(map(str, GROUPS))} divides the inputs of all layers, {', '.join(map(str, inputs))}.\n"
            "  Take --group row (one scale per output), or a multiple of 8 that divides them."
        )
    say(
        f"groups of {fits[0]}: the largest of {', '.join(map(str, GROUPS))} that divides {', '.join(map(str, inputs))}"
    )
    return fits[0]


def refuse_remainder(name: str, k: int, group: int) -> None:
    if k % group:
        fits = [str(size) for size in GROUPS if k % size == 0]
        raise ValueError(
            f"{name} has {k} inputs, and {k} = {k // group} x {group} + {k % group}: minserve can run a shorter last "
            f"group, but transformers and vLLM cannot load one.\n  Take a group that divides {k}"
            f"{f', as {fits[0]} does' if fits else ''}, or the whole row."
        )


# ---------------------------------------------------------------- the folder
def write(model: Model, source: Path, out: Path) -> None:
    """The folder of a model with QuantLinear layers; `source` gives everything else: config, tokenizer, chat."""
    in_file = lambda name: name if name.startswith("lm_head") else f"model.{name}"
    layers = {in_file(name): m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    dense = [in_file(name) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    dense += ["lm_head"] * model.config.tied
    state = {in_file(name): weight.data for name, weight in model.named_parameters()}
    for name, layer in layers.items():
        state |= {f"{name}.{part}": tensor for part, tensor in tensors(name, layer).items()}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"quantization_config": settings(layers, dense), "tie_word_embeddings": model.config.tied}
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        for file in source.iterdir():
            if file.suffix in COPIED and file.name not in REPLACED:
                shutil.copyfile(file, made / file.name)
        try:
            save_file(
                {k: v.contiguous() for k, v in state.items()}, made / "model.safetensors", {"format": "pt"}
            )
        except SafetensorError as error:
            code = next((code for code in FULL if f"os error {code}" in str(error)), None)
            raise OSError(code, str(error), str(out)) from None
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (made / "model.safetensors").chmod(0o644)
        made.chmod(0o755)
        os.rename(made, out)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(made, ignore_errors=True)
        raise


def kind_of(scheme: Scheme) -> str:
    """Without groups, 8 bits need no packing, and that is the form of them that vLLM runs on every device."""
    return "int-quantized" if scheme == Scheme(8) else "pack-quantized"


def tensors(name: str, layer: QuantLinear) -> dict[str, torch.Tensor]:
    """What compressed-tensors calls them -> the tensors of a layer."""
    if layer.order is not None:
        raise ValueError(
            f"{name} is in act-order, its groups scattered over the input channels; compressed-tensors no longer "
            "has files for that.\n  Quantize without act-order."
        )
    scheme, k = layer.scheme, layer.in_features
    refuse_remainder(name, k, scheme.columns(k))
    if kind_of(scheme) == "int-quantized":
        return {"weight": layer.qweight, "weight_scale": layer.scales}
    qweight = layer.qweight if scheme.bits == 4 else _words(layer.qweight)
    made = {"weight_packed": qweight, "weight_scale": layer.scales}
    made["weight_shape"] = torch.tensor([layer.out_features, k])
    if not scheme.symmetric:
        zeros = layer.zeros.T.contiguous()
        made["weight_zero_point"] = (pack(zeros) if scheme.bits == 4 else _words(zeros)).T.contiguous()
    return made


def _words(integers):
    """int8 [R, C] -> int32 [R, ceil(C/4)], packed 128 higher."""
    padded = nn.functional.pad(integers, (0, -integers.shape[1] % 4))
    return (padded.view(torch.uint8) ^ 128).view(torch.int32)


def settings(layers: dict[str, QuantLinear], dense: list[str]) -> dict:
    """config.json's quantization_config; names as in the file, `dense` the linear layers left as they were."""
    head = {name: layer for name, layer in layers.items() if name == "lm_head"}
    schemes = {layer.scheme for name, layer in layers.items() if name not in head}
    if len(schemes) != 1:
        raise ValueError(f"layers in {len(schemes)} schemes: one group of settings has one")
    # vLLM's head is no "Linear": it wants its own name
    groups = [_settings(layer.scheme) | {"targets": [name]} for name, layer in head.items()]
    groups += [_settings(scheme) | {"targets": ["Linear"]} for scheme in schemes]
    kinds = sorted({group["format"] for group in groups})
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kinds[0] if len(kinds) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": dense,
        "kv_cache_scheme": None,
    }


def _settings(scheme: Scheme) -> dict:
    how = {"num_bits": 8, "type": "int", "symmetric": True}
    inputs = how | {"strategy": "token", "dynamic": True}
    weights = how | {"num_bits": scheme.bits, "symmetric": scheme.symmetric, "dynamic": False}
    weights["strategy"], weights["group_size"] = "group" if scheme.group else "channel", scheme.group
    kind = kind_of(scheme)
    inputs = inputs if kind == "int-quantized" else None
    return {"format": kind, "weights": weights, "input_activations": inputs, "output_activations": None}
