"""An iterable of torch that does not divide its rows among workers; workers import it."""

from torch.utils.data import IterableDataset

N = 400


class Whole(IterableDataset):
    def __iter__(self):
        return ({"prompt": f"row {i}", "answer": str(i)} for i in range(N))
