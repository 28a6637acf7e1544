"""The `library` task: answer questions about an invented country by searching documents.

The invented country has towns and people. Each town has a building, and each person was born in a
town. A document describes one town or one person. A one-hop question needs one document. A two-hop
question needs two documents: the first document names the subject of the second document. A model
cannot know the answers, because the country is invented.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from covey.errors import ConfigError
from covey.tasks.task import SplitTask, chat_messages, hashed_into, with_instruction
from covey.types import Prompt

TOWNS = 400
HELD_OUT_SHARE = 0.25
INSTRUCTION = (
    "Search the documents. Then give the answer between <answer> and </answer>, and cite the "
    "documents that it is from in square brackets, such as [doc-17]."
)
_STARTS = ("Ar", "Bel", "Cor", "Dun", "El", "Fen", "Gar", "Hol", "Ist", "Jor", "Kel", "Lor", "Mar",
           "Nor", "Or", "Pel", "Quin", "Ros", "Sol", "Tor", "Ul", "Ver", "Wen", "Zel")  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "an", "er", "in", "ov")
_TOWN_ENDS = ("burg", "dale", "ford", "haven", "mouth", "stead", "wick")
_FIRST = ("Ada", "Boris", "Clara", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leo",
          "Mina", "Nils", "Olga", "Piet", "Rosa", "Sven", "Thea", "Viktor")  # fmt: skip
_LAST_ENDS = ("berg", "dottir", "ek", "ini", "lund", "mann", "ova", "son")
_BUILDINGS = ("bridge", "lighthouse", "library", "town hall", "theatre", "observatory", "mill")
_YEARS = range(1700, 1950)
_TRADES = ("architect", "engineer", "carpenter", "mason", "painter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A person of the invented country, who built some of its buildings."""

    name: str
    trade: str
    born: int
    birthplace: str
    document: str

    @property
    def text(self) -> str:
        return (
            f"{self.name}, {self.trade}, was born in {self.birthplace} in {self.born}. Some of the "
            f"country's best buildings are the work of {self.name}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Town:
    """A town of the invented country, with its building."""

    name: str
    building: str
    opened: int
    builder: Person
    document: str

    @property
    def text(self) -> str:
        return (
            f"{self.name} is a town. Its {self.building}, the pride of {self.name}, was built by "
            f"{self.builder.name} and opened in {self.opened}."
        )


@cache
def towns() -> tuple[Town, ...]:
    """Return the towns of the invented country; every call returns the same towns."""
    random = Random("library")
    pick = random.choice
    names = random.sample([a + b + c for a in _STARTS for b in _MIDDLES for c in _TOWN_ENDS], TOWNS)
    families = [a + b + c for a in _STARTS for b in _MIDDLES for c in _LAST_ENDS]
    ids = [f"doc-{number}" for number in random.sample(range(1, 2 * TOWNS + 1), 2 * TOWNS)]
    people = [
        Person(name=f"{pick(_FIRST)} {family}", trade=pick(_TRADES), born=pick(_YEARS),
               birthplace=pick(names), document=ids.pop())
        for family in random.sample(families, TOWNS)
    ]  # fmt: skip
    return tuple(
        Town(name=name, building=pick(_BUILDINGS), opened=pick(_YEARS), builder=pick(people),
             document=ids.pop())
        for name in names
    )  # fmt: skip


def documents() -> dict[str, str]:
    about: tuple[Town | Person, ...] = (*towns(), *(town.builder for town in towns()))
    return {one.document: one.text for one in about}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library(SplitTask):
    """Questions of at most `max_hops` hops; a fixed quarter of the country's 400 towns is held out.

    `info["sources"]` lists the ids of the documents that are needed to find the answer.
    """

    max_hops: int = 2
    system: str = ""
    instruction: str = INSTRUCTION
    name: str = "library"

    def __post_init__(self) -> None:
        if self.max_hops not in (1, 2):
            raise ConfigError(f"task: max_hops must be 1 or 2, not {self.max_hops}")

    def _prompts(self, split: str) -> list[Prompt]:
        return [
            self._prompt(town, hops, split)
            for town in towns()
            if hashed_into(split, f"library/{town.name}", HELD_OUT_SHARE)
            for hops in range(1, self.max_hops + 1)
        ]

    def _prompt(self, town: Town, hops: int, split: str) -> Prompt:
        what = f"the {town.building} of {town.name}"
        question, target, sources = {
            1: (f"In which year was {what} opened?", str(town.opened), [town.document]),
            2: (
                f"In which town was the builder of {what} born?",
                town.builder.birthplace,
                [town.document, town.builder.document],
            ),
        }[hops]
        return Prompt(
            id=f"{self.name}/{split}/{town.name}/{hops}",
            task=self.name,
            messages=chat_messages(with_instruction(question, self.instruction), self.system),
            target=target,
            info={"sources": sources},
        )
