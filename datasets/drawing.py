"""Render SVG drawings in a process of their own, for its library aborts on some of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec

from fusionzoo.errors import FusionZooError

SVG_SIDE = 512  # pixels of the longer side that a drawing is rendered at
MOST_MEMORY = 2 << 30  # bytes that rendering may take
MOST_SECONDS = 10  # of CPU time

# A pattern, mask or filter region may be of any size, whatever the picture's: the Rust library then
# fails to allocate and ends its process. Limits make that happen early, and only in this one.
RENDER = """
import sys
side, memory, seconds = map(int, sys.argv[1:])
try:
    import resource
except ImportError:  # Windows has no such limits
    pass
else:
    for kind, most in (("AS", memory), ("CPU", seconds), ("CORE", 0)):
        kind = getattr(resource, "RLIMIT_" + kind)
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(kind, (most, hard))
import resvg_py
try:
    text = sys.stdin.buffer.read().decode()
    picture = bytes(resvg_py.svg_to_bytes(svg_string=text, width=side, height=side))
except BaseException as error:  # a panic in Rust is no Exception
    sys.exit(" ".join(str(error).split()))
sys.stdout.buffer.write(picture)
"""


def render(data: bytes, path: str) -> bytes:
    """Draw an SVG: return a PNG whose longer side is `SVG_SIDE`."""
    if find_spec("resvg_py") is None:
        raise FusionZooError(f"{path}: drawings need an extra: pip install 'fusionzoo[svg]'")
    limits = [str(x) for x in (SVG_SIDE, MOST_MEMORY, MOST_SECONDS)]
    command = [sys.executable, "-P", "-c", RENDER, *limits]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=30 * MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise _too_much(path, f"{30 * MOST_SECONDS} s") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode == -signal.SIGXCPU:
        raise _too_much(path, f"{MOST_SECONDS} s of CPU time")
    if done.returncode < 0:
        raise _too_much(path, f"{MOST_MEMORY >> 30} GiB of memory")
    reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise FusionZooError(f"{path} is no drawing that can be read: {' '.join(reason)}")


def _too_much(path: str, what: str) -> FusionZooError:
    return FusionZooError(
        f"{path} takes more than {what} to draw: simplify it (huge patterns, masks or filter"
        " regions), or store it as a PNG"
    )
