"""Checkpoints of any architecture of transformers, a few thousand random weights each.

A configuration's sizes are reduced by what their names mean; `EXACT` holds what some architectures
need besides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from fusionzoo.encoders.hf_image import VIDEO_TYPES
from fusionzoo.testing.encoders import WIDTH

SIDE = 64  # pixels of an image
TOKENS = 128  # longest text
WORDS = 200  # vocabulary
LARGEST = 30_000_000  # parameters of what is still called tiny
SIZES: tuple[tuple[str, int], ...] = (  # the first pattern that a name contains; never enlarged
    (r"token_(id|index)$|_id$", 7),
    (r"vocab_size", WORDS),
    (r"max_source_positions", 100),
    (r"^(max|n)_(position|seq)|positions$|max_position_embeddings|^n_ctx$|seq_length$", TOKENS),
    (r"^(image|img|input|crop)_size$", SIDE),
    (r"feat_extract_layers$", 99),
    (r"layers?$|^(depth|num_blocks|n_layer)|num_hidden_groups|_depth$", 2),
    (r"key_value_heads$|kv_heads$", 2),
    (r"heads?$", 2),
    (r"^(head_dim|d_kv|head_size|.*_head_dim|.*_head_size|qk_.*dim|v_head_dim)$", 16),
    (r"experts_per_tok", 2),
    (r"experts$|n_group$", 4),
    (r"intermediate|ffn|^d_ff$|^n_inner$|mlp_dim|feed_forward|d_inner", 64),
    (r"lora_rank$", 16),
    (
        r"(hidden|embed|embedding|model|proj|projection|encoder|output|out)_(size|dim)$|^d_model$",
        32,
    ),
    (r"^(n_embd|dim|hidden_dim|d_model|width|output_dim|emb_dim|embed_dim)$", 32),
)
LISTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"depths?$|num_blocks$|layers$", (1,)),
    (r"hidden_sizes|embed_dims|^dims$|widths", (16, 32, 48, 64, 80, 96, 96, 96)),
    (r"heads$|num_head$", (1,)),
    (r"conv_dim|tdnn_dim", (32,)),
    (r"(image|input|img)_size$", (SIDE,)),
)
LEFT_OUT = (  # what follows from the number of layers
    *("layer_types", "mlp_layer_types", "per_layer_config", "stage_names", "out_features"),
    *("out_indices", "transformers_version", "architectures"),
)
EXACT: dict[str, dict[str, Any]] = {  # settings by architecture, beside the general ones
    "bit": {"num_groups": 8, "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64]},
    "clap": {  # spectrograms of 32 bands and at most 32 frames
        "audio_config": {
            **{"patch_embeds_hidden_size": 8, "hidden_size": 16, "depths": [1, 1]},
            **{"num_attention_heads": [1, 2], "window_size": 4, "spec_size": 32},
            "num_mel_bins": 32,
        }
    },
    "canine": {"num_hash_buckets": 50},
    "cvt": {"depth": [1, 1, 2], "embed_dim": [16, 32, 32], "num_heads": [1, 1, 2]},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 64},
    "align": {
        "vision_config": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 64}
    },
    "esm": {"vocab_size": WORDS, "pad_token_id": 0, "mask_token_id": 4},
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "patchtst": {"num_input_channels": WIDTH},
    "patchtsmixer": {"num_input_channels": WIDTH},
    "funnel": {"block_sizes": [1, 1, 1], "block_repeats": [1, 1, 1], "d_head": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "reformer": {"axial_pos_shape": [4, 32], "axial_pos_embds_dim": [16, 16]},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "xlnet": {"d_head": 16, "n_head": 2, "d_model": 32},
}
HEADS = {"head_dim": 16, "num_key_value_heads": 2, "num_attention_heads": 2}
for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral"):
    EXACT[name] = HEADS
EXACT["nemotron"] = {"num_key_value_heads": 2}


def _small(name: str, value: Any) -> Any:
    """Return a setting's small value, or the value itself."""
    if isinstance(value, Mapping):
        return tiny_settings(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int) and value > 0:
        small = next((n for pattern, n in SIZES if re.search(pattern, name)), value)
        return min(value, small)
    if name == "mrope_section":
        return [2, 3, 3]  # of half of the 16 channels of a head
    is_list = isinstance(value, list | tuple) and value
    if is_list and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        sizes = next((s for pattern, s in LISTS if re.search(pattern, name)), None)
        if sizes is not None:
            return [min(x, sizes[min(i, len(sizes) - 1)]) for i, x in enumerate(value)]
    return value


