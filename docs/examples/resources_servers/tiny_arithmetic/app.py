"""The environment of the tiny GRPO example as a server: it verifies sums."""

from resources_servers.tiny_arithmetic.scoring import score

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, ReverifyMode, SimpleResourcesServer


class TinyArithmeticVerifyRequest(BaseVerifyRequest):
    """A row and what the policy made of it."""

    question: str


class TinyArithmeticVerifyResponse(BaseVerifyResponse):
    """The verdict."""

    question: str
    is_correct: bool


class TinyArithmeticResourcesServer(SimpleResourcesServer):
    """Looks at the last thing that was said."""

    REVERIFY_MODE = ReverifyMode.STATELESS

    async def verify(self, body: TinyArithmeticVerifyRequest) -> TinyArithmeticVerifyResponse:
        """Score the answer."""
        texts = [part.text for item in body.response.output if item.type == "message" for part in item.content]
        reward = score(body.question, texts[-1] if texts else "")
        return TinyArithmeticVerifyResponse(**dict(body), reward=reward, is_correct=reward == 1.0)


if __name__ == "__main__":
    TinyArithmeticResourcesServer.run_webserver()
