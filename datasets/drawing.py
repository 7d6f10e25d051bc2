"""Render SVG drawings in a separate process, as the library aborts on some of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec

from fusionzoo.errors import FusionZooError

SVG_SIDE = 512  # pixels of the rendered drawing's longer side
MAX_MEMORY = 2 << 30  # bytes
MAX_SECONDS = 10  # of CPU time

# The library opens files that a drawing refers to, wherever they are: such drawings are refused.
# Patterns, masks and filter regions may be huge, whatever the drawing's size: the Rust library then
# fails to allocate memory and aborts its process. The limits make that happen early.
RENDER = """
import sys
side, memory, seconds = map(int, sys.argv[1:])
try:
    import resource
except ImportError:  # Windows has no such limits
    pass
else:
    for kind, limit in (("AS", memory), ("CPU", seconds), ("CORE", 0)):
        kind = getattr(resource, "RLIMIT_" + kind)
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(kind, (limit, hard))
import re
import resvg_py
from xml.etree import ElementTree
try:
    text = sys.stdin.buffer.read().decode()
    for element in ElementTree.fromstring(text).iter():
        for name, value in element.attrib.items():
            link = value.strip()
            if name.rpartition("}")[2] == "href" and not re.match("#|data:|$", link):
                if element.tag.rpartition("}")[2] != "a":  # where a click would lead
                    raise ValueError(f"it refers to the file {link[:80]!r}: embed it instead")
    image = bytes(resvg_py.svg_to_bytes(svg_string=text, width=side, height=side))
except BaseException as error:  # a panic in Rust is not an Exception
    sys.exit(" ".join(str(error).split()))
sys.stdout.buffer.write(image)
"""


def render(data: bytes, path: str) -> bytes:
    """Render an SVG as a PNG whose longer side is `SVG_SIDE`."""
    if find_spec("resvg_py") is None:
        raise FusionZooError(f"{path}: drawings need an extra: pip install 'fusionzoo[svg]'")
    limits = [str(x) for x in (SVG_SIDE, MAX_MEMORY, MAX_SECONDS)]
    command = [sys.executable, "-P", "-c", RENDER, *limits]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=30 * MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise _too_costly(path, f"{30 * MAX_SECONDS} s") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode == -signal.SIGXCPU:
        raise _too_costly(path, f"{MAX_SECONDS} s of CPU time")
    if done.returncode < 0:
        raise _too_costly(path, f"{MAX_MEMORY >> 30} GiB of memory")
    reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise FusionZooError(f"{path} cannot be read as a drawing: {' '.join(reason)}")


def _too_costly(path: str, limit: str) -> FusionZooError:
    return FusionZooError(
        f"{path} takes more than {limit} to render: simplify it (huge patterns, masks or filter"
        " regions), or store it as a PNG"
    )
