"""The `instructions` task: a writing request with verifiable instructions (IFEval).

A prompt asks for a text about a topic, and gives between one and `most` instructions. The task uses
22 of the 25 kinds of instructions that IFEval defines (arXiv 2311.07911), but words the
instructions differently. `info` has the same columns as google/IFEval: `instruction_id_list` has
the names of the instructions, and `kwargs` has the arguments of the instructions. Held-out prompts
and training prompts have different topics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Any

from covey.errors import ConfigError
from covey.tasks.task import GeneratedTask, chat_messages
from covey.types import Prompt

FORMS = (
    "Write a short note about", "Explain to a beginner", "Write a letter about",
    "Describe in plain words", "Write a product description about", "Tell a story about",
    "Give advice about", "Write a speech about",
)  # fmt: skip
TOPICS = MappingProxyType(
    {
        "train": (
            "baking bread", "a lost umbrella", "city bicycles", "the night sky", "learning to swim",
            "old maps", "a rainy market", "planting trees", "a broken clock", "mountain trains",
            "letters from home", "a quiet library", "street music", "saving water", "first snow",
            "a village school", "honey bees", "a long bridge", "winter soup", "morning walks",
        ),
        "held_out": (
            "lighthouse keepers", "a borrowed coat", "desert wells", "paper boats",
            "a small bakery", "night buses", "wild strawberries", "a stubborn goat",
            "harbour fog", "kite season",
        ),
    }
)  # fmt: skip
WORDS = ("simple", "careful", "river", "market", "light", "story", "friend", "garden", "window")
ENDINGS = ("That is all for today.", "Let me know what you think.", "And so it goes on.")

Made = tuple[str, dict[str, Any]]
"""An instruction: its text in the prompt, and its arguments for the reward."""


def _counted(low: int, high: int, text: str, key: str, **given: str) -> Callable[[Random], Made]:
    """Return a function that makes an instruction with a random number from `low` to `high`. `key`
    is the name of the instruction's argument that stores the number."""

    def make(chance: Random) -> Made:
        number = chance.randint(low, high)
        return text.format(number), {**given, key: number}

    return make


def _limited(low: int, high: int, unit: str) -> Callable[[Random], Made]:
    """Return a function that makes an instruction with a random lower or upper limit on the number
    of words or sentences."""

    def make(chance: Random) -> Made:
        relation, number = chance.choice(["at least", "less than"]), chance.randint(low, high)
        return f"Use {relation} {number} {unit}.", {"relation": relation, f"num_{unit}": number}

    return make


def _keywords(chance: Random) -> Made:
    words = chance.sample(WORDS, 2)
    return f"Use the words {words[0]} and {words[1]}.", {"keywords": words}


def _frequency(chance: Random) -> Made:
    word, number = chance.choice(WORDS), chance.randint(2, 4)
    text = f"Use the word {word} at least {number} times."
    return text, {"keyword": word, "relation": "at least", "frequency": number}


def _forbidden(chance: Random) -> Made:
    words = chance.sample(WORDS, 3)
    return f"Do not use the words {', '.join(words)}.", {"forbidden_words": words}


def _letters(chance: Random) -> Made:
    letter, number = chance.choice("qvkwz"), chance.randint(2, 5)
    text = f"The letter {letter} must appear at least {number} times."
    return text, {"letter": letter, "let_relation": "at least", "let_frequency": number}


def _first_word(chance: Random) -> Made:
    number, word = chance.randint(2, 3), chance.choice(WORDS)
    place = chance.randint(1, number)
    text = f"Write {number} paragraphs with an empty line between them"
    return (
        f"{text}; paragraph {place} must start with the word {word}.",
        {"num_paragraphs": number, "nth_paragraph": place, "first_word": word},
    )


def _postscript(chance: Random) -> Made:
    marker = chance.choice(["P.S.", "P.P.S"])
    return f"End with a postscript that starts with {marker}", {"postscript_marker": marker}


def _ending(chance: Random) -> Made:
    phrase = chance.choice(ENDINGS)
    return f"End with exactly this phrase, and nothing after it: {phrase}", {"end_phrase": phrase}


def _plain(text: str) -> Callable[[Random], Made]:
    return lambda chance: (text, {})


