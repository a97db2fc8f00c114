"""An agent in one function: ask, have the answer checked, and return the better one."""

from typing import Any

from responses_api_agents.function_agent.model_client import ModelClient


async def run(row: dict[str, Any], model: ModelClient) -> str:
    """Answer a row."""
    params = row["responses_create_params"]
    draft = await model.create_response(**params)
    review = await model.create_response(
        instructions="Check the answer. Repeat it if it is right, else give the right one in the same form.",
        input=f"Question: {params['input']}\n\nAnswer: {draft.output_text}",
    )
    return review.output_text or draft.output_text
