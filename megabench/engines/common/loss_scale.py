"""The dynamic loss scale of fp16: its initial value for all engines, and a scaler for engines without one."""

from dataclasses import asdict, dataclass

# DeepSpeed begins at 2^16. With DeepSpeed's larger initial scale, engines with fp16 gradients skip two of GPT-2's first
# steps, and engines with fp32 gradients skip none. Their work would then differ.
INITIAL = 2.0**13
WINDOW = 1000  # WINDOW and HYSTERESIS are DeepSpeed's defaults
HYSTERESIS = 2


@dataclass
class LossScale:
    """Doubles the scale after WINDOW finite steps, and halves it at the second non-finite step (arXiv 1710.03740)."""

    value: float = INITIAL
    num_good: int = 0
    hysteresis: int = HYSTERESIS

    def update(self, is_finite: bool) -> None:
        """Counts a step."""
        if is_finite:
            self.num_good += 1
            if self.num_good == WINDOW:
                self.value, self.num_good, self.hysteresis = self.value * 2, 0, HYSTERESIS
            return
        self.num_good = 0
        self.hysteresis -= 1
        if self.hysteresis <= 0:
            self.value = max(self.value / 2, 1.0)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {name: float(value) for name, value in asdict(self).items()}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from `state`."""
        self.value, self.num_good = state["value"], int(state["num_good"])
        self.hysteresis = int(state["hysteresis"])
