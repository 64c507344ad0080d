"""A logits processor that a server's engine imports by name."""

from rustvllm import LogitsProcessor


class Aim(LogitsProcessor):
    """Makes the token that ``target`` names the likeliest."""

    validator = None

    @classmethod
    def validate_params(cls, params):
        if (params.extra_args or {}).get("target") == "nowhere":
            raise ValueError("there is no token 'nowhere'")
        if (params.extra_args or {}).get("target") == "broken":
            cls.validator()

    def __init__(self, config, device, is_pin_memory):
        self.targets = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.targets[index] = (params.extra_args or {}).get("target")
        for one, other, _ in batch_update.moved:
            a, b = self.targets.pop(one, None), self.targets.pop(other, None)
            self.targets[other], self.targets[one] = a, b

    def apply(self, logits):
        for index, target in self.targets.items():
            if target is not None and index < len(logits):
                logits[index, target] += 1e4
        return logits
