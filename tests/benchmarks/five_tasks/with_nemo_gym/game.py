from resources_servers.gymnasium import GymnasiumServer, extract_text


class Guess(GymnasiumServer):
    async def reset(self, metadata, session_id=None):
        self.session_state[session_id] = 0
        return None, {}

    async def step(self, action, metadata, session_id=None):
        self.session_state[session_id] += 1
        guess, digit = extract_text(action).strip(), metadata["digit"]
        if guess == digit or guess not in set("1234567") or self.session_state[session_id] == 3:
            return None, float(guess == digit), True, False, {}
        return "+" if guess < digit else "-", 0.0, False, False, {}


if __name__ == "__main__":
    Guess.run_webserver()
