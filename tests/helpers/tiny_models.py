"""Tiny Hugging Face checkpoints with random weights, saved to folders as libraries save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ["<pad>", "<unk>", "<s>", "</s>", "a", "cat", "line", "longer", "much", "red", "text", "to"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**SMALL, "vocab_size": 16, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
VISION = {**SMALL, "image_size": 32, "patch_size": 16}
AUDIO = {  # CLAP's Swin transformer, for spectrograms of 32 bands
    **{"patch_embeds_hidden_size": 8, "hidden_size": 16, "depths": [1, 1]},
    **{"num_attention_heads": [1, 2], "window_size": 4, "spec_size": 32, "num_mel_bins": 32},
}


def tokenizer() -> Any:
    """Build a tokenizer of whole words that starts and ends each text with a token."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=20, **special)


def _save(folder: Path, family: str, settings: dict[str, Any]) -> None:
    """Save a model of a type of transformers'."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModel.from_config(config)
    for parameter in model.parameters():  # else some answer nearly the same to any input
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def save_clip(folder: Path) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    size = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    text = {**TEXT, "max_position_embeddings": 20}
    config = CLIPConfig(text_config=text, vision_config=VISION, projection_dim=12)
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(**size).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_siglip(folder: Path) -> Path:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    torch.manual_seed(0)
    text = {**TEXT, "max_position_embeddings": 24, "projection_size": 16}
    SiglipModel(SiglipConfig(text_config=text, vision_config=VISION)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_clap(folder: Path, fused: bool = False) -> Path:
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

    torch.manual_seed(0)
    text = {**TEXT, "max_position_embeddings": 22}
    audio = {**AUDIO, "enable_fusion": fused, "fusion_type": "aff_2d" if fused else None}
    config = ClapConfig(text_config=text, audio_config=audio, projection_dim=12)
    ClapModel(config).save_pretrained(folder)
    settings = {"feature_size": 32, "sampling_rate": 16_000, "max_length_s": 1, "hop_length": 512}
    settings |= {"frequency_max": 8000, "truncation": "fusion" if fused else "rand_trunc"}
    ClapFeatureExtractor(**settings).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


POSITIONS = {"max_position_embeddings": 24}
EFFICIENT = {"image_size": 32, "width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 32}
JOINT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the text and the image
    "chinese_clip": ({**TEXT, **POSITIONS}, VISION),
    "blip": ({**TEXT, **POSITIONS, "encoder_hidden_size": 16, "projection_dim": 12}, VISION),
    "flava": ({**TEXT, **POSITIONS}, VISION),
    "aimv2": ({**TEXT, **POSITIONS}, VISION),
    "tipsv2": ({**TEXT, **POSITIONS}, VISION),
    "align": ({**TEXT, **POSITIONS}, EFFICIENT),
    "owlvit": ({**TEXT, **POSITIONS}, VISION),
    "siglip2": (
        {**TEXT, **POSITIONS, "projection_size": 16},
        {**SMALL, "patch_size": 16, "num_patches": 16},
    ),
}


def save_joint(folder: Path, family: str) -> Path:
    """Save a joint model of a type whose towers transformers' `get_*_features` run."""
    import transformers

    text, vision = JOINT[family]
    parts = {"text_config": text, "vision_config": vision, "projection_dim": 12}
    if family == "flava":
        parts["image_config"] = parts.pop("vision_config")
        parts["multimodal_config"] = SMALL
    _save(folder, family, parts)
    prepares = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    if family == "siglip2":  # patches of pictures that keep their shape
        prepares = transformers.Siglip2ImageProcessor(patch_size=16, max_num_patches=12)
    prepares.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_qwen_vl(folder: Path) -> Path:
    """Save a model of pictures and language, which cuts each picture into patches of its own."""
    import transformers

    torch.manual_seed(0)
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 8, "hidden_size": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**TEXT, "num_key_value_heads": 2, "rope_parameters": rope}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=9, video_token_id=10
    )
    transformers.Qwen2VLModel(config).save_pretrained(folder)
    sizes = {"patch_size": 8, "min_pixels": 32 * 32, "max_pixels": 64 * 64}
    transformers.Qwen2VLImageProcessor(**sizes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_whisper(folder: Path) -> Path:
    from transformers import WhisperConfig, WhisperModel

    torch.manual_seed(0)
    settings = {"d_model": 16, "vocab_size": 60, "pad_token_id": 0, **HALF, **OTHER}
    WhisperModel(WhisperConfig(**settings | {"encoder_layers": 2})).save_pretrained(folder)
    return folder


HALF = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
OTHER = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
MELS = {"num_mel_bins": 16, "subsampling_conv_channels": 8}
SOUND: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {  # settings, extractor, its own
    "moonshine": (
        {
            **{"hidden_size": 16, "intermediate_size": 16, "vocab_size": 60},
            **{f"{x}_num_hidden_layers": 1 for x in ("encoder", "decoder")},
            **{f"{x}_num_attention_heads": 2 for x in ("encoder", "decoder")},
            **{f"{x}_num_key_value_heads": 2 for x in ("encoder", "decoder")},
        },
        *("Wav2Vec2FeatureExtractor", {}),
    ),
    "parakeet_encoder": (
        {**SMALL, **MELS, "num_key_value_heads": 2},
        *("ParakeetFeatureExtractor", {"feature_size": 16}),
    ),
    "lasr_encoder": (
        {**SMALL, **MELS, "num_key_value_heads": 2},
        *("LasrFeatureExtractor", {"feature_size": 16}),
    ),
    "wav2vec2-bert": (
        {**SMALL, "feature_projection_input_dim": 160, "output_hidden_size": 16},
        *("SeamlessM4TFeatureExtractor", {}),
    ),
    "wav2vec2": (
        {**SMALL, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16},
        *("Wav2Vec2FeatureExtractor", {}),
    ),
    "speech_to_text": (
        {**HALF, **OTHER, "d_model": 16, "vocab_size": 60, "conv_channels": 16},
        *("Speech2TextFeatureExtractor", {}),
    ),
    "encodec": (
        {"hidden_size": 16, "num_filters": 2, "codebook_size": 16, "num_lstm_layers": 1},
        *("EncodecFeatureExtractor", {}),
    ),
    "qwen3_asr_encoder": (
        {**HALF, "d_model": 16, "downsample_hidden_size": 8, "output_dim": 16},
        *("Qwen3ASRFeatureExtractor", {}),
    ),
    "audioflamingo3_encoder": (
        {
            **{"hidden_size": 16, "num_mel_bins": 80, "max_source_positions": 100},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        },
        *("WhisperFeatureExtractor", {"chunk_length": 2}),
    ),
    "qwen2_audio": (  # what hears, beside a language model
        {
            "audio_config": {
                **{"model_type": "qwen2_audio_encoder", "d_model": 16, "num_mel_bins": 80},
                **{"max_source_positions": 100, **HALF},
            },
            "text_config": {"model_type": "qwen2", **TEXT, "num_key_value_heads": 2},
        },
        *("WhisperFeatureExtractor", {"chunk_length": 2}),
    ),
    "speecht5": ({**SMALL, **HALF, **OTHER, "vocab_size": 60}, *("Wav2Vec2FeatureExtractor", {})),
}


def save_sound(folder: Path, family: str) -> Path:
    """Save a model of audio whose features are as long as the clip, or that needs their mask."""
    import transformers

    settings, extractor, options = SOUND[family]
    _save(folder, family, settings)
    getattr(transformers, extractor)(**options).save_pretrained(folder)
    return folder


def save_vit(folder: Path) -> Path:
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(0)
    ViTModel(ViTConfig(**VISION)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def save_dinov2(folder: Path) -> Path:
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**VISION, mlp_ratio=1)).save_pretrained(folder)
    size = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    BitImageProcessor(**size).save_pretrained(folder)
    return folder


