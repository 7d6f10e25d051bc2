"""What the files of a sentence-transformers folder say of pooling and of the layers after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError

from ._hugging_face import find_file, read_json

MODES = ("mean", "cls", "max", "last", "mean_sqrt_len", "weighted_mean")
LIBRARY_MODES = {  # names in `1_Pooling/config.json`, those of older versions last
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "lasttoken": "last",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU")
# Names that sentence-transformers gave the settings of its transformer over the years.
SETTINGS_FILES = [
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
MOST_MODULES = 16
MOST_FEATURES = 1 << 16  # width of a dense layer


@dataclass(frozen=True)
class SentenceConfig:
    """How a sentence-transformers folder prepares texts and pools the transformer's output."""

    transformer: str  # folder within the folder, often empty
    pooling: str  # of `MODES`
    stages: tuple[tuple[str, Mapping[str, Any]], ...]  # after pooling: type and settings
    stage_folders: tuple[str, ...]
    max_length: int | None
    lower_case: bool
    prompt: str  # put before each text

    @property
    def facts(self) -> dict[str, Any]:
        """What determines the features beside the weights, for the key of cached features."""
        stages = [[name, dict(settings)] for name, settings in self.stages]
        facts = {"pooling": self.pooling, "stages": stages, "max_length": self.max_length}
        return facts | {"lower_case": self.lower_case, "prompt": self.prompt}


def read_sentence_config(source: str) -> SentenceConfig | None:
    """Read `modules.json` and what it names; None where a model has no such file."""
    file = find_file(source, "modules.json")
    if file is None:
        return None
    modules = _modules(file)
    if [name for name, _ in modules[:2]] != ["Transformer", "Pooling"]:
        raise FusionZooError(
            f"{file}: only a Transformer followed by Pooling is supported, found"
            f" {' -> '.join(name for name, _ in modules)}"
        )
    settings: dict[str, Any] = {}
    for name in SETTINGS_FILES:
        path = find_file(source, f"{modules[0][1]}/{name}".lstrip("/"))
        if path is not None:
            settings = _mapping(path)
            break
    pooling = _required(source, modules[1][1], file)
    prompt = _prompt(source)
    if prompt and _mapping(pooling).get("include_prompt") is False:
        raise FusionZooError(f"{pooling}: include_prompt=false is not supported")
    length = settings.get("max_seq_length")
    return SentenceConfig(
        modules[0][1],
        _pooling(pooling),
        tuple((name, _stage(source, name, folder, file)) for name, folder in modules[2:]),
        tuple(folder for _, folder in modules[2:]),
        length if isinstance(length, int) and length > 0 else None,
        bool(settings.get("do_lower_case")),
        prompt,
    )


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return type and folder of each module; folders lie below the model's."""
    listed = read_json(file)
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_MODULES:
        raise FusionZooError(f"{file} must list 1 to {MOST_MODULES} modules")
    modules = []
    for module in listed:
        fields = module if isinstance(module, dict) else {}
        kind, folder = fields.get("type"), fields.get("path", "")
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise FusionZooError(f"{file}: a module must have a type and a path, found {module!r}")
        if Path(folder).is_absolute() or ".." in Path(folder).parts or "\0" in folder:
            raise FusionZooError(f"{file}: path {folder!r} leaves the folder")
        modules.append((kind.rpartition(".")[2], folder))
    return modules


def _mapping(path: Path) -> dict[str, Any]:
    contents = read_json(path)
    if not isinstance(contents, dict):
        raise FusionZooError(f"{path} must hold a JSON object")
    return contents


def _required(source: str, folder: str, file: Path) -> Path:
    path = find_file(source, f"{folder}/config.json".lstrip("/"))
    if path is None:
        raise FusionZooError(f"{file} names {folder!r}, and {folder}/config.json is missing")
    return path


def _prompt(source: str) -> str:
    path = find_file(source, "config_sentence_transformers.json")
    config = {} if path is None else _mapping(path)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    return prompt if isinstance(prompt, str) else ""


def _pooling(path: Path) -> str:
    """Return the pooling of a `1_Pooling/config.json`, in any version's form."""
    config = _mapping(path)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [key for key in LIBRARY_MODES if config.get(key) is True]
    modes = modes if isinstance(modes, list) else [modes]
    known = [LIBRARY_MODES[mode] for mode in modes if mode in LIBRARY_MODES]
    if len(known) == len(modes) == 1:
        return known[0]
    raise FusionZooError(
        f"{path}: pooling by {' and '.join(map(str, modes)) or 'nothing'} is not supported:"
        f" pooling= one of {', '.join(MODES)} pools without the folder's own layers"
    )


def _stage(source: str, kind: str, folder: str, file: Path) -> Mapping[str, Any]:
    """Return the settings of a module after pooling."""
    if kind == "Normalize":
        return {}
    if kind != "Dense":
        raise FusionZooError(
            f"{file}: a module {kind} is not supported, only Dense and Normalize; pooling=mean"
            " pools without the folder's own layers"
        )
    path = _required(source, folder, file)
    config = _mapping(path)
    sizes = [config.get(key) for key in ("in_features", "out_features")]
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if not all(isinstance(size, int) and 0 < size <= MOST_FEATURES for size in sizes):
        raise FusionZooError(f"{path}: in_features and out_features must be 1 to {MOST_FEATURES}")
    elsewhere = {config.get(f"module_{x}put_name") for x in ("in", "out")} - {
        *(None, "sentence_embedding")
    }
    if activation not in ACTIVATIONS or config.get("use_residual") or elsewhere:
        raise FusionZooError(
            f"{path}: only a plain layer with one of {', '.join(ACTIVATIONS)} is supported"
        )
    bias = bool(config.get("bias", True))
    names = ("in_features", "out_features", "bias", "activation_function")
    return dict(zip(names, (*sizes, bias, activation), strict=True))
