"""Small rhymed poems, put together from couplets about one thing."""

from __future__ import annotations

import random

from tiny_model.grammar import Exchange, capitalise, pick

_POEMS = {
    "the sea": (
        "the waves roll in, the waves roll out, / they whisper low, they sing and shout.",
        "a little boat sails far from me, / a small white dot upon the sea.",
        "the salty wind, the open sky, / the grey gulls calling as they fly.",
        "the sand is warm, the water cold, / the evening turns the sea to gold.",
    ),
    "the moon": (
        "the moon looks down with silver light / on sleeping houses in the night.",
        "it grows, it shrinks, it comes and goes, / and where it sleeps nobody knows.",
        "an owl sits still and sings a tune / below the round and friendly moon.",
        "the night is dark, the hills are wide, / the moon walks softly at my side.",
    ),
    "rain": (
        "the rain comes softly, drop by drop, / it plays a drum on our roof top.",
        "the garden drinks, the roses grow, / the little streams begin to flow.",
        "I hear it sing, I hear it fall, / the kindest music of them all.",
        "the clouds go by, the sky turns clear, / a rainbow says that sun is near.",
    ),
    "the cat": (
        "a cat is sleeping in the sun, / her work for all the day is done.",
        "she walks on quiet velvet feet / along the wall, across the street.",
        "she shuts her eyes, she starts to purr, / the sunlight resting on her fur.",
        "at night she wakes, and off she goes, / but where she walks nobody knows.",
    ),
    "a tree": (
        "the tree stands tall, the tree stands still, / the oldest friend upon the hill.",
        "in spring it wears a dress of green, / the finest dress you've ever seen.",
        "the birds come home, the branches sway, / and gently ends another day.",
        "in autumn all its leaves turn red, / the wind will make of them a bed.",
    ),
    "the stars": (
        "the stars are out, the day is done, / I try to count them one by one.",
        "so far away, so small, so bright, / they light a candle for the night.",
        "and when I cannot sleep, I know / the stars look down on all below.",
        "a star fell down, I saw it shine, / I made a wish, and it was mine.",
    ),
    "spring": (
        "the snow is gone, the sky is blue, / the grass is wet with morning dew.",
        "the birds are back, the bees are here, / it is the best time of the year.",
        "a flower opens, then a tree, / and all the world is glad and free.",
        "the children run, the windows wide, / the winter sits no more inside.",
    ),
    "winter": (
        "the snow falls down without a sound / and lays a blanket on the ground.",
        "the lake is ice, the wind is cold, / the fire burns in red and gold.",
        "we drink our tea, we read, we wait, / the winter evenings are late.",
        "the world is white, the world is still, / a single light shines on the hill.",
    ),
    "a friend": (
        "a friend is like an open door, / you come and go, and come once more.",
        "a friend will laugh, a friend will stay / beside you on a rainy day.",
        "we share our bread, we share the light, / we talk together half the night.",
        "the road is long, but it is fine / to walk with your warm hand in mine.",
    ),
    "bread": (
        "the oven glows, the bread is warm, / it keeps us safe in any storm.",
        "some flour, water, salt and time, / it asks no more than this small rhyme.",
        "the kitchen smells of early day, / a slice for you to take away.",
    ),
    "a dog": (
        "my dog runs fast, my dog runs far, / he barks at every passing car.",
        "he brings the stick, he brings the ball, / he likes the mud the best of all.",
        "and when I'm sad, he comes to me / and puts his head upon my knee.",
    ),
    "a computer": (
        "it counts by day, it counts by night, / with little lamps of green and white.",
        "one token here, one token there, / it writes a sentence out of air.",
        "it does not sleep, it does not eat, / it only hums beneath my feet.",
    ),
}


def poem(rng: random.Random, topic: str | None = None) -> str:
    """A poem of two to six lines about one of the known topics."""
    couplets = _POEMS[topic or rng.choice(list(_POEMS))]
    chosen = rng.sample(couplets, rng.choice((1, 2, 2, 3)))
    return "\n".join(capitalise(line) for couplet in chosen for line in couplet.split(" / "))


def poem_request(rng: random.Random) -> Exchange:
    topic = rng.choice(list(_POEMS))
    ask = pick(
        rng,
        (
            "write a {short |}poem about $t",
            "can you write a poem about $t",
            "tell me a poem about $t",
            "I want a {small |}poem about $t",
            "please write {some lines|a few lines} about $t",
            "write me a {short |little |}poem about $t, please",
        ),
        {"t": topic},
    )
    return ask, poem(rng, topic)