FRAMES = {"image_size": 32, "patch_size": 16}
VIDEO: dict[str, tuple[dict[str, Any], str]] = {  # settings, and the class of the processor
    "videomae": ({**SMALL, **FRAMES, "num_frames": 4}, "VideoMAEImageProcessor"),
    "timesformer": ({**SMALL, **FRAMES, "num_frames": 4}, "VideoMAEImageProcessor"),
    "vivit": (
        *({**SMALL, **FRAMES, "num_frames": 4, "tubelet_size": [2, 16, 16]}, "VivitImageProcessor"),
    ),
    "vjepa2": (
        {
            **{"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1},
            **{"crop_size": 32, "patch_size": 16, "frames_per_clip": 4},
            **{f"pred_{x}": 1 for x in ("num_hidden_layers", "mlp_ratio")},
            **{"pred_hidden_size": 24, "pred_num_attention_heads": 2},
        },
        "VJEPA2VideoProcessor",
    ),
    "videoprism_vision_model": (
        {
            **{**SMALL, "image_size": 32, "num_frames": 4, "tubelet_size": [1, 16, 16]},
            **{"num_spatial_layers": 1, "num_temporal_layers": 1},
        },
        "LlavaOnevisionVideoProcessor",
    ),
}


def save_video(folder: Path, family: str, processor: str = "") -> Path:
    """Save a model that reads clips of 4 frames of 32 x 32."""
    import transformers

    settings, name = VIDEO[family]
    _save(folder, family, settings)
    side = {"height": 32, "width": 32}
    size = {"size": {"shortest_edge": 36}, "crop_size": side}
    size = {"size": side} if name.startswith("Llava") else size
    getattr(transformers, processor or name)(**size).save_pretrained(folder)
    return folder


def save_sentences(
    folder: Path, pooling: str = "mean_tokens", dense: int | None = 10, **settings: Any
) -> Path:
    """Save a tiny BERT as sentence-transformers does, with a dense layer and normalisation."""
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(**SMALL, vocab_size=16, pad_token_id=0)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Dense", "Dense")] * bool(dense) + [("3_Normalize", "Normalize")]
    library = "sentence_transformers.models"
    listed = [{"path": path, "type": f"{library}.{kind}"} for path, kind in modules]
    files: dict[str, Any] = {
        "modules.json": [{"idx": i, "name": str(i), **x} for i, x in enumerate(listed)],
        "1_Pooling/config.json": {
            **{"word_embedding_dimension": 16, "pooling_mode_mean_tokens": False},
            f"pooling_mode_{pooling}": True,
        },
        "sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": False, **settings},
    }
    if dense:
        activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
        facts = {"in_features": 16, "out_features": dense, "bias": True, **activation}
        files["2_Dense/config.json"] = facts
    for name, contents in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(contents))
    if dense:
        weights = {"linear.weight": torch.randn(dense, 16), "linear.bias": torch.randn(dense)}
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    return folder


