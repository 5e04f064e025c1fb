"""An environment with a tool, for tests of what is said about calls."""


class Account:
    """An account, and what its tools do to it."""

    def reset(self, seed: int) -> str:
        self.balance = seed
        return f"There is {seed} in it."

    def deposit(self, amount: int, note: str = "") -> str:
        """Put money in.

        Args:
            amount: how much
            note: what for
        """
        self.balance += amount
        return f"{self.balance} now{note and f', {note}'}"
