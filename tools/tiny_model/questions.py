"""Questions about the tables of `tiny_model.facts` and the explanations, each with its answer."""

from __future__ import annotations

import random

from tiny_model import facts
from tiny_model.explanations import DEFINITIONS, HOW, PURPOSES, WHY
from tiny_model.grammar import Exchange, capitalise, expand, join_words, pick, with_article
from tiny_model.passages import animal_sentences
from tiny_model.reckoning import arithmetic, calendar, count


def capital(rng: random.Random) -> Exchange:
    country, (city, continent) = rng.choice(list(facts.CAPITALS.items()))
    slots = {"c": country, "t": city, "k": continent}
    roll = rng.random()
    if roll < 0.7:
        return (
            pick(
                rng,
                (
                    "what is the capital of $c",
                    "what's the capital of $c",
                    "tell me the capital of $c",
                    "do you know the capital of $c",
                    "which city is the capital of $c",
                    "name the capital of $c",
                    "capital of $c",
                    "can you tell me what the capital of $c is",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "the capital of $c is $t.",
                    "$t is the capital of $c.",
                    "it is $t.",
                    "the capital of $c is $t, in $k.",
                ),
                slots,
            ),
        )
    if roll < 0.85:
        return (
            pick(
                rng,
                ("where is $c", "on which continent is $c", "where can I find $c", "in which part of the world is $c"),
                slots,
            ),
            pick(rng, ("$c is in $k.", "$c is a country in $k. its capital is $t."), slots),
        )
    return (
        pick(
            rng,
            (
                "of which country is $t the capital",
                "where is $t",
                "what is $t",
                "which country has $t as its capital",
                "tell me about $t",
            ),
            slots,
        ),
        pick(rng, ("$t is the capital of $c.", "$t is in $c.", "$t is a city in $c. it is the capital."), slots),
    )


def opposite(rng: random.Random) -> Exchange:
    a, b = rng.choice(facts.OPPOSITES)
    if rng.random() < 0.5 and "light" not in (a, b):
        a, b = b, a
    slots = {"a": a, "b": b}
    return (
        pick(
            rng,
            (
                "what is the opposite of $a",
                "what's the opposite of $a",
                "give me the opposite of $a",
                "tell me the opposite of $a",
                "which word is the opposite of $a",
                "opposite of $a",
                "what is the contrary of $a",
            ),
            slots,
        ),
        pick(rng, ("the opposite of $a is $b.", "$b.", "it is $b.", "$b is the opposite of $a."), slots),
    )


def colour(rng: random.Random) -> Exchange:
    if rng.random() < 0.2:
        a, b, c = rng.choice(facts.COLOUR_MIXES)
        a, b = rng.sample((a, b), 2)
        slots = {"a": a, "b": b, "c": c}
        return (
            pick(
                rng,
                (
                    "what do you get when you mix $a and $b",
                    "what colour do $a and $b make",
                    "what happens if I mix $a with $b",
                    "which colour do I get from $a and $b",
                ),
                slots,
            ),
            pick(rng, ("$a and $b make $c.", "you get $c.", "if you mix $a and $b, you get $c."), slots),
        )
    thing, name = rng.choice(list(facts.COLOURS_OF.items()))
    slots = {"t": thing, "c": name}
    return (
        pick(
            rng,
            (
                "what colour is $t",
                "what color is $t",
                "which colour does $t have",
                "tell me the colour of $t",
                "what is the colour of $t",
                "do you know what colour $t is",
            ),
            slots,
        ),
        pick(rng, ("$t is $c.", "it is $c.", "$c.", "$t is usually $c."), slots),
    )