def save_series(folder: Path, family: str, num_channels: int = 5, **changes: Any) -> Path:
    """Write a tiny model of time series that reads 16 steps in patches of 4."""
    import transformers

    patches = {"context_length": 16, "patch_length": 4}
    window = {**patches, "patch_stride": 4, "num_input_channels": num_channels, "d_model": 8}
    attention = {"num_hidden_layers": 1, "num_attention_heads": 2}
    single = {**patches, **attention, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    names: dict[str, tuple[str, dict[str, Any]]] = {
        "patchtst": ("PatchTST", {**window, **attention, "ffn_dim": 8}),
        "patchtsmixer": ("PatchTSMixer", {**window, "num_layers": 1}),
        "timesfm": ("TimesFm", single),
        "timesfm2_5": ("TimesFm2_5", {**single, "num_key_value_heads": 2}),
    }
    name, settings = names[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings | changes)
    getattr(transformers, f"{name}Model")(config).save_pretrained(folder)
    return folder


PICTURE = {"image_size": 32, "patch_size": 16, "width": 16, "head_width": 8, "layers": 2}
LINES = {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
WORDED = {**LINES, "vocab_size": 16, "hf_tokenizer_name": "me/words"}
OPEN_CLIP: dict[str, dict[str, Any]] = {  # model_cfg by what is special
    "clip": {"vision_cfg": PICTURE, "text_cfg": LINES, "quick_gelu": True},
    "siglip": {
        "vision_cfg": {**PICTURE, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": {
            **WORDED,
            **{"no_causal_mask": True, "pool_type": "last", "proj_bias": True},
            "tokenizer_kwargs": {"clean": "canonicalize"},
        },
        "custom_text": True,
    },
    "coca": {
        "vision_cfg": {
            **PICTURE,
            **{"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
            "attn_pooler_queries": 5,
        },
        "text_cfg": {**LINES, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {"context_length": 20, "width": 16, "heads": 2, "layers": 1},
        "custom_text": True,
    },
    "resnet": {
        "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8},
        "text_cfg": LINES,
    },
    "timm": {"vision_cfg": {"timm_model_name": "test_resnet", "image_size": 64}, "text_cfg": LINES},
    "bert": {
        "vision_cfg": {"timm_model_name": "test_vit", "image_size": 160, "timm_pool": "token"},
        "text_cfg": {
            **{"hf_model_name": "bert-base-uncased", "hf_tokenizer_name": "bert-base-uncased"},
            **{"hf_pooler_type": "cls_last_hidden_state_pooler", "hf_proj_type": "mlp"},
            "context_length": 20,
        },
    },
}


def save_open_clip(folder: Path, name: str) -> Path:
    """Save a tiny model as open_clip does; one with a BERT lies beside its configuration."""
    import open_clip
    from open_clip.push_to_hf_hub import save_for_hf
    from transformers import BertConfig

    torch.manual_seed(0)
    config = {"embed_dim": 12, **OPEN_CLIP[name]}
    folder.mkdir()
    settings = json.loads(json.dumps(config))
    if name == "bert":
        BertConfig(**TEXT, max_position_embeddings=20).save_pretrained(folder)
        settings["text_cfg"] |= {"hf_model_name": str(folder), "hf_model_pretrained": False}
    is_custom = settings.pop("custom_text", name == "bert")
    kinds = {(True, True): "CoCa", (True, False): "CustomTextCLIP", (False, False): "CLIP"}
    model = getattr(open_clip, kinds[is_custom, "multimodal_cfg" in settings])(**settings)
    squash = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": "squash"}
    prepared = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
    open_clip.set_model_preprocess_cfg(model, squash if name == "siglip" else prepared)
    for parameter in model.parameters():  # else some answer nearly the same to any input
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_for_hf(model, tokenizer(), config, str(folder), safe_serialization=True)
    if "hf_tokenizer_name" not in config["text_cfg"]:
        for path in folder.glob("tokenizer*"):  # its own needs no file
            path.unlink()
    return folder
