"""What `ng_export` writes is what TRL trains on: a real step of each kind, with the templates of three model families.

The templates are small ones of our own that look at messages as those families' do: which roles they know, whether a
message *has* tool calls, arguments as objects, thoughts of earlier turns left out.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.runs.export import export_rollouts
from nemo_gym.schemas.cli_config import ExportConfig

pytest.importorskip("trl", reason="test-only: make test-rl installs it")

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

QWEN25 = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are helpful.{% endif %}
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant{% if message.content %}
{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set asked = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content if message.content is string else '' %}
{%- if '</think>' in content and loop.index0 < asked.last -%}
{% set content = content.split('</think>')[-1] %}{% endif -%}
<|im_start|>assistant
{{ content }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}
{{- call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA31 = """
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) -%}
<|start|>{{ message.role }}<|sep|>
{% if tools and message.role == 'user' and loop.first %}{{ tools | tojson }}{% endif %}
{{- message.content | trim }}<|im_end|>
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one tool call at a time') }}{% endif -%}
<|start|>assistant<|sep|>
{%- set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>
{%- else -%}
<|start|>ipython<|sep|>
{{ message.content if message.content is string else message.content | tojson }}<|im_end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|sep|>
{% endif %}"""

TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama-3.1": LLAMA31}
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|sep|>"]
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """A token per byte, and the marks of the templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate([*SPECIAL, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    fast.chat_template = template.strip()
    return fast


def config() -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(
        vocab_size=300, max_position_embeddings=2048, **sizes, pad_token_id=0, eos_token_id=2, num_labels=1
    )


def rollout(task: int, index: int, arguments: str, answer: str) -> dict[str, Any]:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "let me see"}]}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "3"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]}
    asked = [
        {"role": "user", "content": f"question {task}"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "now"},
    ]
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "agent_ref": {"name": "agent"},
        "responses_create_params": {"input": asked, "tools": [TOOL]},
        "response": {"output": [thought, call, output, said]},
        "reward": float(index),
    }


ROLLOUTS = [
    rollout(0, 0, '{"a": 1}', "four"),
    rollout(0, 1, '{"a": 1, "b": 2}', "three"),
    rollout(1, 0, '{"c": {"d": [1]}}', "one"),
    rollout(1, 1, '{"e": "x"}', "two"),
]


@pytest.fixture(params=["jsonl", "parquet"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Dataset]:
    """A data set of a format, as `datasets` reads the file."""

    def export(form: str) -> Dataset:
        source, target = tmp_path / "rollouts.jsonl", tmp_path / f"{form}.{request.param}"
        source.write_text("".join(json.dumps(record) + "\n" for record in ROLLOUTS))
        settings = {"rollouts_jsonl_fpath": str(source), "output_fpath": str(target), "format": form}
        export_rollouts(ExportConfig.model_validate(settings))
        kind = {"jsonl": "json", "parquet": "parquet"}[request.param]
        return load_dataset(kind, data_files=str(target), split="train", cache_dir=str(tmp_path / "cache"))

    return export


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_shows_what_happened_and_nothing_else(exported: Any, family: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[family])

    for example, record in zip(exported("messages"), ROLLOUTS, strict=True):
        text = tokenizer.apply_chat_template(example["messages"], tools=example["tools"], tokenize=False)
        arguments = json.loads(record["response"]["output"][1]["arguments"])
        assert json.dumps(arguments) in text
        assert "be brief" in text, "what a developer says is not lost"
        assert "null" not in text
        assert "None" not in text
        assert record["response"]["output"][3]["content"][0]["text"] in text
        assert '"name": "add"' in text


@pytest.mark.parametrize("family", TEMPLATES)
def test_each_kind_of_training_takes_a_step(exported: Any, family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TEMPLATES[family])
    common: dict[str, Any] = {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
    }
    torch.manual_seed(0)
    model, ref, judge = LlamaForCausalLM(config()), LlamaForCausalLM(config()), LlamaForSequenceClassification(config())
    where, pairs = str(tmp_path / "run"), exported("dpo")
    trainers = [
        SFTTrainer(model, SFTConfig(where, **common), train_dataset=exported("sft"), processing_class=tokenizer),
        DPOTrainer(model, ref, args=DPOConfig(where, **common), train_dataset=pairs, processing_class=tokenizer),
        RewardTrainer(judge, args=RewardConfig(where, **common), train_dataset=pairs, processing_class=tokenizer),
    ]
    for trainer in trainers:
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 1
        assert torch.isfinite(torch.tensor(float(losses[0])))
        assert any(not torch.equal(before[name], value) for name, value in trainer.model.named_parameters())
