"""The helpers beside these tests are importable, and an interpreted kernel gets ready once."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from minserve.kernels import INTERPRETED

if INTERPRETED:
    # At every call of a function the interpreter puts its own operations into Triton's modules, and takes them out
    # after every kernel: a third of these tests' time. Here nothing else uses the modules, so they stay in.
    from triton.runtime import interpreter

    def put_in(fn, into=interpreter._patch_lang):
        scope = into(fn)
        scope.restore = lambda: None
        return scope

    interpreter._patch_lang = functools.cache(put_in)
