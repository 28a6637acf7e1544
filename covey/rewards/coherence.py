"""The coherence measure: how much a text looks like language, mathematics or code.

The coherence measure uses only statistics: frequent pairs of Latin letters, common characters of
other scripts, and symbol pairs that are typical of formulas and programs. The statistics of
keyboard mashing and random characters differ from the statistics of real text. The coherence
measure does not detect nonsense that consists of real words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise

from covey.rewards.score import Reward, Score, check_option
from covey.rewards.text import count_words, tag_contents
from covey.types import Prompt, episode_of

# The efficiency reward: penalties for repetition and for too many tool calls or words.


PHRASE = 6
"""Number of words in a phrase. Ordinary prose seldom repeats a sequence of 6 words."""
MIN_WORDS = 24
"""Repeated phrases are not counted in a text with fewer than MIN_WORDS words."""
MAX_REPETITION = 0.3
READ = 40_000
"""In a long text, only the first and the last READ characters are checked for repetition."""

# A point before a digit belongs to a number or a version.
_SENTENCE_END = re.compile(r"\.(?!\d)|[!?\n\u2026\u3002\uff01\uff0e\uff1f\uff61]")
# Long words are split, so that `hahaha...` has phrases too. In scripts without spaces each
# character is a word.
_TOKEN = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
    r"|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,12}|[^\w\s]"
)


def sentences(text: str) -> list[str]:
    """Return a text's sentences of more than 5 characters, in lower case.

    >>> sentences("Pi is 3.14159. So the area is 12.5!")
    ['pi is 3.14159', 'so the area is 12.5']
    """
    pieces = (" ".join(piece.casefold().split()) for piece in _SENTENCE_END.split(text))
    return [piece for piece in pieces if len(piece) > 5]


def _repeated(units: list[str] | list[tuple[str, ...]]) -> float:
    return (len(units) - len(set(units))) / len(units)


def repetition(text: str, above: float = 0.0) -> float:
    """Return the fraction of a text that repeats earlier text, in [0, 1].

    The fraction is computed for sentences and for phrases, and the larger of these two fractions is
    returned. A phrase is a sequence of 6 words or punctuation marks. Repeated sentences count only
    in a text with more than 3 sentences. Repeated phrases count only in a text with at least 24
    words and punctuation marks. Counting phrases detects padding without punctuation, and padding
    in which only the ends of the sentences differ. To save time, phrases are not counted if the
    fraction of repeated phrases cannot exceed `above`.

    >>> repetition("so it is " * 50) > 0.9, repetition("A plain sentence. And another one.")
    (True, 0.0)
    """
    if len(text) > 2 * READ:
        text = f"{text[:READ]}\n{text[-READ:]}"
    share = 0.0
    if len(_SENTENCE_END.findall(text)) >= 3:
        found = sentences(text)
        share = _repeated(found) if len(found) > 3 else 0.0
    tokens = _TOKEN.findall(text.casefold()) if len(text) >= MIN_WORDS else []
    # Each new token starts a new phrase, unless it is too close to the end.
    if len(tokens) >= MIN_WORDS and len(tokens) - len(set(tokens)) > above * (len(tokens) - PHRASE):
        phrases = list(zip(*(islice(tokens, i, None) for i in range(PHRASE)), strict=False))
        share = max(share, _repeated(phrases))
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency(Reward):
    """1 minus penalties for repetition and for too many tool calls or words, but at least 0.

    Each `<tool_call>` beyond the first `expected_steps` lowers the reward by 0.1. In a multi-turn
    episode, each edit beyond the first `expected_edits` and each policy turn beyond the first
    `max_rounds` costs 0.1. An edit is a call of one of the `edit_tools`. The penalties for calls,
    edits and turns are together at most 0.5.

    A completion of more than `max_words` words loses `0.3 * (words - max_words) / max_words`, but
    at most 0.3. A completion with more than 30 % repeated text loses 0.2.

    Each reward part is 1 without a penalty, and 0 with the maximum penalty.
    """

    expected_steps: int = 3
    max_words: int = 512
    expected_edits: int = 0
    """Number of edits without a penalty. The value 0 disables the penalty for edits."""
    max_rounds: int = 0
    """Number of policy turns without a penalty. The value 0 disables the penalty for turns."""
    edit_tools: tuple[str, ...] = ("edit", "rewrite", "write_file", "str_replace", "apply_patch")

    def __post_init__(self) -> None:
        for name in ("expected_steps", "expected_edits", "max_rounds"):
            value = getattr(self, name)
            check_option(value >= 0, f"{name} must be 0 or more, not {value}")
        check_option(self.max_words >= 1, f"max_words must be at least 1, not {self.max_words}")

    def __call__(self, prompt: Prompt, text: str) -> Score:
        extra_steps = max(0, text.count("<tool_call>") - self.expected_steps)
        excess = max(0, count_words(text) - self.max_words) / self.max_words
        more = self._more(text)
        steps = min(5, extra_steps + sum(more.values())) / 5
        length = min(1.0, excess)
        repeats = float(repetition(text) > MAX_REPETITION)
        reward = max(0.0, 1.0 - (5 * steps + 3 * length + 2 * repeats) / 10)
        return Score(
            reward=reward,
            success=reward == 1.0,
            parts={"steps": 1.0 - steps, "length": 1.0 - length, "repetition": 1.0 - repeats}
            | {name: 1.0 - min(5, count) / 5 for name, count in more.items()},
        )

    def _more(self, text: str) -> dict[str, int]:
        """Return by how much the edits and turns exceed their limits. A limit of 0 means no
        limit."""
        episode = episode_of(text)
        edits, rounds = 0, 1
        if episode is not None:
            functions = [call.get("function") for call in episode.tool_calls]
            edits = sum(
                isinstance(function, Mapping) and function.get("name", "") in self.edit_tools
                for function in functions  # a malformed call has no function
            )
            rounds = sum(message["role"] == "assistant" for message in episode.reply)
        counted = {"edits": (edits, self.expected_edits), "rounds": (rounds, self.max_rounds)}
        return {name: max(0, n - most) for name, (n, most) in counted.items() if most}


RARE, RARE_COSTS = 1, 5.0
"""The level of a letter pair is from 0 (very rare in words) to 9 (very common). Each letter pair of
level RARE or below lowers the sum of a word's levels by RARE_COSTS."""
PRIOR, PRIOR_PAIRS = 4.8, 5.0
"""Each text is treated as if it had PRIOR_PAIRS additional letter pairs, all of level PRIOR,
because the mean level of a short text is unreliable."""
LOW, HIGH = 3.0, 4.1
"""A mean level of letter pairs below LOW indicates noise, and a mean level above HIGH indicates
language."""
WINDOW, WINDOWS = 4096, 5
"""In a long text, only WINDOWS evenly spaced excerpts of WINDOW characters each are measured."""

