"""Plain documents that are not stories: people who introduce themselves, days, letters, places, facts, lists."""

from __future__ import annotations

import random

from tiny_model import facts
from tiny_model.explanations import DEFINITIONS, HOW, WHY
from tiny_model.grammar import capitalise, expand, join_words, pick
from tiny_model.lexicon import CLASSES


def introduction(rng: random.Random) -> str:
    """Someone says who they are."""
    job = rng.choice(list(facts.JOBS))
    where = facts.JOBS[job][1]
    slots = {
        "n": rng.choice(CLASSES["name"]),
        "job": job,
        "where": where,
        "hobby": rng.choice(CLASSES["hobby"]),
        "home": rng.choice(list(facts.CAPITALS)),
    }
    parts = [
        pick(
            rng,
            (
                "hello, my name is $n.",
                "{hi|hello|good morning}, I am $n.",
                "my name is $n{ #surname|}.",
                "I am $n, and I am {a^ $job|#count and twenty years old}.",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "I am a^ $job{, and I work $where|}.",
                "I work as a^ $job $where.",
                "I am {seven|eight|nine|ten|eleven} years old, and I go to school.",
                "I have been a^ $job for #count years.",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "I live in a^ #size house {near|by} the #place{ with my #kin|}.",
                "my family lives in a small {town|village} {near the #outdoors|in the #season sun}.",
                "I come from {$home|a small village}, but now I live {in the city|by the sea}.",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "in my free time I like $hobby{ and #hobby|}.",
                "I love $hobby, and I am learning #subject.",
                "in the evening I enjoy $hobby{ with my #kin|}.",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "my favourite colour is #colour{, and my favourite food is #food|}.",
                "I have a^ #beast named #pet{, who is very #good|}.",
                "my best friend is called #name{. we often {cook|sing|walk|read} together|}.",
                "I like {the #season|#weather days} {best|most of all}.",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "{it is nice to meet you|I hope we can be friends|what about you|come and visit me one day}{.|!}",
                "",
                "one day I want to {see the sea|write a book|travel to Japan|learn to sail|build a house}.",
                "",
            ),
            slots,
        ),
    ]
    text = " ".join(part for part in [parts[0], *rng.sample(parts[1:5], rng.choice((2, 3, 3, 4))), parts[5]] if part)
    return text.replace("about you.", "about you?").replace("about you!", "about you?")


def day_report(rng: random.Random) -> str:
    """A day told in order, as in a diary."""
    slots = {"n": rng.choice(CLASSES["name"]), "w": rng.choice(CLASSES["weather"]), "day": rng.choice(CLASSES["day"])}
    steps = (
        (
            "today is $day, and {it is|the weather is} $w.",
            "it was a^ $w $day in #month.",
            "this $day was a^ {long|good|quiet|busy} day.",
            "yesterday was $day. it was $w{ and quiet|}.",
        ),
        (
            "in the morning, {I|we} {had #food for breakfast|went to the #outdoors|made #food|cleaned the kitchen|read a book}.",
            "I got up {early|late|at #count o'clock} and drank {some|a cup of} #drink.",
        ),
        (
            "{then|after that|later}, I {met|visited|called} {$n|my #kin}{, who is {ill|#mood_good|#mood_bad} at the moment|}.",
            "my friend $n came to visit {and brought #food|with a^ #adj #thing}.",
            "at school, we learned about {the #nature|#subject|animals}.",
        ),
        (
            "in the afternoon, we {walked to the #outdoors|worked in the garden|played a game|bought a^ #colour #thing at the market}.",
            "after lunch, I {wrote a letter|tried #hobby|repaired my old #thing|fell asleep in a chair}.",
        ),
        (
            "it was {so|very} #weather that we {stayed inside|had to laugh|soon went home}.",
            "we saw #count #nature and a^ #small_beast.",
            "I found a^ #colour #thing #hiding.",
        ),
        (
            "in the evening, {I|we} {ate #food|listened to music|watched the #nature|sat by the fire}.",
            "for dinner we had #food with {#drink|bread|a salad}.",
        ),
        (
            "now I am {tired but #mood_good|#mood_good|ready for bed}.",
            "it was a {good|fine} day.",
            "tomorrow I want to {try #hobby|visit my #kin|rest|sleep a little longer}.",
            "good night.",
        ),
    )
    chosen = [steps[0], *(step for step in steps[1:-1] if rng.random() < 0.75), steps[-1]]
    return " ".join(pick(rng, step, slots) for step in chosen)


