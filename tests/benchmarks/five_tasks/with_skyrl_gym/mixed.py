from datasets import Dataset
from exact import HELD_OUT, WORDS
from exact import rows as capitals
from game import rows as games

if __name__ == "__main__":
    train = [word for word in WORDS if word not in HELD_OUT]
    mixed = capitals(train) + games(range(len(train) // 2))
    Dataset.from_list(mixed).shuffle(seed=0).to_parquet("mixed_train.parquet")
    held_out = capitals(HELD_OUT) + games(range(800, 832))
    Dataset.from_list(held_out).to_parquet("mixed_validation.parquet")
