"""Formats of images, audio, video, text and arrays: suffixes, first bytes, how to convert."""

from __future__ import annotations

import shlex
from pathlib import PurePath

READ = {"image": "PNG, JPEG, WEBP, GIF, BMP, TIFF and SVG", "audio": "WAV, FLAC, OGG and MP3"}
TARGETS = {"image": ".png", "audio": ".flac"}
BRANDS = {  # of ISO media files: bytes 4 to 12
    **dict.fromkeys((b"ftypheic", b"ftypheix", b"ftypmif1", b"ftyphevc"), "HEIC"),
    **dict.fromkeys((b"ftypavif", b"ftypavis"), "AVIF"),
    **dict.fromkeys((b"ftypM4A ", b"ftypM4B "), "M4A"),
}
MAGIC = {
    b"\x1a\x45\xdf\xa3": "WEBM or MKV",
    b"%PDF": "PDF",
    b"%!PS": "PostScript",
    b"8BPS": "PSD",
    b"\x00\x00\x00\x0cjP": "JPEG 2000",
    b"\xff\x0a": "JPEG XL",
    b"PK\x03\x04": "ZIP",
    b"\x1f\x8b": "gzip",
    b"FORM": "AIFF",
    b"\x30\x26\xb2\x75": "WMA or ASF",
    b"#!AMR": "AMR",
    b"<html": "HTML",
    b"<!DOCTYPE html": "HTML",
    b"<!doctype html": "HTML",
}
IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg"}
CLIPS = {".wav", ".flac", ".ogg", ".oga", ".mp3"}
TEXTS = {".txt"}
ARRAYS = {".npy"}
VIDEOS = {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ogv"}
SUFFIXES = {"image": IMAGES, "audio": CLIPS, "text": TEXTS, "vector": ARRAYS, "sequence": ARRAYS}


def format_of(data: bytes) -> str:
    """Return the name of a format that is not read, from a file's first bytes, or nothing.

    >>> format_of(b"\\0\\0\\0\\x18ftypheic")
    'HEIC'
    """
    if data[4:8] == b"ftyp":
        return BRANDS.get(data[4:12], "MP4")
    if data.startswith((b"\xff\xf1", b"\xff\xf9")):
        return "AAC"
    return next((name for magic, name in MAGIC.items() if data.startswith(magic)), "")


def is_audio(data: bytes) -> bool:
    """Return whether a file starts like WAV, FLAC, OGG or MP3.

    >>> is_audio(b"fLaC"), is_audio(b"junk")
    (True, False)
    """
    is_mp3 = data[:1] == b"\xff" and data[1:2] >= b"\xe0" and not format_of(data)
    return is_mp3 or data.startswith((b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"ID3"))


def how_to_convert(kind: str, name: str, data: bytes) -> str:
    """Return ` (it is HEIC): fusionzoo reads ...; convert it: ffmpeg ...` by first bytes."""
    known = format_of(data)
    path = PurePath(name)
    source = name if path.suffix else "input"
    target = str(path.with_suffix(TARGETS[kind])) if path.suffix else f"output{TARGETS[kind]}"
    if target == source:
        target = str(path.with_name(f"{path.stem}-converted{TARGETS[kind]}"))
    command = f"ffmpeg -i {shlex.quote(source)} {shlex.quote(target)}"
    guess = f" (it is {known})" if known else ""
    return f"{guess}; {READ[kind]} are read; convert it: {command}"