def letter(rng: random.Random) -> str:
    """A short letter between friends or family."""
    slots = {"a": rng.choice(CLASSES["name"]), "b": rng.choice(CLASSES["name"])}
    body = [
        pick(
            rng,
            (
                "thank you for {your letter|the #colour #thing|the #food}.",
                "how are you? I hope you are {well|#mood_good}.",
                "I am writing to you from the #place.",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "here it is #weather, and the #nature are beautiful.",
                "last #day, we went to the #outdoors and saw #nature.",
                "I have started #hobby, and I like it a lot.",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "my #kin sends you warm greetings.",
                "my #beast #pet is {well|growing fast|as #good as ever}.",
                "we {ate #food|talked about you} yesterday.",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "please write soon.",
                "come and visit us in #month.",
                "I look forward to seeing you in #season.",
                "I miss our long walks.",
            ),
            slots,
        ),
    ]
    return (
        f"Dear {slots['a']},\n"
        + " ".join(rng.sample(body[:3], rng.choice((2, 3))) + body[3:])
        + "\n"
        + pick(rng, ("love, $b", "your friend $b", "best wishes, $b"), slots)
    )


def place_description(rng: random.Random) -> str:
    """A place and what one sees there."""
    slots = {"place": rng.choice(CLASSES["place"]), "season": rng.choice(CLASSES["season"])}
    return " ".join(
        [
            pick(
                rng,
                (
                    "the $place is a^ {quiet|beautiful|busy|lovely|lonely} place{ in $season|}.",
                    "there is a^ {#size|old|quiet} $place not far from the #outdoors.",
                    "in $season, the $place is full of {#nature|people|light}.",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "you can see #colour #nature and {a^ #look #thing|#nature everywhere}.",
                    "on one side there are #nature, on the other side stands a^ #size #colour house.",
                    "a^ {small|narrow|quiet} path leads to {a #place|the #outdoors}.",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "#weather days are the best time to visit it.",
                    "in the morning a^ #job opens the door and says hello.",
                    "children {play|sing|run} there {after school|every day}.",
                    "an old #beast sleeps in the sun.",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "people come here to {rest|talk|buy #food|hear music|watch the #nature}.",
                    "when it is #weather, nobody is there.",
                    "{at night|in the evening} it is very quiet, and you can hear {the wind|an owl|the water}.",
                    "it smells of {#food|flowers|rain|wood|the sea}.",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "I like it very much.",
                    "",
                    "many stories are told about it.",
                    "it has hardly changed in #count years.",
                ),
                slots,
            ),
        ]
    ).strip()


def animal_sentences(rng: random.Random, animal: str, count: int) -> list[str]:
    """Up to ``count`` different true sentences about one animal of the table."""
    plural, kind, home, food, young, legs, sound, trait = facts.ANIMALS[animal]
    slots = {
        "a": animal,
        "as": plural,
        "kind": kind,
        "home": home,
        "food": food,
        "young": young,
        "youngs": young + "s",
        "sound": sound,
        "trait": trait,
        "legs": facts.NUMBER_WORDS[legs],
    }
    options = [
        ("$as live $home.", "you can find $as $home.", "the $a lives $home."),
        ("$as eat $food.", "the food of the $a is $food.", "a^ $a likes to eat $food."),
        ("a young $a is called a^ $young.", "the young of the $a are called $youngs."),
        ("a^ $a is $trait.", "$as are {known to be|} $trait.", "the $a is $trait."),
        ("the sound of a^ $a is a^ $sound.",),
        ("a^ $a has " + ("no legs." if not legs else "$legs legs."),),
    ]
    if young == "larva":
        options[2] = ("a young $a is called a larva.",)
    elif young == "fry":
        options[2] = ("young $as are called fry.",)
    if trait.startswith(("covered", "able", "active", "at home", "protected", "sharp", "enormous", "very", "good")):
        options[3] = ("a^ $a is $trait.", "the $a is $trait.")
    return [pick(rng, option, slots) for option in rng.sample(options, min(count, len(options)))]


def animal_passage(rng: random.Random) -> str:
    """A short encyclopaedia entry about an animal."""
    animal = rng.choice(list(facts.ANIMALS))
    kind = facts.ANIMALS[animal][1]
    first = pick(rng, ("the $a is a^ $k.", "a^ $a is a^ $k.", "the $a is a kind of $k."), {"a": animal, "k": kind})
    return " ".join([first, *animal_sentences(rng, animal, rng.choice((2, 3, 4, 5)))])


