"""Text to token ids and back: the checkpoint's own tokenizer and chat template, and text that streams correctly.

    Tokenizer      encode, decode, chat(messages): through `transformers`, so ids equal the reference's
    Detokenizer    one id in, the text that is now certain out
    StopStrings    text in, the text that can no longer be the beginning of a stop string out

Why streaming needs care: a token is a piece of *bytes*. One emoji may be three tokens, a decoder may strip the space at
the start of what it is given, and special tokens print nothing. So the detokenizer never decodes a token alone. It
decodes a window of recent ids and emits what the window gained, holding back an unfinished character.

Invariants   the deltas joined, flush included, equal decode(all ids), for any ids whatsoever
             a delta never ends inside a character: U+FFFD is emitted only where the full text has it
             of a stop string nothing is ever given out, however it is cut into deltas; what is held back is the
             longest end of the text that begins a stop string, and no character more

Special tokens inside a *message* are plain text: a user who types <|im_end|> does not end a turn.
Story    notebooks/01_one_forward_pass.ipynb
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

REPLACEMENT = "\ufffd"
# How byte-level vocabularies write bytes: printable ones as themselves, the others as the characters from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF = {chr(b): b for b in PRINTABLE}
BYTE_OF |= {chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in PRINTABLE)}


class Tokenizer:
    def __init__(self, hf, eos_token_ids: tuple[int, ...]):
        self.hf, self.eos_token_ids = hf, eos_token_ids
        self.special_ids = frozenset(hf.all_special_ids)
        self._byte_level = "ByteLevel" in repr(
            getattr(getattr(hf, "backend_tokenizer", None), "decoder", None)
        )

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Raises FileNotFoundError when the folder has no tokenizer."""
        folder = Path(folder)
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise FileNotFoundError(
                f"{folder} has no tokenizer (tokenizer.json); text cannot become tokens without it"
            )
        # The imports stand here because not everybody reads text, and each costs half a second or more.
        if (folder / "tokenizer.json").is_file():  # it says all there is: no need for the model's own class
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        hf = Loader.from_pretrained(folder, local_files_only=True, clean_up_tokenization_spaces=False)
        ids = [hf.eos_token_id] if hf.eos_token_id is not None else []
        for name in ("generation_config.json", "config.json"):
            if (folder / name).is_file():
                eos = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
                ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
        return cls(hf, tuple(dict.fromkeys(ids)))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of plain text as the model saw it in training: with BOS, if this tokenizer has one and `special`."""
        return self.hf.encode(
            text, add_special_tokens=special, verbose=False
        )  # too long is for the engine to say

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def bytes_of(self, token: int) -> bytes:
        """What one id stands for, a piece of a character too. A special token's are its name."""
        piece = self.hf.convert_ids_to_tokens(token)
        if piece is None:  # a row of the model without a token
            return b""
        if token in self.hf.added_tokens_decoder:
            return piece.encode()
        if _is_byte(piece):
            return bytes([int(piece[3:5], 16)])
        if self._byte_level and BYTE_OF.keys() >= set(piece):
            return bytes(BYTE_OF[c] for c in piece)
        return piece.replace("\u2581", " ").encode()  # how sentencepiece writes a space

    def chat(self, messages: list[dict]) -> list[int]:
        """Render [{role, content}, ...] through the model's chat template, ready for its answer. Returns ids.

        The template writes the special tokens, so none are added (never two BOS), and those spelt out inside a message
        stay text. Raises ValueError for no messages, or for a checkpoint without a template.
        """
        if not messages:
            raise ValueError("a chat needs at least one message, [{'role': 'user', 'content': '...'}]")
        if not self.hf.chat_template:
            raise ValueError(
                "this checkpoint has no chat template; use encode() and plain completion instead"
            )
        specials = self.hf.all_special_tokens
        said = "".join(m["content"] for m in messages)
        veil = next(
            (c for c in map(chr, range(0xE000, 0xF900)) if c not in said), None
        )  # a private-use character
        if veil is None:
            raise ValueError(
                "the messages use all 6,400 characters of the private-use area; one must be left to mark special tokens"
            )
        veiled = [m | {"content": _veil(m["content"], specials, veil)} for m in messages]
        text = self.hf.apply_chat_template(veiled, tokenize=False, add_generation_prompt=True)
        if veiled == messages:
            return self.hf.encode(text, add_special_tokens=False)
        return self._encode_veiled(text, specials, veil)

    def _encode_veiled(self, text: str, specials: list[str], veil: str) -> list[int]:
        """Split at the template's own special tokens; whatever lies between is encoded as text, specials unparsed."""
        ids: list[int] = []
        either = "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True))
        for piece in re.split(f"({either})", text):
            if piece in specials:
                ids.append(self.hf.convert_tokens_to_ids(piece))
            elif piece:
                plain = piece.replace(veil, "")
                ids += self.hf.encode(plain, add_special_tokens=False, split_special_tokens=True)
        return ids


def _veil(content: str, specials: list[str], veil: str) -> str:
    """A veil after the first letter of each special token spelt out in a message hides it from the parser."""
    for special in specials:
        content = content.replace(special, special[0] + veil + special[1:])
    return content


class Detokenizer:
    """Feed ids one at a time; get the text that each makes certain."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.window: list[int] = []  # ids the next text may still depend on
        self.emitted = ""  # what the window's text has given out already

    def push(self, token: int) -> str:
        """The text this id completes; often a word, sometimes nothing yet."""
        self.window.append(token)
        text = self.tokenizer.decode(self.window)
        ready = self._certain(token, text)
        delta = text[len(self.emitted) : ready]
        if delta:
            self.emitted += delta
        if ready == len(text) and len(self.window) > 16:
            self._shorten()
        return delta

    def flush(self) -> str:
        """The rest, once no more ids come: an unfinished character becomes what the full decode makes of it."""
        text = self.tokenizer.decode(self.window)
        delta, self.window, self.emitted = text[len(self.emitted) :], [], ""
        return delta

    def _certain(self, token: int, text: str) -> int:
        """How much of the window's text no later id can change."""
        if token in self.tokenizer.special_ids:
            return len(self.emitted)  # prints nothing, and does not end a run of bytes either
        if _is_byte(self.tokenizer.hf.convert_ids_to_tokens(token)):
            return len(self.emitted)  # a run of byte tokens is decoded as a whole: wait for its end
        return len(text) - text.endswith(REPLACEMENT)  # one character may be unfinished: one U+FFFD

    def _shorten(self) -> None:
        """Drop old ids, keeping some that print: a decoder may treat the first text it is given differently."""
        kept = self.window[-8:]
        if context := self.tokenizer.decode(kept):
            self.window, self.emitted = kept, context


def _is_byte(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


class StopStrings:
    """Feed text; get what may be shown, and whether a stop string has ended it.

    The text ends before the stop string that is complete first; of two that complete with the same character, before
    the one that begins first. When no more text comes, `flush` gives what was held back.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held = tuple(stops), ""

    def push(self, delta: str) -> tuple[str, bool]:
        text = self.held + delta
        ends = [(at + len(s), at) for s in self.stops if (at := text.find(s)) >= 0]
        if ends:
            self.held = ""
            return text[: min(ends)[1]], True
        begin = max(0, len(text) - max(map(len, self.stops), default=0))
        while not any(s.startswith(text[begin:]) for s in self.stops) and begin < len(text):
            begin += 1
        self.held = text[begin:]
        return text[:begin], False

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held
