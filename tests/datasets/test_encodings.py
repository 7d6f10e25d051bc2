"""The encoding of text files: read right, or refused with the encodings that are possible."""

# ruff: noqa: RUF001 - quotation marks and letters of other scripts are meant

from __future__ import annotations

import codecs
import gzip
import itertools
import re
import sys
from pathlib import Path

import pytest

from fusionzoo import create_dataset
from fusionzoo.datasets.sources.text_tables import find_encoding
from fusionzoo.errors import FusionZooError

TEXTS = {
    "french": "café crème|élève à l'école|très fraîche|garçon de forêt|où est l'hôtel ?|"
    "être né à Nîmes|la façade rénovée|une tâche ménagère|çà et là|le coeur léger|"
    "dîner sur l'île|déjà reçu",
    "german": "Straße gesperrt|grüne Äpfel|Öl für Türen|schöne Grüße|Käse und Brötchen|"
    "Müller & Söhne|ein großer Bär|über München|fünf Stück|Gebühr bezahlt|natürlich heiß|"
    "Schlüssel verloren",
    "spanish": "niño pequeño|mañana por la tarde|camión rápido|¿dónde está?|jamón añejo|"
    "árbol y pájaro|canción española|¡qué bonito!|corazón frágil|año próximo|lápiz azul|"
    "el pingüino",
    "polish": "żółta łódź|zażółć gęślą jaźń|świeży chleb|mała książka|dzień dobry|Łódź i Kraków|"
    "piękny kościół|źródło światła|ćwiczenia z języka|był późno|wąska ścieżka|cześć",
    "czech": "příliš žluťoučký kůň|čerstvý chléb|dobrý den|školní třída|řeka a most|zelené údolí|"
    "krásná země|děkuji mnohokrát|šťastný člověk|těžká zkouška|večeře v pět|město Plzeň",
    "hungarian": "árvíztűrő tükörfúrógép|jó reggelt|zöld erdő|friss kenyér|szép kőhíd|"
    "hűvös őszi szél|köszönöm szépen|nagy öröm|tűz és víz|sötét éjszaka|gyönyörű idő|külső ajtó",
    "russian": "добрый день|зелёный лес|свежий хлеб|большая собака|красивый дом|чёрный кот|"
    "доставка товара|новая книга|где находится музей|спасибо большое|Москва и Казань|"
    "объявление",
    "greek": "καλημέρα σας|πράσινο δάσος|φρέσκο ψωμί|μεγάλος σκύλος|όμορφο σπίτι|Αθήνα και Πάτρα|"
    "νέο βιβλίο|ευχαριστώ πολύ|το μουσείο είναι κλειστό|μαύρη γάτα|ώρα για ύπνο|"
    "ζεστός καφές",
    "turkish": "güzel çiçek|ışıklı şehir|taze ekmek değil|büyük köpek|İstanbul'da yağmur|"
    "iyi akşamlar|kırmızı şeker|öğrenci kitabı|teşekkür ederim|soğuk çay|yeşil ağaç|"
    "küçük ev",
    "hebrew": "בוקר טוב|יער ירוק|לחם טרי|כלב גדול|בית יפה|ספר חדש|תודה רבה|המוזיאון סגור|חתול שחור|"
    "שעת לילה|קפה חם|ירושלים ותל אביב",
    "arabic": "صباح الخير|غابة خضراء|خبز طازج|كلب كبير|بيت جميل|كتاب جديد|شكرا جزيلا|المتحف مغلق|"
    "قطة سوداء|وقت النوم|قهوة ساخنة|القاهرة وبغداد",
    "japanese": "おはようございます|緑の森を歩く|新しい本を買った|大きな犬がいる|コーヒーを飲む|"
    "東京と大阪の間|美しい家です|ありがとう|博物館は休みです|黒い猫の写真|寝る時間だ|"
    "テレビを見ました",
    "chinese": "早上好|绿色的森林很大|我买了一本新书|那是一只大狗|喝一杯咖啡|北京和上海之间|"
    "美丽的房子|非常感谢你|博物馆今天关门|黑色的猫在这里|该睡觉了|我们看了电视",
    "taiwanese": "早安|綠色的森林很大|我買了一本新書|那是一隻大狗|喝一杯咖啡|台北和高雄之間|"
    "美麗的房子|非常感謝你|博物館今天關門|黑色的貓在這裡|該睡覺了|我們看了電視",
    "korean": "좋은 아침입니다|푸른 숲을 걷다|새로운 책을 샀다|큰 개가 있습니다|"
    "커피를 마신다|서울과 부산 사이|아름다운 집이다|감사합니다|"
    "박물관은 문을 닫았다|검은 고양이 사진|잘 시간이다|텔레비전을 보았다",
}
ENCODINGS = {
    **dict.fromkeys(("cp1250", "iso8859-2"), ("polish", "czech", "hungarian")),
    **dict.fromkeys(
        ("cp1252", "mac-roman", "latin-1", "iso8859-15"), ("french", "german", "spanish")
    ),
    **dict.fromkeys(("cp1251", "koi8-r", "iso8859-5", "cp866"), ("russian",)),
    **dict.fromkeys(("cp1253", "iso8859-7"), ("greek",)),
    **dict.fromkeys(("cp932", "euc_jp"), ("japanese",)),
    **{"cp1254": ("turkish",), "cp1255": ("hebrew",), "cp1256": ("arabic",)},
    **{"gb18030": ("chinese",), "big5": ("taiwanese",), "cp949": ("korean",)},
}
CASES = [
    (encoding, language) for encoding, languages in ENCODINGS.items() for language in languages
]