def fact_passage(rng: random.Random) -> str:
    """Several short facts of one kind in a row."""
    kind = rng.randrange(7)
    count = rng.choice((1, 2, 3, 4))
    if kind == 0:
        rows = rng.sample(list(facts.CAPITALS.items()), count)
        return " ".join(
            pick(
                rng,
                ("the capital of $c is $t.", "$t is the capital of $c.", "$c is in $k, and its capital is $t."),
                {"c": c, "t": t, "k": k},
            )
            for c, (t, k) in rows
        )
    if kind == 1:
        rows2 = rng.sample(facts.OPPOSITES, count)
        return " ".join(
            pick(rng, ("the opposite of $a is $b.", "$a is the opposite of $b."), {"a": a, "b": b}) for a, b in rows2
        )
    if kind == 2:
        rows3 = rng.sample(list(facts.COLOURS_OF.items()), count)
        return " ".join(pick(rng, ("$t is $c.", "the colour of $t is $c."), {"t": t, "c": c}) for t, c in rows3)
    if kind == 3:
        rows4 = rng.sample(list(facts.USES.items()), count)
        return " ".join(
            pick(
                rng,
                ("a^ $t is $w. you use it to $u.", "you use a^ $t to $u.", "with a^ $t you can $u."),
                {"t": t, "w": w, "u": u},
            ).replace("a scissors", "scissors")
            for t, (w, u) in rows4
        )
    if kind == 4:
        rows5 = rng.sample(list(facts.JOBS.items()), count)
        return " ".join(
            pick(rng, ("a^ $j $d.", "a^ $j works $w.", "a^ $j $d and works $w."), {"j": j, "d": d, "w": w})
            for j, (d, w) in rows5
        )
    if kind == 5:
        season = rng.choice(list(facts.SEASONS))
        weather, people, nature = facts.SEASONS[season]
        slots = {"s": season, "w": weather, "p": people, "n": nature}
        return " ".join(
            rng.sample(
                [
                    expand(rng, "in $s, the weather is $w.", slots),
                    expand(rng, "people $p{ in $s|}.", slots),
                    expand(rng, "in $s, $n.", slots),
                ],
                rng.choice((2, 3)),
            )
        )
    rows6 = rng.sample(list(DEFINITIONS.items()), min(count, 2))
    return " ".join(pick(rng, ("$t is $w. $m.", "$t is $w, and $m."), {"t": t, "w": w, "m": m}) for t, (w, m) in rows6)


def sum_text(a: int, b: int, sign: str) -> str:
    """One sum in figures, for example ``3 + 4 = 7``."""
    result = {"+": a + b, "-": a - b, "x": a * b}[sign]
    return f"{a} {sign} {b} = {result}"


def draw_sum(rng: random.Random) -> tuple[int, int, str]:
    """Draw two small numbers and a sign whose result is not negative."""
    sign = rng.choice("++-x")
    if sign == "x":
        return rng.randint(1, 6), rng.randint(1, 6), sign
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return (max(a, b), min(a, b), sign) if sign == "-" else (a, b, sign)


def counting(rng: random.Random) -> str:
    """Numbers, days or months in order, or a few sums."""
    kind = rng.randrange(5)
    if kind == 0:
        start, length = rng.randint(1, 20), rng.randint(4, 14)
        return ", ".join(str(number) for number in range(start, start + length)) + "."
    if kind == 1:
        start, length = rng.randint(0, 8), rng.randint(4, 12)
        return capitalise(", ".join(facts.NUMBER_WORDS[start : start + length])) + "."
    if kind == 2:
        start = rng.randrange(7)
        return ", ".join(facts.DAYS[(start + offset) % 7] for offset in range(7)) + "."
    if kind == 3:
        start = rng.randrange(12)
        return ", ".join(facts.MONTHS[(start + offset) % 12] for offset in range(12)) + "."
    return "\n".join(sum_text(*draw_sum(rng)) for _ in range(rng.randint(2, 6)))


def explanation(rng: random.Random) -> str:
    """A question and its answer as plain text."""
    asks, answers = rng.choice(WHY + HOW)
    return f"{pick(rng, asks)}? {pick(rng, answers)}"


def group_sentence(rng: random.Random) -> str:
    """Members of a group, as a sentence."""
    group = rng.choice(list(facts.GROUPS))
    members = join_words(rng.sample(facts.GROUPS[group], rng.choice((2, 3, 4))))
    return pick(
        rng, ("$m are $g.", "some $g are $m.", "I like {many|some} $g, for example $m."), {"m": members, "g": group}
    )


PASSAGES = (
    (introduction, 5),
    (day_report, 5),
    (letter, 3),
    (place_description, 5),
    (animal_passage, 3),
    (fact_passage, 3),
    (counting, 2),
    (explanation, 1),
    (group_sentence, 1),
)


def passage(rng: random.Random) -> str:
    """Draw one plain document."""
    maker = rng.choices([maker for maker, _ in PASSAGES], [weight for _, weight in PASSAGES])[0]
    return maker(rng)
