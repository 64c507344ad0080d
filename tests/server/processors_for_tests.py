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


class Say(Aim):
    """Makes an output the tokens that ``says`` lists, and what it likes behind them."""

    @classmethod
    def validate_params(cls, params):
        pass

    def update_state(self, batch_update):
        super().update_state(batch_update)
        if batch_update is not None:
            for index, params, _, output_ids in batch_update.added:
                says = (params.extra_args or {}).get("says")
                self.targets[index] = None if says is None else (says, output_ids)

    def apply(self, logits):
        for index, target in self.targets.items():
            if target is not None and index < len(logits) and len(target[1]) < len(target[0]):
                logits[index, target[0][len(target[1])]] += 1e4
        return logits
