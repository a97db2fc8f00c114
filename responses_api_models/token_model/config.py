"""Config of `token_model`: where the engine is, how its tokenizer writes conversations, how its answers are read."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from nemo_gym.base_responses_api_model import PausableModelConfig


class TokenModelConfig(PausableModelConfig):
    """One model behind one or several engines that take token ids."""

    UNRELATED_TO_ANSWERS: ClassVar[frozenset[str]] = frozenset({"session_ttl_s"})

    base_url: list[str]
    """Address of the engine, with `/v1`; several when the same model is served in several places."""
    api_key: str
    model: str
    """The model asked for, whatever a request says."""
    tokenizer: str
    """Folder with the `tokenizer.json` and `tokenizer_config.json` of the model, as on the Hugging Face hub."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Whose token interface is spoken: vLLM's `/v1/completions` or SGLang's `/generate`."""
    tool_parser: Literal["hermes", "llama3_json", "mistral", "qwen3_coder"] | None = "hermes"
    """How the model writes tool calls; null: its answers are text."""
    reasoning_parser: Literal["think"] | None = "think"
    """Read `<think>` blocks as reasoning; null: they stay in the text."""
    end_of_turn: str | None = None
    """The token that ends what the model says, where that is not the tokenizer's `eos_token`."""
    max_model_len: int | None = Field(None, ge=1)
    """Tokens of prompt and answer together; what does not fit is not asked. Left to the engine when unset."""
    replace_developer_role_with_system: bool = True
    """Chat templates rarely know developers."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template; those in a request's `metadata.chat_template_kwargs` win."""
    extra_body: dict[str, Any] | None = None
    """Added to every request, such as `top_k`; a request's `metadata.extra_body` wins, and its own fields over both."""
    sampling_overrides: dict[str, Any] | None = None
    """Put into every request in place of whatever it says."""
    default_headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request to the engine."""
    session_ttl_s: float | None = Field(default=24 * 60 * 60, gt=0)
    """A session that has not been heard of for so long is forgotten, and with it the engine it was bound to."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("base_url")
    @classmethod
    def _at_least_one(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("at least one address is needed, such as http://127.0.0.1:8000/v1")
        return value
