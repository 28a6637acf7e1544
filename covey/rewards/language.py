"""Detects the language of a text by its script and its common words.

The reward `instructions` uses this module to check the language of a completion. Only the 30
languages of IFEval are detected.
"""

# ruff: noqa: RUF001 - the words of other scripts look like ours
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

_SCRIPTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "cyrillic": (0x0400, 0x04FF), "hebrew": (0x0590, 0x05FF), "arabic": (0x0600, 0x06FF),
        "devanagari": (0x0900, 0x097F), "bengali": (0x0980, 0x09FF), "gurmukhi": (0x0A00, 0x0A7F),
        "gujarati": (0x0A80, 0x0AFF), "tamil": (0x0B80, 0x0BFF), "telugu": (0x0C00, 0x0C7F),
        "kannada": (0x0C80, 0x0CFF), "malayalam": (0x0D00, 0x0D7F), "thai": (0x0E00, 0x0E7F),
        "kana": (0x3040, 0x30FF), "hangul": (0xAC00, 0xD7AF),
    }
)  # fmt: skip
_BY_SCRIPT = MappingProxyType(
    {
        "hebrew": "he", "bengali": "bn", "gurmukhi": "pa", "gujarati": "gu", "tamil": "ta",
        "telugu": "te", "kannada": "kn", "malayalam": "ml", "thai": "th", "kana": "ja",
        "hangul": "ko",
    }
)  # fmt: skip
_COMMON: Mapping[str, Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        script: MappingProxyType({code: frozenset(words.split()) for code, words in table.items()})
        for script, table in {
            "latin": {
                "en": "the and of to in is that it for was with as are this be on have you not by",
                "es": "el la los las de que y en un una es por con para se del como más pero su",
                "pt": "o a os as de que e em um uma é por com para não se do da mais como seu",
                "fr": "le la les de des et un une est que qui dans pour pas sur il elle avec du au",
                "de": "der die das und ist nicht ein eine zu den mit von für auf im es sich dem",
                "it": "il lo la gli le di che e un una è per con non del della sono come più si",
                "pl": "i w na z się nie jest to że do o jak ale po dla są przez od za tym",
                "vi": "và của là có cho không được các một trong với những này đã người như để",
                "sw": "na ya wa kwa ni katika la za kuwa hii cha kama yake pia huo wao hiyo sana",
                "fi": "ja on ei se että oli hän mutta myös kun niin ovat joka tai kuin sen mitä",
            },
            "cyrillic": {
                "ru": "и в не на что он с как это по но из у за от так же бы для мы вы",
                "uk": "і в не на що він з як це по але із у за від та є для ми ви його",
                "bg": "и в не на че той с как това по но от за се да е са ще за които",
            },
            "arabic": {
                "ar": "في من على أن إلى التي هذا هذه مع عن كان هو ما لا الذي ذلك كل بين",
                "fa": "و در به از که این را با است برای آن یک می های شود هم تا بر شده",
                "ur": "اور کے میں کی کا ہے سے کو پر یہ نے ہیں کہ اس ایک بھی تھا جو کر",
            },
            "devanagari": {
                "hi": "के है में की और से का को पर यह हैं ने कि एक भी था जो इस नहीं",
                "mr": "आणि आहे या च्या ते हे आहेत मध्ये एक व तो ती केला होते नाही किंवा साठी",
                "ne": "र छ को मा का लागि यो हो पनि छन् गर्न भएको एक तथा ले हुन् थियो",
            },
        }.items()
    }
)
_WORD = re.compile(r"[^\W\d_]+[^\W\d_\u0900-\u0dff]*|[\u0900-\u0dff]+")


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of a text's main language, or None if the language is unclear.

    The language is unclear if the script is not supported, or if the text has no common word of a
    supported language.

    >>> language_of("The cat is on the table."), language_of("Это не то, что он знал.")
    ('en', 'ru')
    """
    script = _script(text)
    if script is None:
        return None
    if script in _BY_SCRIPT:
        return _BY_SCRIPT[script]
    words = [word.lower() for word in _WORD.findall(text)]
    hits = {code: sum(w in known for w in words) for code, known in _COMMON[script].items()}
    best = max(hits, key=lambda code: hits[code])
    return best if hits[best] else None


def _script(text: str) -> str | None:
    """Return the writing system, such as `latin`, to which most letters of a text belong.

    Return None if the text has no letters, or if its writing system is not supported.
    """
    counts = Counter(_script_of(sign) for sign in text if sign.isalpha())
    # Japanese mixes kana with Han characters.
    if counts["kana"] and counts["other"]:
        counts["kana"] += counts.pop("other")
    if not counts:
        return None
    script = counts.most_common(1)[0][0]
    return None if script == "other" else script


def _script_of(sign: str) -> str:
    code = ord(sign)
    if code < 0x0250 or 0x1E00 <= code < 0x1F00:
        return "latin"
    return next((name for name, (low, high) in _SCRIPTS.items() if low <= code <= high), "other")
