import json

for split, path in (("train", "letters.jsonl"), ("validation", "held_out.jsonl")):
    with open(path) as read, open(f"judge_{split}.jsonl", "w") as write:
        for line in read:
            row = {
                "responses_create_params": {
                    "input": [{"role": "user", "content": json.loads(line)["prompt"]}]
                },
                "agent_ref": {"type": "responses_api_agents", "name": "letters_agent"},
            }
            write.write(json.dumps(row) + "\n")
