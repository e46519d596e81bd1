"""``native``, compiled where a compiler is at hand: products of a few rows and their attention, on the CPU in fp32.

Nobody needs a compiler: without one, ``reason`` says so and callers go the way through torch. The library is made
once for a source, a compiler and a processor, and kept in eyas's cache, where only its owner may write.

Letters: R rows, K inputs, N outputs, D width of the residual stream, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from eyas.fetch import cache_root

SOURCE = Path(__file__).with_name("native") / "pass.c"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off")
PATIENCE = 120  # seconds; it takes two
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
FEW = 32  # rows from which on a matrix product library is the faster way
LANES = 8  # of the source: a head's width and a cache's capacity are multiples of it


class Linear(ctypes.Structure):
    """A weight [outputs, inputs] where it lies, its bias if it has one, and its scale if it is ``int8``."""

    _fields_ = (*((name, POINTER) for name in ("weight", "bias", "scale")), ("outputs", NUMBER), ("inputs", NUMBER))

    @classmethod
    def of(cls, module: nn.Linear) -> Linear:
        scale = address(buffer(module, "scale"))
        return cls(weight_of(module).data_ptr(), address(module.bias), scale, *module.weight.shape)


class Layer(ctypes.Structure):
    """A decoder layer: the gains of its norms (or none), its weights, and which of the sights is its own."""

    GAINS = ("before_attention", "query", "key", "after_attention", "before_mlp", "after_mlp")
    _fields_ = (
        *((name, POINTER) for name in GAINS),
        ("into", Linear * 3),
        ("out", Linear),
        ("rise", Linear * 2),
        ("fall", Linear),
        ("scaling", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


class Shape(ctypes.Structure):
    _fields_ = (*((name, NUMBER) for name in ("layers", "D", "H", "G", "E", "I", "gelu")), ("eps", ctypes.c_float))


class Sight(ctypes.Structure):
    """Cosines and sines [R, E] fp32, the first held column a row sees [R] int64, and which of the last ``tail`` columns
    [R, tail] bool, those of the pass itself among them."""

    _fields_ = (*((name, POINTER) for name in ("cos", "sin", "first", "seen")), ("tail", NUMBER))

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, first: Tensor, seen: Tensor) -> Sight:
        return cls(cos.data_ptr(), sin.data_ptr(), first.data_ptr(), seen.data_ptr(), seen.shape[1])


class Cache(ctypes.Structure):
    """Keys and values [layers, G, capacity, E], of which ``held`` columns are there."""

    _fields_ = (("keys", POINTER), ("values", POINTER), ("held", NUMBER), ("capacity", NUMBER))

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, held: int) -> Cache:
        return cls(keys.data_ptr(), values.data_ptr(), held, keys.shape[2])


class Beside(ctypes.Structure):
    """Rows [R, D] that come to the first layer beside x, and the gain of their norm [D]; or nothing."""

    _fields_ = (("rows", POINTER), ("gain", POINTER))


class Outlet(ctypes.Structure):
    """Where taps, states and logits go: the column each of layers + 1 taps begins at or -1, taps [R, tap_width], the
    last norm's gain [D], states [R, D]; the head and logits [R - first_asked, W], or none."""

    _fields_ = (
        ("tapped", POINTER),
        ("taps", POINTER),
        ("tap_width", NUMBER),
        *((name, POINTER) for name in ("gain", "states", "head", "logits")),
        ("first_asked", NUMBER),
    )


NOTHING = Beside()


class Kernel:
    """The compiled functions. Tensors are contiguous fp32 on the CPU, and live as long as a structure points at them;
    who calls has seen to that."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear, self._pass = library.eyas_linear, library.eyas_pass
        self._linear.argtypes = [POINTER, POINTER, POINTER, NUMBER, NUMBER]
        self._pass.argtypes = [*[POINTER] * 8, NUMBER, NUMBER]
        self._linear.restype = self._pass.restype = None

    def linear(self, of: Linear, x: Tensor) -> Tensor:
        """x [R, inputs] -> [R, outputs]."""
        R = x.shape[0]
        y = x.new_empty(R, of.outputs)
        self._linear(ctypes.addressof(of), x.data_ptr(), y.data_ptr(), R, torch.get_num_threads())
        return y

    def forward(
        self,
        shape: Shape,
        layers: ctypes.Array[Layer],
        sights: ctypes.Array[Sight],
        x: Tensor,
        cache: Cache,
        outlet: Outlet,
        scratch: Tensor,
        beside: Beside = NOTHING,
    ) -> None:
        """Rows ``x`` [R, D] through all layers, in place; their keys and values join the cache after what is held.

        ``scratch``: R * ``scratch_floats`` or more.
        """
        self._pass(
            ctypes.addressof(shape),
            ctypes.addressof(layers),
            ctypes.addressof(sights),
            x.data_ptr(),
            ctypes.addressof(beside),
            ctypes.addressof(cache),
            ctypes.addressof(outlet),
            scratch.data_ptr(),
            x.shape[0],
            torch.get_num_threads(),
        )


def scratch_floats(shape: Shape, capacity: int) -> int:
    """What one row of a pass needs."""
    wide = max(shape.D, (shape.H + 2 * shape.G) * shape.E)
    return int(2 * wide + 3 * shape.I + shape.H * capacity + torch.get_num_threads() * 2 * shape.D)


def weight_of(module: nn.Linear) -> Tensor:
    """What a pass reads of it."""
    whole = buffer(module, "whole")
    return module.weight if whole is None else whole


def buffer(module: nn.Module, name: str) -> Tensor | None:
    return module._buffers.get(name)


def address(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None


@cache
def load() -> tuple[Kernel | None, str | None]:
    """The kernel, or None and why there is none."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if platform.system() != "Linux":
        return None, f"the fast kernel is for Linux, not {platform.system()}"
    if compiler is None:
        return None, f"no C compiler ({', '.join(COMPILERS)}) to make the fast kernel with"
    try:
        kernel = Kernel(ctypes.CDLL(str(compiled(compiler))))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        worst = next((line for line in said if "error" in line), said[0] if said else "no word of why")
        return None, f"{compiler} could not make the fast kernel: {worst}"
    return (kernel, None) if sound(kernel) else (None, f"what {compiler} made of the fast kernel computes wrongly")


def compiled(compiler: str) -> Path:
    """The library's file, made if it is not there."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=True)
    sources = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    made_of = "\0".join((*sources, " ".join(FLAGS), version.stdout, processor()))
    folder = cache_root() / "kernels"
    library = folder / f"{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.so"
    if library.is_file() and owned(library):
        return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", name], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        os.chmod(name, 0o700)  # whatever the umask: a file that others may write is not loaded
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)
    return library


def owned(library: Path) -> bool:
    """Whether nobody else could have put this file there."""
    told = library.stat()
    return told.st_uid == os.getuid() and not told.st_mode & 0o022


def processor() -> str:
    """What ``-march=native`` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), *sorted(set(told))])


def sound(kernel: Kernel) -> bool:
    """A look at the numbers before they are trusted."""
    layer = nn.Linear(37, 19)
    x = torch.linspace(-1, 1, 7 * 37).view(7, 37)
    with torch.no_grad():
        return torch.allclose(kernel.linear(Linear.of(layer), x), layer(x), atol=1e-4)
