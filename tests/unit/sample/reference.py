"""The sampler's rules once more, one row at a time in float64 and plain loops."""

import math
import statistics

MASK = (1 << 64) - 1


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed, position):
    golden = 0x9E3779B97F4A7C15
    state = mix((seed + golden) & MASK)
    state = mix(state ^ ((position * golden) & MASK))
    state = mix((state + golden) & MASK)
    return (state >> 11) * 2.0**-53


def penalised(logits, prompt, output, presence, frequency, repetition):
    logits = list(logits)
    for token in set(prompt) | set(output):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(output):
        logits[token] -= frequency * output.count(token) + presence
    return logits


def ruled(logits, output, allowed=(), bad_words=(), stop_ids=(), bias=()):
    """Logits with those of ids that must not be sampled at minus infinity, and with the biases of ``(id, bias)``."""
    banned = {word[-1] for word in bad_words if list(output[len(output) - len(word) + 1 :]) == list(word[:-1])}
    banned |= set(stop_ids)
    ruled = [
        -math.inf if token in banned or (allowed and token not in allowed) else logit
        for token, logit in enumerate(logits)
    ]
    for token, value in bias:
        ruled[token] += value
    return ruled


def choose(logits, temperature, seed, position, **kept):
    """An id, or −8 when none is left that could be drawn."""
    if max(logits) == -math.inf:
        return -8
    if temperature < 1e-5:
        return max(range(len(logits)), key=lambda token: logits[token])
    return draw(distribution(logits, temperature, **kept), uniform(seed, position))


def within_sigma(logits, n):
    """Whether each logit is at most ``n`` standard deviations below the largest; masked ones do not count."""
    finite = [x for x in logits if x > -math.inf]
    lowest = max(finite) - n * statistics.pstdev(finite)
    return [x >= lowest for x in logits]


def distribution(logits, temperature=1.0, top_n_sigma=0.0, min_p=0.0, top_k=0, top_p=1.0):
    """Probability of every id: temperature, then top_n_sigma, min_p, top_k, top_p; equals of the last one are kept."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    if top_n_sigma > 0:
        is_near = within_sigma(scaled, top_n_sigma)
        weights = [w if is_kept else 0.0 for w, is_kept in zip(weights, is_near, strict=True)]
    weights = [w if w >= min_p * 1.0 else 0.0 for w in weights]
    if 0 < top_k < len(weights):
        smallest = sorted(weights, reverse=True)[top_k - 1]
        kept = sorted(weights, reverse=True)[:top_k]
    else:
        smallest, kept = 0.0, sorted(weights, reverse=True)
    if top_p < 1:
        total, mass = sum(kept), 0.0
        for weight in kept:
            mass += weight
            smallest = weight
            if mass / total >= top_p:
                break
    weights = [w if w >= smallest else 0.0 for w in weights]
    total = sum(weights)
    return [w / total for w in weights]


def draw(probabilities, u):
    mass = 0.0
    for token, probability in enumerate(probabilities):
        mass += probability
        if mass > u:
            return token
    return max(range(len(probabilities)), key=lambda token: probabilities[token] > 0)
