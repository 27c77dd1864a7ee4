import itertools
import random

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from pydantic import BaseModel

NAMES = ["".join(letters) for letters in itertools.product("abcdefghijklmnop", repeat=2)]
PRICES = {name: str(random.Random(name).randrange(10, 100)) for name in NAMES}


class PriceRequest(BaseModel):
    item: str


class PriceResponse(BaseModel):
    price: str


class ShopVerifyRequest(BaseVerifyRequest):
    answer: str


class Shop(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/price")(self.price)
        return app

    async def price(self, body: PriceRequest) -> PriceResponse:
        return PriceResponse(price=PRICES.get(body.item, "error: there is no such item"))

    async def verify(self, body: ShopVerifyRequest) -> BaseVerifyResponse:
        reward = float(body.response.output_text.strip() == body.answer)
        return BaseVerifyResponse(**body.model_dump(), reward=reward)


if __name__ == "__main__":
    Shop.run_webserver()
