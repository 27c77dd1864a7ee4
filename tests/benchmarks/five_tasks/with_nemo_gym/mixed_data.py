import random

import exact_data
import game_data

if __name__ == "__main__":
    train = [word for word in exact_data.WORDS if word not in exact_data.HELD_OUT]
    mixed = exact_data.rows(train) + game_data.rows(range(len(train) // 2))
    random.Random(0).shuffle(mixed)
    exact_data.write("mixed_train.jsonl", mixed)
    held_out = exact_data.rows(exact_data.HELD_OUT) + game_data.rows(range(800, 832))
    exact_data.write("mixed_validation.jsonl", held_out)
