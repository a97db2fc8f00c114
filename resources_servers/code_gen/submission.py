"""What of a model's answer is the program, and whether it kept its thoughts where they belong."""

from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseReasoningItem

_FENCE = "```"
_THINK_TAGS = ("<think>", "</think>")


def extract_code(text: str) -> str | None:
    """The lines between the last two lines with a fence; None when there are not two, or nothing between them."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if _FENCE in line]
    if len(fences) < 2:
        return None
    code = "\n".join(lines[fences[-2] + 1 : fences[-1]])
    return code if code.strip() else None


def breaks_reasoning_format(response: NeMoGymResponse) -> bool:
    """Whether the answer has think tags, or the reasoning more than one of a kind."""
    if any(tag in response.output_text for tag in _THINK_TAGS):
        return True
    thoughts = _reasoning_text(response)
    return any(thoughts.count(tag) > 1 for tag in _THINK_TAGS)


def _reasoning_text(response: NeMoGymResponse) -> str:
    items = [item for item in response.output if isinstance(item, NeMoGymResponseReasoningItem)]
    summaries = [part.text for item in items for part in item.summary]
    return "".join(summaries + [part.text for item in items for part in item.content or []])