def animal(rng: random.Random) -> Exchange:
    name = rng.choice(list(facts.ANIMALS))
    plural, kind, home, food, young, legs, sound, trait = facts.ANIMALS[name]
    slots = {
        "a": name,
        "as": plural,
        "k": kind,
        "home": home,
        "food": food,
        "young": young,
        "sound": sound,
        "trait": trait,
        "legs": "no" if not legs else facts.NUMBER_WORDS[legs],
    }
    form = rng.randrange(8)
    if form == 0:
        return (
            pick(
                rng,
                (
                    "where do $as live",
                    "where does the $a live",
                    "where can I find $as",
                    "what is the home of $as",
                    "tell me where $as live",
                ),
                slots,
            ),
            pick(rng, ("$as live $home.", "they live $home.", "you can find $as $home."), slots),
        )
    if form == 1:
        return (
            pick(
                rng,
                (
                    "what do $as eat",
                    "what does a^ $a eat",
                    "what is the food of the $a",
                    "tell me what $as eat",
                    "what can I feed a^ $a",
                ),
                slots,
            ),
            pick(rng, ("$as eat $food.", "they eat $food.", "a^ $a eats $food."), slots),
        )
    if form == 2:
        return (
            pick(
                rng,
                (
                    "what is a young $a called",
                    "what do you call a baby $a",
                    "what is the name of a baby $a",
                    "how do you call a young $a",
                    "what is a baby $a",
                ),
                slots,
            ),
            pick(rng, ("a young $a is called a^ $young.", "it is called a^ $young.", "a baby $a is a^ $young."), slots),
        )
    if form == 3:
        return (
            pick(
                rng,
                (
                    "what sound does a^ $a make",
                    "what does the $a say",
                    "how does a^ $a sound",
                    "which sound do $as make",
                    "what noise does a^ $a make",
                ),
                slots,
            ),
            pick(rng, ("the sound of a^ $a is a^ $sound.", "it is a^ $sound."), slots),
        )
    if form == 4:
        return (
            pick(
                rng,
                (
                    "how many legs does a^ $a have",
                    "how many legs do $as have",
                    "tell me how many legs a^ $a has",
                    "count the legs of a^ $a",
                ),
                slots,
            ),
            pick(rng, ("a^ $a has $legs legs.", "it has $legs legs.", "$as have $legs legs."), slots),
        )
    if form == 5:
        wrong = rng.choice(("mammal", "bird", "insect", "fish", "reptile"))
        slots["w"] = wrong
        return (
            pick(rng, ("is a^ $a a^ $w", "is the $a a^ $w", "are $as a kind of $w", "tell me, is a^ $a a^ $w"), slots),
            pick(
                rng,
                ("yes, a^ $a is a^ $k.", "yes, the $a is a^ $k.", "yes, it is.")
                if wrong == kind
                else ("no, a^ $a is a^ $k.", "no, the $a is not a^ $w. it is a^ $k."),
                slots,
            ),
        )
    first = pick(rng, ("a^ $a is a^ $k.", "the $a is a^ $k.", "$as are animals, and each one is a^ $k."), slots)
    ask = pick(
        rng,
        (
            "tell me about $as",
            "tell me something about $as",
            "what is a^ $a",
            "what do you know about $as",
            "describe a^ $a",
            "tell me about the $a",
            "write {two|three} sentences about $as",
            "what are $as like",
        ),
        slots,
    )
    return ask, " ".join([first, *animal_sentences(rng, name, rng.choice((1, 2, 3)))])


def size(rng: random.Random) -> Exchange:
    a, b = sorted(rng.sample(range(len(facts.SIZES)), 2))
    small, big = facts.SIZES[a], facts.SIZES[b]
    x, y = rng.sample((small, big), 2)
    slots = {"x": x, "y": y, "s": small, "b": big}
    if rng.random() < 0.5:
        return (
            pick(
                rng,
                (
                    "which is bigger, a^ $x or a^ $y",
                    "what is bigger, a^ $x or a^ $y",
                    "is a^ $x or a^ $y bigger",
                    "which animal is larger, the $x or the $y",
                ),
                slots,
            ),
            pick(rng, ("a^ $b is bigger than a^ $s.", "the $b is bigger.", "the $b is larger than the $s."), slots),
        )
    return (
        pick(
            rng,
            ("which is smaller, a^ $x or a^ $y", "what is smaller, a^ $x or a^ $y", "is a^ $x or a^ $y smaller"),
            slots,
        ),
        pick(rng, ("a^ $s is smaller than a^ $b.", "the $s is smaller.", "the $s is smaller than the $b."), slots),
    )


def use(rng: random.Random) -> Exchange:
    thing, (what, purpose) = rng.choice(list(facts.USES.items()))
    name = "scissors" if thing == "scissors" else with_article(thing)
    verb = "are" if thing == "scissors" else "is"
    slots = {"t": name, "w": what, "u": purpose, "v": verb}
    if rng.random() < 0.6:
        return (
            pick(
                rng,
                (
                    "what $v $t for",
                    "what can I do with $t",
                    "what do people use $t for",
                    "what do I need $t for",
                    "why do people use $t",
                    "how is $t used" if verb == "is" else "how are $t used",
                ),
                slots,
            ),
            pick(rng, ("you use $t to $u.", "with $t you can $u.", "people use $t to $u."), slots),
        )
    if rng.random() < 0.5:
        return (
            pick(rng, ("what $v $t", "tell me what $t $v", "explain what $t $v", "describe $t"), slots),
            pick(rng, ("$t $v $w. you use it to $u.", "$t $v $w. with it you can $u."), slots),
        )
    return (
        pick(
            rng, ("what do I need to $u", "what can I use to $u", "how can I $u", "I want to $u. what do I need"), slots
        ),
        pick(rng, ("you need $t.", "you can use $t.", "to $u, you need $t."), slots),
    )


