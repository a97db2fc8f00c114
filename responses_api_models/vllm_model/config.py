"""Config of `vllm_model`: where the endpoints are, what they can do, what to add to requests."""

from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from nemo_gym.base_responses_api_model import PausableModelConfig


class VLLMModelConfig(PausableModelConfig):
    """One model behind one or several vLLM endpoints."""

    UNRELATED_TO_ANSWERS: ClassVar[frozenset[str]] = frozenset({"audio_root", "session_ttl_s"})

    base_url: list[str]
    """Address of the API, with `/v1`; several when the same model is served in several places."""
    api_key: str
    model: str
    """The model asked for, whatever a request says."""
    return_token_id_information: bool
    """Put token ids and log-probs on the last item of every answer, for training."""
    uses_reasoning_parser: bool
    """The endpoint splits reasoning from the answer (vLLM's `--reasoning-parser`)."""
    request_prompt_and_generation_token_ids: bool = False
    """Have vLLM (0.10.2 and later) send the token ids with the answer; else `/tokenize` is asked for the prompt's."""
    uses_interleaved_reasoning: bool = True
    """Send earlier reasoning back, in fields of its own; needs the reasoning parser."""
    preserve_reasoning_in_assistant_content: bool = False
    """Send earlier reasoning back as think blocks in the text instead."""
    sequential_reasoning_allowed: bool = True
    """Let the model go on after a turn that was nothing but reasoning; else such a conversation ends."""
    replace_developer_role_with_system: bool = False
    """For chat templates that do not know developers."""
    is_responses_native: bool = False
    """The endpoint speaks the Responses API itself: requests go on without conversion."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template; those in a request's `metadata.chat_template_kwargs` win."""
    extra_body: dict[str, Any] | None = None
    """Added to every request; a request's `metadata.extra_body` wins over it, and its own fields over both."""
    sampling_overrides: dict[str, Any] | None = None
    """Put into every request in place of whatever it says."""
    default_headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request to the endpoint."""
    audio_root: str | None = None
    """Folder of the audio files that rows name by relative paths."""
    session_ttl_s: float | None = Field(default=24 * 60 * 60, gt=0)
    """A session that has not been heard of for so long is forgotten, and with it the endpoint it was bound to."""
    use_completions_api: bool = False
    """Send prompts as plain text to `/completions`, for base models."""
    render_chat_template: bool = False
    """With the completions API: make the prompt with the chat template of `tokenizer`."""
    tokenizer: str | None = None
    """Name or folder of the Hugging Face tokenizer whose chat template is used; `model` when unset."""

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

    @model_validator(mode="after")
    def _template_needs_completions(self) -> "VLLMModelConfig":
        if self.render_chat_template and not self.use_completions_api:
            raise ValueError("render_chat_template works with use_completions_api: true only")
        return self

    def check_combination(self) -> None:
        """Refuse settings that a native Responses endpoint cannot honour.

        Raises:
            NotImplementedError: names the settings that do not go together.
        """
        conflicting = {
            "return_token_id_information: true": self.return_token_id_information,
            "replace_developer_role_with_system: true": self.replace_developer_role_with_system,
            "sequential_reasoning_allowed: false": not self.sequential_reasoning_allowed,
            "use_completions_api: true": self.use_completions_api,
        }
        found = [setting for setting, is_set in conflicting.items() if is_set]
        if self.is_responses_native and found:
            raise NotImplementedError(
                f"{self.name}: is_responses_native: true passes requests on unconverted, so it does not go together "
                f"with {', '.join(found)}; change one of them"
            )
