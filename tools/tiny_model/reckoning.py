"""Questions with one right answer in order or number: days, months, seasons, sums, counting."""

from __future__ import annotations

import random

from tiny_model import facts
from tiny_model.grammar import Exchange, join_words, pick
from tiny_model.lexicon import CLASSES
from tiny_model.passages import draw_sum


def calendar(rng: random.Random) -> Exchange:
    form = rng.randrange(8)
    if form < 4:
        names = facts.DAYS if form < 2 else facts.MONTHS
        unit = "day" if form < 2 else "month"
        index = rng.randrange(len(names))
        slots = {"x": names[index], "u": unit, "next": names[(index + 1) % len(names)], "prev": names[index - 1]}
        if form % 2:
            return (
                pick(
                    rng,
                    (
                        "which $u comes after $x",
                        "what $u comes after $x",
                        "what is the $u after $x",
                        "what comes after $x",
                        "tell me the $u after $x",
                    ),
                    slots,
                ),
                pick(rng, ("$next comes after $x.", "the $u after $x is $next.", "it is $next."), slots),
            )
        return (
            pick(
                rng,
                (
                    "which $u comes before $x",
                    "what $u comes before $x",
                    "what is the $u before $x",
                    "what comes before $x",
                ),
                slots,
            ),
            pick(rng, ("$prev comes before $x.", "the $u before $x is $prev.", "it is $prev."), slots),
        )
    if form == 4:
        return rng.choice(
            (
                (
                    pick(rng, ("how many days are in a week", "how many days does a week have", "how long is a week")),
                    "A week has seven days.",
                ),
                (
                    pick(
                        rng, ("how many months are in a year", "how many months does a year have", "how long is a year")
                    ),
                    "A year has twelve months.",
                ),
                (
                    pick(rng, ("how many hours are in a day", "how many hours does a day have", "how long is a day")),
                    "A day has twenty-four hours.",
                ),
                (
                    pick(
                        rng,
                        (
                            "how many minutes are in an hour",
                            "how many minutes does an hour have",
                            "how long is an hour",
                        ),
                    ),
                    "An hour has sixty minutes.",
                ),
            )
        )
    if form == 5:
        return (
            pick(
                rng,
                (
                    "name the days of the week",
                    "what are the days of the week",
                    "list the days of the week",
                    "tell me the days of the week",
                ),
            ),
            pick(rng, ("the days of the week are ", "they are ", "")) + " " + join_words(facts.DAYS) + ".",
        )
    if form == 6:
        season = rng.choice(list(facts.SEASONS))
        weather, people, nature = facts.SEASONS[season]
        slots = {"s": season, "w": weather, "p": people, "n": nature}
        return (
            pick(
                rng,
                (
                    "what is $s like",
                    "tell me about $s",
                    "what happens in $s",
                    "what do people do in $s",
                    "how is the weather in $s",
                    "describe $s",
                ),
                slots,
            ),
            pick(rng, ("in $s, the weather is $w. people $p.", "in $s, $n, and people $p.", "$s is $w. $n."), slots),
        )
    state, (wear, extra) = rng.choice(list(facts.WEATHER_WEAR.items()))
    slots = {"s": state, "w": wear, "e": extra}
    return (
        pick(
            rng,
            (
                "what should I wear when $s",
                "what do I wear if $s",
                "$s. what should I wear",
                "$s outside, what do I need",
                "$s today. what should I take with me",
            ),
            slots,
        ),
        pick(rng, ("wear $w.", "you should wear $w. take $e, too.", "when $s, wear $w{ and take $e|}."), slots),
    )


def arithmetic(rng: random.Random) -> Exchange:
    a, b, sign = draw_sum(rng)
    result = {"+": a + b, "-": a - b, "x": a * b}[sign]
    word = {"+": "plus", "-": "minus", "x": "times"}[sign]
    slots = {"a": str(a), "b": str(b), "w": word, "s": sign, "r": str(result)}
    if sign == "+" and rng.random() < 0.25 and a and b:
        thing = rng.choice(("apples", "books", "coins", "pears", "stones", "eggs", "cakes", "pencils"))
        slots |= {"t": thing, "n": rng.choice(CLASSES["name"])}
        return (
            pick(
                rng,
                (
                    "$n has $a $t and gets $b more. how many $t does $n have",
                    "I have $a $t and you give me $b more. how many are there",
                    "there are $a $t on the table and $b in the box. how many $t are there",
                ),
                slots,
            ),
            pick(rng, ("$a plus $b is $r, so there are $r $t.", "$r $t, because $a + $b = $r."), slots),
        )
    return (
        pick(
            rng,
            (
                "what is $a $w $b",
                "what is $a $s $b",
                "how much is $a $w $b",
                "what's $a $s $b",
                "$a $s $b",
                "calculate $a $s $b",
                "can you tell me what $a $w $b is",
                "how much is $a $s $b",
                "$a $w $b",
            ),
            slots,
        ),
        pick(rng, ("$a $w $b is $r.", "$a $s $b = $r.", "$a $w $b is $r.", "the answer is $r."), slots),
    )


def count(rng: random.Random) -> Exchange:
    start = rng.choice((1, 1, 1, rng.randint(2, 12)))
    stop = start + rng.randint(2, 12)
    numbers = list(range(start, stop + 1))
    slots = {"a": str(start), "b": str(stop)}
    if rng.random() < 0.2:
        return (
            pick(rng, ("count backwards from $b to $a", "count down from $b to $a"), slots),
            ", ".join(map(str, reversed(numbers))) + ".",
        )
    ask = pick(
        rng,
        (
            "count from $a to $b",
            "can you count from $a to $b",
            "please count from $a to $b",
            "write the numbers from $a to $b",
        ),
        slots,
    )
    if start == 1 and rng.random() < 0.4:
        ask = pick(rng, ("count to $b", "can you count to $b", "count up to $b"), slots)
    return ask, ", ".join(map(str, numbers)) + "."
