"""What users do with the Hub, against the stand-in; prints the outcome of each step as JSON.

A process of its own: huggingface_hub reads its settings when it is imported. Arguments: a scratch
folder, and the steps to run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import hub_stand_in as hub

SCRATCH = Path(sys.argv[1])
os.environ |= {
    "HF_ENDPOINT": hub.start(),
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HOME": str(SCRATCH / "cache"),
}

import torch  # noqa: E402
from huggingface_hub import constants  # noqa: E402

import fusionzoo as fz  # noqa: E402
from helpers import tiny_models  # noqa: E402

constants.DOWNLOAD_CHUNK_SIZE = 4096  # bytes; else a small file is kept whole or not at all
NAME = "me/stamps"


def model_of(classes: list[str]) -> fz.FusionModel:
    sentences = SCRATCH / "sentences"
    if not sentences.is_dir():
        sentences.mkdir()
        tiny_models.save_sentences(sentences)
    torch.manual_seed(len(classes))
    table = {"name": "vector/mlp", "kind": "vector", "in_dim": 3, "dim": 8}
    return fz.create_model(
        {"name": "gmu", "dim": 8}, {"text": f"hf/{sentences}", "table": table}, classes=classes
    )


def files(name: str = NAME, revision: str = "main") -> dict[str, bytes]:
    repo = hub.REPOS[name]
    found: dict[str, bytes] = repo["commits"][repo["branches"][revision]]
    return found


def edit(name: str, file: str, data: bytes) -> None:
    """Commit another content of a file, as somebody does on the Hub's pages."""
    repo = hub.REPOS[name]
    sha = hashlib.sha1(data + bytes(len(repo["commits"]))).hexdigest()
    repo["commits"][sha], repo["branches"]["main"] = {**files(name), file: data}, sha


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except fz.FusionZooError as error:
        return str(error)
    return ""


def same(a: fz.FusionModel, b: fz.FusionModel) -> bool:
    samples = [{"text": "a red cat", "table": [1.0, 2.0, 3.0]}, {"text": "a line"}]
    state, other = a.state_dict(), b.state_dict()
    weights = all(torch.equal(state[name], other[name]) for name in state)
    return weights and bool(a.eval().predict(samples) == b.predict(samples))


def forget_downloads() -> None:
    shutil.rmtree(SCRATCH / "cache")
    hub.LOG.clear()


def main() -> dict[str, Any]:
    says: dict[str, Any] = {}
    first, second = model_of(["a", "b"]), model_of(["a", "b", "c"])
    says["address"] = first.push_to_hub(NAME, token=hub.TOKEN)
    says["pushed"] = sorted(files())
    says["card"] = files()["README.md"].decode()
    says["leaks"] = [name for name, data in files().items() if str(SCRATCH).encode() in data]
    says["equal"] = same(first, fz.load(NAME)) and same(first, fz.FusionModel.from_pretrained(NAME))

    second.push_to_hub(NAME, token=hub.TOKEN, revision="three")
    says["branches"] = [len(fz.load(NAME, revision=x).classes) for x in ("main", "three")]
    second.push_to_hub(NAME, token=hub.TOKEN)
    says["pushed again"] = same(second, fz.load(NAME))
    says["card again"] = files()["README.md"].decode()
    edit(NAME, "README.md", b"My own words.")
    first.push_to_hub(NAME, token=hub.TOKEN)
    says["edited card"] = files()["README.md"].decode()
    says["own card"] = fz.load(NAME).readme

    says["missing"] = error_of(lambda: fz.load("me/nothing"))
    says["revision"] = error_of(lambda: fz.load(NAME, revision="four"))
    says["token"] = error_of(lambda: first.push_to_hub("me/other", token="hf_wrong"))
    first.push_to_hub("me/private", token=hub.TOKEN, private=True)
    says["private"] = error_of(lambda: fz.load("me/private", token=False))
    says["private with a token"] = same(first, fz.load("me/private", token=hub.TOKEN))

    forget_downloads()
    hub.CUT.add("model.safetensors")
    says["cut"] = same(first, fz.load(NAME))
    weights = [part for _, path, part in hub.LOG if path.endswith("model.safetensors")]
    says["parts"] = weights[1:]  # the first is a HEAD

    first.push_to_hub("me/tampered", token=hub.TOKEN)
    data = bytearray(files("me/tampered")["model.safetensors"])
    data[-1] ^= 1
    edit("me/tampered", "model.safetensors", bytes(data))
    says["tampered"] = error_of(lambda: fz.load("me/tampered"))
    listed = json.loads(files()["digests.json"])
    first.push_to_hub("me/code", token=hub.TOKEN)
    for file in ("text/model.py", "text/weights.bin", "../../out.json"):
        listed["files"][file] = "0" * 64
        edit("me/code", "digests.json", json.dumps(listed).encode())
        says[file] = error_of(lambda: fz.load("me/code"))
        del listed["files"][file]
    config = json.loads(files()["config.json"])
    config["plugins"] = ["evil.py"]
    edit("me/code", "config.json", json.dumps(config).encode())
    forget_downloads()
    says["plugins"] = error_of(lambda: fz.load("me/code"))
    says["read before"] = sorted({x.rpartition("/")[2] for m, x, _ in hub.LOG if "/resolve/" in x})
    fz.load(NAME)  # for the session without a network
    return says


def offline() -> dict[str, Any]:
    constants.HF_HUB_OFFLINE = True
    return {
        "equal": same(model_of(["a", "b"]), fz.load(NAME)),
        "unknown": error_of(lambda: fz.load("me/unknown")),
        "asked": hub.LOG,
    }


if __name__ == "__main__":
    print(json.dumps({"main": main, "offline": offline}[sys.argv[2]]()))