def job(rng: random.Random) -> Exchange:
    name, (work, where) = rng.choice(list(facts.JOBS.items()))
    slots = {"j": name, "d": work, "w": where}
    roll = rng.random()
    if roll < 0.5:
        return (
            pick(
                rng,
                (
                    "what does a^ $j do",
                    "what is a^ $j",
                    "tell me what a^ $j does",
                    "what is the work of a^ $j",
                    "what do {you|we} call the work of a^ $j",
                ),
                slots,
            ),
            pick(rng, ("a^ $j $d.", "a^ $j $d and works $w."), slots),
        )
    if roll < 0.75:
        return (
            pick(rng, ("where does a^ $j work", "where can I find a^ $j", "where do you meet a^ $j"), slots),
            pick(rng, ("a^ $j works $w.", "you find a^ $j $w."), slots),
        )
    return (
        pick(rng, ("who $d", "which job is it when someone $d", "what do you call someone who $d"), slots),
        pick(rng, ("a^ $j $d.", "that is a^ $j."), slots),
    )


def group(rng: random.Random) -> Exchange:
    name = rng.choice(list(facts.GROUPS))
    amount = rng.choice((2, 3, 3, 4))
    members = rng.sample(facts.GROUPS[name], amount)
    slots = {"g": name, "n": facts.NUMBER_WORDS[amount], "m": join_words(members)}
    if rng.random() < 0.2:
        return pick(
            rng,
            ("tell me something about $g", "give me an example of $g", "which $g do you know", "what $g are there"),
            slots,
        ), group_sentence_of(rng, name)
    return (
        pick(
            rng,
            (
                "name $n $g",
                "list $n $g",
                "give me $n $g",
                "can you name $n $g",
                "tell me the names of $n $g",
                "write a list of $n $g",
            ),
            slots,
        ),
        pick(rng, ("$m.", "$n $g are $m.", "here are $n: $m.", "sure: $m."), slots),
    )


def group_sentence_of(rng: random.Random, name: str) -> str:
    """A sentence with some members of one group."""
    members = join_words(rng.sample(facts.GROUPS[name], 3))
    return pick(rng, ("$m are $g.", "some $g are $m.", "I know $m."), {"m": members, "g": name})


def definition(rng: random.Random) -> Exchange:
    thing, (what, more) = rng.choice(list(DEFINITIONS.items()))
    slots = {"t": thing, "w": what, "m": more}
    ask = pick(
        rng,
        (
            "what is $t",
            "what's $t",
            "explain $t",
            "can you explain $t",
            "tell me about $t",
            "what do you know about $t",
            "what does the word mean: $t",
            "explain $t in one sentence",
            "can you explain to me what $t is",
            "describe $t",
            "do you know what $t is",
        ),
        slots,
    )
    if "one sentence" in ask:
        return ask, expand(rng, "$t is $w.", slots)
    return ask, pick(rng, ("$t is $w. $m.", "$t is $w.", "$t is $w, and $m.", "it is $w. $m."), slots)


_WRAPS = (
    "{}",
    "{}",
    "{}",
    "{}",
    "{}",
    "{}",
    "I have a question: {}",
    "tell me, {}",
    "my question is: {}",
    "let me ask you: {}",
)


def explained(rng: random.Random) -> Exchange:
    asks, answers = rng.choice(rng.choice((WHY, WHY, HOW, HOW, PURPOSES)))
    ask = rng.choice(asks)
    if ask.startswith(("why", "how", "what")):
        ask = rng.choice(_WRAPS).format(ask)
    return capitalise(ask), pick(rng, answers)


KINDS = (
    (capital, 8),
    (opposite, 5),
    (colour, 5),
    (animal, 12),
    (size, 4),
    (use, 7),
    (job, 5),
    (calendar, 7),
    (arithmetic, 12),
    (count, 4),
    (group, 6),
    (definition, 16),
    (explained, 12),
)


def question(rng: random.Random) -> Exchange:
    """Draw one question (without its final mark) and its answer."""
    maker = rng.choices([maker for maker, _ in KINDS], [weight for _, weight in KINDS])[0]
    return maker(rng)