def table(language: str, start: int, count: int, english: int = 0) -> str:
    """Return rows with texts of a language, among so many with English ones."""
    texts = itertools.islice(itertools.cycle(TEXTS[language].split("|")), start, start + count)
    cells = [*texts, *["a small blue box"] * english]
    rows = [f"{n},{('yes', 'no')[n % 2]},{x},{n * 7 % 90}.5" for n, x in enumerate(cells)]
    return "\n".join(["id,label,text,price", *rows, ""])


def is_read(path: Path, text: str, encoding: str) -> bool:
    """Return whether a file's encoding is found; if so the text is right, else the error helps."""
    path.write_bytes(text.encode(encoding))
    try:
        name, reason = find_encoding(path)
    except FusionZooError as error:
        assert re.search(r"row \d+ is in .*'.*--data\.encoding \w", str(error))
        assert "\n" not in str(error)
        words = path.read_bytes().decode(encoding).split()
        assert any(x in str(error) for word in words for x in word.split(",") if not x.isascii())
        return False
    assert path.read_bytes().decode(name) == text
    assert reason.startswith("guessed")
    return True


@pytest.mark.parametrize(("encoding", "language"), CASES)
def test_forty_rows_are_read_right(encoding: str, language: str, tmp_path: Path) -> None:
    assert is_read(tmp_path / "m.csv", table(language, 0, 40), encoding)


@pytest.mark.parametrize(("encoding", "language"), CASES)
def test_few_words_are_read_right_or_refused(encoding: str, language: str, tmp_path: Path) -> None:
    for start, count, english in itertools.product(range(0, 12, 4), (1, 4), (0, 36)):
        text = table(language, start, count, english)
        if not text.isascii():
            is_read(tmp_path / "m.csv", text, encoding)


@pytest.mark.parametrize(
    "text",
    [
        *("café", "résumé", "Müller", "Straße", "José", "Niño", "größer", "don’t", "“so” he said"),
        *("10 €", "£20", "20°C", "5 m²", "wait…", "crème brûlée", "¿Qué?", "Noël à Besançon"),
    ],
)
def test_one_western_word_is_enough(text: str, tmp_path: Path) -> None:
    assert is_read(tmp_path / "m.csv", f"id,text\n1,{text}\n2,two words\n", "cp1252")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *(("più", "cp1252"), ("Málaga", "cp1252"), ("Øresund", "cp1252"), ("façade", "cp850")),
        *(("Čapek", "cp1250"), ("лес", "koi8-r"), ("ЛЕС", "koi8-r"), ("中文", "gb18030")),
    ],
)
def test_a_word_that_several_languages_may_have_is_refused(
    text: str, encoding: str, tmp_path: Path
) -> None:
    assert not is_read(tmp_path / "m.csv", f"id,text\n1,{text}\n2,two words\n", encoding)


def test_a_header_that_is_not_ascii_is_read(tmp_path: Path) -> None:
    text = "id,größe,prüfung\n" + "".join(f"{n},{n}.5,blue\n" for n in range(40))
    assert is_read(tmp_path / "m.csv", text, "cp1252")


def test_bytes_that_stand_far_into_a_file_take_part(tmp_path: Path) -> None:
    path = tmp_path / "m.csv.gz"
    lines = ["id,text", *(f"{n},schöne Grüße" for n in range(80_000))]
    path.write_bytes(gzip.compress("\n".join(lines).encode("cp1250"), 1))
    assert find_encoding(path)[0] == "cp1252"  # which reads these alike
    lines[70_000:70_012] = TEXTS["polish"].split("|")
    path.write_bytes(gzip.compress("\n".join(lines).encode("cp1250"), 1))
    assert find_encoding(path)[0] == "cp1250"


@pytest.mark.parametrize("language", sorted(TEXTS))
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_unicode_needs_no_guess(
    encoding: str, language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    path = tmp_path / "m.csv"
    path.write_bytes(table(language, 0, 40).encode(encoding))
    assert find_encoding(path)[0] == encoding.removesuffix("-sig")


def test_japanese_with_escape_sequences_is_not_taken_for_ascii(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(table("japanese", 0, 40).encode("iso2022_jp"))
    name, reason = find_encoding(path)
    assert (codecs.lookup(name).name, reason) == ("iso2022_jp_ext", "by its escape sequences")
    data = create_dataset("manifest", root=str(path), columns={"text": "text"})
    assert data.references("text")[0] == TEXTS["japanese"].split("|")[0]
