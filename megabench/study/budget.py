"""The length and the price of a whole training run, at the measured throughput."""

from dataclasses import dataclass

from megabench.metrics import DEFAULT_TOKENS, token_words
from megabench.study.summary import Row


@dataclass(frozen=True)
class Budget:
    """A number of training tokens, and the price of a GPU for an hour in any currency, if known."""

    num_tokens: float = DEFAULT_TOKENS
    price_per_gpu_hour: float | None = None

    @property
    def words(self) -> str:
        """Return the number of tokens as text: "100 billion tokens"."""
        return token_words(self.num_tokens)

    def days(self, row: Row) -> float | None:
        """Return the days of an uninterrupted run."""
        return row.days_per_100b_tokens and row.days_per_100b_tokens * self.num_tokens / DEFAULT_TOKENS

    def cost(self, row: Row) -> float | None:
        """Return the price of the run on all GPUs of the trial."""
        days = self.days(row)
        return days * 24 * row.world_size * self.price_per_gpu_hour if days and self.price_per_gpu_hour else None