def tiny_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the sizes among a configuration's settings, also of its parts."""
    small = {k: _small(k, v) for k, v in settings.items() if k not in LEFT_OUT}
    patch, side = small.get("patch_size"), small.get("image_size")
    if isinstance(patch, int) and isinstance(side, int):
        small["image_size"] = min(side // patch, 4) * patch or patch
    return small


def tiny_config(family: str) -> Any:
    """Build the small configuration of an architecture, `bert` or `vit`."""
    config = CONFIG_MAPPING[family]
    settings = tiny_settings(config().to_dict())
    for name, value in EXACT.get(family, {}).items():
        inner = settings.get(name)
        settings[name] = {**inner, **value} if isinstance(value, dict) and inner else value
    settings.pop("model_type", None)
    return config(**settings)


def tokenizer(config: Any) -> Any:
    """Build a tokenizer of words and letters whose special tokens are those of a configuration."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    text = getattr(config, "text_config", None) or config
    special: dict[str, int] = {}
    for name, default in (("pad", 0), ("bos", 2), ("eos", 3), ("unk", 4), ("mask", 5)):
        token = getattr(text, f"{name}_token_id", None)
        number = token if isinstance(token, int) and 0 <= token < 20 else default
        while number in special.values():
            number += 1
        special[f"<{name}>"] = number
    words = dict(special)
    free = (n for n in range(WORDS) if n not in special.values())
    for word in [
        "a",
        "cat",
        "red",
        "longer",
        "line",
        "of",
        "text",
        "and",
        *"bcdefghijklmnopqrstuvw",
    ]:
        words[word] = next(free)
    for number in list(free)[: max(words.values()) - len(words) + 1]:
        words[f"<{number}>"] = number
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.normalizer = normalizers.Lowercase()
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[(name, special[name]) for name in ("<bos>", "<eos>")],
    )
    names = {f"{name[1:-1]}_token": name for name in special}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, model_max_length=TOKENS, **names
    )


def model_class(family: str) -> Any:
    """Return the class that `AutoModel` builds of an architecture."""
    names = MODEL_MAPPING_NAMES[family]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def _processor_name(mapping: Mapping[str, Any], family: str) -> str | None:
    """Return the class that prepares an architecture's inputs, or a related one's."""
    part = re.sub("_(vision_model|vision|encoder|moe)$", "", family)
    for name in (family, part, family.replace("-", "_")):
        processor = mapping.get(name)
        if isinstance(processor, dict):
            processor = processor.get("torchvision") or next(iter(processor.values()))
        if isinstance(processor, list | tuple):
            processor = processor[-1] or processor[0]
        if processor:
            return str(processor)
    return None


def image_processor(family: str, config: Any) -> Any:
    """Build the architecture's own processor, or ViT's, for images of the configured size."""
    usual = "VideoMAEImageProcessor" if family in VIDEO_TYPES else "ViTImageProcessor"
    name = _processor_name(IMAGE_PROCESSOR_MAPPING_NAMES, family) or usual
    kind = getattr(transformers, name)
    default = kind()
    part = getattr(config, "vision_config", None) or getattr(config, "image_config", None) or config
    side = getattr(part, "image_size", None) or SIDE
    side = side[0] if isinstance(side, list | tuple) else side
    side = side if isinstance(side, int) and side > 0 else SIDE
    settings: dict[str, Any] = {
        name: value
        for name in ("patch_size", "temporal_patch_size", "merge_size")
        if getattr(default, name, None)
        and (value := getattr(part, name, None) or getattr(part, f"spatial_{name}", None))
    }
    size = dict(getattr(default, "size", None) or {})
    if set(size) == {"height", "width"}:
        settings["size"] = {"height": side, "width": side}
    elif set(size) == {"shortest_edge"}:
        settings["size"] = {"shortest_edge": side}
    if getattr(default, "crop_size", None):
        settings["crop_size"] = {"height": side, "width": side}
    return kind(**settings)


def feature_extractor(family: str, config: Any) -> Any:
    """Build the architecture's own feature extractor, or wav2vec 2.0's for waveforms."""
    name = _processor_name(FEATURE_EXTRACTOR_MAPPING_NAMES, family)
    if family in ("wav2vec2-bert", "seamless_m4t"):
        name = "SeamlessM4TFeatureExtractor"
    if name is None:
        reads_waves = model_class(family).main_input_name == "input_values"
        name = "Wav2Vec2FeatureExtractor" if reads_waves else "WhisperFeatureExtractor"
    options: dict[str, Any] = {}
    if name == "ASTFeatureExtractor":
        options = {"max_length": config.max_length}
    elif name == "WhisperFeatureExtractor":
        part = getattr(config, "audio_config", None) or config
        positions = getattr(part, "max_source_positions", 100)
        bands = getattr(part, "num_mel_bins", 80)
        options = {"chunk_length": max(1, positions // 50), "feature_size": bands}
    elif name == "ClapFeatureExtractor":
        options = {"truncation": "rand_trunc", "feature_size": 32, "hop_length": 512}
        options |= {"max_length_s": 1, "sampling_rate": 16_000, "frequency_max": 8000}
    return getattr(transformers, name)(**options)


def save(family: str, kinds: tuple[str, ...], folder: Path) -> Path:
    """Save a tiny model of an architecture with what prepares the inputs of `kinds`."""
    torch.manual_seed(0)
    config = tiny_config(family)
    if "text" in kinds:
        words = tokenizer(config)
        for part in (config, getattr(config, "text_config", None)):
            for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
                if part is not None and getattr(part, name, None) is not None:
                    setattr(part, name, getattr(words, name))
        words.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    if (count := sum(x.numel() for x in model.parameters())) > LARGEST:
        raise RuntimeError(f"not tiny: {count:,} parameters")
    model = transformers.AutoModel.from_config(config)
    for parameter in model.parameters():  # else some answer nearly the same to any input
        if parameter.is_floating_point():
            parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if "image" in kinds:
        image_processor(family, config).save_pretrained(folder)
    if "audio" in kinds:
        feature_extractor(family, config).save_pretrained(folder)
    return folder