# Row: a letter, or the edge of a word (first row). Column: the next letter or edge. A digit d is a
# probability of about 2 ** (d - 9), from common words of ten languages, mostly English.
_FOLLOWS = (
    "055555444433454451565344022",
    "634541242413646130656332032",
    "463107000610600600642500040",
    "460306006505400700425400022",
    "760037021600211600441411032",
    "742454231312546230664232321",
    "660016510600500600524500020",
    "760017035500414500543500020",
    "671017000600323600425401030",
    "552545340123547531465140002",
    "570137110404113610131610001",
    "661007002603414600454412030",
    "661147211602621510044420050",
    "674107000600141650131400030",
    "751456261503104500056320021",
    "623442331313557440654534121",
    "560106104500510650644400020",
    "420000000200000000000900000",
    "662347131603333620355421032",
    "751406104503321540056401021",
    "660207005600211500544402031",
    "544445341512556240665221211",
    "470008000700100600310200010",
    "671127005601204600341200040",
    "751505103600110460016410330",
    "842425021312444530354202011",
    "672227011602324510113503054",
)
# Common characters of a script, and the fractions of common characters in a text at which the
# plausibility is 0 and 1. In plain text the fraction is about a half to three quarters.
_COMMON: dict[str, tuple[str, float, float]] = {
    "han": (
        "的是一在不人有了我国这为中个大会们他来和年上以要到时对么能你就发可地生家出也说于学后成与过"
        "行用日多自现都没作下得开经还法动好方而公子事分之民主里政看吗本月所天新业同全定部最其进如前"
        "机美那当工关实小被但因长样理等什道去些面很心间区内电然力起体只着从并者高加想文问种员重及点"
        "将意合产三外由市无女已制网第情场名应西代正表真此位题相明资计建利系化期特性度果次给让两通教"
        "任比该东活手世提或使她物数立认怎知结入更國這為個會們來時對麼發說於學後與過現沒開經還動長樣"
        "電間體點種員將產無場應題資計實關業進機從當問解设求令式值角边积除乘减故则根据证答案约每共",
        0.12,
        0.3,
    ),
    "kana": ("のいてなにたしでるとはがかっをすーもらうんれまだこンスルトリ", 0.3, 0.5),
    "hangul": (
        "이다는에하고가을지의로서은아한어도기사니있를나해리시그요인들자일게대라으스수만보",
        0.08,
        0.25,
    ),
    "cyrillic": ("оеаинтсрвлкмі", 0.45, 0.62),
    "greek": ("ατοσιενρπκμης", 0.45, 0.62),
    "arabic": ("اليمنورتعبدةیکہےں", 0.45, 0.6),
    "hebrew": ("יוהלאתרבמש", 0.42, 0.58),
    "devanagari": ("ाकेरहीनस्ंमितोलपयद", 0.35, 0.6),
}
_BLOCKS = (
    ("latin", 0x41, 0x24F),
    ("greek", 0x370, 0x3FF),
    ("cyrillic", 0x400, 0x52F),
    ("hebrew", 0x590, 0x5FF),
    ("arabic", 0x600, 0x6FF),
    ("devanagari", 0x900, 0x97F),
    ("latin", 0x1E00, 0x1EFF),
    ("kana", 0x3040, 0x30FF),
    ("han", 0x3400, 0x9FFF),
    ("hangul", 0xAC00, 0xD7A3),
)
# For each sign, the signs that often follow it in formulas, programs and prose.
_SIGNS_AFTER = {
    "!": '"()=[',
    '"': "$%'()+,-./:;<=>?\\]{}",
    "#": "!{",
    "$": '"(),-./=\\{|',
    "%": "(),.",
    "&": "(=",
    "'": '"%()*+,-./:;<=>?[\\]{}',
    "(": "!\"$%&')*+-.:<?[\\`{",
    ")": "!\"$'(*+,-./:;=?[\\]^{|}",
    "*": "'(),./:?{",
    "+": "$'()-=?\\{",
    ",": "\"$'()-[\\{",
    "-": "$%'(+.=>\\]{",
    ".": "\"$'()*+,/;?[\\]",
    "/": '"(*.>{',
    ":": "\"'()*-/=\\]",
    ";": '"/<}',
    "<": "(-/=",
    "=": "\"'(-<>[\\{",
    ">": "\"%'()<=",
    "?": '"().:[\\^',
    "[": "\"&'(*+-.:\\]^",
    "\\": "!'()+,.;?[]{|}",
    "]": "'()*+,-./:;=?[^{}",
    "^": "(-[\\]{",
    "`": "),.",
    "{": "\"'(-[\\}",
    "|": "(,-=[\\^}",
    "}": "\"$')+,-./:;=?\\]^{|",
    "~": "/",
}
_WORD = re.compile(r"[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff]+")
_PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Each pattern starts with its rarest part; lookbehinds check the text before it.
_LONE_LETTERS = re.compile(r"[A-Za-z](?= )(?<!\S[A-Za-z])(?: [A-Za-z]){5,}(?!\S)")
_LONG = re.compile(r"[A-Za-z0-9]{8,}")
_SIGNS = re.compile(r"[^\w\s]{2,}")
_ODD_INFIX = re.compile(r"[$!#~?;](?<=[^\W\d_][$!#~?;])(?=[^\W\d_])")
_RUN = re.compile(r"(\S)\1{3,}|([^\W\d_]{2,4}?)\2{3,}")


