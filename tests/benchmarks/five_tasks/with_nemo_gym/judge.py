import re

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import ModelServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json

RUBRIC = "The reply is a polite letter of at most five sentences."


class LettersConfig(BaseResourcesServerConfig):
    judge_model_server: ModelServerRef


class Letters(SimpleResourcesServer):
    config: LettersConfig

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        question, reply = body.responses_create_params.input[-1].content, body.response.output_text
        asked = f"{RUBRIC}\n\nQuestion: {question}\nReply: {reply}\n\nEnd with Score: N, from 0 to 10."
        answer = await self.server_client.post(
            server_name=self.config.judge_model_server.name,
            url_path="/v1/responses",
            json=NeMoGymResponseCreateParamsNonStreaming(input=[{"role": "user", "content": asked}]),
        )
        judged = NeMoGymResponse.model_validate(await get_response_json(answer))
        found = re.findall(r"Score: (\d+)", judged.output_text)
        reward = min(int(found[-1]), 10) / 10 if found else 0.0
        return BaseVerifyResponse(**body.model_dump(), reward=reward)


if __name__ == "__main__":
    Letters.run_webserver()
