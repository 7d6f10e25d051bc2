"""The encoding of text that is not UTF-8: the one that its words show, or those that they allow."""

# ruff: noqa: RUF001 - quotation marks and dashes are meant

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

# Each stands for its subsets (cp1252 for latin-1, gb18030 for gbk, cp932 for shift_jis, cp949 for
# euc_kr). Of those that read a text alike the first is named, and ties go to cp1252.
CANDIDATES = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp874"),
    *("cp932", "euc_jp", "gb18030", "big5", "big5hkscs", "cp949", "koi8_r", "koi8_u"),
    *("iso8859_2", "iso8859_5", "iso8859_6", "iso8859_7", "iso8859_8", "iso8859_9", "iso8859_15"),
    *("mac_roman", "mac_cyrillic", "cp850", "cp437", "cp852", "cp866", "cp737", "cp862"),
)
# Letters besides a to z of languages in Latin letters, and those of usual loans.
ALPHABETS = (
    *("àâæçéèêëîïôœùûüÿ", "äöüßé", "áéíóúüñ", "àçèéíïòóúü", "áâãàçéêíóôõúü", "àèéìíîòóùú"),
    *("éëïóöüèê", "åäöéü", "åäöšž", "æøåéü", "áðéíóúýþæö", "ąćęłńóśźż", "áčďéěíňóřšťúůýž"),
    *("áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "ăâîșț", "ăâîşţ", "čćđšž", "çğıöşüâî", "äõöüšž"),
    *("āčēģīķļņšūž", "ąčęėįšųūž", "çë"),
)
LONE = frozenset("àáèéêíòúöåæøÀÁÈÉÍÒÚÖÅÆØавеийкосуэяієАВИКОСУЭЯІЄ")  # words of one letter
EAST_ASIAN = {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "IDEOGRAPHIC"}
SIGNS = {"So", "Sm", "Sk", "No", "Sc"}  # Unicode's categories of signs that begin no word
LETTER = r"[^\W\d_ªºµ]"
WEST = r"[^\W\d_ªºµ\u2e80-\uffff]"  # a letter, but of East Asia
ODD_SIGNS = re.compile(
    rf"[¤†‡\ufffd\u2500-\u259f]|{LETTER}\xa0$|(^|\W)[’¶]{LETTER}|{WEST}[^\w\x00-\x7f\xa0’–—־׳״]+{WEST}"
)
# Where no word has these letters: final ones before others, hard and soft signs first, ß
# behind a consonant, Polish ń before a vowel, Slovak ŕ and ĺ beside one, Romanian ă, Lithuanian iė.
ODD_LETTERS = re.compile(
    rf"[ςةى](?={LETTER})|^[ъьы]|(?<![aeiouäöüy])ß|ń(?=[aeiouyąęó])|ă(?=[aeo])|iė"
    "|[ŕĺ](?![bcdfghjklmnpqrstvz])|(?<![bcdfghjklmnpqrstvz])[ŕĺ]"
)
# ASCII with typographic signs where they belong, of bytes that other encodings take for letters.
TYPOGRAPHIC = re.compile(
    "[“‘„]?[A-Za-z]+(’(s|t|re|ve|ll|d|m))?[”…™]?|«[A-Za-z]+»?|[–—•…“”€£™©®]|[ck]?m[²³]|°[CF]"
    "|[£€¥±©]?[0-9.,]+([€£%½¼¾°]|°[CF]|[ck]?m[²³])?"
)


class Reading(NamedTuple):
    """Words read in an encoding, and how unlikely they are."""

    encoding: str
    words: tuple[str, ...]
    odd: frozenset[int]  # numbers of words that no language writes so
    foreign: frozenset[int]  # words that the language which explains most does not have
    script: str
    chaos: float  # charset_normalizer's measures
    coherence: float

    @property
    def disorder(self) -> float:
        """How unlikely the text is, in whatever script."""
        return self.chaos + 2 * len(self.odd) / len(self.words)


def read_words(words: Sequence[bytes]) -> list[Reading]:
    """Return the plausible readings of words that are not ASCII, the likeliest first."""
    from charset_normalizer import from_bytes

    readings: dict[tuple[str, ...], Reading] = {}
    for encoding in CANDIDATES:
        try:
            texts = tuple(word.decode(encoding) for word in words)
        except UnicodeDecodeError:
            continue
        pairs = zip(texts, words, strict=True)
        odd = frozenset(number for number, pair in enumerate(pairs) if is_odd(*pair))
        if texts in readings or len(odd) == len(words) or len(odd) > 1 + 0.4 * len(words):
            continue
        match = from_bytes(
            b" ".join(words),
            cp_isolation=[encoding],
            threshold=1.0,
            language_threshold=0.0,
            preemptive_behaviour=False,
            enable_fallback=False,
        ).best()
        measures = (1.0, 0.0) if match is None else (match.chaos, match.coherence)
        foreign = min((_outside(texts, alphabet) for alphabet in ALPHABETS), key=len)
        scripts = [_script_of(text) for text in texts]
        script = max(scripts, key=scripts.count)
        readings[texts] = Reading(encoding, texts, odd, foreign, script, *measures)
    return sorted(readings.values(), key=lambda x: (len(x.odd), x.disorder - x.coherence))


def find_sure(readings: Sequence[Reading]) -> Reading | None:
    """Return the reading beside which each of the others is unlikely."""
    for best in readings:
        limit = min(1 + len(best.words) / 10, len(best.words) / 5)
        # Lower-case letters of another script may be capitals here: ЮАГФИЗ is אבחזית.
        is_loud = best.script in ("CYRILLIC", "GREEK") and "".join(best.words).isupper()
        if (
            len(best.odd) <= limit
            and not is_loud
            and all(_is_surer(best, other) for other in readings if other is not best)
        ):
            return best
    return None


def _is_surer(best: Reading, other: Reading) -> bool:
    """Whether one reading is so much likelier than another that the other is out.

    charset_normalizer tells scripts apart. It cannot tell cp1250 from cp1252; there words decide
    that only one reading has as odd, or outside of the language that explains most.
    """
    scripts = {best.script, other.script}
    if scripts == {"EAST"}:
        gap = other.chaos - other.coherence - best.chaos + best.coherence
        return (
            gap > 0.06
            and len(other.odd) >= len(best.odd)
            and sum(x > "\u2e7f" for x in "".join(best.words)) >= 16
        )
    if len(scripts) == 2 and not {"LATIN", ""} & scripts:
        gap = other.disorder - best.disorder
        if "EAST" not in scripts:  # coherence is smaller where there are thousands of characters
            gap += best.coherence - other.coherence
        return gap > (0.3 if other.script == "EAST" else 0.1)  # Thai has a letter for any byte
    odd = len(other.odd - best.odd) - 3 * len(best.odd - other.odd)
    if scripts != {"LATIN"}:
        return odd > 0
    foreign = len(other.foreign - best.foreign) - 3 * len(best.foreign - other.foreign)
    margin = 1 if odd else 3
    if CANDIDATES.index(best.encoding) < CANDIDATES.index(other.encoding):
        margin = int(best.encoding != "cp1252" and len(best.words) < 8)
    return odd >= 0 and 2 * odd + foreign > margin


def is_odd(word: str, data: bytes) -> bool:
    """Whether no language writes a word so; `data` are its bytes.

    >>> [is_odd("Wałęsa".encode("cp1250").decode(x), b"") for x in ("cp1250", "cp1252", "cp1251")]
    [False, True, True]
    """
    usual = data.decode("cp1252", "replace")
    if TYPOGRAPHIC.fullmatch(usual.strip("()[]{}.,;:!?\"'")):
        return word != usual
    kinds = {unicodedata.category(x) for x in word}
    without_marks = "".join(x for x in word if unicodedata.category(x) != "Mn")
    if not kinds.isdisjoint({"Cc", "Co", "Cn"}) or ODD_SIGNS.search(without_marks):
        return True
    if any(map(_is_odd_pair, " " + word, word)):
        return True
    if sum(x > "\u2e7f" for x in word) == 1 and re.search("[A-Za-z0-9]", word):
        return True  # one character of East Asia amid ASCII
    runs = [run for run in re.findall(rf"{LETTER}+", without_marks) if not run.isascii()]
    return any(map(_is_odd_run, runs))


def _is_odd_pair(before: str, character: str) -> bool:
    """Whether an accent has no letter below, a sign stands before a letter or in another script."""
    if before.isascii() and character.isascii():
        return False
    if unicodedata.category(character) == "Mn" and before < "\u0300":
        return True
    is_sign = before > "\x7f" and unicodedata.category(before) in SIGNS
    if is_sign and character.isalpha() and before + character not in ("°C", "°F"):
        return True
    scripts = {_script(x).partition("-")[0] for x in (before, character) if not x.isalpha()}
    is_latin = any(x.isascii() and x.isalpha() for x in (before, character))
    return is_latin and not scripts.isdisjoint({"ARABIC", "HEBREW", "THAI"})


def _is_odd_run(run: str) -> bool:
    scripts = {_script(letter) for letter in run}
    if scripts <= EAST_ASIAN:
        return "HANGUL" in scripts and len(scripts) > 1
    is_mixed = (len(scripts) > 1 and not scripts & EAST_ASIAN) or "HALFWIDTH" in scripts
    has_capital_inside = not run.isupper() and any(x.isupper() and x > "\x7f" for x in run[1:])
    has_capital_inside |= any(a.islower() and b.isupper() for a, b in pairwise(run))
    if is_mixed or has_capital_inside or ODD_LETTERS.search(run.lower()):
        return True
    if len(run) == 1 and scripts <= {"LATIN", "CYRILLIC"}:
        return run not in LONE
    if scripts != {"LATIN"}:
        return False
    is_never_plain = len(run) > 2 and not any(letter.isascii() for letter in run)
    return is_never_plain or all(_outside([run], alphabet) for alphabet in ALPHABETS)


def _outside(words: Iterable[str], alphabet: str) -> frozenset[int]:
    """Return the numbers of words with letters that are neither ASCII nor in an alphabet."""
    lower = (word.replace("İ", "i").lower() for word in words)  # "İ" else becomes two characters
    return frozenset(
        number
        for number, word in enumerate(lower)
        if any(not x.isascii() and x.isalpha() and x not in alphabet for x in word)
    )


@lru_cache(1 << 12)
def _script(character: str) -> str:
    return unicodedata.name(character, "CONTROL").split()[0]


def _script_of(word: str) -> str:
    """Return the script of a word's first letter that is not ASCII, one for all of East Asia."""
    letter = re.search(r"[^\W\d_ªºµ\x00-\x7f]", word)
    script = _script(letter[0]) if letter else ""
    return "EAST" if script in EAST_ASIAN else script
