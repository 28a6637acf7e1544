"""The instructions reward: the fraction of verifiable instructions that a completion follows."""

# ruff: noqa: RUF001
from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.errors import DataError
from covey.rewards.score import Reward, Score
from covey.rewards.text import after_thinking
from covey.types import Prompt

# Detects the language of a text by its script and its common words.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions(Reward):
    """The fraction of IFEval's strict checks that the text after the thinking passes.

    The reward accepts two data formats. In google/IFEval, the columns `instruction_id_list` and
    `kwargs` contain the instructions of a prompt. In open-instruct's RLVR data, the target contains
    the instruction.

    A completion that passes all checks is a success. An empty completion passes no check. IFEval's
    checks do not test whether the content is correct, so combine this reward with a correctness
    reward.
    """

    all_or_nothing: bool = False
    """If true, the reward is 1 for a completion that follows all instructions, and 0 for any other
    completion."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        said = after_thinking(text)
        wanted = instructions_of(prompt.info, prompt.target)
        followed = [follows(said, name, given) for name, given in wanted]
        share = sum(followed) / len(followed)
        reward = float(all(followed)) if self.all_or_nothing else share
        return Score(
            reward=reward,
            success=all(followed),
            parts={"followed": share},
            attempted=bool(said.strip()),
        )


# The 25 verifiable instructions of IFEval (arXiv 2311.07911), each as a check of a text.
#
# An instruction has a name and arguments, as in google/IFEval. The names and arguments of
# open-instruct's data are accepted too.

Check = Callable[[str, Mapping[str, Any]], bool]

_WORDS = re.compile(r"\w+")
_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|[A-Z])\.(?=\s)", re.IGNORECASE
)
# A run of stops is tried once, from its first stop: from each, it would take quadratic time.
_STOPS = ".!?\u3002\uff01\uff1f"
_SENTENCE_END = re.compile(rf"(?<![{_STOPS}])[{_STOPS}]++[\"')\]]*+(?:\s+|$)")
_DIVIDER = re.compile(r"\s?\*\*\*\s?|\s?\* \* \*\s?")
_HIGHLIGHT = re.compile(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*")
_BULLET = re.compile(r"^[ \t]*(?:\*[^*]|-).*$", re.MULTILINE)
CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
MOST_CHARACTERS = 200_000
"""A text with more than MOST_CHARACTERS characters fails every instruction."""


def counts(number: int, relation: str, wanted: int) -> bool:
    """Compare two numbers by a relation, such as `at least` or `less than`.

    With the relation `around`, the numbers may differ by 10 % of `wanted` or by 1, whichever is
    larger.
    """
    if relation == "around":
        return abs(number - wanted) <= max(round(wanted * 0.1), 1)
    rules = {"less than": number < wanted, "at least": number >= wanted,
             "at most": number <= wanted, "exactly": number == wanted}  # fmt: skip
    if relation not in rules:
        known = ", ".join(rules)
        raise DataError(f"instructions: the relation {relation!r} is unknown; use one of: {known}")
    return rules[relation]


def sentences(text: str) -> int:
    """Count the sentences of a text.

    >>> sentences("Dr. Who came at 3.15. Why? No idea!")
    3
    """
    plain = _ABBREVIATION.sub(lambda found: found.group().replace(".", ""), text.strip())
    ends = list(_SENTENCE_END.finditer(plain))
    rest = plain[ends[-1].end() :] if ends else plain
    return len(ends) + bool(rest.strip())


def _keyword_frequency(text: str, given: Mapping[str, Any]) -> bool:
    found = re.findall(rf"\b{re.escape(str(given['keyword']))}\b", text, re.IGNORECASE)
    return counts(len(found), given.get("relation", "exactly"), given["frequency"])


def _forbidden(text: str, given: Mapping[str, Any]) -> bool:
    return not any(
        re.search(rf"\b{re.escape(str(word))}\b", text, re.IGNORECASE)
        for word in given["forbidden_words"]
    )


def _letter_frequency(text: str, given: Mapping[str, Any]) -> bool:
    number = text.lower().count(str(given["letter"]).lower())
    return counts(number, given.get("let_relation", "exactly"), given["let_frequency"])


def _paragraphs(text: str, given: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in _DIVIDER.split(text.strip())]
    return all(parts) and len(parts) == given["num_paragraphs"]


def _first_word(text: str, given: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in re.split(r"\n\s*\n", text.strip())]
    place = given["nth_paragraph"]
    if len(parts) != given["num_paragraphs"] or not 1 <= place <= len(parts):
        return False
    first = _WORDS.search(parts[place - 1])
    return first is not None and first.group().lower() == str(given["first_word"]).lower()


def _postscript(text: str, given: Mapping[str, Any]) -> bool:
    # Line by line, because one pattern would try each of many empty lines as the start.
    marker = re.compile(re.escape(str(given["postscript_marker"])), re.IGNORECASE)
    end, start = len(text.rstrip()), 0
    for line in text.split("\n"):
        found = marker.match(text, start + len(line) - len(line.lstrip()))
        if found is not None and found.end() < end:
            return True
        start += len(line) + 1
    return False


def _choice(text: str, given: Mapping[str, Any]) -> bool:
    options = given.get("options") or CHOICES
    return any(re.search(rf"(?<!\w){re.escape(str(o))}(?!\w)", text) for o in options)


def _highlights(text: str, given: Mapping[str, Any]) -> bool:
    found = [part.strip("* ") for part in _HIGHLIGHT.findall(text)]
    return bool(sum(map(bool, found)) >= given["num_highlights"])


def _sections(text: str, given: Mapping[str, Any]) -> bool:
    marker = re.escape(str(given["section_spliter"]))
    parts = re.split(rf"\s?{marker}\s?\d+\s?", text)
    return bool(len(parts) - 1 >= given["num_sections"])


def _json(text: str, given: Mapping[str, Any]) -> bool:
    plain = text.strip()
    if plain.startswith("```") and plain.endswith("```") and len(plain) >= 6:
        plain = plain[3:-3]
        plain = plain[4:] if plain[:4].lower() == "json" else plain
    try:
        json.loads(plain)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, given: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _end(text: str, given: Mapping[str, Any]) -> bool:
    plain = text.strip().strip('"').lower()
    return plain.endswith(str(given["end_phrase"]).strip().lower())


def _quotation(text: str, given: Mapping[str, Any]) -> bool:
    plain = text.strip()
    return len(plain) > 2 and plain[0] == plain[-1] == '"'


def _capital_words(text: str, given: Mapping[str, Any]) -> bool:
    words = [word for word in re.findall(r"[\w'-]+", text) if word.isupper()]
    return counts(len(words), given["capital_relation"], given["capital_frequency"])


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "keywords:existence": lambda text, given: all(
            re.search(re.escape(str(word)), text, re.IGNORECASE) for word in given["keywords"]
        ),
        "keywords:frequency": _keyword_frequency,
        "keywords:forbidden_words": _forbidden,
        "keywords:letter_frequency": _letter_frequency,
        "language:response_language": lambda text, given: language_of(text) == given["language"],
        "length_constraints:number_sentences": lambda text, given: counts(
            sentences(text), given["relation"], given["num_sentences"]
        ),
        "length_constraints:number_paragraphs": _paragraphs,
        "length_constraints:number_words": lambda text, given: counts(
            len(_WORDS.findall(text)), given["relation"], given["num_words"]
        ),
        "length_constraints:nth_paragraph_first_word": _first_word,
        "detectable_content:number_placeholders": lambda text, given: (
            len(re.findall(r"\[[^\[\]\n]+\]", text)) >= given["num_placeholders"]
        ),
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": lambda text, given: (
            len(_BULLET.findall(text)) == given["num_bullets"]
        ),
        "detectable_format:constrained_response": _choice,
        "detectable_format:number_highlighted_sections": _highlights,
        "detectable_format:multiple_sections": _sections,
        "detectable_format:json_format": _json,
        "detectable_format:title": lambda text, given: any(
            title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text)
        ),
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": lambda text, given: (
            text.strip().lower().startswith(str(given["prompt_to_repeat"]).strip().lower())
        ),
        "startend:end_checker": _end,
        "startend:quotation": _quotation,
        "change_case:capital_word_frequency": _capital_words,
        "change_case:english_capital": lambda text, given: (
            text.isupper() and language_of(text) in ("en", None)
        ),
        "change_case:english_lowercase": lambda text, given: (
            text.islower() and language_of(text) in ("en", None)
        ),
        "punctuation:no_comma": lambda text, given: "," not in text,
    }
)
"""Maps the IFEval name of each instruction to a function that checks whether a text follows the
instruction."""

OPEN_INSTRUCT: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
        "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
        "validate_forbidden_words": ("keywords:forbidden_words", {}),
        "verify_letter_frequency": ("keywords:letter_frequency", {"N": "let_frequency"}),
        "validate_response_language": ("language:response_language", {}),
        "verify_paragraph_count": (
            "length_constraints:number_paragraphs", {"N": "num_paragraphs"},
        ),
        "validate_word_constraint": (
            "length_constraints:number_words", {"N": "num_words", "quantifier": "relation"},
        ),
        "verify_sentence_constraint": (
            "length_constraints:number_sentences", {"N": "num_sentences", "quantifier": "relation"},
        ),
        "validate_paragraphs": (
            "length_constraints:nth_paragraph_first_word",
            {"N": "num_paragraphs", "i": "nth_paragraph"},
        ),
        "verify_postscript": ("detectable_content:postscript", {}),
        "validate_placeholders": (
            "detectable_content:number_placeholders", {"N": "num_placeholders"},
        ),
        "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
        "validate_title": ("detectable_format:title", {}),
        "validate_choice": ("detectable_format:constrained_response", {}),
        "validate_highlighted_sections": (
            "detectable_format:number_highlighted_sections", {"N": "num_highlights"},
        ),
        "validate_sections": (
            "detectable_format:multiple_sections",
            {"N": "num_sections", "section_splitter": "section_spliter"},
        ),
        "validate_json_format": ("detectable_format:json_format", {}),
        "validate_repeat_prompt": (
            "combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"},
        ),
        "validate_two_responses": ("combination:two_responses", {}),
        "validate_uppercase": ("change_case:english_capital", {}),
        "validate_lowercase": ("change_case:english_lowercase", {}),
        "validate_frequency_capital_words": (
            "change_case:capital_word_frequency",
            {"N": "capital_frequency", "quantifier": "capital_relation"},
        ),
        "validate_end": ("startend:end_checker", {}),
        "validate_quotation": ("startend:quotation", {}),
        "validate_no_commas": ("punctuation:no_comma", {}),
    }
)  # fmt: skip
"""Maps the open-instruct name of each instruction to its IFEval name, and to a table {argument name
in open-instruct: argument name in IFEval}."""


def follows(text: str, name: str, given: Mapping[str, Any]) -> bool:
    """Return whether a text follows an instruction. An empty text follows no instruction."""
    if name not in CHECKS:
        raise DataError(
            f"instructions: {name!r} is not one of the {len(CHECKS)} known instructions; correct "
            "the column instruction_id_list"
        )
    if not text.strip() or len(text) > MOST_CHARACTERS:
        return False
    known = {key: value for key, value in given.items() if value is not None}
    try:
        return CHECKS[name](text, known)
    except KeyError as error:
        raise DataError(
            f"instructions: the instruction {name} needs the argument {error}, which the data "
            "does not contain"
        ) from None


def from_open_instruct(target: str) -> tuple[str, dict[str, Any]]:
    try:
        data: Mapping[str, Any] = json.loads(target)
        name, renamed = OPEN_INSTRUCT[data["func_name"]]
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"instructions: the target {target[:80]!r} must be a JSON object with the name of a "
            "known instruction in the field func_name"
        ) from None
    return name, {renamed.get(k, k): v for k, v in data.items() if k != "func_name"}


def instructions_of(info: Mapping[str, Any], target: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return a prompt's instructions from the columns of google/IFEval, or else from the target."""
    names: Sequence[str] | None = info.get("instruction_id_list")
    if not names:
        return [from_open_instruct(target)]
    given = info.get("kwargs") or [{}] * len(names)
    if len(given) != len(names):
        raise DataError(
            f"instructions: a prompt has {len(names)} names in instruction_id_list, but "
            f"{len(given)} tables in kwargs; each instruction needs one table"
        )
    return list(zip(names, given, strict=True))
