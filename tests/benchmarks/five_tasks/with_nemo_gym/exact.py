from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class CapitalsVerifyRequest(BaseVerifyRequest):
    answer: str


class Capitals(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: CapitalsVerifyRequest) -> BaseVerifyResponse:
        reward = float(body.response.output_text.strip() == body.answer)
        return BaseVerifyResponse(**body.model_dump(), reward=reward)


if __name__ == "__main__":
    Capitals.run_webserver()
