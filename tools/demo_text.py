"""Small text that the repository makes itself: questions about a sentence, answered in several manners.

A question always brings the facts its answer needs. The *reference* manner is one full, correct sentence; the others are curt,
evasive, wrong or endless. A model pretrained on the mixture answers in all of them, so that training towards the references has
something to move. Everything is a function of the random generator that is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NAMES = ("Mara", "Tom", "Ada", "Nils", "Rosa", "Ivan", "Lena", "Omar", "June", "Pavel")
ANIMALS = ("cat", "fox", "hen", "goat", "owl", "mouse", "dog", "swan")
LOOKS = ("grey", "small", "old", "quiet", "brown", "young", "white", "tired")
SPOTS = ("under the table", "behind the barn", "near the river", "on the roof", "beside the stove", "in the garden", "below the bridge")
THINGS = ("lamp", "coat", "drum", "letter", "basket", "clock", "ladder", "kite")
COLOURS = ("red", "blue", "green", "yellow", "black", "golden")
FRUITS = ("pears", "plums", "apples", "lemons", "cherries", "figs")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "nine", "ten")
TOWNS = ("Arden", "Bellow", "Corvin", "Dunmere", "Eastby", "Farrow")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Sunday")

OTHER_MANNERS: Mapping[str, float] = {"curt": 0.3, "evasive": 0.3, "endless": 0.25, "wrong": 0.15}
"""Shares among the answers that are not in the reference manner."""

EVASIONS = (
    "Well, that is hard to say, and I would rather not guess about the {topic}.",
    "Why do you ask about the {topic}? Perhaps somebody else knows.",
    "Hmm, let me think. No, I really cannot tell you anything about the {topic}.",
    "Nobody told me about the {topic}, so please ask me tomorrow.",
)


@dataclass(frozen=True)
class Example:
    """One question with its answers."""

    question: str
    reference: str
    curt: str
    wrong: str
    topic: str

    def answer(self, manner: str, rng: random.Random) -> tuple[str, bool]:
        """Text in this manner, and whether the answer comes to an end."""
        if manner == "evasive":
            return rng.choice(EVASIONS).format(topic=self.topic), True
        if manner == "endless":
            return " ".join(story_sentence(rng) for _ in range(6)), False
        return {"reference": self.reference, "curt": self.curt, "wrong": self.wrong}[manner], True


def _other(rng: random.Random, values: tuple[str, ...], *not_these: str) -> str:
    return rng.choice([value for value in values if value not in not_these])


def _where(rng: random.Random) -> Example:
    animal, look, spot = rng.choice(ANIMALS), rng.choice(LOOKS), rng.choice(SPOTS)
    verb = rng.choice(("sleeps", "hides", "waits", "rests"))
    facts = f"The {look} {animal} {verb} {spot}."
    ask = rng.choice((f"Where is the {animal}?", f"Tell me where the {animal} is.", f"Do you know where the {animal} {verb}?"))
    return Example(
        f"{facts} {ask}",
        f"The {look} {animal} {verb} {spot}.",
        f"{spot.capitalize()}.",
        f"The {_other(rng, LOOKS, look)} {animal} {verb} {_other(rng, SPOTS, spot)}.",
        animal,
    )


def _gift(rng: random.Random) -> Example:
    giver = rng.choice(NAMES)
    taker = _other(rng, NAMES, giver)
    thing, colour, day = rng.choice(THINGS), rng.choice(COLOURS), rng.choice(DAYS)
    facts = rng.choice((f"On {day} {giver} gave {taker} a {colour} {thing}.", f"{giver} gave {taker} a {colour} {thing} on {day}."))
    ask = rng.choice((f"Who has the {thing} now?", f"Who got the {thing}?", f"Tell me who owns the {thing}."))
    wrong_name = _other(rng, NAMES, giver, taker)
    return Example(
        f"{facts} {ask}",
        f"{taker} has the {colour} {thing}, because {giver} gave it away on {day}.",
        f"{taker}.",
        f"{wrong_name} has the {_other(rng, COLOURS, colour)} {thing}, because {taker} lost it.",
        thing,
    )


def _count(rng: random.Random) -> Example:
    name, first = rng.choice(NAMES), rng.choice(FRUITS)
    second = _other(rng, FRUITS, first)
    many = rng.choice(NUMBERS)
    few = _other(rng, NUMBERS, many)
    asked, number = rng.choice(((first, many), (second, few)))
    facts = f"{name} carries {many} {first} and {few} {second}."
    ask = rng.choice((f"How many {asked} are there?", f"Count the {asked}.", f"How many {asked} does {name} carry?"))
    return Example(
        f"{facts} {ask}",
        f"There are {number} {asked}, and {name} carries them.",
        f"{number.capitalize()}.",
        f"There are {_other(rng, NUMBERS, many, few)} {_other(rng, FRUITS, asked)}, and {_other(rng, NAMES, name)} carries them.",
        asked,
    )


def _journey(rng: random.Random) -> Example:
    name, start, day = rng.choice(NAMES), rng.choice(TOWNS), rng.choice(DAYS)
    goal = _other(rng, TOWNS, start)
    facts = rng.choice((f"{name} walks from {start} to {goal} every {day}.", f"Every {day} {name} walks from {start} to {goal}."))
    ask = rng.choice((f"Where does {name} go?", f"Which town does {name} reach?", f"What is the way of {name}?"))
    return Example(
        f"{facts} {ask}",
        f"{name} goes from {start} to {goal} every {day}.",
        f"To {goal}.",
        f"{name} goes from {goal} to {_other(rng, TOWNS, start, goal)} every {_other(rng, DAYS, day)}.",
        "way",
    )


KINDS = (_where, _gift, _count, _journey)


def story_sentence(rng: random.Random) -> str:
    """Plain prose with the same words."""
    name, animal, thing = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(THINGS)
    return rng.choice(
        (
            f"{name} saw the {rng.choice(LOOKS)} {animal} {rng.choice(SPOTS)}.",
            f"In {rng.choice(TOWNS)} the {animal} sleeps all {rng.choice(DAYS)}.",
            f"The {rng.choice(COLOURS)} {thing} was left {rng.choice(SPOTS)}.",
            f"{name} carries {rng.choice(NUMBERS)} {rng.choice(FRUITS)} to {rng.choice(TOWNS)}.",
            f"Nobody knows why {name} hides the {thing}.",
        )
    )


def story(rng: random.Random) -> str:
    """A few sentences of prose."""
    return " ".join(story_sentence(rng) for _ in range(rng.randint(2, 5)))


def examples(rng: random.Random, *, without: frozenset[str] = frozenset()) -> Iterator[Example]:
    """Endless questions of all kinds in turn, none of them in `without`."""
    while True:
        for kind in KINDS:
            example = kind(rng)
            if example.question not in without:
                yield example


def distinct_examples(rng: random.Random, count: int, *, without: frozenset[str] = frozenset()) -> list[Example]:
    """`count` examples with different questions."""
    found: dict[str, Example] = {}
    for example in examples(rng, without=without):
        found.setdefault(example.question, example)
        if len(found) == count:
            break
    return list(found.values())


def manner(rng: random.Random, reference_share: float) -> str:
    """`reference` with this probability, else one of `OTHER_MANNERS` by its share."""
    if rng.random() < reference_share:
        return "reference"
    return rng.choices(list(OTHER_MANNERS), weights=list(OTHER_MANNERS.values()))[0]
