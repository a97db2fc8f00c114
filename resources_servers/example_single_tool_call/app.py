"""The smallest environment: one tool, and a verdict that is always good.

It is the environment to copy when you write your own, and the one the tutorial starts with.
"""

from fastapi import FastAPI
from pydantic import BaseModel

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)


class SimpleWeatherResourcesServerConfig(BaseResourcesServerConfig):
    """Nothing to configure."""


class GetWeatherRequest(BaseModel):
    """What the tool wants to know."""

    city: str


class GetWeatherResponse(BaseModel):
    """What the tool answers."""

    city: str
    weather_description: str


class SimpleWeatherResourcesServer(SimpleResourcesServer):
    """It is cold everywhere."""

    replicable = True
    REVERIFY_MODE = ReverifyMode.STATELESS

    config: SimpleWeatherResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """The standard routes and one route per tool, named like the tool."""
        app = super().setup_webserver()
        app.post("/get_weather")(self.get_weather)
        return app

    async def get_weather(self, body: GetWeatherRequest) -> GetWeatherResponse:
        """The tool."""
        return GetWeatherResponse(city=body.city, weather_description=f"The weather in {body.city} is cold.")

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """Every rollout is a success."""
        return BaseVerifyResponse(**dict(body), reward=1.0)


if __name__ == "__main__":
    SimpleWeatherResourcesServer.run_webserver()