MAKERS: Mapping[str, Callable[[Random], Made]] = MappingProxyType(
    {
        "length_constraints:number_words": _limited(20, 120, "words"),
        "length_constraints:number_sentences": _limited(3, 8, "sentences"),
        "keywords:existence": _keywords,
        "keywords:frequency": _frequency,
        "keywords:forbidden_words": _forbidden,
        "keywords:letter_frequency": _letters,
        "length_constraints:number_paragraphs": _counted(
            2, 4, "Write {} paragraphs, separated by a line with ***.", "num_paragraphs"
        ),
        "length_constraints:nth_paragraph_first_word": _first_word,
        "detectable_content:number_placeholders": _counted(
            1,
            3,
            "Use at least {} placeholders in square brackets, such as [name].",
            "num_placeholders",
        ),
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": _counted(
            2, 5, "Use exactly {} bullet points, each on a line that starts with *.", "num_bullets"
        ),
        "detectable_format:number_highlighted_sections": _counted(
            1, 3, "Highlight at least {} parts between asterisks, like *this*.", "num_highlights"
        ),
        "detectable_format:multiple_sections": _counted(
            2,
            3,
            "Write {} sections, and begin each with SECTION and its number.",
            "num_sections",
            section_spliter="SECTION",
        ),
        "startend:end_checker": _ending,
        "change_case:capital_word_frequency": _counted(
            1,
            4,
            "Write at least {} words in capital letters only.",
            "capital_frequency",
            capital_relation="at least",
        ),
        "detectable_format:title": _plain("Give it a title in double angle brackets, <<title>>."),
        "detectable_format:json_format": _plain("Reply with one JSON value and nothing else."),
        "startend:quotation": _plain("Put the whole reply between double quotation marks."),
        "combination:two_responses": _plain("Give two different texts, with ****** between them."),
        "change_case:english_capital": _plain("Use capital letters only."),
        "change_case:english_lowercase": _plain("Use lowercase letters only."),
        "punctuation:no_comma": _plain("Use no commas."),
    }
)
"""Maps the IFEval name of an instruction to the function that makes the instruction. All
instructions in this mapping fit any writing request. The three other instructions of IFEval need a
special request: a choice between answers, another language, or a repetition of the request."""

APART: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        # A prompt has at most one instruction of each line, because two may contradict each other.
        "length_constraints:number_words length_constraints:number_sentences",
        "length_constraints:number_paragraphs length_constraints:nth_paragraph_first_word"
        " combination:two_responses detectable_format:multiple_sections"
        " detectable_format:json_format detectable_format:number_bullet_lists",
        "change_case:english_capital change_case:english_lowercase"
        " change_case:capital_word_frequency detectable_format:multiple_sections",
        "startend:end_checker startend:quotation detectable_content:postscript"
        " detectable_format:json_format combination:two_responses",
        "keywords:existence keywords:frequency keywords:forbidden_words"
        " length_constraints:nth_paragraph_first_word",
        "change_case:english_lowercase detectable_content:postscript startend:end_checker",
        "change_case:english_capital startend:end_checker",
        "detectable_format:json_format detectable_format:title",
        "detectable_format:number_highlighted_sections length_constraints:number_paragraphs"
        " combination:two_responses detectable_format:number_bullet_lists",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions(GeneratedTask):
    """Requests with 1 to `most` verifiable instructions, for the reward `instructions`."""

    train_size: int = 2000
    held_out_size: int = 200
    most: int = 3
    seed: int = 0
    name: str = "instructions"

    def __post_init__(self) -> None:
        GeneratedTask.__post_init__(self)
        if not 1 <= self.most <= 4:
            raise ConfigError(f"task: the option `most` must be between 1 and 4, not {self.most}")

    def _prompt(self, split: str, index: int) -> Prompt:
        chance = Random(f"{self.seed}/{split}/{index}")
        request = f"{chance.choice(FORMS)} {chance.choice(TOPICS[split])}."
        count, names = chance.randint(1, self.most), list[str]()
        for name in chance.sample(list(MAKERS), len(MAKERS)):
            if len(names) < count and not any(name in s and s & set(names) for s in APART):
                names.append(name)
        made = [MAKERS[name](chance) for name in names]
        return Prompt(
            id=f"{self.name}/{split}/{index}",
            task=self.name,
            messages=chat_messages(" ".join([request, *(text for text, _ in made)])),
            target="",
            info={"instruction_id_list": names, "kwargs": [given for _, given in made]},
        )