def _between(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _sample(text: str) -> str:
    if len(text) <= WINDOW * WINDOWS:
        return text
    step = (len(text) - WINDOW) // (WINDOWS - 1)
    return "\n".join(text[i * step : i * step + WINDOW] for i in range(WINDOWS))


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    category = unicodedata.category(character)
    if category in ("Cc", "Cn", "Co", "Cs") or character == "\ufffd":
        return "space" if character.isspace() else "noise"
    if category[0] not in "LM":
        return {"N": "digit", "Z": "space", "C": "space"}.get(category[0], "sign")
    code = ord(character)
    for script, first, last in _BLOCKS:
        if first <= code <= last:
            return script
    return f"block {code >> 7}"


@lru_cache(maxsize=1024)
def _base(character: str) -> str:
    """Map a Latin letter to a letter from a to z, for example `é` to `e`."""
    letter = unicodedata.normalize("NFD", character)[0].lower()
    return (
        letter
        if "a" <= letter <= "z"
        else {"\u00f8": "o", "\u0142": "l", "\u0111": "d", "\u0131": "i"}.get(letter, "s")
    )


def _pieces(word: str) -> list[str]:
    """Split a camel-case word such as `getHttpCode` into parts, and leave other words whole."""
    if word.islower() or word.isupper() or not word.isascii():
        return [word]
    return _PIECE.findall(word)


def _levels(word: str) -> list[int]:
    """Return the frequency level of each letter pair of a word. Word edges count as letters.

    If a letter occurs three times in a row, the pair of the second and third letter gets level 0.
    """
    letters = [ord(c) - 96 if "a" <= c <= "z" else ord(_base(c)) - 96 for c in word.lower()]
    edged = [0, *letters, 0]
    levels = [ord(_FOLLOWS[a][b]) - 48 for a, b in pairwise(edged)]
    for i in range(2, len(letters)):
        if letters[i] == letters[i - 1] == letters[i - 2]:
            levels[i] = 0
    return levels


def _sum_of_levels(word: str) -> tuple[float, int]:
    total, pairs = 0.0, 0
    for levels in map(_levels, _pieces(word)):
        total += sum(levels) - RARE_COSTS * sum(level <= RARE for level in levels)
        pairs += len(levels)
    return total, pairs


# Most completions share their words. The cache is bounded, because noise has endless words.
_known_sum = lru_cache(maxsize=1 << 14)(_sum_of_levels)


def _latin(text: str) -> float:
    """Return the plausibility of the letter pairs in Latin-script words, from 0 to 1."""
    total, pairs = PRIOR * PRIOR_PAIRS, PRIOR_PAIRS
    for word in _WORD.findall(text):
        # A single letter may be a variable in a formula, so it is not counted.
        if (length := len(word)) > 1:
            levels, count = _known_sum(word) if length < 20 else _sum_of_levels(word)
            total += levels
            pairs += count
    # Many single letters in a row count as pairs of level 0.
    pairs += sum(len(match[0]) / 2 for match in _LONE_LETTERS.finditer(text))
    return _between(total / pairs, LOW, HIGH)


def _jumbled(word: str) -> bool:
    """Return whether a word looks like encoded data, such as base64.

    Encoded data often alternates between upper and lower case, or between letters and digits.
    """
    pieces = len(_PIECE.findall(word))
    return pieces > 4 and 3 * pieces > len(word)


def _signs(text: str) -> float:
    """Return the plausibility of adjacent symbols, from 0 to 1.

    A pair of symbols is plausible if it is common in formulas or programs.
    """
    odd = pairs = len(_ODD_INFIX.findall(text))
    for run in _SIGNS.findall(text):
        pairs += len(run) - 1
        for a, b in pairwise(run):
            odd += a != b and b not in _SIGNS_AFTER.get(a, "") and (a + b).isascii()
    return 1.0 - _between(odd / (pairs + 2), 0.15, 0.5)


def coherence(text: str) -> float:
    """Return how much a text looks like language, mathematics or code, from 0 to 1.

    Each kind of character (Latin words, other alphabets, digits, symbols) gets a plausibility. The
    coherence of a text is the mean plausibility of its characters. The coherence is lowered if the
    text consists mostly of symbols, mixes many alphabets, or repeats characters or phrases. A text
    with a coherence below 0.5 is noise. An empty text has a coherence of 0.

    >>> coherence("So 47 + 8 = 55, and 55 - 6 = 49.") > 0.9, coherence("zxcv kjhg qwpt bnmd") < 0.3
    (True, True)
    """
    sample = _sample(text)
    text = _LONG.sub(lambda match: "" if _jumbled(match[0]) else match[0], sample)
    counts = Counter(text)
    kinds: Counter[str] = Counter()
    for character, count in counts.items():
        kinds[_kind(character)] += count
    del kinds["space"]
    if kinds.total() == kinds["sign"] + kinds["noise"]:
        return 0.0
    jumbled = len(sample) - len(text)
    plausible = _plausibility(text, counts, kinds)
    mean = sum(plausible[kind] * count for kind, count in kinds.items()) / (kinds.total() + jumbled)
    return mean * _medley(kinds) * _monotony(text, counts, kinds)


def _plausibility(text: str, counts: Counter[str], kinds: Counter[str]) -> dict[str, float]:
    plausible = {kind: 1.0 for kind in kinds} | {"noise": 0.0, "sign": _signs(text)}
    if kinds["latin"]:
        plausible["latin"] = _latin(text)
        # Programs and formulas abbreviate words, so plausible signs raise the value.
        if plausible["sign"] > 0.9 and kinds["sign"] > 0.25 * kinds.total():
            plausible["latin"] = max(0.3, plausible["latin"])
    for script in kinds.keys() & _COMMON.keys():
        common, low, high = _COMMON[script]
        share = (sum(counts[c] for c in common) + 2 * high) / (kinds[script] + 2)
        plausible[script] = _between(share, low, high)
    # Japanese mixes kana with Han characters, and its common Han characters differ from those of
    # Chinese.
    if kinds["kana"] > 0.2 * kinds["han"]:
        plausible["han"] = plausible["kana"]
    return plausible


def _medley(kinds: Counter[str]) -> float:
    """Return the factor by which many alphabets, symbols or noise lower the coherence."""
    letters = {kind: n for kind, n in kinds.items() if kind not in ("sign", "noise", "digit")}
    main = sum(sorted(letters.values())[-3:]) / max(1, sum(letters.values()))
    signs, noise = kinds["sign"] / kinds.total(), kinds["noise"] / kinds.total()
    return (
        (_between(main, 0.5, 0.8) if letters else 1.0)
        * (1.0 - _between(signs, 0.7, 0.9))
        * (1.0 - _between(noise, 0.05, 0.5))
    )


def _runs(text: str, counts: Counter[str]) -> int:
    """Count repeated characters, as in `aaaaaa`, except the first three of each repetition."""
    # Without four of a character in a row, a match of _RUN has at least eight letters.
    four = any(4 * c in text for c, count in counts.items() if count > 3 and not c.isspace())
    words = (word for word in text.split() if len(word) >= (4 if four else 8))
    return sum(len(match[0]) - 3 for word in words for match in _RUN.finditer(word))


def _monotony(text: str, counts: Counter[str], kinds: Counter[str]) -> float:
    """Return the factor by which repeated characters or phrases lower the coherence."""
    total = kinds.total()
    factor = 1.0 - _between(_runs(text, counts) / total, 0.35, 0.75)
    # Tables of numbers may repeat themselves.
    if kinds["digit"] + kinds["sign"] < 0.9 * total:
        factor *= 1.0 - _between(repetition(text, above=0.5), 0.5, 0.9)
    return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Coherence(Reward):
    """The coherence of the text: near 1 for language, mathematics and code, near 0 for noise.

    A completion with a coherence of at least 0.5 is a success.
    """

    def __call__(self, prompt: Prompt, text: str) -> Score:
        value = coherence(text)
        return Score(reward=value, success=value >= 0.5, parts={"coherence": value})


# The factor that lowers the reward of padded, repetitive or incoherent completions.


MANY_WORDS, MANY_CALLS = 1000, 8
"""More than MANY_WORDS words or MANY_CALLS tool calls lower the reward of a completion."""


def robust_factor(text: str) -> float:
    """Return a factor for a completion's reward, which is 1 without signs of reward hacking.

    The factor is multiplied by 0.5 for thinking that is not language, by 0.5 for text that mostly
    repeats itself, and by 0.7 for more than 1,000 words. For more than 8 tool calls, the factor is
    multiplied by `max(0.5, 1 - 0.05 * (calls - 8))`.
    """
    factor = 1.0
    thinking: list[str] = []
    for tag in ("think", "reasoning"):
        before, closing, _ = text.partition(f"</{tag}>")
        if closing and f"<{tag}>" not in before:  # the opening tag may be part of the prompt
            thinking.append(before)
        thinking += tag_contents(text, tag)
    if thinking and coherence(" ".join(thinking)) < 0.5:
        factor *= 0.5
    if repetition(text, above=0.5) > 0.5:
        factor *= 0.5
    if len(text) > MANY_WORDS and count_words(text) > MANY_WORDS:
        factor *= 0.7
    calls = text.count("<tool_call>")
    if calls > MANY_CALLS:
        factor *= max(0.5, 1.0 - 0.05 * (calls - MANY_CALLS))
    return factor
