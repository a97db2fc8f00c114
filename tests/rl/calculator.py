"""An environment with one tool, for agents that take several turns."""

CALCULATOR = """
from fastapi import FastAPI
from pydantic import BaseModel
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer

class Expression(BaseModel):
    expression: str

class Calculator(SimpleResourcesServer):
    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/calculate")(self.calculate)
        return app

    async def calculate(self, body: Expression) -> str:
        return f"= {len(body.expression)}."

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**dict(body), reward=1.0)
"""
TOOL = {
    "type": "function",
    "name": "calculate",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    "strict": False,
}
